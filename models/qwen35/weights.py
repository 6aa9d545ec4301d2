"""Checkpoints in the Hugging Face layout, in and out.

The modules are named as the tensors are, so one rule turns a parameter's path into its tensor's name. A loader that
guesses is a loader that is silently wrong: every tensor is either expected, on the short list of parts that a text
model does not have, or an error.
"""

import dataclasses
import json
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from models.blocks import Float32Param
from models.qwen35.config import Config
from models.qwen35.model import Model

_TEXT_PREFIX = "model."
_MULTIMODAL_PREFIX = "model.language_model."
_NOT_TEXT = ("model.visual.", "mtp.")
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


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
    config = Config.from_hf(_read_json(directory / "config.json"))
    files = _tensor_files(directory)
    if "lm_head.weight" not in files and not config.tie_word_embeddings:
        raise ValueError(f"{directory} has no lm_head.weight and its config does not set tie_word_embeddings")
    prefix = _MULTIMODAL_PREFIX if any(name.startswith(_MULTIMODAL_PREFIX) for name in files) else _TEXT_PREFIX
    tensors = _TensorReader(files)
    config = dataclasses.replace(config, tie_word_embeddings="lm_head.weight" not in files)
    if prefix + "embed_tokens.weight" in files:
        own = str(tensors.read(prefix + "embed_tokens.weight").dtype)
        config = dataclasses.replace(config, dtype=dtype or own)

    abstract = nnx.eval_shape(lambda: Model(config, rngs=nnx.Rngs(0)))
    graphdef, parameters = nnx.split(abstract)
    flat = nnx.to_flat_state(parameters)
    names = {path: _tensor_name(path, prefix) for path, _ in flat}
    _check_names(set(names.values()), set(files))
    loaded = []
    for path, variable in flat:
        value = _from_tensor(names[path], tensors.read(names[path]), path, variable.shape)
        kept = jnp.float32 if isinstance(variable, Float32Param) else dtype or value.dtype
        loaded.append((path, variable.replace(jnp.asarray(value, dtype=kept))))
    return config, nnx.merge(graphdef, nnx.from_flat_state(loaded))


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
        save_file(shards[0], directory / _SINGLE, metadata={"format": "pt"})
    else:
        weight_map = {}
        for i, shard in enumerate(shards):
            name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
            save_file(shard, directory / name, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(shard, name)
        total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
    (directory / "config.json").write_text(json.dumps(config.to_hf(), indent=2) + "\n")


def from_config(config: Config, key: Array, *, param_dtype: str | None = None) -> Model:
    """A model with fresh parameters, its decays spread as in Mamba and FLA (memories of ten to thousands of tokens).

    Args:
      config: The configuration.
      key: A JAX random key.
      param_dtype: Dtype of the stored parameters; `config.dtype` if None. Use "float32" with a bfloat16 config to
        train with master weights.
    """
    return Model(config, rngs=nnx.Rngs(key), param_dtype=param_dtype)


def cast(model: Model, dtype: str) -> Model:
    """The model with parameters and activations in `dtype`; `Float32Param`s stay float32."""
    config = dataclasses.replace(model.config, dtype=dtype)
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: Model(config, rngs=nnx.Rngs(0))))

    def convert(path: tuple, variable: nnx.Variable) -> nnx.Variable:
        del path
        keep = isinstance(variable, Float32Param)
        return variable if keep else variable.replace(variable[...].astype(dtype))

    return nnx.merge(graphdef, nnx.map_state(convert, nnx.state(model, nnx.Param)))


def _tensor_name(path: tuple, prefix: str) -> str:
    """("layers", 0, "mlp", "up_proj", "kernel") -> "model.layers.0.mlp.up_proj.weight"."""
    *modules, leaf = map(str, path)
    if leaf in ("kernel", "embedding", "weight"):
        leaf = "weight"  # A_log and dt_bias are tensors without this suffix
    if modules == ["lm_head"]:
        prefix = ""
    return prefix + ".".join([*modules, leaf])


def _from_tensor(name: str, tensor: np.ndarray, path: tuple, shape: tuple[int, ...]) -> np.ndarray:
    """PyTorch's layout to ours: kernels [out, in] -> [in, out], convolutions [C, 1, taps] -> [taps, C]."""
    if path[-1] == "kernel":
        tensor = tensor[:, 0].T if tensor.ndim == 3 and tensor.shape[1] == 1 else tensor.T
    if tensor.shape != tuple(shape):
        raise ValueError(f"tensor {name} does not fit config.json: expected {shape} in our layout, got {tensor.shape}")
    return tensor


def _to_tensor(value: Array, path: tuple) -> np.ndarray:
    """The inverse of `_from_tensor`."""
    tensor = np.asarray(value)
    if path[-1] == "kernel":
        tensor = tensor.T[:, None] if path[-2] == "conv1d" else tensor.T
    return np.ascontiguousarray(tensor)


class _TensorReader:
    """Reads tensors by name from the files that hold them, keeping one file open at a time."""

    def __init__(self, files: dict[str, Path]):
        self._files = files
        self._open_path: Path | None = None
        self._open_file = None

    def read(self, name: str) -> np.ndarray:
        if self._files[name] != self._open_path:
            self._open_path = self._files[name]
            self._open_file = _open(self._open_path)
        return self._open_file.get_tensor(name)


def _open(path: Path):
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError("reading checkpoints needs safetensors: install leapquant-jax[models]") from error
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise ValueError(f"{path} is not a complete safetensors file (truncated download?): {error}") from error


def _tensor_files(directory: Path) -> dict[str, Path]:
    """Which file holds which tensor, checked against the files themselves."""
    index = directory / _INDEX
    if index.exists():
        weight_map = {name: directory / file for name, file in _read_json(index)["weight_map"].items()}
    else:
        weight_map = None
    paths = [directory / _SINGLE] if weight_map is None else sorted(set(weight_map.values()))
    absent = [str(path) for path in paths if not path.exists()]
    if absent:
        raise FileNotFoundError(f"missing checkpoint files: {', '.join(absent)}")
    present = {name: path for path in paths for name in _open(path).keys()}
    if weight_map is not None and weight_map != present:
        wrong = sorted(name for name in weight_map | present if weight_map.get(name) != present.get(name))
        raise ValueError(f"{index} and its shards disagree about: {_listing(wrong)}")
    return present


def _check_names(expected: set[str], present: set[str]) -> None:
    unknown = sorted(name for name in present - expected if not name.startswith(_NOT_TEXT))
    missing = sorted(expected - present)
    if unknown or missing:
        parts = [f"missing tensors: {_listing(missing)}"] * bool(missing)
        parts += [f"unknown tensors: {_listing(unknown)}"] * bool(unknown)
        raise ValueError("checkpoint does not match config.json; " + "; ".join(parts))


def _listing(names: list[str], limit: int = 20) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _read_json(path: Path) -> dict:
    if not path.exists():
        raise FileNotFoundError(f"missing checkpoint file: {path}")
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON (truncated download?): {error}") from error
