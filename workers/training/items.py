"""Runs a batch's items in order: passes in groups, steps, saves and loads.

Consecutive passes are gathered into groups of as many adapters as the bank holds and as many tokens as fit into memory;
a group is one packed pass (forwards and backwards apart). Consecutive steps of different adapters run together: one
after another on a CPU, with one wait for a device that computes behind the host.

Does not depend on epochs, installs, sampling or AdamW's arithmetic (`optim`).

Main invariant: an item's result and its adapter's bits depend on that item and adapter alone, not on the other items or
on how they are grouped. A failing item changes only its own adapter; a failing step changes no weights.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import cast

from workers.bank.state_files import DamagedStateError, NonFiniteGradientError, OtherAdapterError
from workers.contract.messages import (
    ErrorCode,
    Item,
    ItemError,
    ItemResult,
    LoadItem,
    OptimStepItem,
    PassItem,
    SaveItem,
)
from workers.training.copies import AdapterCopies
from workers.training.optim import NonFiniteStepError, Step, StepNorms, adamw_step, adamw_steps, check_params
from workers.training.passes import Outcome, PassRunner, Request, pass_error

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Member:
    """A pass of a group."""

    item: PassItem
    request: Request | None = None
    error: ItemError | None = None
    """The reason why there is no request."""
    is_admitted: bool = True
    """Whether the copy's fence has advanced over the item."""


@dataclass(slots=True)
class _Group:
    """Passes that run together."""

    members: list[_Member] = field(default_factory=list)
    adapters: set[str] = field(default_factory=set)
    num_tokens: int = 0


class ItemRunner:
    """Runs items of one engine. One thread only."""

    def __init__(self, passes: PassRunner, copies: AdapterCopies, *, pass_tokens_max: int) -> None:
        """Run groups of at most `pass_tokens_max` tokens, unless an item alone has more."""
        self._passes = passes
        self._steps = StepRunner(copies, is_deferred=passes.base_model.is_deferred)
        self._copies = copies
        self._pass_tokens_max = pass_tokens_max

    def run(self, items: Sequence[Item]) -> list[ItemResult]:
        """Run items in order; return their results in the same order."""
        results: list[ItemResult] = []
        for kind, group in groupby(items, key=type):
            consecutive = list(group)
            if kind is PassItem:
                results += self._run_passes(cast("list[PassItem]", consecutive))
            elif kind is OptimStepItem:
                self._passes.times.begin()
                for steps in self._cut(cast("list[OptimStepItem]", consecutive)):
                    results += self._steps.run(steps)
                self._passes.times.end("step")
            else:
                results += [self._run_state(item) for item in consecutive]
        return results

    def _cut(self, steps: Sequence[OptimStepItem]) -> Iterator[list[OptimStepItem]]:
        """Cut consecutive steps where an adapter would come twice, or more adapters than the bank holds."""
        together: dict[str, OptimStepItem] = {}
        for step in steps:
            if step.adapter_id in together or not self._copies.fit([*together, step.adapter_id]):
                yield list(together.values())
                together = {}
            together[step.adapter_id] = step
        yield list(together.values())

    # ------------------------------------------------------------------ passes

    def _run_passes(self, items: Sequence[PassItem]) -> list[ItemResult]:
        tokens_max = self._passes.pass_tokens(items, self._pass_tokens_max)
        results: list[ItemResult] = []
        group = _Group()
        for item in items:
            num_tokens = item.num_tokens
            is_known = item.adapter_id in group.adapters
            is_full = not is_known and not self._copies.fit({*group.adapters, item.adapter_id})
            is_long = group.num_tokens and group.num_tokens + num_tokens > tokens_max
            if is_full or is_long or (item.drop_gradient and is_known):
                results += self._run_group(group)
                group = _Group()
            self._add(group, item, num_tokens)
        return results + self._run_group(group)

    def _add(self, group: _Group, item: PassItem, num_tokens: int) -> None:
        """Admit a pass, check it, and add it to a group."""
        error = self._copies.admit(item)
        if error is not None:
            group.members.append(_Member(item, error=error, is_admitted=False))
            return
        group.adapters.add(item.adapter_id)
        try:
            request = self._passes.checked(item)
        except ValueError as invalid:
            error = ItemError(code=ErrorCode.INVALID_ARGUMENT, message=str(invalid))
            group.members.append(_Member(item, error=error))
        else:
            group.members.append(_Member(item, request))
            group.num_tokens += num_tokens

    def _run_group(self, group: _Group) -> list[ItemResult]:
        results: dict[int, ItemResult] = {}
        members = list(enumerate(group.members))
        while members:
            members = self._run_members(members, results)
        return [results[index] for index in range(len(group.members))]

    def _run_members(
        self, members: Sequence[tuple[int, _Member]], results: dict[int, ItemResult]
    ) -> list[tuple[int, _Member]]:
        """Run one packed pass; add its results by index, and return the members that must run again.

        If a batch fails, its adapter's gradient is dropped, with what later batches of the same adapter added to it in
        this pass. They run again on the empty gradient, in order, so everything of that adapter behind them waits.
        """
        requests = [member.request for _, member in members if member.request is not None]
        outcomes = iter(self._passes.run(requests))
        again: list[tuple[int, _Member]] = []
        waiting: set[str] = set()
        for index, member in members:
            outcome = Outcome(error=member.error) if member.request is None else next(outcomes)
            key = member.item.adapter_id
            if key in waiting or (member.is_admitted and self._copies.must_run_again(member.item)):
                waiting.add(key)
                again.append((index, member))
            else:
                results[index] = self._settled(member, outcome)
        return again

    def _settled(self, member: _Member, outcome: Outcome) -> ItemResult:
        """Record a pass's outcome in its copy, and make its result."""
        item = member.item
        if not member.is_admitted:
            return ItemResult(op_id=item.op_id, error=member.error)
        error = self._copies.settle(item, outcome.error)
        if error is not None:
            return ItemResult(op_id=item.op_id, error=error, engine_s=outcome.engine_s)
        request, part = member.request, outcome.part
        assert request is not None
        assert part is not None
        metrics = {"loss:sum": part.loss_sum}
        if part.num_clipped is not None:
            metrics["clipped_tokens:sum"] = float(part.num_clipped)
        return ItemResult(
            op_id=item.op_id,
            logprobs=request.loss.split_logprobs(part.logprobs),
            metrics=metrics,
            num_tokens=request.num_tokens,
            engine_s=outcome.engine_s,
        )

    # ------------------------------------------------------------------ saves and loads

    def _run_state(self, item: Item) -> ItemResult:
        begin_s = time.perf_counter()
        error = self._copies.admit(item)
        state = None
        if error is None:
            try:
                match item:
                    case SaveItem():
                        state = self._copies.save(item)
                    case LoadItem():
                        self._copies.load(item)
                    case _:
                        raise TypeError(f"an engine cannot run a {type(item).__name__}")
            except Exception as exception:  # noqa: BLE001 (becomes the item's error)
                error = _item_error(exception)
                self._copies.fail(item, error)
        return ItemResult(op_id=item.op_id, error=error, state=state, engine_s=time.perf_counter() - begin_s)


class StepRunner:
    """Runs steps of one engine. One thread only."""

    def __init__(self, copies: AdapterCopies, *, is_deferred: bool) -> None:
        """`is_deferred`: the device computes behind the host, so wait for it once for many steps."""
        self._copies = copies
        self._is_deferred = is_deferred

    def run(self, items: Sequence[OptimStepItem]) -> list[ItemResult]:
        """Run steps of different adapters that fit into the bank together; return their results in order."""
        return self._run_together(items) if self._is_deferred else [self._run_one(item) for item in items]

    def _run_one(self, item: OptimStepItem) -> ItemResult:
        begin_s = time.perf_counter()
        outcome: StepNorms | ItemError | None = self._checked(item)
        if outcome is None:
            try:
                [row] = self._copies.rows([item.adapter_id])
                outcome = adamw_step(row, item.params, self._copies.next_step(item.adapter_id))
                self._copies.note_step(item.adapter_id)
            except Exception as error:  # noqa: BLE001 (becomes the item's error)
                outcome = self._failed(item, error)
        return self._result(item, outcome, time.perf_counter() - begin_s)

    def _run_together(self, items: Sequence[OptimStepItem]) -> list[ItemResult]:
        """Run steps with one wait for the device. Engine time is shared equally."""
        begin_s = time.perf_counter()
        outcomes: dict[str, StepNorms | ItemError | None] = {item.adapter_id: self._checked(item) for item in items}
        admitted = [item for item in items if outcomes[item.adapter_id] is None]
        for item, norms in zip(admitted, self._take(admitted), strict=True):
            outcomes[item.adapter_id] = norms if isinstance(norms, StepNorms) else self._failed(item, norms)
        engine_s = (time.perf_counter() - begin_s) / len(items)
        return [self._result(item, outcomes[item.adapter_id], engine_s) for item in items]

    def _checked(self, item: OptimStepItem) -> ItemError | None:
        """Admit a step; return the error if it cannot run."""
        refusal = self._copies.admit(item)
        if refusal is not None:
            return refusal
        try:
            check_params(item.params)
        except ValueError as invalid:
            return self._failed(item, invalid)
        return None

    def _failed(self, item: OptimStepItem, error: Exception) -> ItemError:
        failure = _item_error(error)
        self._copies.fail(item, failure)
        return failure

    def _take(self, items: Sequence[OptimStepItem]) -> list[StepNorms | Exception]:
        """Take steps that were admitted. If the rows cannot be loaded together, take halves of the steps."""
        try:
            rows = self._copies.rows([item.adapter_id for item in items])
        except Exception as error:
            logger.warning("the adapters of %d steps cannot be loaded", len(items), exc_info=error)
            if len(items) == 1:
                return [error]
            middle = len(items) // 2
            return [*self._take(items[:middle]), *self._take(items[middle:])]
        outcomes = adamw_steps(
            [
                Step(row=row, params=item.params, num_steps=self._copies.next_step(item.adapter_id))
                for row, item in zip(rows, items, strict=True)
            ]
        )
        for item, outcome in zip(items, outcomes, strict=True):
            if isinstance(outcome, StepNorms):
                self._copies.note_step(item.adapter_id)  # the rows of another half may take the place of these
        return outcomes

    def _result(self, item: OptimStepItem, outcome: StepNorms | ItemError | None, engine_s: float) -> ItemResult:
        """Record a step that was taken, and make its result."""
        if isinstance(outcome, ItemError):
            return ItemResult(op_id=item.op_id, error=outcome, engine_s=engine_s)
        assert outcome is not None, "every step has an outcome"
        metrics = {
            "grad_norm:last": outcome.gradient,
            "update_norm:last": outcome.update,
            "adapter_norm:last": outcome.adapter,
            "num_datums:sum": float(self._copies.stepped(item.adapter_id)),
        }
        return ItemResult(op_id=item.op_id, metrics=metrics, engine_s=engine_s)


def _item_error(error: Exception) -> ItemError:
    """Return the error of a step, save or load that failed, without a stack or a path. Logs faults of the worker."""
    match error:
        case NonFiniteStepError():
            message = f"{error}; the step was not taken and the gradient was dropped. Lower the learning rate or clip."
            return ItemError(code=ErrorCode.NON_FINITE, message=message)
        case NonFiniteGradientError():
            return ItemError(code=ErrorCode.NON_FINITE, message=str(error))
        case DamagedStateError():
            return ItemError(code=ErrorCode.DATA_LOSS, message=str(error))
        case ValueError() if type(error) in {ValueError, OtherAdapterError}:
            return ItemError(code=ErrorCode.INVALID_ARGUMENT, message=str(error))
    failure = pass_error(error)
    if failure.code is ErrorCode.INTERNAL:
        logger.error("an item failed", exc_info=error)
    return failure
