"""A program's options as one frozen dataclass, from whose fields its absl flags are made when it is the main program.

    @dataclasses.dataclass(frozen=True)
    class Settings:
        num_tokens: int = option(2048, "Length of every stream.")

    def main(argv): run_main("accuracy", argv, Settings, run)

    if __name__ == "__main__":
        define_flags(Settings)
        app.run(main)

So an import defines no flags, programs may use the same flag names, and tests pass a dataclass.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import app, flags, logging

flags.disclaim_key_flags()  # --help shows the flags below as those of the main module


def option(default: Any, help: str, *, choices: Sequence[str] = ()) -> Any:
    """A field of a settings dataclass.

    Args:
      default: A bool, int, float, str, or tuple of str (a comma-separated flag); says what type the flag has.
      help: One line.
      choices: Allowed values of a str.
    """
    return dataclasses.field(default=default, metadata={"help": help, "choices": tuple(choices)})


def define_flags(settings: type) -> None:
    """Defines one absl flag per field of `settings`."""
    for field in dataclasses.fields(settings):
        name, text, choices = field.name, field.metadata["help"], field.metadata["choices"]
        default: Any = field.default
        if choices:
            flags.DEFINE_enum(name, default, choices, text)
        elif isinstance(default, tuple):
            flags.DEFINE_list(name, list(default), text)
        elif isinstance(default, bool):
            flags.DEFINE_bool(name, default, text)
        elif isinstance(default, int):
            flags.DEFINE_integer(name, default, text)
        elif isinstance(default, float):
            flags.DEFINE_float(name, default, text)
        else:
            flags.DEFINE_string(name, default, text)


def from_flags[S](settings: type[S]) -> S:
    """The settings that the command line asks for.

    Raises:
      ValueError: What the dataclass itself refuses.
    """
    values = {field.name: flags.FLAGS[field.name].value for field in dataclasses.fields(settings)}  # pyright: ignore
    return settings(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def start[S](program: str, argv: Sequence[str], settings: type[S]) -> S:
    """What a main begins with: quiet logs, checked flags, and the folder of compiled programs if there is such a flag.

    Raises:
      SystemExit: With one line that names the program, for flags that do not fit; app.UsageError for stray arguments.
    """
    if len(argv) > 1:
        raise app.UsageError(f"Unexpected arguments: {argv[1:]}")
    logging.set_verbosity(logging.ERROR)
    try:
        chosen = from_flags(settings)
    except ValueError as error:
        raise SystemExit(f"{program}: {error}") from error
    folder = getattr(chosen, "compilation_cache", "")
    if folder and not getattr(chosen, "report_only", False):
        keep_compiled_programs(Path(folder))
    return chosen


def run_main[S](program: str, argv: Sequence[str], settings: type[S], run: Callable[[S], str]) -> None:
    """A whole main: prints what `run` returns, or one line that says what to change."""
    chosen = start(program, argv, settings)
    try:
        print(run(chosen))
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"{program}: {error}") from error


def keep_compiled_programs(directory: Path) -> None:
    """So that a run that goes on after a kill does not compile again."""
    jax.config.update("jax_compilation_cache_dir", str(directory.resolve()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
