"""A small model for the tests of experiments."""

import jax
import pytest

from models import qwen35


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """A random hybrid of one recurrent and one windowed attention layer, which has learned nothing."""
    config = qwen35.Config(
        vocab_size=264, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=16,
        linear_value_head_dim=8, layer_types=("linear_attention", "full_attention"), attention_window=32,
        tie_word_embeddings=True,
    )  # fmt: skip
    directory = tmp_path_factory.mktemp("model")
    key = jax.random.key(0, impl="unsafe_rbg")  # compiles in half the time of the others
    qwen35.save_pretrained(config, qwen35.from_config(config, key), directory)
    return directory
