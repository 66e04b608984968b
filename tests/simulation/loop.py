"""An asyncio event loop in virtual time: it never sleeps, and the same seed gives the same order of callbacks.

Does not depend on what runs on it. Calls that production runs in threads run on the loop itself, at a drawn moment, and
their results arrive at a later one. A deadlock, a livelock or a run beyond its time limit ends with an error instead of
hanging.

Main invariant: the order of callbacks is a function of the seed. Therefore tasks hash by number and not by address:
sets of tasks iterate in the same order in every process.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, ThreadPoolExecutor
from random import Random
from typing import Any, TypeVar, TypeVarTuple, Unpack, cast

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

THREAD_START_S = 0.0005
THREAD_WORK_S = 0.002
"""Mean delays of calls in threads: until a call starts, and from its effect until its result arrives."""
TICK_S = 1e-6
"""The least delay of a timer: a delay that rounds to zero could otherwise repeat forever without time passing."""
ITERATIONS_MAX = 20_000
"""Most iterations of the loop at one instant of virtual time."""


class Crash(SystemExit):
    """The process was killed. Not an `Exception`: asyncio lets it propagate at once."""


class Deadlock(Exception):
    """No callback or timer is left, and the awaited result has not arrived."""


class Livelock(Exception):
    """Callbacks run forever at one instant of virtual time."""


class TooLong(Exception):
    """More virtual time has passed than a history may take."""


class SimTask(asyncio.Task[T]):
    """A task that hashes by its number."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], *, number: int, **kwargs: Any) -> None:
        self.number = number
        super().__init__(coroutine, **kwargs)

    def __hash__(self) -> int:
        return self.number


class _NoSelector:
    """Takes the place of the selector: advances virtual time to the next timer instead of waiting for input."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[object]:
        if timeout is None:
            raise Deadlock(self._loop.waiting())
        if timeout > 0:
            self._loop.advance()
        return []

    def close(self) -> None:
        pass


class SimLoop(asyncio.BaseEventLoop):
    """The loop of one process. Starts at `now` and ends with an error at `end`, in seconds of virtual time."""

    def __init__(self, random: Random, now: float, end: float, files_start_s: float = THREAD_START_S) -> None:
        """`files_start_s`: mean delay until a file operation starts; the number of its threads is not limited."""
        super().__init__()
        self.now = now
        self.problems: list[str] = []
        """Exceptions that were not caught."""
        self._random = random
        self._end = end
        self._files_start_s = files_start_s
        self._selector = _NoSelector(self)
        self._numbers = itertools.count()
        self._tasks: dict[SimTask[Any], None] = {}
        self._free_at: dict[Executor, float] = {}
        self._is_dropped = False
        self._num_iterations = 0
        self.set_task_factory(self._make_task)  # type: ignore[arg-type]
        self.set_exception_handler(self._note_problem)

    def time(self) -> float:
        return self.now

    def advance(self) -> None:
        """Advance virtual time to the next timer."""
        scheduled = cast("list[asyncio.TimerHandle]", self._scheduled)  # type: ignore[attr-defined]
        self.now = max(self.now, scheduled[0].when())
        self._num_iterations = 0
        if self.now > self._end:
            raise TooLong(self.waiting())

    def waiting(self) -> str:
        """Describe every unfinished task with its stack."""
        lines = [f"unfinished tasks at {self.now:.3f} s:"]
        for task in self._tasks:
            frames = [f"{f.f_code.co_qualname}:{f.f_lineno}" for f in _frames(task.get_coro())]
            lines.append(f"  {task.get_name()} {' > '.join(frames)}")
        return "\n".join(lines)

    def kill(self) -> None:
        """Kill the process: no ready or future callback runs, and the loop ends with `Crash`."""
        self._is_dropped = True
        for handle in self._ready:  # type: ignore[attr-defined]
            handle.cancel()

    def drop(self) -> None:
        """Close all unfinished tasks, after the end of the process."""
        self._is_dropped = True
        for task in list(self._tasks):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            for _ in range(3):  # a coroutine may wait again while it is being closed
                try:
                    task.get_coro().close()
                    break
                except BaseException:  # noqa: BLE001 (errors of a killed process have no effect)
                    continue
        self._tasks.clear()

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Run the call on this loop at a later time. Calls of a one-thread executor run in the order of submission."""
        future: asyncio.Future[T] = self.create_future()
        start_s = self._files_start_s if executor is None else THREAD_START_S
        starts = self.now + self._random.expovariate(1 / start_s)
        ends = starts + self._random.expovariate(1 / THREAD_WORK_S)
        if isinstance(executor, ThreadPoolExecutor) and executor._max_workers == 1:
            delay = max(0.0, self._free_at.get(executor, 0.0) - starts)
            starts, ends = starts + delay, ends + delay
            self._free_at[executor] = ends
        self.call_at(starts, self._run_call, future, ends, func, *args)
        return future

    def call_soon(self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Any = None) -> Any:
        return None if self._is_dropped else super().call_soon(callback, *args, context=context)

    def call_at(self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Any = None) -> Any:
        return super().call_at(max(when, self.now + TICK_S), callback, *args, context=context)

    def call_soon_threadsafe(self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Any = None) -> Any:
        return self.call_soon(callback, *args, context=context)

    def _run_call(self, future: asyncio.Future[T], ends: float, func: Callable[[Unpack[Ts]], T], *args: *Ts) -> None:
        try:
            result = func(*args)
        except Exception as error:  # noqa: BLE001 (raised where the future is awaited)
            self.call_at(ends, _resolve, future, None, error)
        else:
            self.call_at(ends, _resolve, future, result, None)

    def _make_task(self, _loop: object, coroutine: Coroutine[Any, Any, T], **kwargs: Any) -> SimTask[T]:
        number = next(self._numbers)
        task = SimTask(coroutine, number=number, loop=self, **kwargs)
        self._tasks[task] = None
        task.add_done_callback(self._task_done, context=contextvars.Context())
        return task

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(cast("SimTask[Any]", task), None)

    def _note_problem(self, _loop: object, context: dict[str, Any]) -> None:
        if not self._is_dropped:
            self.problems.append(f"{context['message']}: {context.get('exception')!r}")

    def _run_once(self) -> None:
        if self._is_dropped:
            raise Crash("the process was killed")
        self._num_iterations += 1
        if self._num_iterations > ITERATIONS_MAX:
            ready = [repr(handle) for handle in self._ready]  # type: ignore[attr-defined]
            raise Livelock("\n".join([self.waiting(), "ready callbacks:", *ready]))
        super()._run_once()  # type: ignore[misc]

    def _process_events(self, event_list: list[object]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


def _resolve(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def _frames(coroutine: Any) -> list[Any]:
    frames: list[Any] = []
    while coroutine is not None and len(frames) < 20:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "ag_frame", None)
        if frame is None:
            break
        frames.append(frame)
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "ag_await", None)
    return frames
