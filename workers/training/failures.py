"""How an exception becomes the error of an item: without a stack or a path, and with what the user can change."""

from __future__ import annotations

import logging

from workers.bank.state_files import DamagedStateError, NonFiniteGradientError, OtherAdapterError
from workers.contract.messages import ErrorCode, ItemError
from workers.host.allocator import is_out_of_memory
from workers.training.optim import NonFiniteStepError

logger = logging.getLogger(__name__)


def pass_error(error: Exception) -> ItemError:
    """Return the error of a request whose packed pass failed. The request itself was checked before."""
    if is_out_of_memory(error):
        message = "there is not enough memory for this alone; send shorter sequences"
        return ItemError(code=ErrorCode.OUT_OF_MEMORY, message=message)
    return ItemError(code=ErrorCode.INTERNAL, message="the worker failed to run this; its log has the reason")


def item_error(error: Exception) -> ItemError:
    """Return the error of a step, save or load that failed. Logs faults of the worker."""
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


def non_finite_loss() -> ItemError:
    """Return the error of a pass whose loss or gradient is not finite."""
    return ItemError(
        code=ErrorCode.NON_FINITE,
        message=(
            "the loss or its gradient is infinite or not a number, and was not applied; look for extreme values in the "
            "loss inputs, or a learning rate that has driven the adapter away"
        ),
    )
