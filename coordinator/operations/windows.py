"""The coordinator's gradient windows: their bytes in a snapshot's row, and the error of an operation in a closed one.

The rule is in `workers.contract.gradient_windows`. Does not depend on adapter logs. Main invariant: a window read back
is equal to the one that was written, so that a restart changes no outcome.
"""

from __future__ import annotations

import json

from coordinator.base.errors import Code
from coordinator.operations.operation import Operation
from tinkerpool.v1 import operations_pb2 as ops_pb
from workers.contract.gradient_windows import EMPTY, GradientWindow, WindowRole
from workers.contract.messages import UNMARKED, RequestBatch

Window = GradientWindow[ops_pb.OperationError]


def window_bytes(window: Window) -> bytes:
    """Return the form of a window in the database; empty for an open window without gradient."""
    if window == EMPTY:
        return b""
    error, batch = window.closed_by, window.batch
    form = {
        "closed_by": None if error is None else {"code": error.code, "reason": error.reason, "message": error.message},
        "batch": None if batch is None else [batch.first_seq, batch.last_seq],
    }
    return json.dumps(form).encode()


def window_of(data: bytes) -> Window:
    """Return the window that was written as these bytes."""
    if not data:
        return EMPTY
    form = json.loads(data)
    error, batch = form["closed_by"], form["batch"]
    return GradientWindow(
        None if error is None else ops_pb.OperationError(**error), None if batch is None else RequestBatch(*batch)
    )


def failure_of(operation: Operation) -> ops_pb.OperationError:
    """Return the error of a failed operation as the failure that closes a window: it names the operation."""
    assert operation.outcome is not None
    error = ops_pb.OperationError()
    error.CopyFrom(operation.outcome.error)
    error.message = f"{operation.name} failed: {error.message}"
    return error


def window_closed(window: Window, role: WindowRole) -> ops_pb.OperationError:
    """Return why an operation of this role does not run in a closed window."""
    assert window.closed_by is not None
    if role is WindowRole.STEP or window.batch != UNMARKED:
        mend = "submit the step again"
    else:
        mend = "call discard_gradient, or take an optim_step, which fails and begins a new step; then submit it again"
    return ops_pb.OperationError(
        code=Code.FAILED_PRECONDITION,
        reason="GRADIENT_WINDOW_CLOSED",
        message=f"not run: an earlier operation of the same step failed and the gradient of the step was dropped; "
        f"{window.closed_by.message}; {mend}",
    )
