"""What a person means by an argument: an adapter by the beginning of its id or by its name, an operation or checkpoint
of it, a key.

The pool finds the candidates; here only what is unique is taken. A whole id or path always means itself, so that a
script never acts on another object than the one that it names. Does not depend on what a command does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, NoReturn

import typer

from tinkerpool.cli import show
from tinkerpool.cli.connection import fetch_list
from tinkerpool.cli.finding import Target
from tinkerpool.cli.show import CliError
from tinkerpool.client.calls.methods import LIST_ADAPTERS, LIST_API_KEYS, LIST_CHECKPOINTS
from tinkerpool.names import SCHEME, CheckpointPath, is_adapter_id, operation_name
from tinkerpool.v1.adapters_pb2 import Adapter, ListAdaptersRequest
from tinkerpool.v1.admin_pb2 import ApiKey, ListApiKeysRequest
from tinkerpool.v1.checkpoints_pb2 import ListCheckpointsRequest

CANDIDATES_MAX = 10
"""Most candidates that an error lists."""
SAMPLER_PART = ":sample:"
"""In the id of a sampler, which no list has."""
KEYS_MAX = 100_000
"""More keys than a pool has: the list of keys has no filter."""

AdapterArgument = Annotated[
    str,
    typer.Argument(
        metavar="ADAPTER", help="Its id in `tinkerpool adapter list`, a unique beginning of the id, or its name."
    ),
]
PathArgument = Annotated[
    str,
    typer.Argument(
        metavar="PATH",
        help="The path in `tinkerpool checkpoint list`; or ADAPTER/weights/NAME with a unique beginning of the "
        "adapter's id, or its name.",
    ),
]


def find_adapter(target: Target, reference: str) -> Adapter:
    """Return the adapter that is meant. Raises CliError if it is none, or more than one."""
    _check(reference)
    request = partial(ListAdaptersRequest, reference=reference)
    found = fetch_list(target, LIST_ADAPTERS, request, "adapters", CANDIDATES_MAX + 1)
    # A pool of an older version lists all its adapters.
    meant = [each for each in found.adapters if each.name == reference or _may_mean(reference, each.adapter_id)]
    if len(meant) == 1:
        return meant[0]
    if meant:
        lines = [f"{each.adapter_id}  {_described(each)}" for each in meant]
        name_one = "name one of these, as BEGINNING:train:NUMBER"
        _raise_ambiguous(f"{reference!r} may mean more than one adapter: {name_one}", lines, found.total_size)
    if is_adapter_id(reference):  # one of another tenant, for an administrator; or the pool says that there is none
        return Adapter(adapter_id=reference)
    raise CliError(
        f"no adapter has the name {reference!r} or an id that begins so; `tinkerpool adapter list` shows yours"
    )


def find_operation(target: Target, reference: str) -> str:
    """Return the name of the operation that is meant, ADAPTER:SEQ; one of a sampler is named whole. Raises CliError."""
    if SAMPLER_PART in reference:
        return reference
    adapter, _, seq = reference.rpartition(":")
    if not (adapter and seq.isascii() and seq.isdecimal()):
        raise CliError(f"{reference!r} is no operation: write ADAPTER:SEQ, as futures and errors show it")
    return operation_name(find_adapter(target, adapter).adapter_id, int(seq))


def find_checkpoint(target: Target, reference: str) -> str:
    """Return the path of the checkpoint that is meant. Raises CliError if it is none, or more than one."""
    _check(reference)
    text = reference.removeprefix(SCHEME)
    adapter, slash, rest = text.partition("/")
    request = partial(ListCheckpointsRequest, reference=text)
    found = fetch_list(target, LIST_CHECKPOINTS, request, "checkpoints", CANDIDATES_MAX + 1)
    is_whole = bool(
        rest.partition("/")[2]
    )  # a whole name means itself: `run/weights/step-1` is not the beginning of step-10's path
    meant = []
    for each in found.checkpoints:
        own = each.path.removeprefix(f"{SCHEME}{each.adapter_id}")
        fits = own == slash + rest if is_whole else own.startswith(slash + rest)
        if fits and (each.adapter_name == adapter or _may_mean(adapter, each.adapter_id)):
            meant.append(each)
    if len(meant) == 1:
        return meant[0].path
    if meant:
        lines = [f"{each.path}  {each.adapter_name}" for each in meant]
        _raise_ambiguous(f"{reference!r} may mean more than one checkpoint: name one of these", lines, found.total_size)
    try:
        return str(CheckpointPath.parse(reference))  # another tenant's, which is public; or the pool says there is none
    except ValueError:
        raise CliError(
            f"no checkpoint {reference!r}: give its path, or ADAPTER/weights/NAME with the beginning of the adapter's "
            "id or its name; `tinkerpool checkpoint list` shows yours"
        ) from None


def find_key(target: Target, reference: str) -> ApiKey:
    """Return the key that is meant; a revoked one only by its whole id. Raises CliError."""
    _check(reference)
    found = fetch_list(target, LIST_API_KEYS, ListApiKeysRequest, "api_keys", KEYS_MAX)
    meant = [each for each in found.api_keys if each.key_id.startswith(reference) and not each.is_revoked]
    if len(meant) == 1:
        return meant[0]
    if meant:
        lines = [f"{each.key_id}  {each.tenant}" for each in meant]
        _raise_ambiguous(f"{reference!r} may mean more than one key: give more of one of these", lines, len(meant))
    raise CliError(f"no key has an id that begins with {reference!r}; `tinkerpool key list` shows them")


def _may_mean(reference: str, adapter_id: str) -> bool:
    """Return whether the pool's rule finds this id: a beginning, or a session's beginning and the whole rest."""
    begin, colon, rest = reference.partition(":")
    return adapter_id.startswith(begin) and adapter_id.endswith(colon + rest)


def _described(adapter: Adapter) -> str:
    return f"{adapter.name or '(no name)'}, used {show.age(adapter.last_use_time)}"


def _check(reference: str) -> None:
    if not reference:
        raise CliError("the argument is empty: name an adapter, a checkpoint or a key; `list` shows them")


def _raise_ambiguous(problem: str, lines: Sequence[str], num_total: int) -> NoReturn:
    shown = [f"  {line.rstrip()}" for line in lines[:CANDIDATES_MAX]]
    if num_total > len(shown):
        shown.append(f"  and {num_total - len(shown)} more")
    raise CliError("\n".join([problem, *shown]))
