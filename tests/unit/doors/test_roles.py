"""Roles: each RPC and route has a least role, and a key below it is refused before a use case runs, at both doors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.rpc import error_details_pb2, status_pb2

from coordinator.doors.http_app import HANDLERS, PREFIX
from coordinator.doors.rpcs import SERVICES, use_case_name
from coordinator.service.roles import LEAST_ROLES
from coordinator.tenants.keys import Authenticator
from coordinator.tenants.principals import Role
from tests.support.doors.fake_service import FakeBackend, FakeService
from tests.support.doors.open_doors import grpc_door, http_door

RPCS = {use_case_name(method): method for service in SERVICES for method in service.methods}


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
async def channel(keys: Authenticator, service: FakeService) -> AsyncIterator[grpc.aio.Channel]:
    async with (
        grpc_door(FakeBackend(service, keys=keys)) as door,
        grpc.aio.insecure_channel(f"127.0.0.1:{door.port}") as channel,
    ):
        yield channel


async def reason_of(channel: grpc.aio.Channel, method: MethodDescriptor, key: str) -> str:
    """Make an RPC with an empty request; return the reason of its refusal, empty for a stream without a response."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    call: Any = channel.unary_stream(path) if method.server_streaming else channel.unary_unary(path)
    begun = call(b"", metadata=(("authorization", f"Bearer {key}"),))
    if await begun.code() is grpc.StatusCode.OK:
        return ""
    status = status_pb2.Status.FromString(dict(await begun.trailing_metadata())["grpc-status-details-bin"])
    info = error_details_pb2.ErrorInfo()
    status.details[0].Unpack(info)
    return str(info.reason)


def test_every_rpc_of_the_contract_has_a_least_role_and_nothing_else_has() -> None:
    assert set(LEAST_ROLES) == set(RPCS)


def test_a_key_that_only_reads_has_no_rpc_or_route_that_changes_something() -> None:
    reading = {name for name, least in LEAST_ROLES.items() if least is Role.READ_ONLY}
    assert all(name.startswith(("get_", "list_", "wait_", "watch_", "export_")) for name in reading)
    routes = {(method, path) for method, path, _, use_case in HANDLERS if use_case in reading}
    assert {path for method, path in routes if method != "GET"} == {
        "/client/config",
        "/client/dynamic_config",
        "/telemetry",
        "/get_info",
        "/retrieve_future",
        "/retrieve_futures",
        "/weights_info",
    }


async def test_every_rpc_refuses_a_key_below_its_role_without_running_its_use_case(
    keys: Authenticator, service: FakeService, channel: grpc.aio.Channel
) -> None:
    expected = {Role.READ_ONLY: "", Role.MEMBER: "READ_ONLY_KEY", Role.ADMIN: "ADMIN_ONLY"}
    for role in Role:
        key, _ = await keys.create_key("alice", role=role)
        for name, method in RPCS.items():
            service.calls.clear()
            refused = await reason_of(channel, method, key)
            may = role.covers(LEAST_ROLES[name])
            assert [called for called, _, _ in service.calls] == ([name] if may else [])
            assert refused == expected[LEAST_ROLES[name]] or (may and refused in ("", "UNIMPLEMENTED")), (role, name)


async def test_every_route_refuses_a_key_below_its_role_without_running_its_use_case(
    keys: Authenticator, service: FakeService
) -> None:
    key, _ = await keys.create_key("alice", role=Role.READ_ONLY)
    openai = [("POST", f"/v1/{path}") for path in ("completions", "chat/completions")]
    async with (
        http_door(FakeBackend(service, keys=keys)) as door,
        httpx.AsyncClient(base_url=door.url, headers={"x-api-key": key}, timeout=60) as client,
    ):
        for method, path in [
            *((method, f"{PREFIX}{path}") for method, path, _, name in HANDLERS if LEAST_ROLES[name] is Role.MEMBER),
            *openai,
        ]:
            response = await client.request(method, path, json={} if method in ("POST", "PUT") else None)
            assert response.status_code == 403, path
            assert "read" in response.text, path
        assert service.calls == []
        assert (await client.get(f"{PREFIX}/sessions")).status_code != 403
        assert service.calls != []


@pytest.mark.parametrize("is_local", [True, False])
async def test_the_machines_own_key_administers_only_from_this_machine_at_both_doors(
    keys: Authenticator,
    service: FakeService,
    channel: grpc.aio.Channel,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_local: bool,
) -> None:
    # Patched: a test has no other machine to call from.
    for module in ("coordinator.doors.grpc.callers", "coordinator.doors.http.calls"):
        monkeypatch.setattr(f"{module}.is_this_machine", lambda peer, host: is_local and peer == "127.0.0.1")
    key, _ = await keys.create_key("default", role=Role.ADMIN, is_local=True)
    await reason_of(channel, RPCS["get_usage"], key)
    reason = await reason_of(channel, RPCS["list_api_keys"], key)
    assert reason == ("UNIMPLEMENTED" if is_local else "ADMIN_ONLY")
    async with (
        http_door(FakeBackend(service, keys=keys)) as door,
        httpx.AsyncClient(base_url=door.url, headers={"x-api-key": key}, timeout=60) as client,
    ):
        await client.get(f"{PREFIX}/sessions")
    roles = {name: principal.role for name, principal, _ in service.calls}
    expected = Role.ADMIN if is_local else Role.MEMBER
    assert roles["get_usage"] is roles["session_ids"] is expected
