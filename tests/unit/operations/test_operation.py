"""An operation's two states: every transition asserts the states that it starts from."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.operations.operation import Acceptance, Operation, OutcomeState, Usage, new_row, operation_of_row
from coordinator.runtime.recovery import restored_operation
from coordinator.storage.rows import OperationRow
from tests.support.adapter_logs import ERROR, FB, STEP, appending
from tinkerpool.v1 import operations_pb2 as ops_pb
from workers.contract.messages import UNMARKED, RequestBatch

A, D, W = Acceptance.APPENDING, Acceptance.DURABLE, Acceptance.WITHDRAWN
UNDECIDED, DECIDING, DECIDED = OutcomeState.UNDECIDED, OutcomeState.DECIDING, OutcomeState.DECIDED
COMMITTED, RETIRED = OutcomeState.COMMITTED, OutcomeState.RETIRED

Transition = Callable[[Operation], object]
TRANSITIONS: dict[
    str, tuple[Transition, set[Acceptance], set[OutcomeState], Acceptance | None, OutcomeState | None]
] = {
    "accept": (Operation.accept, {A}, set(OutcomeState), D, None),
    "withdraw": (Operation.withdraw, {A}, set(OutcomeState), W, None),
    "begin_deciding": (Operation.begin_deciding, set(Acceptance), {UNDECIDED}, None, DECIDING),
    "succeed": (lambda one: one.succeed(1, Usage()), set(Acceptance), {UNDECIDED, DECIDING}, None, DECIDED),
    "fail": (lambda one: one.fail(ERROR), set(Acceptance), {UNDECIDED, DECIDING}, None, DECIDED),
    "undecide": (Operation.undecide, set(Acceptance), {DECIDED}, None, UNDECIDED),
    "commit": (Operation.commit, {D}, {DECIDED}, None, COMMITTED),
    "retire": (Operation.retire, {D}, {COMMITTED}, None, RETIRED),
}
"""Name to transition, the acceptance and outcome states that it may start from, and the states after it."""


@given(st.lists(st.sampled_from(sorted(TRANSITIONS)), max_size=12))
def test_each_transition_is_possible_from_its_source_states_only_and_leads_to_its_target(names: list[str]) -> None:
    one = appending(1, STEP)
    for name in names:
        transition, acceptances, outcomes, acceptance, outcome = TRANSITIONS[name]
        before = one.acceptance, one.outcome_state
        if one.acceptance in acceptances and one.outcome_state in outcomes:
            transition(one)
            assert (one.acceptance, one.outcome_state) == (acceptance or before[0], outcome or before[1])
        else:
            with pytest.raises(AssertionError):
                transition(one)
            assert (one.acceptance, one.outcome_state) == before
        assert one.is_final is (one.outcome is not None) is (one.outcome_state not in (UNDECIDED, DECIDING))


def test_an_outcome_is_visible_from_its_commit_until_its_retirement() -> None:
    one = appending(1, STEP)
    one.accept()
    one.succeed(7, Usage(4, 0.5)).optim_step.metrics["x"] = 1.0
    assert one.as_message().state == ops_pb.OPERATION_STATE_QUEUED
    assert one.as_message(is_running=True).state == ops_pb.OPERATION_STATE_RUNNING
    one.commit()
    shown = one.as_message()
    assert (shown.state, shown.cycle_id, shown.num_tokens) == (ops_pb.OPERATION_STATE_SUCCEEDED, 7, 4)
    assert shown.optim_step.metrics["x"] == 1.0
    one.retire()
    assert one.as_message().state == ops_pb.OPERATION_STATE_RUNNING, "only the store has the result now"
    assert one.outcome == ops_pb.Operation(state=ops_pb.OPERATION_STATE_SUCCEEDED)


def test_a_retired_failure_keeps_its_error_because_it_may_close_a_window() -> None:
    one = appending(1, STEP)
    one.accept()
    one.fail(ERROR, cycle_id=3)
    one.commit()
    one.retire()
    assert one.outcome == ops_pb.Operation(state=ops_pb.OPERATION_STATE_FAILED, error=ERROR)


def row(outcome: bytes | None, batch: tuple[int | None, int | None] = (None, None)) -> OperationRow:
    return OperationRow(
        target_id="a",
        seq=1,
        append_id=5,
        tenant_id="t",
        kind=STEP.value,
        request_id=None,
        payload_hash=b"",
        num_bytes=3,
        chunk_tokens=16,
        batch_first_seq=batch[0],
        batch_last_seq=batch[1],
        outcome_bytes=len(outcome) if outcome is not None else None,
        outcome=outcome or None,
    )


def test_a_logged_operation_is_restored_in_the_state_of_its_row() -> None:
    failed = ops_pb.Operation(state=ops_pb.OPERATION_STATE_FAILED, error=ERROR).SerializeToString()
    assert [operation_of_row(row(each)).outcome_state for each in (None, failed, b"")] == [
        UNDECIDED,
        COMMITTED,
        OutcomeState.DROPPED,
    ]
    undecided, decided = restored_operation(row(None), b"abc"), restored_operation(row(failed), b"abc")
    assert (undecided.is_durable, undecided.outcome_state, undecided.payload) == (True, UNDECIDED, b"abc")
    assert (decided.is_durable, decided.outcome_state, decided.payload, decided.is_failed) == (True, RETIRED, b"", True)


@pytest.mark.parametrize("batch", [UNMARKED, RequestBatch(1, 3)])
def test_the_batch_of_an_operation_is_in_its_row(batch: RequestBatch) -> None:
    appended = new_row(replace(appending(1, FB), batch=batch))
    assert operation_of_row(row(None, (appended.batch_first_seq, appended.batch_last_seq))).batch == batch
