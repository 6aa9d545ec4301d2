"""config.json in both layouts, the public sizes, and settings that must be refused."""

import dataclasses
import json

import pytest

from models import kimi_delta, qwen35
from models.qwen35.config import FULL, LINEAR


def _fields(fixtures, name="tiny_a") -> dict:
    return json.loads((fixtures / name / "config.json").read_text())


def test_both_layouts_read_alike(fixtures):
    config = qwen35.Config.from_hf(_fields(fixtures))
    assert config == qwen35.Config.from_hf(_fields(fixtures, "tiny_a_wrapped"))
    assert config.layer_types == (LINEAR, LINEAR, LINEAR, FULL)
    assert config.rotary_dim == 8 and config.tie_word_embeddings


@pytest.mark.parametrize("change", [{}, {"attention_window": 256}, {"eos_token_id": (3, 5)}, {"dtype": "bfloat16"}])
def test_round_trip_through_json(fixtures, change):
    config = dataclasses.replace(qwen35.Config.from_hf(_fields(fixtures)), **change)
    fields = json.loads(json.dumps(config.to_hf()))
    assert qwen35.Config.from_hf(fields) == config
    assert "matmul_precision" not in fields
    assert ("attention_window" in fields) == (config.attention_window is not None)


def test_layer_pattern_and_flags(fixtures):
    fields = _fields(fixtures) | {"layer_types": None, "num_hidden_layers": 6, "full_attention_interval": 3}
    assert qwen35.Config.from_hf(fields).layer_types == (LINEAR, LINEAR, FULL) * 2
    nested = _fields(fixtures, "tiny_a_wrapped")
    for top in (True, False):
        for inner in (True, False):
            nested["tie_word_embeddings"] = top
            nested["text_config"]["tie_word_embeddings"] = inner
            assert qwen35.Config.from_hf(nested).tie_word_embeddings == (top or inner)


@pytest.mark.parametrize(
    ("size", "layers", "megabytes"),
    [("0_8b", 18, 18.9), ("2b", 18, 18.9), ("4b", 24, 50.3), ("9b", 24, 50.3), ("27b", 48, 151)],
)
def test_public_sizes(size, layers, megabytes):
    config = getattr(qwen35.Config, f"qwen35_{size}")()
    state = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim * 4
    assert config.num_linear_layers == layers
    assert round(layers * state / 1e6, 1 if megabytes < 100 else 0) == megabytes
    assert config.rotary_dim == 64


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model_type": "qwen3_5_moe_text"}, NotImplementedError, "mixture-of-experts"),
        ({"num_experts": 256}, NotImplementedError, "mixture-of-experts"),
        ({"model_type": "llama"}, ValueError, "llama"),
        ({"hidden_act": "gelu"}, ValueError, "hidden_act"),
        ({"attention_bias": True}, ValueError, "attention_bias"),
        ({"rope_parameters": {"rope_type": "yarn"}}, NotImplementedError, "yarn"),
        ({"hidden_size": None}, ValueError, "lacks hidden_size"),
        ({"linear_num_value_heads": 5}, ValueError, "multiple of linear_num_key_heads"),
        ({"num_attention_heads": 3}, ValueError, "multiple of num_key_value_heads"),
        ({"layer_types": ["linear_attention"]}, ValueError, "layer_types must name 4 layers"),
        ({"vocab_size": 0}, ValueError, "vocab_size"),
        ({"attention_window": 0}, ValueError, "attention_window"),
        ({"linear_conv_kernel_dim": 1}, ValueError, "linear_conv_kernel_dim"),
    ],
)
def test_refused_settings(fixtures, change, error, message):
    with pytest.raises(error, match=message):
        qwen35.Config.from_hf(_fields(fixtures) | change)


def test_kimi_layer_numbers_count_from_one(fixtures):
    config = kimi_delta.Config.from_hf(_fields(fixtures, "kda_layer_a"))
    assert config.kda_layers == (0,)
    assert len(kimi_delta.Config().kda_layers) == 20
    with pytest.raises(ValueError, match="kda_layers"):
        kimi_delta.Config.from_hf({"hidden_size": 48})
