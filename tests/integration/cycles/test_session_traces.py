"""The timeline of a session, from the history of a working pool."""

from __future__ import annotations

from pathlib import Path

from coordinator.base.errors import Code
from coordinator.service.session_traces import PART_BYTES
from coordinator.storage.rows import EXAMINED_MAX
from coordinator.tenants.principals import Principal
from tests.support.timelines import Slice, packets, slices
from tests.support.toy_engine import POISON_TOKEN
from tests.support.toy_pool import ToyPool, refusal, running_pool
from tinkerpool.v1 import history_pb2 as pb


async def parts_of(pool: ToyPool, session_id: str, principal: Principal | None = None) -> list[bytes]:
    request = pb.ExportSessionTraceRequest(session_id=session_id)
    responses = pool.service.export_session_trace(principal or await pool.principal(), request)
    return [response.data async for response in responses]


async def trace_of(pool: ToyPool, session_id: str, principal: Principal | None = None) -> list[Slice]:
    return slices(b"".join(await parts_of(pool, session_id, principal)))


async def entries_of(pool: ToyPool, target_id: str) -> list[pb.HistoryEntry]:
    request = pb.ListHistoryRequest(target_id=target_id)
    return list((await pool.service.list_history(await pool.principal(), request)).entries)


async def test_a_timeline_has_the_requests_waits_and_cycles_of_the_history(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        adapter = await pool.adapter(name="mine")
        session_id = adapter.partition(":")[0]
        sampler = await pool.sampler(session_id)
        other = await pool.adapter()  # of another session
        pool.hold()
        names = [await pool.forward_backward(adapter, 1, 5), await pool.optim_step(adapter, 2)]
        names += [await pool.forward_backward(adapter, 3, 4, token=POISON_TOKEN), await pool.sample(sampler, 1)]
        others = await pool.forward_backward(other, 1, 5)
        await pool.release()
        done = await pool.wait(*names, others)
        found = await trace_of(pool, session_id)
        entries = {each.operation: each for target in (adapter, sampler) for each in await entries_of(pool, target)}
        requests = {each.values["operation"]: each for each in found if each.category == "request"}
        runs = {each.values["operation"]: each for each in found if each.category == "operation"}
        assert requests.keys() == runs.keys() == entries.keys() == set(names)
        for name, entry in entries.items():
            moments = (entry.arrive_time.ToNanoseconds(), entry.end_time.ToNanoseconds())
            assert (requests[name].begin, requests[name].end, requests[name].track) == (*moments, "requests")
            assert (runs[name].begin, runs[name].end) == (entry.begin_time.ToNanoseconds(), moments[1])
            waits = [each for each in found if each.category == "wait" and each.values["operation"] == name]
            waited_s = sum(each.end - each.begin for each in waits) / 1e9
            assert abs(waited_s - sum(each.seconds for each in entry.waits)) < 2e-3
        assert {runs[name].track for name in names} == {"train:0 mine", "sample:0"}
        assert runs[names[2]].values["error"] == done[2].error.reason
        passes = [each for each in found if each.track == "worker w0" and each.name == "pass"]
        steps = [each for each in found if each.track == "worker w0" and each.name == "step"]
        ran = {each["operation"]: each["cycle"] for phase in passes for each in phase.values["operations"]}
        assert ran == {operation.name: operation.cycle_id for operation in (done[0], done[2])}
        ran = {each["operation"]: each["cycle"] for phase in steps for each in phase.values["operations"]}
        assert ran == {done[1].name: done[1].cycle_id}
        [cycle] = [each for each in found if each.name == f"cycle {done[0].cycle_id}"]
        [shown] = [each for each in pool.core.journal.recent if each.cycle_id == done[0].cycle_id]
        assert cycle.begin == shown.start_time.ToNanoseconds()
        assert "phase_seconds" not in cycle.values, "the phases are of everybody in the cycle"


async def test_an_administrator_sees_every_session_with_the_phases_of_its_cycles(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        adapter = await pool.adapter()
        await pool.wait(await pool.forward_backward(adapter, 1, 5))
        session_id = adapter.partition(":")[0]
        found = await trace_of(pool, session_id, await pool.administrator())
        [cycle] = [each for each in found if each.name.startswith("cycle ")]
        [work] = pool.core.journal.recent[0].workers
        assert cycle.values["phase_seconds"] == dict(work.seconds)
        refused = await refusal(parts_of(pool, session_id, await pool.principal("eve")))
        assert refused.code is Code.NOT_FOUND
        missing = await refusal(parts_of(pool, "no-such-session", await pool.administrator()))
        assert missing.code is Code.NOT_FOUND


async def test_a_long_timeline_comes_in_parts_and_outlives_session_and_adapter(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        adapter, between = await pool.adapter(), await pool.adapter()
        session_id, number = adapter.partition(":")[0], EXAMINED_MAX + 10
        names = []
        for seq in range(1, number + 1):
            names.append(await pool.optim_step(adapter, seq))
            names.append(await pool.optim_step(between, seq))
        await pool.wait(*names)
        await pool.delete_adapter(adapter)
        await pool.finish_session(session_id)
        parts = await parts_of(pool, session_id)
        found = slices(b"".join(parts))
        assert len([each for each in found if each.category == "request"]) == number
        assert len(parts) > 1
        assert max(map(len, parts)) < 2 * PART_BYTES
        assert all(packets(part) for part in parts), "each part is whole packets"


async def test_a_session_without_a_history_has_a_timeline_without_slices(tmp_path: Path) -> None:
    async with running_pool(tmp_path, history_rows=0) as pool:
        adapter = await pool.adapter()
        await pool.wait(await pool.forward_backward(adapter, 1, 5))
        session_id = adapter.partition(":")[0]
        data = b"".join(await parts_of(pool, session_id))
        assert slices(data) == []
        assert [each.track_descriptor.name for each in packets(data)] == [f"session {session_id}"]
