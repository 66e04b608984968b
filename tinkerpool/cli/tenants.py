"""`tinkerpool tenant`: the tenants of a pool. Needs an administrator's key."""

from __future__ import annotations

from typing import Annotated

import typer

from tinkerpool.cli import show
from tinkerpool.cli.connection import JsonOption, KeyOption, UrlOption, call, find_target
from tinkerpool.cli.limits import limit
from tinkerpool.client.calls.methods import CREATE_TENANT, LIST_TENANTS, RELEASE_TENANT
from tinkerpool.v1 import admin_pb2, probation_pb2

app = typer.Typer(no_args_is_help=True)
app.command()(limit)

TenantArgument = Annotated[str, typer.Argument(help="The tenant's name: 1 to 64 letters, digits, '-', '_'.")]


@app.command()
def create(tenant: TenantArgument, url: UrlOption = "", api_key: KeyOption = "") -> None:
    """Create a tenant, without a key."""
    call(find_target(url, api_key), CREATE_TENANT, admin_pb2.CreateTenantRequest(tenant=tenant))
    show.note(f"Tenant {tenant} is created. A key for it: tinkerpool key create {tenant}")


@app.command()
def release(tenant: TenantArgument, url: UrlOption = "", api_key: KeyOption = "") -> None:
    """End the probation of a tenant whose operations killed workers: they run with those of others again."""
    call(find_target(url, api_key), RELEASE_TENANT, probation_pb2.ReleaseTenantRequest(tenant=tenant))
    show.note(f"Tenant {tenant} is not on probation.")


@app.command("list")
def list_tenants(url: UrlOption = "", api_key: KeyOption = "", json: JsonOption = False) -> None:
    """List the tenants."""
    response = call(find_target(url, api_key), LIST_TENANTS, admin_pb2.ListTenantsRequest())
    if json:
        show.json_message(response)
        return
    show.table("Tenants", ("tenant", "created"), ((each.name, show.age(each.create_time)) for each in response.tenants))
