"""The Qwen3.5 text model: gated DeltaNet layers on any `leapquant_jax` state method, and gated attention layers.

config, model = qwen35.from_pretrained(directory)
cache = qwen35.init_cache(config, batch=2, max_length=4096, method="leapquant-int8")
logits, cache = qwen35.prefill(model, tokens, cache, mask)
logits, cache = qwen35.decode_step(model, next_tokens, cache)
"""

from models.qwen35.cache import Cache as Cache
from models.qwen35.cache import init_cache as init_cache
from models.qwen35.cache import recurrent_states as recurrent_states
from models.qwen35.config import Config as Config
from models.qwen35.generate import generate as generate
from models.qwen35.model import Model as Model
from models.qwen35.model import decode_step as decode_step
from models.qwen35.model import prefill as prefill
from models.qwen35.sampling import Greedy as Greedy
from models.qwen35.sampling import Temperature as Temperature
from models.qwen35.sampling import TopK as TopK
from models.qwen35.sampling import TopP as TopP
from models.qwen35.weights import cast as cast
from models.qwen35.weights import from_config as from_config
from models.qwen35.weights import from_pretrained as from_pretrained
from models.qwen35.weights import save_pretrained as save_pretrained
from models.qwen35.weights import with_config as with_config
