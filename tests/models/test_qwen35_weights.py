"""Checkpoints: strict about names and shapes, clear about broken files, bit-exact on the way out and back."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models import kimi_delta, qwen35
from tests.models.helpers import assert_bit_equal


@pytest.fixture
def directory(fixtures, tmp_path):
    """A copy of the reference checkpoint that a test may spoil."""
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(fixtures / "tiny_a" / name, tmp_path / name)
    return tmp_path


def _edit(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def _edit_config(directory, **fields):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_8_unknown_tensor_is_named(directory):
    _edit(directory, lambda tensors: tensors.update({"model.layers.0.surprise.weight": np.zeros(3, np.float32)}))
    with pytest.raises(ValueError, match=r"unknown tensors: model\.layers\.0\.surprise\.weight"):
        qwen35.from_pretrained(directory)


def test_8_missing_tensor_is_named(directory):
    _edit(directory, lambda tensors: tensors.pop("model.layers.2.linear_attn.A_log"))
    with pytest.raises(ValueError, match=r"missing tensors: model\.layers\.2\.linear_attn\.A_log"):
        qwen35.from_pretrained(directory)


def test_misshapen_tensor_is_named(directory):
    _edit(directory, lambda tensors: tensors.update({"model.norm.weight": np.zeros(3, np.float32)}))
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        qwen35.from_pretrained(directory)


def test_vision_and_mtp_tensors_are_skipped(directory):
    extra = {"model.visual.merger.norm.weight": np.zeros(3, np.float32), "mtp.fc.weight": np.zeros(3, np.float32)}
    _edit(directory, lambda tensors: tensors.update(extra))
    qwen35.from_pretrained(directory)


def test_broken_files(directory, fixtures, tmp_path):
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        qwen35.from_pretrained(directory)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        qwen35.from_pretrained(directory)
    (directory / "config.json").write_text('{"vocab_size": 3')
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        qwen35.from_pretrained(directory)
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        qwen35.from_pretrained(tmp_path / "nowhere")

    sharded = tmp_path / "sharded"
    shutil.copytree(fixtures / "tiny_a_wrapped", sharded)
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.language_model.norm.weight"] = "model.safetensors-00001-of-00002.safetensors"
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"disagree about: model\.language_model\.norm\.weight"):
        qwen35.from_pretrained(sharded)
    (sharded / "model.safetensors-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="00002-of-00002"):
        qwen35.from_pretrained(sharded)


def test_tied_and_untied_heads(directory):
    _edit_config(directory, tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"no lm_head\.weight"):
        qwen35.from_pretrained(directory)
    head = np.random.default_rng(0).standard_normal((320, 64)).astype(np.float32)
    _edit(directory, lambda tensors: tensors.update({"lm_head.weight": head}))
    for tied in (False, True):  # a head in the file wins over the flag
        _edit_config(directory, tie_word_embeddings=tied)
        config, model = qwen35.from_pretrained(directory)
        assert not config.tie_word_embeddings
        np.testing.assert_allclose(model.head(jnp.eye(64)[:3]), head.T[:3], atol=1e-6)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 300_000])
def test_save_and_load_round_trip(fixtures, tmp_path, dtype, max_shard_bytes):
    config, model = qwen35.from_pretrained(fixtures / "tiny_a", dtype=dtype)
    qwen35.save_pretrained(config, model, tmp_path, max_shard_bytes=max_shard_bytes)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (max_shard_bytes < 10**9)
    again_config, again = qwen35.from_pretrained(tmp_path)
    assert again_config == config
    assert_bit_equal(model, again)
    if dtype is None and max_shard_bytes == 10**9:
        original = load_file(fixtures / "tiny_a" / "model.safetensors")
        saved = load_file(tmp_path / "model.safetensors")
        assert original.keys() == saved.keys()
        assert all(np.array_equal(saved[name], original[name]) for name in saved)


def test_bfloat16_decays_of_a_file_are_kept_in_float32(directory):
    def to_bfloat16(tensors):
        tensors.update({name: x.astype(jnp.bfloat16) for name, x in tensors.items()})

    _edit(directory, to_bfloat16)
    config, model = qwen35.from_pretrained(directory)
    mixer = model.layers[0].linear_attn
    assert config.dtype == "bfloat16" and mixer.in_proj_z.kernel.dtype == jnp.bfloat16
    assert mixer.A_log.dtype == mixer.dt_bias.dtype == mixer.norm.weight.dtype == jnp.float32


def test_fresh_model_with_master_weights(small, tmp_path):
    config = dataclasses.replace(
        small.config, num_hidden_layers=1, layer_types=("linear_attention",), dtype="bfloat16", attention_window=5
    )
    model = qwen35.from_config(config, jax.random.key(0), param_dtype="float32")
    assert model.embed_tokens.embedding.dtype == jnp.float32
    qwen35.save_pretrained(config, model, tmp_path)
    again_config, again = qwen35.from_pretrained(tmp_path)
    assert again_config == dataclasses.replace(config, dtype="float32")
    for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(again), strict=True):
        assert_bit_equal(a, b)
    tokens = jnp.zeros((1, 64), jnp.int32)
    logits, _ = qwen35.prefill(model, tokens, qwen35.init_cache(config, batch=1))
    assert np.isfinite(logits).all()


def test_kimi_layer_is_strict_too(fixtures, tmp_path):
    for name in ("config.json", "layer.safetensors"):
        shutil.copyfile(fixtures / "kda_layer_a" / name, tmp_path / name)
    with pytest.raises(ValueError, match="layer 3 is not a KDA layer"):
        kimi_delta.load_layer(tmp_path, layer_index=3)
    tensors = load_file(tmp_path / "layer.safetensors")
    del tensors["model.layers.0.self_attn.dt_bias"]
    tensors["model.layers.0.self_attn.g_proj.1.bias"] = np.zeros(3, np.float32)
    save_file(tensors, tmp_path / "layer.safetensors")
    with pytest.raises(ValueError, match=r"missing tensors: .*dt_bias; unknown tensors: .*g_proj\.1\.bias"):
        kimi_delta.load_layer(tmp_path)
