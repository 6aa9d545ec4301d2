"""Long work as named items, each kept in a file of its own as soon as it is finished.

A killed run repeats at most the items that it was in the middle of. Compilation is most of the work of an item, and its
programs share no state, so items run side by side.
"""

import concurrent.futures
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from experiments import report

Records = list[dict[str, Any]]


def finish_items(directory: Path, items: Mapping[str, Callable[[], Records]], title: str) -> Records:
    """Computes the items that have no file yet.

    Args:
      directory: Of the run; the files go to its folder `items`.
      items: What computes the records of each item, by name. Names become file names.
      title: Of the progress bar.

    Returns:
      The records of all items, in their order, as they read back from JSON.

    Raises:
      ValueError: If the file of a finished item cannot be read.
    """
    folder = directory / "items"
    folder.mkdir(exist_ok=True)
    todo = {name: compute for name, compute in items.items() if not _file(folder, name).exists()}

    def finish(name: str) -> None:
        report.write_json(_file(folder, name), todo[name]())

    with (
        concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool,
        tqdm(total=len(items), initial=len(items) - len(todo), desc=title, unit="item") as bar,
    ):
        started = [pool.submit(finish, name) for name in todo]
        try:
            for future in concurrent.futures.as_completed(started):
                future.result()
                bar.update()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [record for name in items for record in _read(_file(folder, name))]


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name.replace('/', '_').replace(' ', '_')}.json"


def _read(file: Path) -> Records:
    try:
        return json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is damaged: delete it, and it is computed again") from error
