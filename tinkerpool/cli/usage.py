"""`usage`: the tokens and engine time of tenants, since the beginning or from a day on."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Mapping
from typing import Annotated

import typer
from rich.text import Text

from tinkerpool.cli import show
from tinkerpool.cli.connection import JsonOption, call
from tinkerpool.cli.finding import Target, calls_pool
from tinkerpool.cli.limits import show_limits
from tinkerpool.cli.times import SINCE_METAVAR, moment_of
from tinkerpool.client.calls.methods import GET_TENANT_LIMITS, GET_USAGE
from tinkerpool.v1 import limits_pb2, pool_pb2

GROUPS = {"tenant": "tenant", "model": "base_model", "adapter": "adapter_id", "kind": "kind", "day": "day"}
"""What usage can be summed by, with the field of a row."""
NUMBERS = ("num_operations", "num_tokens", "engine_seconds", "file_bytes", "file_seconds")
WORDS = {
    "base_model": {"": "(not counted by model)"},
    "adapter_id": {"": "(base model)", "*": "(several)"},
    "day": {"": "(before)"},
}
"""What the table says for a value that is no name."""


@calls_pool
def usage(
    target: Target,
    since: Annotated[
        str,
        typer.Option(metavar=SINCE_METAVAR, help="From this day on, in UTC: 7d for seven days ago, or 2026-11-26."),
    ] = "",
    by: Annotated[
        str, typer.Option(metavar="GROUPS", help="Sum by some of tenant,model,adapter,kind,day. Default: tenant,kind.")
    ] = "",
    is_csv: Annotated[bool, typer.Option("--csv", help="Print CSV with a header, for spreadsheets.")] = False,
    json: JsonOption = False,
) -> None:
    """Show tokens and engine time, by tenant and kind of operation, and the limits of your tenant.

    An administrator's key shows the use of all tenants, any other key its own. With --since, --by or --csv the limits
    are left out. Days begin at midnight UTC.
    """
    if is_csv and json:
        raise typer.BadParameter("--csv and --json are two formats: give one of them")
    groups = _groups(by)
    day = moment_of(since).date().isoformat() if since else ""
    request = pool_pb2.GetUsageRequest(since=day, group_by=map(_number, groups) if since or by else ())
    response = call(target, GET_USAGE, request)
    if response.start_day > request.since > "":
        show.note(f"The pool keeps days apart since {response.start_day}: what was before is not in these numbers.")
    if is_csv:
        _print_csv(response, groups)
    elif since or by:
        if json:
            show.json_message(response)
        else:
            _show_groups(response, groups)
    else:
        limits = call(target, GET_TENANT_LIMITS, limits_pb2.GetTenantLimitsRequest())
        if json:
            show.json_message(response, limits)
            return
        if response.rows:
            _show_usage(response)
        else:
            show.say("Nothing has been used yet.")
        show.console.print()
        show_limits(limits.tenant, limits.limits)


def _groups(by: str) -> list[str]:
    groups = list(dict.fromkeys(each.strip() for each in by.split(","))) if by else ["tenant", "kind"]
    if unknown := [each for each in groups if each not in GROUPS]:
        raise typer.BadParameter(f"--by takes some of {','.join(GROUPS)}, not {unknown[0]!r}")
    return groups


def _number(group: str) -> pool_pb2.UsageGroup.ValueType:
    return pool_pb2.UsageGroup.Value(f"USAGE_GROUP_{group.upper()}")


def _print_csv(response: pool_pb2.GetUsageResponse, groups: list[str]) -> None:
    fields = [*(GROUPS[group] for group in groups), *NUMBERS]
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(fields)
    for row in response.rows:
        values = [getattr(row, field) for field in fields]
        writer.writerow([f"{value:.6f}" if isinstance(value, float) else value for value in values])


def _show_groups(response: pool_pb2.GetUsageResponse, groups: list[str]) -> None:
    if not response.rows:
        show.say("Nothing was used in this time.")
        return
    fields = [GROUPS[group] for group in groups]
    lines: list[tuple[str | Text, ...]] = [
        (*(WORDS.get(field, _NO_WORDS).get(value := getattr(row, field), value) for field in fields), *_numbers(row))
        for row in response.rows
    ]
    total = _numbers(_total(response.rows))
    lines.append(tuple(Text(cell, "bold") for cell in ("all", *("" for _ in groups[1:]), *total)))
    begin = f"{response.start_day} (UTC)" if response.start_day else "the pool's data began"
    show.table(
        f"Usage since {begin}",
        (*groups, "operations", "tokens", "engine time"),
        lines,
        right="operations tokens engine time",
        whole=("adapter",),
    )


_NO_WORDS: Mapping[str, str] = {}


def _show_usage(response: pool_pb2.GetUsageResponse) -> None:
    lines: list[tuple[str | Text, ...]] = []
    for tenant in dict.fromkeys(row.tenant for row in response.rows):
        rows = [row for row in response.rows if row.tenant == tenant]
        lines += [(row.tenant, row.kind, *_numbers(row)) for row in rows]
        lines.append(tuple(Text(cell, "bold") for cell in (tenant, "all", *_numbers(_total(rows)))))
    show.table(
        "Usage since the pool's data began",
        ("tenant", "kind", "operations", "tokens", "engine time"),
        lines,
        right="operations tokens engine time",
    )


def _total(rows: Iterable[pool_pb2.UsageRow]) -> pool_pb2.UsageRow:
    rows = list(rows)
    return pool_pb2.UsageRow(
        num_operations=sum(row.num_operations for row in rows),
        num_tokens=sum(row.num_tokens for row in rows),
        engine_seconds=sum(row.engine_seconds for row in rows),
    )


def _numbers(row: pool_pb2.UsageRow) -> tuple[str, ...]:
    return show.count(row.num_operations), show.count(row.num_tokens), show.duration(row.engine_seconds)
