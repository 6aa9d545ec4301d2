"""States on disk: any pytree of arrays, exact to the bit, also in the middle of a window.

A checkpoint is a directory that orbax writes and renames when it is complete. It holds the leaves as a flat dict of
arrays and, as JSON, a schema version, the method's options, and path, dtype, shape and checksum of every leaf.
Containers are never stored: they come back from the caller's own template, so lists stay lists and dataclasses
dataclasses, and a leaf that is missing, renamed or of another shape is an error instead of a silent fresh start.
"""

import dataclasses
import itertools
import json
import os
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from leapquant_jax.config import LeapConfig
from leapquant_jax.methods import LeapMethod, get_method

_VERSION = 2  # 2: rotation="hadamard" has signs


class Checkpoint(NamedTuple):
    """What a checkpoint holds.

    Attributes:
      arrays: the leaves by their path in the pytree (`jax.tree_util.keystr`), in the order of the pytree. A typed PRNG
        key is held as its key data.
      method: the options of the config or method, as saved.
      metadata: the caller's own JSON.
      leaves: {"path", "dtype", "shape", ...} of every leaf, in the same order.
    """

    arrays: dict[str, np.ndarray]
    method: Any
    metadata: Any
    leaves: list[dict[str, Any]]


def save_state(directory: str | os.PathLike, method: Any, state: Any, *, metadata: Any = None) -> None:
    """Writes a state, or any pytree that contains states, to a new directory.

    Args:
      directory: must not exist yet; its parents are created.
      method: LeapConfig, method or method name the state belongs to, or a list of them (one per layer).
      state: pytree of arrays, sharded or not; typed PRNG keys are welcome.
      metadata: anything JSON can hold, e.g. {"num_tokens": 21}.

    Raises:
      ValueError: the directory exists (nothing is overwritten), or `method` or `metadata` cannot be described.
    """
    path = Path(directory).absolute()
    if path.exists():
        raise ValueError(f"{path} exists already and is left as it is: pass a new directory, or remove this one first")
    try:
        metadata = json.loads(json.dumps(metadata))
    except TypeError as error:
        raise ValueError(f"metadata must be what JSON can hold: {error}") from error
    arrays, leaves = {}, []
    for n, (key_path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(state)):
        array = jax.random.key_data(leaf) if _is_key(leaf) else leaf
        described = {**_describe_leaf(key_path, leaf), "crc32": zlib.crc32(np.asarray(array).tobytes())}
        if _is_key(leaf):  # the global default may be another one when it is read
            described["key_impl"] = str(jax.random.key_impl(leaf))
        leaves.append(described)
        if np.size(array):  # orbax stores no empty arrays
            arrays[_name(n)] = array if isinstance(array, jax.Array) else np.asarray(array)
    document = {"version": _VERSION, "method": _describe(method), "metadata": metadata, "leaves": leaves}
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(
            path, args=ocp.args.Composite(state=ocp.args.StandardSave(arrays), document=ocp.args.JsonSave(document))
        )


def load_state[State](directory: str | os.PathLike, method: Any, like: State) -> State:
    """Reads a state that `save_state` wrote.

    Args:
      directory: of the checkpoint.
      method: config, method, name or list as it was saved; None to accept any.
      like: pytree of arrays or `jax.ShapeDtypeStruct`s with the structure, shapes and dtypes to expect, for example
        `jax.eval_shape(lambda: lq.init_state(config, ...))`. Leaves with a sharding are placed accordingly, whatever
        the number of devices when they were saved.

    Returns:
      pytree of `jax.Array`s with the structure of `like` and the saved bits.

    Raises:
      ValueError: no checkpoint there, damaged, saved with other options, or not of this structure; all or nothing.
    """
    checkpoint = read_checkpoint(directory)
    if method is not None:
        _check_method(checkpoint.method, _describe(method), directory)
    expected = [_describe_leaf(*item) for item in jax.tree_util.tree_leaves_with_path(like)]
    for have, want in itertools.zip_longest(checkpoint.leaves, expected):
        if _in_words(have) != _in_words(want):
            raise ValueError(f"{directory} does not fit: it holds {_in_words(have)}, but {_in_words(want)} is expected")
    leaves = []
    for leaf, template in zip(checkpoint.leaves, jax.tree.leaves(like), strict=True):
        array = jax.device_put(checkpoint.arrays[leaf["path"]])
        if "key_impl" in leaf:
            array = jax.random.wrap_key_data(array, impl=leaf["key_impl"])
        sharding = getattr(template, "sharding", None)
        leaves.append(array if sharding is None else jax.device_put(array, sharding))
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def read_checkpoint(directory: str | os.PathLike) -> Checkpoint:
    """Everything in a checkpoint as NumPy arrays, without a template.

    Raises:
      ValueError: no checkpoint there, damaged, or of another schema version.
    """
    path = Path(directory).absolute()
    if not path.is_dir():
        raise ValueError(f"there is no checkpoint at {path}: pass a directory that save_state wrote")
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            document = checkpointer.restore(path, args=ocp.args.Composite(document=ocp.args.JsonRestore()))["document"]
            if document["version"] != _VERSION:
                raise ValueError(f"schema version {document['version']}, this library reads {_VERSION}")
            leaves = document["leaves"]
            # NumPy templates: arrays saved on any number of devices are read on this one.
            empty = [np.empty(leaf["stored_shape"], leaf["stored_dtype"]) for leaf in leaves]
            template = {_name(n): array for n, array in enumerate(empty) if array.size}
            stored = checkpointer.restore(
                path, args=ocp.args.Composite(state=ocp.args.StandardRestore(template))
            )["state"] if template else {}  # fmt: skip
        arrays = {leaf["path"]: stored.get(_name(n), empty[n]) for n, leaf in enumerate(leaves)}
        for leaf, array in zip(leaves, arrays.values(), strict=True):
            described = (list(array.shape), str(array.dtype), zlib.crc32(array.tobytes()))
            if described != (leaf["stored_shape"], leaf["stored_dtype"], leaf["crc32"]):
                raise ValueError(f"leaf {leaf['path']} differs from its shape, dtype or checksum")
    except Exception as error:  # orbax and tensorstore raise whatever their readers run into
        raise ValueError(f"the checkpoint at {path} is damaged or not one of ours: {error}") from error
    return Checkpoint(arrays, document["method"], document["metadata"], leaves)


def _name(n: int) -> str:
    return f"{n:05d}"


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _describe_leaf(path: Any, leaf: Any) -> dict[str, Any]:
    """What must be equal between a saved and an expected leaf, and how the array is stored."""
    leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    stored = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
    return {
        "path": jax.tree_util.keystr(path), "dtype": str(leaf.dtype), "shape": list(leaf.shape),
        "stored_dtype": str(stored.dtype), "stored_shape": list(stored.shape),
    }  # fmt: skip


def _describe(method: Any) -> Any:
    """The options of a method as JSON; a LeapConfig and a method made of it are the same."""
    if isinstance(method, list | tuple):
        return [_describe(one) for one in method]
    method = method if isinstance(method, LeapConfig) else get_method(method)
    config = method.config if isinstance(method, LeapMethod) else method
    return dataclasses.asdict(config) if isinstance(config, LeapConfig) else config.name


def _check_method(saved: Any, expected: Any, directory: str | os.PathLike) -> None:
    if saved == expected:
        return
    if isinstance(saved, dict) and isinstance(expected, dict):
        differing = [name for name in {**saved, **expected} if saved.get(name) != expected.get(name)]
        saved, expected = ({name: x.get(name) for name in differing} for x in (saved, expected))
    raise ValueError(f"{directory} was saved with {saved}, not with {expected}: pass the method it was made with")


def _in_words(leaf: dict[str, Any] | None) -> str:
    return "nothing more" if leaf is None else f"{leaf['path'] or 'a leaf'} {leaf['dtype']} {tuple(leaf['shape'])}"
