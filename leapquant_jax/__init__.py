"""LeapQuant-JAX: low-bit recurrent states for linear attention (Gated DeltaNet, Kimi delta attention).

config = lq.LeapConfig(bits=8)
state = lq.init_state(config, batch=1, num_heads=32, num_key_heads=16, key_dim=128, value_dim=128)
state, out = lq.step(config, state, q, k, v, g, beta)
"""

from leapquant_jax.checkpoint import Checkpoint as Checkpoint
from leapquant_jax.checkpoint import load_state as load_state
from leapquant_jax.checkpoint import read_checkpoint as read_checkpoint
from leapquant_jax.checkpoint import save_state as save_state
from leapquant_jax.chunked import chunked_delta_rule as chunked_delta_rule
from leapquant_jax.config import LeapConfig as LeapConfig
from leapquant_jax.exact import exact_decode as exact_decode
from leapquant_jax.exact import exact_step as exact_step
from leapquant_jax.methods import ExactMethod as ExactMethod
from leapquant_jax.methods import LeapMethod as LeapMethod
from leapquant_jax.methods import Method as Method
from leapquant_jax.methods import get_method as get_method
from leapquant_jax.methods import list_methods as list_methods
from leapquant_jax.mixed import HeadGroup as HeadGroup
from leapquant_jax.mixed import MixedMethod as MixedMethod
from leapquant_jax.numerics import l2norm as l2norm
from leapquant_jax.plan import Budget as Budget
from leapquant_jax.plan import Measurements as Measurements
from leapquant_jax.plan import default_candidates as default_candidates
from leapquant_jax.plan import measure_candidates as measure_candidates
from leapquant_jax.plan import plan as plan
from leapquant_jax.plan import plan_policy as plan_policy
from leapquant_jax.policy import LayerChoice as LayerChoice
from leapquant_jax.policy import Policy as Policy
from leapquant_jax.rows import concatenate_rows as concatenate_rows
from leapquant_jax.rows import put_rows as put_rows
from leapquant_jax.rows import reset_rows as reset_rows
from leapquant_jax.rows import take_rows as take_rows
from leapquant_jax.state import LeapState as LeapState
from leapquant_jax.state import finite_rows as finite_rows
from leapquant_jax.state import state_bytes as state_bytes
from leapquant_jax.trace import Trace as Trace
from leapquant_jax.trace import check_trace as check_trace
from leapquant_jax.transitions import decode as decode
from leapquant_jax.transitions import dense_state as dense_state
from leapquant_jax.transitions import fold as fold
from leapquant_jax.transitions import init_state as init_state
from leapquant_jax.transitions import prefill as prefill
from leapquant_jax.transitions import rollback as rollback
from leapquant_jax.transitions import step as step
