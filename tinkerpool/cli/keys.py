"""`tinkerpool key`: API keys and their tenants. Needs an administrator's key, except to rotate one's own."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer
from rich.text import Text

from tinkerpool.cli import show
from tinkerpool.cli.connection import JsonOption, LimitOption, YesOption, call, fetch_list, note_rest
from tinkerpool.cli.finding import Target, calls_no_other_pool, calls_pool
from tinkerpool.cli.references import find_key
from tinkerpool.cli.times import seconds_of
from tinkerpool.client.calls.methods import CREATE_API_KEY, LIST_API_KEYS, REVOKE_API_KEY, ROTATE_API_KEY
from tinkerpool.credentials import replace_key
from tinkerpool.v1 import admin_pb2

app = typer.Typer(no_args_is_help=True)

KEY_ID_LENGTH = 12
"""A shorter text is the beginning of a key's id."""


class Role(StrEnum):
    """What a key may do."""

    READ_ONLY = "read-only"
    MEMBER = "member"
    ADMIN = "admin"


NUMBERS = {
    Role.READ_ONLY: admin_pb2.ROLE_READ_ONLY,
    Role.MEMBER: admin_pb2.ROLE_MEMBER,
    Role.ADMIN: admin_pb2.ROLE_ADMIN,
}
_NAMES = {number: role.value for role, number in NUMBERS.items()}


@app.command()
@calls_pool
def create(
    target: Target,
    tenant: Annotated[
        str, typer.Argument(help="The key's tenant, new or existing: 1 to 64 letters, digits, '-', '_'.")
    ],
    role: Annotated[Role, typer.Option(help="What the key may do; admin: also manage tenants and keys.")] = Role.MEMBER,
    expires: Annotated[
        str, typer.Option(metavar="DURATION", help="When it expires: 90d, 12h. Default: never.", show_default=False)
    ] = "",
    certificate: Annotated[
        str,
        typer.Option(
            metavar="SHA256",
            help="Fingerprint of the only client certificate that it works with: openssl x509 -fingerprint -sha256.",
            show_default=False,
        ),
    ] = "",
) -> None:
    """Create a key, and its tenant if it is new. The key is printed once."""
    ttl_s = seconds_of(expires) if expires else 0
    if expires and not ttl_s:
        raise typer.BadParameter(f"{expires!r} would never expire: give a longer time, or leave --expires out")
    request = admin_pb2.CreateApiKeyRequest(
        tenant=tenant, role=NUMBERS[role], ttl_seconds=ttl_s, certificate_sha256=certificate
    )
    response = call(target, CREATE_API_KEY, request)
    print(response.key)
    show.note(
        "Keep it: only its hash is stored. Its user sets TINKERPOOL_API_KEY, or passes api_key= to ServiceClient."
    )
    if ttl_s:
        show.note(f"It expires in {show.duration(ttl_s)}.")


@app.command("list")
@calls_pool
def list_keys(target: Target, limit: LimitOption = 100, json: JsonOption = False) -> None:
    """List the keys, newest first, without their secrets."""
    response = fetch_list(target, LIST_API_KEYS, admin_pb2.ListApiKeysRequest, "api_keys", limit)
    if json:
        show.json_message(response)
        return
    show.table(
        "API keys",
        ("key id", "tenant", "role", "created", "last used", "state"),
        (
            (
                key.key_id,
                key.tenant,
                _NAMES.get(key.role, "") + (" (on its machine)" if key.is_local else ""),
                show.age(key.create_time),
                show.age(key.last_use_time) if key.HasField("last_use_time") else "never",
                _state(key),
            )
            for key in response.api_keys
        ),
        whole=("key id",),
        spare=("created", "last used"),
    )
    note_rest(response, limit)


@app.command()
@calls_no_other_pool
def rotate(
    target: Target,
    key_id: Annotated[
        str,
        typer.Argument(
            help="The id of another key, or a unique beginning, for administrators. Default: the key of this command."
        ),
    ] = "",
    grace: Annotated[
        str, typer.Option(metavar="DURATION", help="How long the old key stays valid; 0: it ends at once.")
    ] = "24h",
    yes: YesOption = False,
) -> None:
    """Replace a key by a new one with the same rights and expiry. It asks first if an id is given that is not whole.

    A key in this machine's credentials files is replaced there; otherwise the new key is printed once.
    """
    key_id = _find(target, key_id, "Replace key {} by a new one?", yes=yes) if key_id else ""
    request = admin_pb2.RotateApiKeyRequest(key_id=key_id, grace_seconds=seconds_of(grace))
    response = call(target, ROTATE_API_KEY, request)
    replaced, is_own = response.replaced, response.replaced.key_id == _id_of(target.api_key)
    try:
        path = replace_key(target.api_key, response.key) if is_own and target.is_key_stored else None
    except OSError as error:
        path = None
        show.note(f"The new key cannot be written to the credentials file: {error}.")
    if path is not None:
        show.note(f"The new key {response.api_key.key_id} is in {path}.")
    else:
        print(response.key)
        show.note("Keep it: only its hash is stored.")
    if replaced.is_revoked:
        show.note(f"The old key {replaced.key_id} is revoked.")
    else:
        show.note(f"The old key {replaced.key_id} expires {show.moment(replaced.expire_time)}.")


@app.command()
@calls_no_other_pool
def revoke(
    target: Target,
    key_id: Annotated[
        str, typer.Argument(help="The id in `tinkerpool key list`, a unique beginning of it, or a whole key.")
    ],
    yes: YesOption = False,
) -> None:
    """Revoke a key for good. It asks first if the id is not whole."""
    key_id = _find(target, key_id, "Revoke key {} for good?", yes=yes)
    response = call(target, REVOKE_API_KEY, admin_pb2.RevokeApiKeyRequest(key_id=key_id))
    show.note(f"{key_id} is revoked.")
    for successor in response.successors:
        show.note(
            f"Its successor {successor} is still valid. If you do not know who replaced the key: "
            f"tinkerpool key revoke {successor}"
        )


def _find(target: Target, key: str, question: str, *, yes: bool) -> str:
    """Return the id of the key that is meant. Raises CliError if it is none, or more than one.

    If the id is not given whole, asks the question, with the key and its tenant in it; unless `yes` is set.
    """
    key_id = _id_of(key)
    if len(key_id) >= KEY_ID_LENGTH:
        return key_id
    found = find_key(target, key_id)
    if not yes:
        typer.confirm(question.format(f"{found.key_id} of tenant {found.tenant}"), abort=True)
    return found.key_id


def _id_of(key: str) -> str:
    """Return the id of a key, which may be given whole."""
    parts = key.removeprefix("tml-").split("_")
    return parts[1] if parts[0] == "tp" and len(parts) > 2 else key


def _state(key: admin_pb2.ApiKey) -> Text:
    return _standing(key).append(f", replaced by {key.successor}" if key.successor else "")


def _standing(key: admin_pb2.ApiKey) -> Text:
    if key.is_revoked:
        return Text("revoked", "red")
    if key.is_expired:
        return Text("expired", "red")
    if key.HasField("expire_time"):
        return Text(f"good until {show.moment(key.expire_time)}", "green")
    return Text("good", "green")
