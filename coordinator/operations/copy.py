"""An adapter's copy on a worker: how far it ran the adapter's operations, and which ones a worker may run next.

In memory. Does not depend on when a copy is placed or lost, or on what the operations compute. The invariants:

- `cursor` is the last seq that the copy has passed, `applied_seq` the last one that its worker ran. They differ by
  operations that need no worker: failed ones, discard_gradients, and on a replay all that change no state, except saves
  whose weights must be rematerialized;
- progress of execution belongs to one generation of the copy.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from coordinator.operations.operation import Kind, Operation, OutcomeState, Usage
from coordinator.operations.windows import Window, failure_of
from workers.contract.gradient_windows import EMPTY
from workers.contract.messages import ItemResult

NO_SEQS = (0, -1)
"""An empty range of sequence numbers."""


@dataclass(slots=True, eq=False)
class Progress:
    """How far an operation has run on one generation of its adapter's copy."""

    num_chunks_done: int = 0
    results: dict[int, ItemResult] = field(default_factory=dict)
    """The results of those chunks, by chunk."""
    is_running: bool = False
    """A worker has it."""


@dataclass(slots=True, eq=False)
class Copy:
    """One generation of the adapter's state on a worker, from the newest snapshot on."""

    generation: int = 0
    cursor: int = 0
    applied_seq: int = 0
    """The last seq that the worker ran."""
    window: Window = EMPTY
    """The gradient window at the cursor."""
    applied_window: Window = EMPTY
    """The gradient window at `applied_seq`: that of a snapshot."""
    home: str = ""
    """The worker that has the state. Empty: there is no copy, the next worker must install one."""
    must_drop_gradient: bool = False
    """The copy holds gradient of a closed window."""
    progress: dict[int, Progress] = field(default_factory=dict)
    """By seq."""
    reinstalls: Counter[tuple[str, int]] = field(default_factory=Counter)
    """How often each chunk of an operation found a copy out of order, since the last result for an undecided operation,
    or since its worker was lost."""

    def next_generation(self, seq: int, window: Window, home: str) -> Copy:
        """Return the copy that begins at a snapshot after this one was lost."""
        return Copy(self.generation + 1, seq, seq, window, window, home, reinstalls=self.reinstalls)

    def count_reinstall(self, op_id: str, chunk: int) -> int:
        """Count that this chunk found the copy before this one out of order; return how often in a row it did."""
        self.reinstalls[op_id, chunk] += 1
        return self.reinstalls[op_id, chunk]

    # ---- questions

    def num_chunks_done(self, operation: Operation) -> int:
        """Return the number of the operation's chunks that this copy has run."""
        found = self.progress.get(operation.seq)
        return found.num_chunks_done if found is not None else 0

    def results(self, operation: Operation) -> list[ItemResult]:
        """Return the results of those chunks, in their order."""
        found = self.progress.get(operation.seq)
        return [result for _, result in sorted(found.results.items())] if found is not None else []

    def usage(self, operation: Operation) -> Usage:
        """Return what the operation cost on this copy so far."""
        results = self.results(operation)
        return Usage(sum(r.num_tokens for r in results), sum(r.engine_s for r in results))

    def is_running(self, operation: Operation) -> bool:
        """Return whether a worker has the operation."""
        found = self.progress.get(operation.seq)
        return found is not None and found.is_running

    def has_begun(self, operation: Operation) -> bool:
        """Return whether a worker has the operation, has run a part of it, or its result is being written."""
        has_run = self.is_running(operation) or bool(self.num_chunks_done(operation))
        return has_run or operation.outcome_state is OutcomeState.DECIDING

    def must_replay(self, operation: Operation) -> bool:
        """Return whether the operation is decided, and its effect is missing in this copy."""
        return (
            operation.is_final
            and not operation.is_failed
            and (operation.kind.changes_state or operation.must_rematerialize)
            and operation.kind.needs_worker
            and operation.seq > self.applied_seq
        )

    def forbids(self, operation: Operation) -> bool:
        """Return whether the window is closed to the operation, so that it fails in its turn."""
        return (
            self.window.closed_by is not None
            and not operation.is_final
            and self.window.forbids(operation.kind.window_role, operation.seq)
        )

    # ---- progress

    def start(self, operation: Operation) -> None:
        """Record that the operation is about to be sent to a worker."""
        self._progress_of(operation).is_running = True

    def pause(self, operation: Operation) -> None:
        """Record that the worker ran a part of the operation; the rest waits for another cycle."""
        self._progress_of(operation).is_running = False
        self._added_gradient(operation)

    def add_result(self, operation: Operation, chunk: int, result: ItemResult) -> None:
        """Add the result of one more chunk, or of a whole operation without chunks, as chunk 0."""
        progress = self._progress_of(operation)
        progress.results[chunk] = result
        progress.num_chunks_done += 1
        self.reinstalls.clear()

    def replayed_chunk(self, operation: Operation, *, is_last: bool) -> None:
        """Count one more replayed chunk of a decided operation."""
        progress = self._progress_of(operation)
        progress.num_chunks_done = 0 if is_last else progress.num_chunks_done + 1

    def took_gradient_drop(self) -> None:
        """Record that an item on its way to the worker tells it to drop the closed window's gradient."""
        self.must_drop_gradient = False

    def applied(self, operation: Operation) -> None:
        """Record that the worker ran this operation to its end, whether it succeeded or failed."""
        self.applied_seq = operation.seq
        self.end(operation)

    def end(self, operation: Operation) -> None:
        """Drop the progress of an operation that does not run any more."""
        self.progress.pop(operation.seq, None)

    def move_past(self, operation: Operation) -> None:
        """Move the cursor over the decided operation behind it."""
        role = operation.kind.window_role
        self.cursor = operation.seq
        failure = failure_of(operation) if operation.is_failed else None
        self.window = self.window.after(role, operation.seq, failure, operation.batch)
        if operation.seq == self.applied_seq:
            self.applied_window = self.window
        if role.leaves_gradient(has_failed=failure is not None):
            self.must_drop_gradient = True
        else:
            self._added_gradient(operation)

    def _progress_of(self, operation: Operation) -> Progress:
        return self.progress.setdefault(operation.seq, Progress())

    def _added_gradient(self, operation: Operation) -> None:
        """Note that the copy's gradient is that of the present window.

        If an operation ran behind a failed batch in the same phase, then the worker dropped that batch's by itself.
        """
        if operation.kind is Kind.FORWARD_BACKWARD:
            self.must_drop_gradient = False


@dataclass(frozen=True, slots=True, eq=False)
class Ahead:
    """The operations that a worker may run next on a copy, which has passed all that need none. No method writes.

    Valid until the adapter log changes.
    """

    copy: Copy
    operations: Mapping[int, Operation]
    """By seq; empty for a log that cannot run."""
    quarantined: tuple[int, int]
    """First and last seq of operations that run in a batch of their own each."""
    may_begin: bool
    """Whether operations may begin; otherwise only replays, and operations that ran in part, are ready."""

    @property
    def is_replaying(self) -> bool:
        """The copy is behind the decided operations."""
        operation = self.operations.get(self.copy.cursor + 1)
        return operation is not None and self.copy.must_replay(operation)

    def passes(self) -> Iterator[Operation]:
        """Yield the prefix of forwards and forward_backwards, in order."""
        return self._one_by_one(self._unrun(is_pass=True))

    def states(self) -> Iterator[Operation]:
        """Yield the operations that the step phase may run, in order.

        These are saves, at most one optim_step, and at most one load. The load is the last one: if it fails, the
        operations behind it must not have run.
        """
        return self._one_by_one(self._states())

    def chunks(self) -> Iterator[int]:
        """Yield the tokens of the chunks of `passes` that the copy has not run; each is looked up when asked for."""
        for operation in self.passes():
            num_done = self.copy.num_chunks_done(operation)
            for chunk in operation.chunks[num_done:] if num_done else operation.chunks:
                yield chunk.num_tokens

    def _unrun(self, *, is_pass: bool) -> Iterator[Operation]:
        """Yield the operations that the copy has not run, up to one of another phase or one that no worker may run."""
        copy, operations = self.copy, self.operations
        seq, is_closed = copy.cursor + 1, copy.window.closed_by is not None
        while (operation := operations.get(seq)) is not None:
            if not operation.is_final or copy.must_replay(operation):
                kind = operation.kind
                if kind.is_pass is not is_pass or not kind.needs_worker or (is_closed and copy.forbids(operation)):
                    return
                yield operation
            elif operation.is_failed or operation.kind.changes_state:
                return
            seq += 1

    def _states(self) -> Iterator[Operation]:
        num_steps, has_save = 0, False
        for operation in self._unrun(is_pass=False):
            kind = operation.kind
            if kind is Kind.OPTIM_STEP and num_steps == 1:
                return
            if kind is Kind.LOAD_STATE and has_save:
                return  # it may load the checkpoint being saved, and it cuts the log that an unwritten save needs
            num_steps += kind is Kind.OPTIM_STEP
            has_save |= kind.is_save
            yield operation
            if kind is Kind.LOAD_STATE:
                return

    def _one_by_one(self, ready: Iterator[Operation]) -> Iterator[Operation]:
        """Return the operations before the first quarantined one, or only that one if it is first.

        Without those that may not begin now.
        """
        if not self.may_begin:
            copy = self.copy
            ready = itertools.takewhile(lambda each: copy.must_replay(each) or copy.num_chunks_done(each) > 0, ready)
        return ready if self.quarantined == NO_SEQS else _until_quarantined(ready, *self.quarantined)


def _until_quarantined(ready: Iterable[Operation], first: int, last: int) -> Iterator[Operation]:
    for index, operation in enumerate(ready):
        is_quarantined = first <= operation.seq <= last
        if is_quarantined and index:
            return
        yield operation
        if is_quarantined:
            return
