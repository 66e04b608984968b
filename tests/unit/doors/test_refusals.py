"""Every reason of a refusal in `docs/errors.md`, as each door sends it: it asks for a retry exactly if waiting helps.

`tests/unit/test_docs.py` compares the tables of that page with what the code raises.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import tinker
from google.rpc import error_details_pb2
from starlette.responses import Response
from tinker._client import AsyncTinker

import tinkerpool
from coordinator.base.errors import Code, Quota, ServiceError, busy, over_ceiling
from coordinator.doors.grpc.statuses import to_status
from coordinator.doors.openai.errors import error_response as openai_response
from coordinator.doors.tinker.errors import error_response as tinker_response
from tinkerpool.errors import api_error

PAGE = Path(__file__).resolve().parents[3] / "docs" / "errors.md"
WITH_DELAY = "Refusals with a retry delay"
OUTCOMES = "Failed outcomes"
RETRIED = {402, 408, 409, 425, 429} | set(range(500, 600))
"""Statuses that OpenAI's client or the Tinker SDK tries again."""
HEADERS = {"retry-after", "retry-after-ms"}
HTTP_DOORS = pytest.mark.parametrize("respond", [tinker_response, openai_response], ids=["tinker", "openai"])


def refusals() -> list[tuple[str, Code, bool]]:
    """Return reason, code and whether waiting clears it, of each refusal in the tables."""
    found, section = [], ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif section != OUTCOMES and (row := re.match(r"\| `([A-Z_]+)` \| ([A-Z_]+) \|", line)):
            found.append((row[1], Code[row[2]], section == WITH_DELAY))
    return found


EACH = pytest.mark.parametrize(("reason", "code", "may_wait"), refusals(), ids=[reason for reason, *_ in refusals()])


def refusal(reason: str, code: Code, may_wait: bool) -> ServiceError:
    return ServiceError(code, reason, "m", retry_delay_s=1.5 if may_wait else None)


def test_the_page_has_tables_of_refusals_with_and_without_a_delay() -> None:
    assert {may_wait for *_, may_wait in refusals()} == {True, False}
    assert len(refusals()) > 60


@EACH
def test_over_grpc_retry_info_is_sent_exactly_if_waiting_clears_the_refusal(
    reason: str, code: Code, may_wait: bool
) -> None:
    status = to_status(refusal(reason, code, may_wait))
    assert any(each.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for each in status.details) is may_wait
    assert status.code == code


@EACH
@HTTP_DOORS
def test_over_http_a_status_that_clients_retry_and_both_headers_are_sent_exactly_if_waiting_clears_the_refusal(
    respond: Callable[[Exception, str], Response], reason: str, code: Code, may_wait: bool
) -> None:
    response = respond(refusal(reason, code, may_wait), "a call")
    assert HEADERS & set(response.headers) == (HEADERS if may_wait else set())
    assert (response.status_code in RETRIED) is may_wait
    if may_wait and (code is Code.RESOURCE_EXHAUSTED or respond is tinker_response):
        assert response.status_code == 429


@HTTP_DOORS
def test_a_quota_is_a_429_that_names_limit_usage_and_delay_if_waiting_frees_it_else_a_403_that_says_what_does(
    respond: Callable[[Exception, str], Response],
) -> None:
    quota = Quota("things of yours", 7, 8, "tinkerpool tenant limit alice things_max=NUMBER")
    full, over = busy("QUEUE_FULL", quota, "wait"), over_ceiling("ADAPTER_QUOTA", quota, "delete some")
    refused = respond(full, "a call")
    assert (refused.status_code, refused.headers["retry-after-ms"]) == (429, "1000")
    assert "things of yours: 7 in use, at most 8; wait, then try again: after 1 s" in _text(refused)
    refused = respond(over, "a call")
    assert (refused.status_code, HEADERS & set(refused.headers)) == (403, set())
    assert "delete some, or ask an administrator to raise it: tinkerpool tenant limit alice" in _text(refused)
    for error in (full, over):
        assert any(each.Is(error_details_pb2.QuotaFailure.DESCRIPTOR) for each in to_status(error).details)


def sdk_error(response: Response) -> tinker.APIStatusError:
    """Return what the SDK raises for a response. The function has no public name."""
    received = httpx.Response(response.status_code, request=httpx.Request("POST", "http://pool"))
    return AsyncTinker._make_status_error(None, "m", body=None, response=received)  # type: ignore[arg-type]


@EACH
def test_the_client_raises_the_class_that_the_sdk_raises_for_the_same_refusal(
    reason: str, code: Code, may_wait: bool
) -> None:
    theirs = sdk_error(tinker_response(refusal(reason, code, may_wait), "a call"))
    ours = api_error(code, "m", reason=reason, retry_delay_s=1.5 if may_wait else None)
    assert isinstance(ours, getattr(tinkerpool, type(theirs).__name__))
    assert isinstance(ours, tinkerpool.APIStatusError)
    assert ours.status_code == theirs.status_code


def test_a_ceiling_is_a_permission_error_of_the_client_as_of_the_sdk_and_no_bad_request() -> None:
    over = over_ceiling("ADAPTER_QUOTA", Quota("adapters", 8, 8, "a command"), "delete some")
    assert type(sdk_error(tinker_response(over, "a call"))) is tinker.PermissionDeniedError
    ours = api_error(over.code, over.message, reason=over.reason, metadata=over.metadata)
    assert isinstance(ours, tinkerpool.PermissionDeniedError)
    assert not isinstance(ours, tinkerpool.BadRequestError | tinkerpool.errors.PermissionDenied)


def _text(response: Response) -> str:
    body = json.loads(bytes(response.body))
    return str(body["detail"] if "detail" in body else body["error"]["message"])
