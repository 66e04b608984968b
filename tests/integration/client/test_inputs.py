"""Every row of docs/inputs.md is true: what a call takes besides its own types, and the words of its refusals."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from tests.support.served_pool import ServedPool, restartable_pool
from tinkerpool import AdamParams, Datum, ModelInput, OperationFailed, SamplingParams, ServiceClient, TrainingClient
from tinkerpool.client.training import passes

PAGE = (Path(__file__).parents[3] / "docs" / "inputs.md").read_text(encoding="utf-8")
ROWS = [
    re.split(r" (?<!\\)\| ", line.strip("| ")) for line in PAGE.splitlines() if line.startswith("|") and "`" in line
]
MEANS = [(code.strip("`"), re.match(r"means `([^`]+)`", what)[1]) for code, what in ROWS if what.startswith("means")]  # type: ignore[index]
REFUSED = [(code.strip("`"), what[len('refused: "') : -1]) for code, what in ROWS if what.startswith("refused")]
LOSSES = [(code.strip("`"), what.strip('"')) for code, what in ROWS if what.startswith('"')]
TOKENS = [1, 2, 3]
INPUTS = {"target_tokens": [2, 3, 4]}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPool]:
    with restartable_pool(tmp_path_factory.mktemp("pool")) as pool:
        yield pool


@pytest.fixture
def names(pool: ServedPool) -> Iterator[dict[str, Any]]:
    """The names that the rows use."""
    with ServiceClient(pool.url, pool.key()) as service:
        yield {
            "service": service,
            "client": service.create_lora_training_client(rank=8),
            "sampler": service.create_sampling_client(base_model="toy"),
            "params": SamplingParams(max_tokens=4, seed=1),
            "tokens": TOKENS,
            "inputs": INPUTS,
            "datum": Datum(TOKENS, INPUTS),
            "encoding": BatchEncoding({"input_ids": TOKENS, "attention_mask": [1, 1, 1]}),
            "encoding_of_torch": BatchEncoding({"input_ids": torch.tensor([TOKENS])}),
            "encoding_of_two": BatchEncoding({"input_ids": [TOKENS, [4]]}),
            "torch_loss": lambda data, logprobs: (logprobs[0].sum(), {}),
            "numpy_loss": lambda data, logprobs: (0.0, logprobs, {}),
            "np": np,
            "torch": torch,
            "AdamParams": AdamParams,
            "Datum": Datum,
            "ModelInput": ModelInput,
        }


def result(code: str, names: dict[str, Any]) -> Any:
    """Return what a row's call returns, without the cycle that ran it."""
    found = eval(code, names).result(60)  # the code is a row of our page
    if hasattr(found, "metrics"):
        metrics = {name: value for name, value in found.metrics.items() if not name.startswith("clock_cycle")}
        return metrics, getattr(found, "loss_fn_outputs", None)
    return getattr(found, "sequences", found)


@pytest.mark.parametrize(("code", "meaning"), MEANS)
def test_a_row_that_means_another_has_its_result(names: dict[str, Any], code: str, meaning: str) -> None:
    given, expected = result(code, names), result(meaning, names)
    if "-100" in code:  # the toy's log-probabilities show the target, which has no meaning there
        given, expected = given[0], expected[0]
    assert given == expected


@pytest.mark.parametrize(("code", "message"), REFUSED)
def test_a_refused_row_raises_its_words_and_uses_no_sequence_number(
    names: dict[str, Any], code: str, message: str
) -> None:
    client: TrainingClient = names["client"]
    with pytest.raises(ValueError, match=re.escape(message.replace(r"\|", "|"))):
        result(code, names)
    client.optim_step().result(60)
    stepped = names["service"].create_rest_client().get_operation(f"{client.model_id}:1").result(60)
    assert stepped.HasField("optim_step")


@pytest.mark.parametrize(("code", "message"), LOSSES)
def test_a_custom_loss_that_returns_something_else_raises_its_row(
    names: dict[str, Any], code: str, message: str
) -> None:
    client: TrainingClient = names["client"]

    def loss_fn(data: Any, logprobs: Any) -> Any:
        return eval(code, {"torch": torch, "logprobs": logprobs})  # the code is a row of our page

    with pytest.raises(ValueError, match=re.escape(message)):
        client.forward_backward_custom([names["datum"]], loss_fn).result(60)


def test_the_page_has_rows_of_every_kind() -> None:
    assert (len(MEANS) > 10, len(REFUSED) > 15, len(LOSSES)) == (True, True, 7)
    assert len(MEANS) + len(REFUSED) + len(LOSSES) == len(ROWS)


def test_a_custom_loss_that_raises_says_what_to_call_next_and_its_step_names_the_error(names: dict[str, Any]) -> None:
    client: TrainingClient = names["client"]

    def broken(data: Any, logprobs: Any) -> Any:
        raise ZeroDivisionError("a bug of mine")

    failed = client.forward_backward_custom([names["datum"]], broken)
    step = client.optim_step()
    with pytest.raises(ZeroDivisionError, match="a bug of mine") as raised:
        failed.result(60)
    assert raised.value.__notes__ == [passes.NOTE]
    with pytest.raises(
        OperationFailed, match="raised ZeroDivisionError: a bug of mine; submit the step again"
    ) as after:
        step.result(60)
    assert "unspecified" not in str(after.value)
    client.discard_gradient()
    client.train_step([names["datum"]], "cross_entropy").result(60)


def test_a_refused_pass_names_its_input_as_the_user_does_and_what_became_of_the_step(names: dict[str, Any]) -> None:
    client: TrainingClient = names["client"]
    bad = Datum([1, 2, 3], {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0]})
    refused = client.forward_backward([bad], "cross_entropy")
    step = client.optim_step()
    with pytest.raises(ValueError, match=r"data\[0\]\.loss_fn_inputs\['weights'\] has length 2 but model_input has 3"):
        refused.result(60)
    assert refused.future().exception().__notes__ == [passes.NOTE]  # type: ignore[union-attr]
    with pytest.raises(OperationFailed, match=r"the gradient of the step was dropped; .*submit the step again"):
        step.result(60)
    client.train_step([names["datum"]], "cross_entropy").result(60)
