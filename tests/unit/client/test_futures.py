"""Futures and streams, for threads and for coroutines on any loop."""

import asyncio
import concurrent.futures
import copy
import threading
import time
from typing import Any

import pytest

from tinkerpool.client.calls import futures
from tinkerpool.client.calls.futures import BackgroundLoop, shared_loop
from tinkerpool.errors import ClientClosed


async def later(value: Any, delay_s: float = 0.02) -> Any:
    await asyncio.sleep(delay_s)
    if isinstance(value, Exception):
        raise value
    return value


def start(value: Any, delay_s: float = 0.02, **options: Any) -> futures.APIFuture[Any]:
    return futures.start(shared_loop(), later(value, delay_s), **options)


def test_a_result_can_be_read_many_times() -> None:
    future = start(5)
    assert future.result() == future.result(0) == asyncio.run(future.result_async()) == 5


def test_an_error_is_raised_at_every_read() -> None:
    future = start(KeyError("x"))
    for _ in range(2):
        with pytest.raises(KeyError):
            future.result()


@pytest.mark.parametrize("name", ["forward_backward", "metrics", "path", "sequences"])
def test_a_field_of_the_result_is_refused_with_the_call_that_was_forgotten(name: str) -> None:
    future = start(5)
    with pytest.raises(AttributeError, match=f"'{name}': call .result\\(\\), or await this future"):
        getattr(future, name)
    assert not hasattr(future, name)
    assert future.result() == 5


def test_a_wait_with_progress_shows_each_change_once_and_ends_with_the_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(futures, "PROGRESS_S", 0.01)
    answers = iter(["waits", "waits", "runs"])

    async def describe() -> str:
        return next(answers, "")

    shown: list[str] = []
    future = futures.start(shared_loop(), later(5, 0.3), describe=describe)

    assert future.result(progress=shown.append) == 5
    assert shown == ["waits", "runs"]
    answers = iter(["waits for its turn"])
    assert futures.start(shared_loop(), later(5, 0.1), describe=describe).result(progress=True) == 5
    assert capsys.readouterr().err == "waits for its turn\n"


def test_a_wait_with_progress_goes_on_although_no_progress_is_known_and_ends_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(futures, "PROGRESS_S", 0.01)

    async def describe() -> str:
        raise ClientClosed("no answer")

    future = futures.start(shared_loop(), later(5, 0.2), describe=describe)
    with pytest.raises(TimeoutError):
        future.result(0.05, progress=True)
    assert future.result(progress=True) == 5
    assert start(5).result(progress=True) == 5, "of a call that is no operation"


def test_names_that_protocols_look_for_are_missing_without_a_hint_and_a_copy_is_the_same_result() -> None:
    future = start(5)
    for name in ("__array__", "__getstate_of_a_library__", "_repr_html_"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'$"):
            getattr(future, name)
    assert copy.copy(future).result() == 5


def test_a_timeout_does_not_stop_the_work() -> None:
    future = start(5, 0.2, label="5e55:train:0:1")
    with pytest.raises(TimeoutError, match=r"5e55:train:0:1 still runs after 0.01 s: call result\(\) again"):
        future.result(0.01)
    assert future.result() == 5


def test_a_timeout_of_the_work_itself_is_raised_as_it_is() -> None:
    with pytest.raises(TimeoutError, match=r"the disk$"):
        start(TimeoutError("the disk")).result(60)


async def test_futures_are_awaited_on_the_users_loop() -> None:
    assert await start(5) == 5
    first, second = await asyncio.gather(start(1), start(2))
    assert (first, second) == (1, 2)
    with pytest.raises(KeyError):
        await start(KeyError())


def test_one_future_is_awaited_on_several_loops() -> None:
    future = start(5, 0.1)
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        results = [threads.submit(lambda: asyncio.run(future.result_async())) for _ in range(4)]
    assert [result.result() for result in results] == [5] * 4


async def test_cancelling_a_wait_does_not_cancel_training() -> None:
    future = start(5, 0.2)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(future.result_async(), 0.01)
    with pytest.raises(TimeoutError, match=r"the operation still runs after 0\.01 s"):
        await future.result_async(0.01)
    assert not future.cancel()
    assert await future == 5


async def test_cancelling_a_wait_cancels_cancellable_work() -> None:
    cancelled = threading.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    future = futures.start(shared_loop(), work(), is_cancellable=True)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(future.result_async(), 0.05)
    assert await asyncio.to_thread(cancelled.wait, 5)
    cancelled.clear()
    future = futures.start(shared_loop(), work(), is_cancellable=True)
    with pytest.raises(TimeoutError):
        await asyncio.to_thread(future.result, 0.01)
    assert not future.done()
    with pytest.raises(TimeoutError):
        await future.result_async(0.01)
    assert await asyncio.to_thread(cancelled.wait, 5)
    other = futures.start(shared_loop(), work(), is_cancellable=True)
    assert other.cancel()
    assert other.done()


def test_blocking_on_the_clients_own_thread_raises_instead_of_hanging() -> None:
    background = shared_loop()

    async def block() -> None:
        start(5).result()

    with pytest.raises(RuntimeError, match="client's own thread"):
        background.submit(block()).result(60)


def test_work_starts_in_the_order_of_submission() -> None:
    order: list[int] = []

    async def note(i: int) -> None:
        order.append(i)

    for future in [futures.start(shared_loop(), note(i)) for i in range(200)]:
        future.result()
    assert order == list(range(200))


def test_a_loop_that_stops_cancels_running_work_and_refuses_more() -> None:
    background = BackgroundLoop()
    running = futures.start(background, later(5, 10))
    time.sleep(0.01)
    background.stop()
    background.stop()
    with pytest.raises(concurrent.futures.CancelledError):
        running.result(60)
    with pytest.raises(ClientClosed, match="this process ends"):
        futures.start(background, later(5))
