"""The folder of one run: what was run, on what, and the checkpoints from which a killed run goes on.

    run = RunDirectory.open("runs/accuracy", config)     # a new folder, or the same run again; else ValueError
    with run.checkpoints(minimum_seconds=20) as manager:
        done, tree = restore_latest(manager, template)
        ...
        save(manager, done, tree)

`run.json` holds the configuration and, for every start of the program, the exact command, versions and device. A folder
whose configuration differs, or that holds files of something else, is never touched.
"""

import dataclasses
import datetime
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from experiments import report

_RUN_FILE = "run.json"
_SCHEMA = 1
_PACKAGES = ("leapquant-jax", "jax", "jaxlib", "flax", "orbax-checkpoint", "numpy", "scipy")


def environment() -> dict[str, str]:
    """Device and versions, for the record."""
    device = jax.devices()[0]
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "device": f"{len(jax.devices())} x {device.device_kind} ({device.platform})",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        **versions,
    }


def command() -> str:
    """The command line of this program, as one would type it; without a folder of compiled programs, which is of one
    machine and changes no result."""
    main = sys.modules["__main__"].__spec__
    program = ["python", "-m", main.name] if main is not None else ["python", Path(sys.argv[0]).name]
    return shlex.join([*program, *(x for x in sys.argv[1:] if not x.startswith("--compilation_cache="))])


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """A folder that belongs to exactly one configuration.

    Attributes:
      path: The folder.
      config: What determines the results, as JSON reads it back.
      sessions: One entry per start: command, versions, device and time. The last one is this process.
    """

    path: Path
    config: dict[str, Any]
    sessions: list[dict[str, str]]

    @classmethod
    def open(cls, path: str | os.PathLike, config: Mapping[str, Any]) -> Self:
        """Creates the folder, or opens it again for the same configuration.

        Args:
          path: The folder; made with its parents.
          config: Everything that determines the results (JSON values), the program's name included.

        Returns:
          The folder, with this start entered in `run.json`.

        Raises:
          ValueError: If the folder belongs to another run or to something else; the message names the differences
            and the fix. Nothing in it is changed.
        """
        path = Path(path)
        wanted: dict[str, Any] = json.loads(json.dumps(report.plain({"schema": _SCHEMA, **config})))
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} is a file: give --output_dir a folder")
        file = path / _RUN_FILE
        sessions: list[dict[str, str]] = []
        if file.exists():
            try:
                stored = json.loads(file.read_text())
                stored_config, sessions = stored["config"], stored["sessions"]
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(f"{file} does not describe a run of ours: choose another --output_dir") from error
            if stored_config != wanted:
                raise ValueError(
                    f"{path} holds another run, which differs in {_differences(stored_config, wanted)}. Nothing was "
                    "changed: choose another --output_dir, delete the folder, or go on with that run by its own flags"
                )
        elif path.is_dir() and any(path.iterdir()):
            raise ValueError(
                f"{path} is not empty and has no {_RUN_FILE}, so it is no run of ours. Nothing was changed: choose "
                "another --output_dir"
            )
        path.mkdir(parents=True, exist_ok=True)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        run = cls(path, wanted, [*sessions, {"command": command(), "started": now, **environment()}])
        report.write_json(file, {"config": run.config, "sessions": run.sessions})
        return run

    def checkpoints(self, *, minimum_seconds: float) -> ocp.CheckpointManager:
        """A manager of this run's checkpoints that keeps the newest two and saves at most every `minimum_seconds`.

        What a kill in the middle of a save leaves behind carries a temporary name: it is never taken for a
        checkpoint, and removed here.
        """
        options = ocp.CheckpointManagerOptions(
            max_to_keep=2,
            cleanup_tmp_directories=True,
            save_decision_policy=checkpoint_managers.ContinuousCheckpointingPolicy(
                minimum_interval_secs=round(minimum_seconds) or None
            ),
        )
        return ocp.CheckpointManager((self.path / "checkpoints").resolve(), options=options)

    def header(self) -> dict[str, Any]:
        """The first record of a results file: what was run, and on what."""
        return {"measure": "run", "config": self.config, "sessions": self.sessions}


def save(manager: ocp.CheckpointManager, done: int, tree: Any, *, force: bool = False) -> bool:
    """Saves `tree` as the state after `done` items, unless the last save was a moment ago; returns whether it did.

    The files are complete when this returns, so the caller may donate the arrays, and a failed write is seen at once.
    """
    tree = jax.tree.map(_filled, tree)
    saved = manager.save(
        done,
        args=ocp.args.Composite(state=ocp.args.StandardSave(tree), cursor=ocp.args.JsonSave({"done": done})),
        force=force,
    )
    manager.wait_until_finished()
    return saved


def restore_latest(manager: ocp.CheckpointManager, template: Any) -> tuple[int, Any]:
    """The newest complete checkpoint.

    Args:
      manager: From `RunDirectory.checkpoints`.
      template: A tree of arrays as saved: gives types, shapes, dtypes and placement. It also is the answer when there
        is no checkpoint yet.

    Returns:
      (items done, tree).

    Raises:
      ValueError: If the checkpoint's files are damaged or belong to another program version.
    """
    latest = manager.latest_step()
    if latest is None:
        return 0, template
    abstract = jax.tree.map(lambda x: ocp.utils.to_shape_dtype_struct(_filled(x)), template)
    try:
        restored = manager.restore(
            latest,
            args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract), cursor=ocp.args.JsonRestore()),
        )
    except Exception as error:  # orbax raises a different type for each way in which files can be damaged
        raise ValueError(
            f"checkpoint {manager.directory / str(latest)} cannot be read ({type(error).__name__}): delete that folder to "
            "go on from the one before it"
        ) from error
    state = jax.tree.map(lambda old, new: new if np.size(old) else old, template, restored["state"])
    return restored["cursor"]["done"], state


def _filled(x: Any) -> Any:
    """`x`, or one zero in place of no entries: orbax saves no empty arrays."""
    return x if np.size(x) else np.zeros((1,) * np.ndim(x), x.dtype)


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return "; ".join(f"{name}: {old.get(name)!r} there, {new.get(name)!r} now" for name in names)
