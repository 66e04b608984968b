"""`tinkerpool tenant`: the tenants of a pool. Needs an administrator's key."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from tinkerpool.cli import show
from tinkerpool.cli.connection import JsonOption, LimitOption, YesOption, call, fetch_list, note_rest
from tinkerpool.cli.finding import Target, calls_no_other_pool, calls_pool
from tinkerpool.cli.limits import limit, show_limits
from tinkerpool.client.calls.methods import (
    CREATE_TENANT,
    DELETE_TENANT,
    GET_TENANT,
    GET_TENANT_LIMITS,
    LIST_TENANTS,
    RELEASE_TENANT,
    RESUME_TENANT,
    SUSPEND_TENANT,
)
from tinkerpool.v1 import admin_pb2, limits_pb2, probation_pb2

app = typer.Typer(no_args_is_help=True)
app.command()(limit)

TenantArgument = Annotated[str, typer.Argument(help="The tenant's name: 1 to 64 letters, digits, '-', '_'.")]


@app.command()
@calls_pool
def create(target: Target, tenant: TenantArgument) -> None:
    """Create a tenant, without a key."""
    call(target, CREATE_TENANT, admin_pb2.CreateTenantRequest(tenant=tenant))
    show.note(f"Tenant {tenant} is created. A key for it: tinkerpool key create {tenant}")


@app.command()
@calls_pool
def release(target: Target, tenant: TenantArgument) -> None:
    """End the probation of a tenant whose operations killed workers: they run with those of others again."""
    call(target, RELEASE_TENANT, probation_pb2.ReleaseTenantRequest(tenant=tenant))
    show.note(f"Tenant {tenant} is not on probation.")


@app.command("list")
@calls_pool
def list_tenants(target: Target, limit: LimitOption = 100, json: JsonOption = False) -> None:
    """List the tenants, by name."""
    response = fetch_list(target, LIST_TENANTS, admin_pb2.ListTenantsRequest, "tenants", limit)
    if json:
        show.json_message(response)
        return
    show.table(
        "Tenants",
        ("tenant", "created", "state"),
        ((each.name, show.age(each.create_time), _state(each)) for each in response.tenants),
    )
    note_rest(response, limit)


@app.command("show")
@calls_pool
def show_tenant(target: Target, tenant: TenantArgument, json: JsonOption = False) -> None:
    """Show a tenant, how much it has, and its limits."""
    response = call(target, GET_TENANT, admin_pb2.GetTenantRequest(tenant=tenant))
    limits = call(target, GET_TENANT_LIMITS, limits_pb2.GetTenantLimitsRequest(tenant=tenant))
    limits.ClearField("tenant")  # the other message has more of it
    if json:
        show.json_message(limits, response)
        return
    show.table(
        f"Tenant {tenant}",
        ("created", "state", "keys", "sessions", "adapters", "checkpoints", "stored"),
        [
            (
                show.age(response.tenant.create_time),
                _state(response.tenant),
                show.count(response.num_keys),
                show.count(response.num_sessions),
                show.count(response.num_adapters),
                show.count(response.num_checkpoints),
                show.size(response.stored_bytes),
            )
        ],
        right="keys sessions adapters checkpoints stored",
    )
    show.console.print()
    show_limits(tenant, limits.limits)


@app.command()
@calls_no_other_pool
def suspend(
    target: Target,
    tenant: TenantArgument,
    reason: Annotated[str, typer.Option(help="Why, as its users are told.")] = "",
) -> None:
    """Refuse a tenant's calls and let its queued work wait, until it is resumed. Nothing of it is lost."""
    call(target, SUSPEND_TENANT, admin_pb2.SuspendTenantRequest(tenant=tenant, reason=reason))
    show.note(f"Tenant {tenant} is suspended. To resume it: tinkerpool tenant resume {tenant}")


@app.command()
@calls_pool
def resume(target: Target, tenant: TenantArgument) -> None:
    """Let a suspended tenant call again, and its queued work run."""
    call(target, RESUME_TENANT, admin_pb2.ResumeTenantRequest(tenant=tenant))
    show.note(f"Tenant {tenant} is active.")


@app.command()
@calls_no_other_pool
def delete(target: Target, tenant: TenantArgument, yes: YesOption = False) -> None:
    """Delete a tenant with everything that it has: adapters, checkpoints, results, keys. It cannot be undone."""
    if not yes:
        typer.confirm(f"Delete tenant {tenant} with its adapters, checkpoints, results and keys for good?", abort=True)
    call(target, DELETE_TENANT, admin_pb2.DeleteTenantRequest(tenant=tenant))
    show.note(
        f"Tenant {tenant} is refused from now on, and is being deleted; `tinkerpool tenant list` shows when it is gone."
    )


def _state(tenant: admin_pb2.Tenant) -> Text:
    match tenant.state:
        case admin_pb2.TENANT_STATE_SUSPENDED:
            reason = f": {tenant.suspension_reason}" if tenant.suspension_reason else ""
            return Text(f"suspended{reason}", "yellow")
        case admin_pb2.TENANT_STATE_DELETING:
            return Text("being deleted", "red")
        case _:
            return Text("active", "green")
