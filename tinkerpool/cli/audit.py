"""`tinkerpool audit`: what administrators did. Needs an administrator's key."""

from __future__ import annotations

import re
from typing import Annotated

import typer
from google.protobuf.timestamp_pb2 import Timestamp

from tinkerpool.cli import show
from tinkerpool.cli.connection import JsonOption, LimitOption, fetch_list, note_rest
from tinkerpool.cli.finding import Target, calls_pool
from tinkerpool.cli.times import SINCE_METAVAR, moment_of
from tinkerpool.client.calls.methods import LIST_AUDIT_ENTRIES
from tinkerpool.v1 import admin_pb2

_COUNTS = re.compile(r"num_.*|.*_(max|per_s|per_month)")
"""Details that are numbers; ids and reasons may have only digits, too."""


@calls_pool
def audit(
    target: Target,
    act: Annotated[
        str, typer.Option(help="Only these acts: key.revoke; or all on a kind of subject: key, tenant.")
    ] = "",
    subject: Annotated[
        str, typer.Option(help="Only acts on this subject: the id of a key, the name of a tenant.")
    ] = "",
    key: Annotated[str, typer.Option(help="Only acts of this key, by its id.")] = "",
    since: Annotated[
        str,
        typer.Option(metavar=SINCE_METAVAR, help="Only acts of the last 7d, 12h; or from 2026-11-26 on, in UTC."),
    ] = "",
    limit: LimitOption = 100,
    json: JsonOption = False,
) -> None:
    """List what administrators did, the newest first."""
    start = None
    if since:
        start = Timestamp()
        start.FromDatetime(moment_of(since))

    def make_request(page_size: int, page_token: str) -> admin_pb2.ListAuditEntriesRequest:
        return admin_pb2.ListAuditEntriesRequest(
            page_size=page_size, page_token=page_token, act=act, subject=subject, key_id=key, start_time=start
        )

    response = fetch_list(target, LIST_AUDIT_ENTRIES, make_request, "entries", limit)
    if json:
        show.json_message(response)
        return
    show.table(
        "Audit log",
        ("entry", "time", "by", "act", "subject", "details"),
        (
            (
                str(entry.entry_id),
                show.moment(entry.time),
                f"{entry.key_id} ({entry.tenant})" if entry.key_id else "operator",
                entry.act,
                entry.subject,
                ", ".join(_detail(name, value) for name, value in sorted(entry.details.items())),
            )
            for entry in response.entries
        ),
        right="entry",
        whole=("subject",),
    )
    note_rest(response, limit)


def _detail(name: str, value: str) -> str:
    """Return a detail for people: `ttl 90 days` for `ttl_seconds` 7776000. JSON has it as it was recorded."""
    if not value:  # a limit that was set back
        return f"{name} default"
    if name.endswith("_seconds"):
        return f"{name.removesuffix('_seconds')} {show.duration(float(value))}"
    if name.endswith("_bytes_max") and value.isdecimal():
        return f"{name} {show.size(int(value))}"
    if _COUNTS.fullmatch(name) and value.isdecimal():
        return f"{name} {show.count(int(value))}"
    return f"{name} {value}"
