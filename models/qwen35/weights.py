"""Checkpoints in the Hugging Face layout, in and out.

The modules are named as the tensors are, so one rule turns a parameter's path into its tensor's name. Every tensor of
a file is either expected, on the short list of parts that a text model does not have, or an error.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from models.blocks import Float32Param
from models.checkpoints import INDEX, SINGLE, Checkpoint, check_names, read_json
from models.qwen35.config import Config
from models.qwen35.model import Model

_TEXT_PREFIX = "model."
_MULTIMODAL_PREFIX = "model.language_model."
_NOT_TEXT = ("model.visual.", "mtp.")


def from_pretrained(directory: str | os.PathLike, *, dtype: str | None = None) -> tuple[Config, Model]:
    """Loads a Qwen3.5 text model from config.json and safetensors files.

    Args:
      directory: Holds config.json and either model.safetensors or shards with their index. Both the text-only and
        the public multimodal layout are read; vision and multi-token-prediction tensors are skipped.
      dtype: Cast the parameters to this dtype and compute in it. None keeps each tensor's own dtype and computes in
        the embedding's. `A_log`, `dt_bias` and `linear_attn.norm` are float32 in either case.

    Returns:
      The configuration and the model. `tie_word_embeddings` says whether the file had no `lm_head.weight`.

    Raises:
      FileNotFoundError: If config.json, the index or a shard is missing.
      NotImplementedError: For mixture-of-experts models.
      ValueError: For a truncated file, unknown, missing or misshapen tensors (naming them), or a file without
        `lm_head.weight` whose config does not tie the embeddings.
    """
    directory = Path(directory)
    config = Config.from_hf(read_json(directory / "config.json"))
    checkpoint = Checkpoint(directory)
    present = checkpoint.files
    tied = "lm_head.weight" not in present
    if tied and not config.tie_word_embeddings:
        raise ValueError(f"{directory} has no lm_head.weight and its config does not set tie_word_embeddings")
    prefix = _MULTIMODAL_PREFIX if any(name.startswith(_MULTIMODAL_PREFIX) for name in present) else _TEXT_PREFIX
    config = dataclasses.replace(config, tie_word_embeddings=tied)
    flat = nnx.to_flat_state(nnx.state(_abstract(config)))
    names = {path: _tensor_name(path, prefix) for path, _ in flat}
    check_names(names.values(), present, skip=_NOT_TEXT)
    loaded = []
    for path, variable in flat:
        value = _from_tensor(checkpoint.read(names[path]), path)
        if value.shape != variable.shape:
            raise ValueError(f"tensor {names[path]} gives shape {value.shape}, config.json asks for {variable.shape}")
        kept = jnp.float32 if isinstance(variable, Float32Param) else dtype or value.dtype
        loaded.append((path, variable.replace(jnp.asarray(value, dtype=kept))))
    parameters = nnx.from_flat_state(loaded)
    config = dataclasses.replace(config, dtype=str(parameters["embed_tokens"]["embedding"].dtype))
    return config, _assemble(config, parameters)


def save_pretrained(
    config: Config, model: Model, directory: str | os.PathLike, *, max_shard_bytes: int = 5_000_000_000
) -> None:
    """Writes config.json and safetensors files in the text-only layout, each parameter in its own dtype.

    Args:
      config: The model's configuration.
      model: The parameters.
      directory: Created if needed.
      max_shard_bytes: Start a new shard when a file would exceed this.
    """
    from safetensors.numpy import save_file

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, np.ndarray]] = [{}]
    size = 0
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        tensor = _to_tensor(variable[...], path)
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][_tensor_name(path, _TEXT_PREFIX)] = tensor
        size += tensor.nbytes

    if len(shards) == 1:
        save_file(shards[0], directory / SINGLE, metadata={"format": "pt"})
    else:
        weight_map = {}
        for i, shard in enumerate(shards):
            name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
            save_file(shard, directory / name, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(shard, name)
        total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
        _write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    _write_json(directory / "config.json", config.to_hf())


def from_config(config: Config, key: Array, *, param_dtype: str | None = None) -> Model:
    """A model with fresh parameters, its decays spread as in Mamba and FLA (memories of ten to thousands of tokens).

    Args:
      config: The configuration.
      key: A JAX random key.
      param_dtype: Dtype of the stored parameters; `config.dtype` if None. Use "float32" with a bfloat16 config to
        train with master weights.
    """
    return jax.jit(lambda key: Model(config, rngs=nnx.Rngs(key), param_dtype=param_dtype))(key)


def with_config(model: Model, config: Config) -> Model:
    """The same parameters, shared and not copied, under another configuration of the same shapes.

    For changing `dtype`, `matmul_precision` or `attention_window` of a model that exists.
    """
    return _assemble(config, nnx.state(model))


def cast(model: Model, dtype: str) -> Model:
    """The model with parameters and activations in `dtype`; decays and gated norms stay float32."""

    def convert(path: tuple, variable: Any) -> Any:
        del path
        return variable if isinstance(variable, Float32Param) else variable.replace(variable[...].astype(dtype))

    return _assemble(dataclasses.replace(model.config, dtype=dtype), nnx.map_state(convert, nnx.state(model)))


def _abstract(config: Config) -> Model:
    """The model's structure with shapes in place of arrays."""
    return nnx.eval_shape(lambda: Model(config, rngs=nnx.Rngs(0)))


def _assemble(config: Config, parameters: nnx.State) -> Model:
    """The model of `config` around existing parameters."""
    return nnx.merge(nnx.graphdef(_abstract(config)), parameters)


def _tensor_name(path: tuple, prefix: str) -> str:
    """("layers", 0, "mlp", "up_proj", "kernel") -> "model.layers.0.mlp.up_proj.weight"."""
    *modules, leaf = map(str, path)
    if leaf in ("kernel", "embedding"):
        leaf = "weight"
    return ("" if modules == ["lm_head"] else prefix) + ".".join([*modules, leaf])


def _from_tensor(tensor: np.ndarray, path: tuple) -> np.ndarray:
    """PyTorch's layout to ours: kernels [out, in] -> [in, out], convolutions [C, 1, taps] -> [taps, C]."""
    if path[-1] != "kernel":
        return tensor
    return tensor[:, 0].T if path[-2] == "conv1d" else tensor.T


def _to_tensor(value: Array, path: tuple) -> np.ndarray:
    """The inverse of `_from_tensor`."""
    tensor = np.asarray(value)
    if path[-1] == "kernel":
        tensor = tensor.T[:, None] if path[-2] == "conv1d" else tensor.T
    return np.ascontiguousarray(tensor)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
