"""`tinkerpool tenant limit`: the limits of a tenant, and what is in use of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer
from rich.text import Text

from tinkerpool.cli import show
from tinkerpool.cli.connection import JsonOption, call
from tinkerpool.cli.finding import Target, calls_pool
from tinkerpool.client.calls.methods import GET_CAPABILITIES, GET_TENANT_LIMITS, SET_TENANT_LIMITS
from tinkerpool.v1 import limits_pb2, sessions_pb2

UNLIMITED = "unlimited"
"""The value of a limit that limits nothing."""


@calls_pool
def limit(
    target: Target,
    tenant: Annotated[str, typer.Argument(help="The tenant's name.")],
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME=VALUE]...", help="Limits to set; NAME= gives it the pool's default again."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Set limits of a tenant, at once and for good, and show all of them. An administrator's key sets them."""
    wanted: dict[str, str] = {}
    for name, value in map(_change, changes or ()):
        if name in wanted:
            raise show.CliError(f"{name} is given twice: give each limit once")
        wanted[name] = value
    if wanted:
        call(target, SET_TENANT_LIMITS, limits_pb2.SetTenantLimitsRequest(tenant=tenant, limits=wanted))
    if "base_models" in wanted:
        _note_unserved(target, wanted["base_models"])
    response = call(target, GET_TENANT_LIMITS, limits_pb2.GetTenantLimitsRequest(tenant=tenant))
    if json:
        show.json_message(response)
    else:
        show_limits(response.tenant, response.limits)


def show_limits(tenant: str, limits: Iterable[limits_pb2.TenantLimit]) -> None:
    """Print a table of a tenant's limits."""
    show.table(
        f"Limits of {tenant}",
        ("limit", "in use", "value", "set"),
        (
            (
                each.name,
                f"{each.usage:,}" if each.HasField("usage") else "",
                each.value,
                Text("for this tenant", "yellow") if each.is_set else "",
            )
            for each in limits
        ),
        right="use value",
    )


def _note_unserved(target: Target, value: str) -> None:
    """Name the base models of a limit that the pool does not serve: it may serve them later, or they are mistyped."""
    served = [model.name for model in call(target, GET_CAPABILITIES, sessions_pb2.GetCapabilitiesRequest()).base_models]
    named = [name for part in value.split(",") if (name := part.strip()) and value != UNLIMITED]
    if unserved := [name for name in named if name not in served]:
        show.note(f"Note: the pool does not serve {', '.join(unserved)}. It serves {', '.join(served)}.")


def _change(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise show.CliError(f"{text!r} is no limit: write NAME=VALUE, for example adapters_max=50")
    return name, value
