"""Limits of tenants through both real doors: statuses and headers of refusals, the client's retries, the commands."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import tinker

import tinkerpool
from coordinator.base.tenant_limits import LABELS
from coordinator.tenants.principals import Role
from tests.support.doors.sdk import LEAKS, Wire, sdk
from tests.support.served_pool import ServedPool, restartable_pool
from tinkerpool.cli.main import main
from tinkerpool.errors import FailedPrecondition


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPool]:
    with restartable_pool(tmp_path_factory.mktemp("pool") / "data") as pool:
        yield pool


@pytest.fixture
def admin(pool: ServedPool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs a command with an administrator's key, and returns what it prints."""
    key, _ = pool.run(pool.pool.coordinator.authenticator.create_key("root", role=Role.ADMIN))
    monkeypatch.setenv("TINKERPOOL_BASE_URL", pool.url)
    monkeypatch.setenv("TINKERPOOL_API_KEY", key)

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["tinkerpool", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        assert not ended.value.code, captured.err
        return captured.out

    return run


def step(model: str, seq: int) -> dict[str, object]:
    return {"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": 1e-3}, "type": "optim_step"}


def test_over_http_a_rate_is_a_429_with_both_headers_and_a_ceiling_a_403_without(
    pool: ServedPool, wire: Callable[[str], Wire], admin: Callable[..., str]
) -> None:
    wired = wire("hasty")
    session = wired.session()
    model = wired.model(session)
    admin("tenant", "limit", "hasty", "operations_per_s=0.1", "adapters_max=1")
    wired.ok("/optim_step", step(model, 1))
    refused = wired.post("/optim_step", step(model, 2))
    assert (refused.status_code, refused.json()["reason"]) == (429, "RATE_LIMITED")
    assert 9000 < int(refused.headers["retry-after-ms"]) <= 10_000
    assert refused.headers["retry-after"] == "10"
    assert {"limit", "usage", "maximum"} <= refused.json().keys()
    created = wired.post("/create_session", {"tags": [], "sdk_version": "0.38.0"})
    assert (created.status_code, created.json()["reason"]) == (429, "RATE_LIMITED"), "a creation is an operation"
    assert int(created.headers["retry-after-ms"]) > 9000
    ceiling = wired.post(
        "/create_model",
        {"session_id": session, "model_seq_id": 1, "base_model": "toy", "lora_config": {"rank": 8}, "type": "create"},
    )
    assert (ceiling.status_code, ceiling.json()["reason"]) == (403, "ADAPTER_QUOTA")
    assert not {"retry-after", "retry-after-ms"} & ceiling.headers.keys()
    assert "tinkerpool tenant limit hasty adapters_max=NUMBER" in ceiling.json()["detail"]
    for path, body in (("/session_heartbeat", {"session_id": session}), ("/cancel_future", {"request_id": "x:1"})):
        assert wired.post(path, body).status_code == 200, "no rate refuses it"


@LEAKS
@pytest.mark.slow
def test_the_sdk_waits_until_it_may_create_a_session_a_model_and_a_sampling_client(
    pool: ServedPool, wire: Callable[[str], Wire], admin: Callable[..., str]
) -> None:
    wired = wire("eager")
    admin("tenant", "limit", "eager", "operations_per_s=1")
    refused = False
    while not refused:
        created = wired.post("/create_session", {"tags": [], "sdk_version": "0.38.0"})
        refused = created.status_code == 429
    began = time.monotonic()
    with sdk(pool.http_url, pool.key("eager")) as service:
        service.create_lora_training_client("toy", rank=8).result(60)
        prompt, params = tinker.ModelInput.from_ints([1, 2]), tinker.SamplingParams(max_tokens=2, seed=1)
        sampler = service.create_sampling_client(base_model="toy").result(60)
        sampler.sample(prompt, 1, params).result(60)
        assert time.monotonic() - began > 2.9, "a session, a model, a sampling client and a sample: one a second"


def test_the_client_waits_out_a_rate_and_raises_a_ceiling(pool: ServedPool, admin: Callable[..., str]) -> None:
    with tinkerpool.ServiceClient(base_url=pool.url, api_key=pool.key("patient")) as client:
        training = client.create_lora_training_client(base_model="toy", rank=8)
        admin("tenant", "limit", "patient", "operations_per_s=2", "adapters_max=1")
        began = time.monotonic()
        steps = [training.optim_step(tinkerpool.AdamParams(learning_rate=1e-3)) for _ in range(20)]
        for each in steps:
            each.result(timeout=60)
        for _ in range(2):  # one after another: no step waits for one that is refused
            training.optim_step(tinkerpool.AdamParams(learning_rate=1e-3)).result(timeout=60)
        assert time.monotonic() - began > 0.9, "twenty at once, then two a second"
        with pytest.raises(FailedPrecondition, match="adapters of yours: 1 in use, at most 1"):
            client.create_lora_training_client(base_model="toy", rank=8)


def test_a_member_sees_its_limits_with_its_usage(
    pool: ServedPool, admin: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = pool.key("member")
    admin("tenant", "limit", "member", "stored_bytes_max=3GiB", "weight=0.5")
    monkeypatch.setenv("TINKERPOOL_API_KEY", key)
    shown = json.loads(admin("usage", "--json"))
    assert shown["tenant"] == "member"
    limits = {each["name"]: each for each in shown["limits"]}
    assert limits["stored_bytes_max"] == {"name": "stored_bytes_max", "value": "3GiB", "is_set": True, "usage": "0"}
    assert (limits["weight"]["value"], limits["adapters_max"]["is_set"]) == ("0.5", False)


def test_every_limit_on_what_a_tenant_takes_is_listed_with_its_use_and_maximum(pool: ServedPool) -> None:
    async def listed() -> dict[str, tuple[int, int | None]]:
        tenant_id, limits = "of a tenant without calls", pool.pool.coordinator.limits
        return {name: (limit.used(tenant_id), limit.maximum(tenant_id)) for name, limit in limits.items()}

    found = pool.run(listed())
    of_pool = {"operations_at_once", "tokens_at_once", "result_bytes", "file_turns", "decode_turns", "listing_turns"}
    of_http = {"http_calls", "http_downloads", "http_polls", "http_received_bytes", "http_decompressed_bytes"}
    of_grpc = {"grpc_received_bytes", "grpc_readers"}
    assert found.keys() == of_pool | of_http | of_grpc | {name for name in LABELS if not name.endswith("_per_s")}
    assert not any(used for used, _ in found.values())
    assert {name for name, (_, most) in found.items() if most is None} == {"tokens_per_month", "tokens_at_once"}
