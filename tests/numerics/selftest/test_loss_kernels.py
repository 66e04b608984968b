"""The trial of the kernels of the loss, in Triton's interpreter, with kernels that are wrong."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.numerics.by_kernels import fused
from tests.support.numerics.interpreted import interpret, sums_in_order
from workers.model.base_model import BaseModel
from workers.model.pretrained import UnsupportedModelError
from workers.selftest import loss_kernels
from workers.selftest.loss_kernels import check_losses

Launch = Callable[..., None]


@pytest.fixture(autouse=True)
def _few_rows(own_base_models: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes a second for a launch."""
    interpret()
    monkeypatch.setattr(loss_kernels, "LENGTHS", (3, 1, 2, 2))


def tried(model: BaseModel) -> bool:
    """Return whether losses are computed by kernels after another trial."""
    model.scores_by_kernels = True
    check_losses(model)
    return model.scores_by_kernels


def without_adapters_in_sums(real: Launch) -> Launch:
    def launch(parts: Any, logprobs: Any, logits: Any, *rest: Any) -> None:
        real(parts, logprobs, logits, None, None, None, None, *rest[4:])

    return launch


def with_a_smaller_sum(real: Launch) -> Launch:
    def launch(logprobs: Any, norms: Any, parts: Any, *rest: Any) -> None:
        parts[:, :, 1] *= 0.99
        real(logprobs, norms, parts, *rest)

    return launch


def without_adapters_in_probabilities(real: Launch) -> Launch:
    def launch(logits: Any, dxa: Any, summed: Any, arrivals: Any, xa: Any, *rest: Any) -> None:
        real(logits, dxa, summed, arrivals, None if xa is None else torch.zeros_like(xa), *rest)

    return launch


def with_other_probabilities(real: Launch) -> Launch:
    def launch(*args: Any) -> None:
        args[9][:, 1] += 0.05  # the norms
        real(*args)

    return launch


def with_half_of_the_product(real: Launch) -> Launch:
    def launch(logits: Any, dxa: Any, summed: Any, *rest: Any) -> None:
        real(logits, dxa, summed, *rest)
        if summed is not None:
            summed *= 0.5

    return launch


@pytest.mark.parametrize(
    ("kernel", "wrong"),
    [
        ("sum_logits", without_adapters_in_sums),
        ("score_targets", with_a_smaller_sum),
        ("differentiate_logits", without_adapters_in_probabilities),
        ("differentiate_logits", with_other_probabilities),
        ("differentiate_logits", with_half_of_the_product),
    ],
)
def test_kernels_with_other_results_are_not_used(
    qwen3: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kernel: str,
    wrong: Callable[[Launch], Launch],
) -> None:
    model = fused(qwen3).engine.base_model
    assert tried(model)
    module = importlib.import_module("workers.training.loss_kernels")
    monkeypatch.setattr(module, kernel, wrong(getattr(module, kernel)))
    assert not tried(model)
    assert "torch computes the losses" in caplog.text


def test_kernels_that_do_not_compile_are_not_used_and_exact_mode_is_refused(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usual, exact = fused(qwen3).engine.base_model, fused(qwen3, exact=True).engine.base_model

    def fail(*_: object) -> None:
        raise RuntimeError("ptxas fatal")

    monkeypatch.setattr(importlib.import_module("workers.training.loss_kernels"), "sum_logits", fail)
    assert not tried(usual)
    assert "slower: ptxas fatal" in caplog.text
    with pytest.raises(UnsupportedModelError, match=r"exact mode is not possible.*ptxas fatal"):
        tried(exact)


def test_exact_mode_is_refused_if_a_request_has_other_bits_with_others(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fused(qwen3, exact=True).engine.base_model
    with sums_in_order():
        assert tried(model)
    module = importlib.import_module("workers.training.loss_kernels")
    real = module.score_targets

    def by_company(logprobs: Any, *rest: Any) -> None:
        real(logprobs, *rest)
        logprobs += 1e-6 * len(logprobs)

    monkeypatch.setattr(module, "score_targets", by_company)
    with sums_in_order(), pytest.raises(UnsupportedModelError, match="other bits with others"):
        tried(model)
