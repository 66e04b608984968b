"""Errors of sample requests: the checks before a request is queued, and the error code of each exception.

Does not depend on how a request runs.

Main invariant: a message to the user never contains a stack trace or a path of the server.
"""

from __future__ import annotations

import logging

from workers.bank.bank import RowMemoryError
from workers.bank.state_files import DamagedStateError, OtherAdapterError
from workers.contract.capacity import what_is_too_large
from workers.contract.logs import about
from workers.contract.messages import ErrorCode, ItemError, SampleRequest
from workers.host.allocator import is_out_of_memory
from workers.model.base_model import BaseModel
from workers.sampling.drawing import NonFiniteLogitsError

logger = logging.getLogger(__name__)


class SampleError(Exception):
    """A request cannot run; the message is for the user."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def check_request(request: SampleRequest, model: BaseModel, num_cache_blocks: int) -> None:
    """Raise SampleError if the model can never run a request with a cache of `num_cache_blocks` blocks."""
    problem = _problem(request, model)
    if not problem:
        problem = what_is_too_large(len(request.prompt), request.params.max_tokens, num_cache_blocks)
    if problem:
        raise SampleError(ErrorCode.INVALID_ARGUMENT, problem)


def _problem(request: SampleRequest, model: BaseModel) -> str:
    """Return the reason why the model cannot run a request with any amount of memory; empty if it can."""
    prompt, targets = request.prompt, request.prompt_targets
    max_tokens = request.params.max_tokens
    if not len(prompt):
        return "the prompt is empty; it needs at least one token"
    if len(prompt) + max(0, max_tokens - 1) > model.max_seq_len:  # the last token is drawn, never computed with
        return (
            f"the prompt has {len(prompt)} tokens and max_tokens is {max_tokens}; together they may be at most "
            f"{model.max_seq_len + 1}"
        )
    if int(prompt.min()) < 0 or int(prompt.max()) >= model.vocab_size:
        return f"token ids of the prompt must be 0 to {model.vocab_size - 1}"
    if targets is None:
        return ""
    if targets.ndim != 2 or len(targets) != len(prompt) - 1:
        return (
            f"prompt_targets has the shape {targets.shape}; it needs a row for each token of the prompt but the "
            f"first: {len(prompt) - 1} rows"
        )
    if targets.size and (int(targets.min()) < -1 or int(targets.max()) >= model.vocab_size):
        return f"token ids of prompt_targets must be 0 to {model.vocab_size - 1}, or -1 for no token"
    return ""


def item_error(error: Exception) -> ItemError:
    """Return the error of a request that an exception ended."""
    match error:
        case SampleError():
            return ItemError(code=error.code, message=str(error))
        case NonFiniteLogitsError():
            return ItemError(code=ErrorCode.NON_FINITE, message=str(error))
        case DamagedStateError() | OtherAdapterError():
            return ItemError(code=ErrorCode.DATA_LOSS, message=str(error))
        case ValueError() if type(error) is ValueError:
            return ItemError(code=ErrorCode.INVALID_ARGUMENT, message=str(error))
    if isinstance(error, RowMemoryError):
        return ItemError(code=ErrorCode.OUT_OF_MEMORY, message=str(error))
    if is_out_of_memory(error):
        message = (
            "there is not enough memory for this sample; send a shorter prompt, or ask for fewer tokens or samples"
        )
        return ItemError(code=ErrorCode.OUT_OF_MEMORY, message=message)
    return ItemError(code=ErrorCode.INTERNAL, message="the worker failed to sample; its log has the reason")


def logged_error(op_id: str, error: Exception) -> ItemError:
    """Return `item_error`, and log an exception that has no error code of its own."""
    failure = item_error(error)
    if failure.code is ErrorCode.INTERNAL:
        logger.error("sample %s failed", op_id, exc_info=error, extra=about(operation=op_id))
    return failure
