"""`tinkerpool key`: API keys and their tenants. Needs an administrator's key."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from tinkerpool.cli import show
from tinkerpool.cli.connection import JsonOption, KeyOption, UrlOption, call, find_target
from tinkerpool.client.calls.methods import CREATE_API_KEY, LIST_API_KEYS, REVOKE_API_KEY
from tinkerpool.v1 import admin_pb2

app = typer.Typer(no_args_is_help=True)


@app.command()
def create(
    tenant: Annotated[
        str, typer.Argument(help="The key's tenant, new or existing: 1 to 64 letters, digits, '-', '_'.")
    ],
    is_admin: Annotated[bool, typer.Option("--admin", help="The key may also create and revoke keys.")] = False,
    url: UrlOption = "",
    api_key: KeyOption = "",
) -> None:
    """Create a key, and its tenant if it is new. The key is printed once."""
    request = admin_pb2.CreateApiKeyRequest(tenant=tenant, is_admin=is_admin)
    response = call(find_target(url, api_key), CREATE_API_KEY, request)
    print(response.key)
    show.note(
        "Keep it: only its hash is stored. Its user sets TINKERPOOL_API_KEY, or passes api_key= to ServiceClient."
    )


@app.command("list")
def list_keys(url: UrlOption = "", api_key: KeyOption = "", json: JsonOption = False) -> None:
    """List the keys, without their secrets."""
    response = call(find_target(url, api_key), LIST_API_KEYS, admin_pb2.ListApiKeysRequest())
    if json:
        show.json_message(response)
        return
    show.table(
        "API keys",
        ("key id", "tenant", "admin", "created", "state"),
        (
            (
                key.key_id,
                key.tenant,
                "yes" if key.is_admin else "",
                show.age(key.create_time),
                Text("revoked", "red") if key.is_revoked else Text("good", "green"),
            )
            for key in response.api_keys
        ),
    )


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(help="The id in `tinkerpool key list`, or a whole key.")],
    url: UrlOption = "",
    api_key: KeyOption = "",
) -> None:
    """Revoke a key for good."""
    parts = key_id.removeprefix("tml-").split("_")
    key_id = parts[1] if parts[0] == "tp" and len(parts) > 2 else key_id
    call(find_target(url, api_key), REVOKE_API_KEY, admin_pb2.RevokeApiKeyRequest(key_id=key_id))
    show.note(f"{key_id} is revoked.")
