"""Adapters by name and label: listed, found, renamed, kept over restarts, and seen by their tenant only."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from coordinator.base.errors import Code
from coordinator.operations.registry import USE_INTERVAL_S
from coordinator.service.listings import SLICE_ROWS
from tests.support.toy_pool import FakeTime, ToyPool, refusal, running_pool
from tinkerpool.v1 import adapters_pb2, checkpoints_pb2, training_pb2, types_pb2
from tinkerpool.v1.adapters_pb2 import Adapter, DeleteAdapterRequest, ListAdaptersRequest, RenameAdapterRequest
from tinkerpool.v1.checkpoints_pb2 import GetCheckpointRequest, ListCheckpointsRequest


async def listed(pool: ToyPool, tenant: str = "alice", **wanted: Any) -> list[str]:
    """Return the names of a tenant's adapters, of all pages of a list."""
    found: list[str] = []
    request = ListAdaptersRequest(**wanted)
    while True:
        page = await pool.service.list_adapters(await pool.principal(tenant), request)
        found += [adapter.name for adapter in page.adapters]
        if not page.next_page_token:
            assert page.total_size == len(found)
            return found
        assert len(page.adapters) == request.page_size
        request.page_token = page.next_page_token


async def adapter_of(pool: ToyPool, adapter_id: str) -> Adapter:
    request = adapters_pb2.GetAdapterRequest(adapter_id=adapter_id)
    adapter: Adapter = (await pool.service.get_adapter(await pool.principal(), request)).adapter
    return adapter


async def rename(pool: ToyPool, adapter_id: str, name: str) -> Adapter:
    request = RenameAdapterRequest(adapter_id=adapter_id, name=name)
    adapter: Adapter = (await pool.service.rename_adapter(await pool.principal(), request)).adapter
    return adapter


async def test_a_name_and_labels_outlive_a_restart_and_a_name_can_be_changed(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        adapters = [await pool.adapter(name=name, user_metadata={"team": "nlp"}) for name in ("first", "second", "")]
        assert (await rename(pool, adapters[1], "2nd")).name == "2nd"
        assert (await rename(pool, adapters[2], "third")).name == "third"
        assert (await rename(pool, adapters[0], "")).name == ""
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        found = [await adapter_of(pool, adapter_id) for adapter_id in adapters]
        assert [adapter.name for adapter in found] == ["", "2nd", "third"]
        assert all(dict(adapter.user_metadata) == {"team": "nlp"} for adapter in found)


async def test_a_repeated_creation_returns_the_adapter_under_its_present_name(pool: ToyPool) -> None:
    session, principal = await pool.session(), await pool.principal()
    request = adapters_pb2.CreateAdapterRequest(session_id=session, base_model="toy", index=0, name="first")
    created = (await pool.service.create_adapter(principal, request)).adapter
    await rename(pool, created.adapter_id, "second")
    assert (await pool.service.create_adapter(principal, request)).adapter.name == "second"
    request.name = "second"
    assert (await refusal(pool.service.create_adapter(principal, request))).reason == "ADAPTER_EXISTS"


@pytest.mark.parametrize("name", ["a/b", " a", "a ", "a\nb", "a\x00", "x" * 101, "s:train:0"])
async def test_a_name_that_a_list_or_a_path_could_not_hold_is_refused(pool: ToyPool, name: str) -> None:
    adapter, principal = await pool.adapter(name="kept"), await pool.principal()
    request = RenameAdapterRequest(adapter_id=adapter, name=name)
    creation = adapters_pb2.CreateAdapterRequest(session_id=await pool.session(), base_model="toy", name=name)
    for call in (pool.service.rename_adapter(principal, request), pool.service.create_adapter(principal, creation)):
        refused = await refusal(call)
        assert (refused.code, "name" in refused.message) == (Code.INVALID_ARGUMENT, True)
    assert (await adapter_of(pool, adapter)).name == "kept"


async def test_lists_filter_by_prefix_and_labels_and_keep_their_pages(pool: ToyPool) -> None:
    num = 2 * SLICE_ROWS + 3
    for number in range(num):
        labels = {"team": "nlp" if number % 2 else "rl", "note": "x"}
        await pool.adapter(name=f"{'sft' if number % 3 else 'rl'}-{number}", user_metadata=labels)
    numbers = range(num - 1, -1, -1)  # newest first
    assert await listed(pool, page_size=5, name_prefix="sft-") == [f"sft-{n}" for n in numbers if n % 3]
    of_team = [f"{'sft' if n % 3 else 'rl'}-{n}" for n in numbers if n % 2]
    assert await listed(pool, page_size=5, labels={"team": "nlp"}) == of_team
    both = {"team": "nlp", "note": "x"}
    assert await listed(pool, page_size=2, labels=both, name_prefix="rl") == [n for n in of_team if n[0] == "r"]
    assert await listed(pool, labels={"team": "nlp", "note": "y"}) == []
    assert await listed(pool, labels={"tea": "nlp"}) == []
    assert await listed(pool, name_prefix="SFT") == []
    assert await listed(pool, name_prefix="sft_") == []  # no character stands for others
    assert await listed(pool, name_prefix="%") == []


async def test_adapters_that_are_deleted_or_created_between_two_pages_of_a_label_shift_no_other_adapter(
    pool: ToyPool,
) -> None:
    labels = {"team": "nlp"}
    adapters = [await pool.adapter(name=str(number), user_metadata=labels) for number in range(6)]
    request = ListAdaptersRequest(page_size=2, labels=labels)
    first = await pool.service.list_adapters(await pool.principal(), request)
    for adapter in adapters[4:]:
        await pool.delete_adapter(adapter)
    request.page_token = first.next_page_token
    second = await pool.service.list_adapters(await pool.principal(), request)
    await pool.adapter(name="new", user_metadata=labels)
    request.page_token = second.next_page_token
    third = await pool.service.list_adapters(await pool.principal(), request)
    assert [[each.name for each in page.adapters] for page in (first, second, third)] == [
        ["5", "4"],
        ["3", "2"],
        ["1", "0"],
    ]
    assert (third.next_page_token, third.total_size) == ("", 5)


async def test_a_person_finds_an_adapter_by_the_begin_of_its_id_or_by_its_whole_name(pool: ToyPool) -> None:
    first, second = await pool.adapter(name="first"), await pool.adapter(name="second")
    assert await listed(pool, reference=first) == ["first"]
    assert await listed(pool, reference=second[:8]) == ["second"]
    assert await listed(pool, reference="second") == ["second"]
    assert await listed(pool, reference="secon") == []
    session, _, rest = second.partition(":")
    assert await listed(pool, reference=f"{session[:8]}:{rest}") == ["second"]
    assert await listed(pool, reference=f"{session[:8]}:{rest[:-1]}") == []
    assert await listed(pool, reference=f":{rest}") == ["second", "first"]
    await rename(pool, first, second[:8])
    assert await listed(pool, reference=second[:8]) == ["second", second[:8]]


async def test_a_member_never_sees_the_names_of_others(pool: ToyPool) -> None:
    adapter = await pool.adapter(name="secret", user_metadata={"team": "nlp"})
    saved = await pool.save(adapter, 1, "final")
    path = saved.save_state.path
    await pool.set_access(path, is_public=True)
    eve, alice = await pool.principal("eve"), await pool.principal()
    for wanted in (
        {},
        {"name_prefix": "s"},
        {"reference": "secret"},
        {"reference": adapter},
        {"labels": {"team": "nlp"}},
    ):
        assert await listed(pool, "eve", **wanted) == []
        assert await listed(pool, **wanted) == ["secret"]
    for reference in ("secret", adapter[:8]):
        request = ListCheckpointsRequest(reference=reference)
        assert not (await pool.service.list_checkpoints(eve, request)).checkpoints
        assert [each.path for each in (await pool.service.list_checkpoints(alice, request)).checkpoints] == [path]
    shown = [
        (await pool.service.get_checkpoint(who, GetCheckpointRequest(path=path))).checkpoint.adapter_name
        for who in (alice, eve)
    ]
    assert shown == ["secret", ""]
    refused = await refusal(pool.service.rename_adapter(eve, RenameAdapterRequest(adapter_id=adapter, name="mine")))
    assert refused.code is Code.NOT_FOUND
    assert (await adapter_of(pool, adapter)).name == "secret"


async def test_checkpoints_are_found_by_their_adapters_name_also_once_it_is_deleted(pool: ToyPool) -> None:
    run, other = await pool.adapter(name="run"), await pool.adapter(name="run-2")
    paths = [(await pool.save(run, seq, name)).save_state.path for seq, name in ((1, "a"), (2, "b"), (3, "ab"))]
    await pool.save(other, 1, "a")

    async def found(reference: str) -> list[checkpoints_pb2.Checkpoint]:
        request = ListCheckpointsRequest(reference=reference)
        return list((await pool.service.list_checkpoints(await pool.principal(), request)).checkpoints)

    for _ in range(2):
        assert {each.path for each in await found("run")} == set(paths)
        assert [each.path for each in await found("run/weights/b")] == [paths[1]]
        assert [each.path for each in await found(f"tinker://{run[:8]}/weights/")] == paths[::-1]
        assert [each.path for each in await found("run/weights/a")] == [paths[0]]  # not ab's
        assert [each.path for each in await found(f"{run[:8]}:train:0/weights/a")] == [paths[0]]
        assert [each.path for each in await found(paths[1])] == [paths[1]]
        assert [each.adapter_name for each in await found(f"{run}/weights/b")] == ["run"]
        assert await found("run/weights/") == await found("run")
        assert await found("run/weights/") != await found("run/weights/a")
        assert await found("ru") == await found("run/b") == []
        if run in pool.core.registry.logs:
            await pool.delete_adapter(run)


async def test_the_last_use_of_an_adapter_is_its_last_accepted_operation(tmp_path: Path) -> None:
    time = FakeTime()
    async with running_pool(tmp_path, time=time, is_crash=True) as pool:
        adapter = await pool.adapter()

        async def used_s() -> float:
            return (await adapter_of(pool, adapter)).last_use_time.ToNanoseconds() / 1e9 - time.wall_offset

        assert await used_s() == pytest.approx(1000)
        time.now += 2 * USE_INTERVAL_S
        await pool.optim_step(adapter, 1)
        assert await used_s() == pytest.approx(time.now)
        stored = time.now
        time.now += USE_INTERVAL_S / 2
        await pool.optim_step(adapter, 2)
        assert await used_s() == pytest.approx(time.now)
        await pool.service.optim_step(await pool.principal(), _step(adapter, 2))  # a repeat is no use
        time.now += 10
        await refusal(pool.service.optim_step(await pool.principal(), _step(adapter, -1)))
        assert await used_s() == pytest.approx(time.now - 10)
    async with running_pool(tmp_path, time=time) as pool:
        await pool.take_over()
        assert await used_s() == pytest.approx(stored)


def _step(adapter_id: str, seq: int) -> Any:
    return training_pb2.OptimStepRequest(adapter_id=adapter_id, seq=seq, adam=types_pb2.AdamParams(learning_rate=1e-3))


async def test_a_deletion_for_idleness_leaves_an_adapter_that_was_used_since_or_has_operations(pool: ToyPool) -> None:
    adapter, principal = await pool.adapter(), await pool.principal()
    seen = (await adapter_of(pool, adapter)).last_use_time

    async def delete(unless_used_after: Timestamp) -> None:
        request = DeleteAdapterRequest(adapter_id=adapter, unless_used_after=unless_used_after)
        await pool.service.delete_adapter(principal, request)

    await asyncio.sleep(0.002)
    pool.hold()
    name = await pool.submit(adapter, 1)
    used = (await adapter_of(pool, adapter)).last_use_time
    assert used.ToNanoseconds() > seen.ToNanoseconds()
    assert (await refusal(delete(used))).reason == "ADAPTER_IN_USE"  # it is not used since, but an operation waits
    await pool.release()
    await pool.wait(name)
    assert (await refusal(delete(seen))).reason == "ADAPTER_IN_USE"
    await delete(used)
    assert await listed(pool) == []
    await delete(seen)  # idempotent
