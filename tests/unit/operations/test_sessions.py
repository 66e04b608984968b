"""Live sessions, whose age counts only while the service runs."""

from contextlib import suppress

import pytest

from coordinator.base.errors import ServiceError
from coordinator.operations.sessions import SessionTable
from coordinator.storage.rows import SamplerRow
from coordinator.storage.sqlite import StorageError
from coordinator.storage.store import Store
from tests.support.database import session_row
from tests.support.toy_pool import FakeTime


async def add_row(store: Store, session_id: str, ended_at: float | None = None) -> None:
    await store.sessions.insert(session_row(session_id, ended_at=ended_at))


async def add_sampler(store: Store, session_id: str, index: int) -> None:
    sampler_id = f"{session_id}:sample:{index}"
    row = SamplerRow(sampler_id=sampler_id, tenant_id="t", session_id=session_id, base_model="toy", created_at=0.0)
    await store.samplers.insert(row)


async def test_a_session_without_heartbeats_expires_after_the_time_allowed(store: Store) -> None:
    time = FakeTime()
    table = SessionTable(store, time)
    for session_id in ("s1", "s2"):
        await add_row(store, session_id)
    table.add("s1")
    time.now += 6
    table.add("s2")
    table.keep_alive("s1")
    time.now += 9
    assert [session.session_id for session in table.expired(10, 10)] == []
    table.keep_alive("s2")
    time.now += 2
    assert [session.session_id for session in table.expired(10, 10)] == ["s1"]
    with table.ending("s1"):
        assert table.get("s1") is None
        assert table.expired(10, 10) == []
    assert table.get("s1") is None
    assert table.expired(10, 10) == []


async def test_a_session_stays_live_if_the_call_that_would_end_it_fails(store: Store) -> None:
    await add_row(store, "s")
    table = SessionTable(store, FakeTime())
    table.add("s")

    def end(*, times: int) -> None:
        with table.ending("s"):
            if times > 1:
                with suppress(StorageError):
                    end(times=times - 1)
            assert table.get("s") is None
            raise StorageError

    with pytest.raises(StorageError):
        end(times=2)
    assert table.get("s") is not None


async def test_an_ended_session_is_not_added_again_and_a_live_one_keeps_its_numbering(store: Store) -> None:
    await add_row(store, "ended", ended_at=5.0)
    await add_row(store, "live")
    await add_sampler(store, "live", 4)
    table = SessionTable(store, FakeTime())
    for session_id in ("ended", "live"):
        table.add(session_id)
    assert table.get("ended") is None
    assert table.take_sampler_index("live", "op", None) == 5


async def test_adding_a_session_again_changes_nothing(store: Store) -> None:
    await add_row(store, "s")
    table = SessionTable(store, FakeTime())
    table.add("s")
    assert table.take_sampler_index("s", "op", None) == 0
    table.add("s")
    assert table.take_sampler_index("s", "op", None) == 1


async def test_a_requested_number_belongs_to_one_operation_only(store: Store) -> None:
    await add_row(store, "s")
    await add_sampler(store, "s", 4)
    table = SessionTable(store, FakeTime())
    table.add("s")
    assert table.take_sampler_index("s", "op1", 7) == 7
    assert table.take_sampler_index("s", "op1", 7) == 7  # it runs again, after its worker was lost
    for operation, taken in (("op2", 7), ("op2", 4)):
        with pytest.raises(ServiceError) as raised:
            table.take_sampler_index("s", operation, taken)
        assert raised.value.reason == "SAMPLER_EXISTS"
    assert table.take_sampler_index("s", "op3", 1) == 1
    assert table.take_sampler_index("s", "op4", None) == 8


async def test_downtime_ages_no_session_and_its_numbering_continues(store: Store) -> None:
    await add_row(store, "live")
    await add_row(store, "ended", ended_at=5.0)
    for index in (0, 4, 11):
        await add_sampler(store, "live", index)
    time = FakeTime(now=1e9)
    table = SessionTable(store, time)
    table.load()
    assert table.expired(1, 1) == []
    assert table.get("ended") is None
    assert [table.take_sampler_index("live", f"op{i}", None) for i in range(2)] == [12, 13]


async def test_an_ended_session_accepts_no_more_samplers(store: Store) -> None:
    table = SessionTable(store, FakeTime())
    with pytest.raises(ServiceError) as raised:
        table.take_sampler_index("gone", "op", None)
    assert raised.value.reason == "SESSION_ENDED"
