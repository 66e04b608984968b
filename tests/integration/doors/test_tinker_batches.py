"""What a refused forward_backward fails beside itself, by the order in which the parts of batches arrive."""

from __future__ import annotations

from typing import Any

import pytest
import tinker
from tinker import types

from tests.support.doors.sdk import LEAKS, Wire, datum, pass_of, sdk
from tests.support.served_pool import ServedPool

pytestmark = [LEAKS, pytest.mark.slow]
WAIT_S = 30
VERSION = {"x-stainless-package-version": tinker.__version__}
OTHER_VERSIONS: list[dict[str, str]] = [{}] + [
    {"x-stainless-package-version": version} for version in ("0.19.0", "0.39.0", "1.0", "newest")
]
CLOSED = "GRADIENT_WINDOW_CLOSED"


@pytest.fixture
def model(wired: Wire) -> str:
    return wired.model(wired.session())


def send(wired: Wire, model: str, seq: int, *, good: bool = True, headers: dict[str, str] = VERSION) -> str:
    """Send a forward_backward; return its promise."""
    request = pass_of(model, seq, [1, 2])
    if not good:
        del request.data[0].loss_fn_inputs["target_tokens"]
    return str(wired.binary(request, None, **headers).json()["request_id"])


def error(wired: Wire, promise: str) -> str:
    """Return an operation's error; empty: it succeeded."""
    return str(wired.result(promise).get("error", ""))


def stepped(wired: Wire, model: str, seq: int) -> Any:
    """Take a step; return its result."""
    body = {"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": 1e-3}}
    return wired.result(wired.ok("/optim_step", body)["request_id"])


def test_after_a_refused_batch_of_one_request_the_corrected_one_and_its_step_run(wired: Wire, model: str) -> None:
    assert "target_tokens" in error(wired, send(wired, model, 1, good=False))
    assert error(wired, send(wired, model, 2)) == ""
    assert stepped(wired, model, 3)["metrics"]["num_datums:sum"] == 1


def test_a_step_behind_a_refused_batch_of_one_request_still_fails(wired: Wire, model: str) -> None:
    send(wired, model, 1, good=False)
    assert CLOSED in stepped(wired, model, 2)["error"]
    assert error(wired, send(wired, model, 3)) == ""
    assert stepped(wired, model, 4)["metrics"]["num_datums:sum"] == 1


@pytest.mark.parametrize("bad", [1, 2, 3])
@pytest.mark.parametrize("order", [(2, 3, 1), (3, 2, 1)])
def test_of_a_batch_of_several_parts_with_a_refused_one_nothing_is_stepped_on(
    wired: Wire, model: str, order: tuple[int, ...], bad: int
) -> None:
    """The SDK sends the first part last; a batch of several parts is not marked, so its window stays closed."""
    promises = {seq: send(wired, model, seq, good=seq != bad) for seq in order}
    errors = {seq: error(wired, promise) for seq, promise in promises.items()}
    assert [seq for seq, text in errors.items() if not text] == [seq for seq in order if seq < bad]
    assert CLOSED in error(wired, send(wired, model, 4))
    assert CLOSED in stepped(wired, model, 5)["error"]
    assert error(wired, send(wired, model, 6)) == ""
    assert stepped(wired, model, 7)["metrics"]["num_datums:sum"] == 1


def test_a_refused_batch_in_a_window_with_gradient_of_others_closes_it_up_to_the_step(wired: Wire, model: str) -> None:
    send(wired, model, 1)
    send(wired, model, 2, good=False)
    assert CLOSED in error(wired, send(wired, model, 3))
    assert CLOSED in stepped(wired, model, 4)["error"]


@pytest.mark.parametrize("headers", OTHER_VERSIONS, ids=lambda headers: headers.get("x-stainless-package-version", "-"))
def test_of_a_client_whose_order_is_not_known_no_batch_is_taken_for_whole(
    wired: Wire, model: str, headers: dict[str, str]
) -> None:
    """Before 0.20 the first part may arrive first: the second one must not begin a window of its own."""
    send(wired, model, 1, good=False, headers=headers)
    assert CLOSED in error(wired, send(wired, model, 2, headers=headers))
    assert CLOSED in stepped(wired, model, 3)["error"]


def test_a_repeated_request_is_recognised_whatever_arrived_meanwhile(wired: Wire, model: str) -> None:
    promises = [send(wired, model, 1, good=False), send(wired, model, 2)]
    assert [send(wired, model, 1, good=False), send(wired, model, 2)] == promises
    large = [send(wired, model, seq) for seq in (4, 5, 3)]
    assert [send(wired, model, seq) for seq in (4, 5, 3)] == large
    assert stepped(wired, model, 6)["metrics"]["num_datums:sum"] == 4
    assert send(wired, model, 2) == promises[1]


def test_a_corrected_call_of_the_sdk_works_at_once(pool: ServedPool) -> None:
    with sdk(pool.http_url, pool.key("corrector")) as service:
        client: Any = service.create_lora_training_client("toy", rank=8).result(WAIT_S)
        with pytest.raises(tinker.RequestFailedError):
            client.forward_backward([datum(1, 2)], "ppo").result(WAIT_S)
        client.forward_backward([datum(1, 2)], "cross_entropy").result(WAIT_S)
        assert client.optim_step(types.AdamParams()).result(WAIT_S).metrics["num_datums:sum"] == 1
