"""Whether command lines in deploy files are ones that `tinkerpool serve` and `ray start` take."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import click
import typer
from ray.scripts.scripts import start as ray_start

from tinkerpool.cli.app import command_line

REFUSALS: tuple[type[Exception], ...] = (click.UsageError, typer.BadParameter.mro()[1])
"""Of unknown options and wrong values. typer has a copy of click, whose UsageError has no public name."""


def serve_fault(arguments: Sequence[str]) -> str:
    """Return why `tinkerpool serve` refuses the arguments; empty if it takes them."""
    command: Any = command_line()
    return _fault(command.commands["serve"], arguments)


def ray_start_fault(arguments: Sequence[str]) -> str:
    """Return why `ray start` refuses the arguments; empty if it takes them."""
    return _fault(ray_start, arguments)


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """Return a container's argument with its `$(NAME)`, as Kubernetes expands them. Raises LookupError."""
    return re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], text)


def interpolated(text: str) -> str:
    """Return a text of a compose file with the defaults of its `${NAME:-default}`."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def _fault(command: click.Command, arguments: Sequence[str]) -> str:
    try:
        command.make_context(command.name, list(arguments))
    except REFUSALS as error:
        return str(error)
    return ""
