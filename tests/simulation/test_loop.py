"""Virtual time: sleeps return at once, every run ends, and a killed process runs no more callbacks."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest

from tests.simulation.loop import Crash, Deadlock, Livelock, SimLoop, TooLong


@pytest.fixture
def loop() -> SimLoop:
    return SimLoop(Random(0), 0.0, 1e6)


def test_a_day_passes_at_once(loop: SimLoop) -> None:
    loop.run_until_complete(asyncio.sleep(86400))
    assert loop.now == 86400
    loop.close()


def test_a_deadlock_raises_an_error_that_names_the_waiting_task(loop: SimLoop) -> None:
    async def wait_for_nothing() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="wait_for_nothing"):
        loop.run_until_complete(wait_for_nothing())
    loop.drop()
    loop.close()


def test_endless_timers_and_endless_callbacks_raise_errors(loop: SimLoop) -> None:
    async def tick(seconds: float) -> None:
        while loop.is_running():  # noqa: ASYNC110 (this is what is tested)
            await asyncio.sleep(seconds)

    with pytest.raises(TooLong):
        loop.run_until_complete(tick(1000.0))
    with pytest.raises(Livelock):
        loop.run_until_complete(tick(0.0))
    loop.drop()
    loop.close()


def test_a_single_thread_runs_its_calls_in_order_and_they_take_time(loop: SimLoop) -> None:
    done: list[int] = []
    thread = ThreadPoolExecutor(1)

    async def work() -> None:
        running = asyncio.get_running_loop()
        await asyncio.gather(*(running.run_in_executor(thread, done.append, number) for number in range(50)))

    loop.run_until_complete(work())
    assert done == list(range(50))
    assert loop.now > 0
    loop.close()


def test_no_callback_runs_after_a_crash_not_even_a_ready_one(loop: SimLoop) -> None:
    after: list[str] = []

    async def crash() -> None:
        running = asyncio.get_running_loop()
        running.call_soon(after.append, "ready")
        try:
            loop.kill()
            raise Crash("now")
        except BaseException:
            await asyncio.sleep(0)
            after.append("cleaned up")
            raise

    with pytest.raises(Crash):
        loop.run_until_complete(crash())
    loop.drop()
    loop.close()
    assert after == []
