"""Errors of the client: what they print, and copies of them."""

from __future__ import annotations

import copy
import pickle

import pytest

from tinkerpool import errors
from tinkerpool.errors import Code, api_error, of_operation

REFUSED = api_error(Code.FAILED_PRECONDITION, "it has ended", reason="SESSION_ENDED", metadata={"a": "b"})
ERRORS = [
    (REFUSED, "FailedPrecondition: it has ended"),
    (api_error(Code.INVALID_ARGUMENT, "beta1 is 2", reason="INVALID_ARGUMENT"), "InvalidArgument: beta1 is 2"),
    (api_error(Code.UNAVAILABLE, "no pool replies"), "Unavailable: no pool replies"),
    (api_error(Code.INTERNAL, "see the log"), "InternalError: see the log"),
    (api_error(Code.UNIMPLEMENTED, "no such call"), "InternalError: UNIMPLEMENTED: no such call"),
    (of_operation(REFUSED, "s:train:0:1"), "FailedPrecondition: it has ended"),
    (
        errors.OperationFailed("overflow", code=Code.FAILED_PRECONDITION, reason="NON_FINITE", operation="s:train:0:1"),
        "OperationFailed: s:train:0:1: overflow",
    ),
]


@pytest.mark.parametrize(("error", "shown"), ERRORS)
def test_an_error_shown_with_its_class_names_each_thing_once(error: errors.TinkerpoolError, shown: str) -> None:
    assert f"{type(error).__name__}: {error}" == shown


@pytest.mark.parametrize("error", [error for error, _ in ERRORS])
def test_a_copy_of_an_error_from_another_process_is_caught_alike(error: errors.TinkerpoolError) -> None:
    for copied in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(copied) is type(error)
        assert str(copied) == str(error)
        assert vars(copied) == vars(error)


def test_a_refused_operation_is_a_failed_request_whose_fault_is_the_users() -> None:
    error = of_operation(REFUSED, "s:train:0:1")
    assert isinstance(error, errors.RequestFailedError)
    assert isinstance(error, errors.FailedPrecondition)
    assert isinstance(error, errors.PermissionDeniedError)
    assert not isinstance(error, errors.OperationFailed)
    assert (error.request_id, error.category, error.reason) == ("s:train:0:1", "user", "SESSION_ENDED")
