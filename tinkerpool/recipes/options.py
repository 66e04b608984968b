"""A recipe's settings as options of its command line."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from tinkerpool.errors import TinkerpoolError

S = TypeVar("S")


def option(text: str, default: Any = dataclasses.MISSING) -> Any:
    """Return the field of a setting: its help, and its default; a setting without a default is required."""
    return dataclasses.field(default=default, metadata={"help": text})


def parse(settings: type[S], doc: str, module: str, argv: Sequence[str] | None = None) -> S:
    """Return settings from a command line; None: this process's. Prints help and exits for `--help` and mistakes."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        usage="%(prog)s --data FILE --log-dir FOLDER [options]",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    hints = get_type_hints(settings)
    for field in dataclasses.fields(settings):  # type: ignore[arg-type]  # a dataclass
        is_required = field.default is dataclasses.MISSING
        shown = "required" if is_required else f"default: {field.default}" if field.default is not None else ""
        kind, choices = _kind(hints[field.name])
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            type=kind,
            choices=choices,
            metavar=None if choices else kind.__name__.upper(),
            required=is_required,
            default=None if is_required else field.default,
            help=field.metadata["help"].replace("%", "%%") + (f" ({shown})" if shown else ""),
        )
    return settings(**vars(parser.parse_args(argv)))


def run_program(settings: type[S], train: Callable[[S], Any], doc: str, module: str) -> None:
    """Run a recipe with this process's command line. An expected error is one line and exit code 1."""
    try:
        train(parse(settings, doc, module))
    except (TinkerpoolError, ValueError, TypeError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command continues at the last checkpoint")


def _kind(hint: Any) -> tuple[Callable[[str], Any] | type, Sequence[Any] | None]:
    """Return how to read a value of a type: `X`, `X | None` or `Literal[...]`, and the choices."""
    if get_origin(hint) is types.UnionType:
        hint = next(part for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is Literal:
        return str, get_args(hint)
    assert hint in {str, int, float, Path}
    return hint, None
