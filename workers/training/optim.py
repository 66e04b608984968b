"""AdamW on adapters' rows, with each step's own hyperparameters: one fused call over contiguous vectors.

Depends on vectors of numbers; not on their adapter or model. `adamw_step` steps one row and returns its norms;
`adamw_steps` steps many rows and waits for the device once, on a GPU with two launches of our own (`adamw_launches`).

Main invariant: a step reads and writes one row alone, and its bits depend on that row's length and values alone. If the
gradient or the new weights are not finite, nothing is written: an adapter's state is always finite.

Dimensions: P values of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.bank.entries import Row, RowNorms
from workers.contract.messages import AdamParams
from workers.host.allocator import is_out_of_memory
from workers.model.gpu_operations import has_kernels
from workers.training.adamw_launches import LaunchedNorms, launch

KEPT_BYTES_MAX = 4 << 30
"""Most bytes of copies of rows, which are kept until their steps have succeeded. A single row may exceed it."""


class NonFiniteStepError(ArithmeticError):
    """The norm of the gradient or of the new weights is infinite or not a number; no step was taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNorms:
    """Euclidean norms over all of an adapter's values."""

    gradient: float
    """Before clipping."""
    update: float
    """Of the change of the weights."""
    adapter: float
    """Of the weights after the step."""


def check_params(params: AdamParams) -> None:
    """Raise ValueError, naming the field, if a hyperparameter is outside its range."""
    checks = {
        "learning_rate": (params.learning_rate, params.learning_rate >= 0, "at least 0"),
        "beta1": (params.beta1, 0 <= params.beta1 < 1, "at least 0 and below 1"),
        "beta2": (params.beta2, 0 <= params.beta2 < 1, "at least 0 and below 1"),
        "eps": (params.eps, params.eps > 0, "above 0"),
        "weight_decay": (params.weight_decay, params.weight_decay >= 0, "at least 0"),
        "grad_clip_norm": (params.grad_clip_norm, params.grad_clip_norm >= 0, "at least 0"),
    }
    for name, (value, is_valid, expected) in checks.items():
        if not (is_valid and math.isfinite(value)):
            raise ValueError(f"{name} is {value}; expected a finite number, {expected}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One adapter's step."""

    row: Row
    params: AdamParams
    num_steps: int
    """Includes this step (bias correction)."""


@torch.no_grad()
def adamw_steps(steps: Sequence[Step]) -> list[StepNorms | Exception]:
    """Take the steps of different rows in place and use the gradients up; return their outcomes in order.

    The same definition as `adamw_step`, and the same promise: a step whose outcome is an error (NonFiniteStepError, or
    out of memory) has changed no weights or moments. Compute copies of weights are updated too.
    """
    if steps and has_kernels(steps[0].row.weights.device):
        return _launched(steps)
    return _with_copies(steps, _steps_together)


def _launched(steps: Sequence[Step]) -> list[StepNorms | Exception]:
    """Take steps by two launches; those whose new weights might not be finite by two more, with copies."""
    found = _launch(steps, is_checked=True)
    assert not any(math.isnan(norms.weights) for norms in found), "a checked step writes numbers alone"
    outcomes = [_outcome(norms.gradient, norms.update, norms.weights) for norms in found]
    unsure = [index for index, norms in enumerate(found) if math.isfinite(norms.gradient) and math.isinf(norms.weights)]
    for index, outcome in zip(
        unsure, _with_copies([steps[index] for index in unsure], _launched_unchecked), strict=True
    ):
        outcomes[index] = outcome
    return outcomes


def _launched_unchecked(steps: Sequence[Step], kept: Sequence[_Kept]) -> list[StepNorms | Exception]:
    """Take steps whose new weights may not be finite; then undo them."""
    found = _launch(steps, is_checked=False)
    for step, before, norms in zip(steps, kept, found, strict=True):
        if not math.isfinite(norms.weights):
            before.restore(step.row)
    return [_outcome(norms.gradient, norms.update, norms.weights) for norms in found]


def _launch(steps: Sequence[Step], *, is_checked: bool) -> list[LaunchedNorms]:
    """Take steps by two launches; note the norms of rows that were stepped."""
    rows = [step.row for step in steps]
    found = launch(rows, [step.params for step in steps], [step.num_steps for step in steps], is_checked=is_checked)
    for row, norms in zip(rows, found, strict=True):
        if math.isfinite(norms.gradient) and math.isfinite(norms.weights):
            row.norms = RowNorms(norms.weights, norms.exp_avg)
    return found


def _with_copies(
    steps: Sequence[Step], take: Callable[[Sequence[Step], Sequence[_Kept]], list[StepNorms | Exception]]
) -> list[StepNorms | Exception]:
    """Take steps, as many at a time as may be kept, by a function that gets copies of their rows."""
    outcomes: list[StepNorms | Exception] = []
    for together in _within_memory(steps):
        try:
            kept = [_Kept(step.row) for step in together]
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            outcomes += [error] * len(together)
        else:
            outcomes += take(together, kept)
    return outcomes


class _Kept:
    """A copy of a row from before its step, and a buffer for the change of its weights: all memory of a step."""

    def __init__(self, row: Row) -> None:
        self.state = [vector.clone() for vector in _state(row)[:3]]
        self.change = torch.empty_like(row.weights)

    def restore(self, row: Row) -> None:
        """Write weights and moments back."""
        for vector, old in zip(_state(row)[:3], self.state, strict=True):
            vector.copy_(old)
        row.refresh()


def _within_memory(steps: Sequence[Step]) -> Iterator[list[Step]]:
    """Yield steps in order, as many at a time as may be kept."""
    together: list[Step] = []
    num_bytes = 0
    for step in steps:
        step_bytes = 4 * step.row.weights.nbytes
        if together and num_bytes + step_bytes > KEPT_BYTES_MAX:
            yield together
            together, num_bytes = [], 0
        together.append(step)
        num_bytes += step_bytes
    if together:
        yield together


def _steps_together(steps: Sequence[Step], kept: Sequence[_Kept]) -> list[StepNorms | Exception]:
    states = [_state(step.row) for step in steps]  # weights, first and second moment, gradient
    gradient_norms = [torch.linalg.vector_norm(gradient) for *_, gradient in states]
    for step, (*_, gradient), norm in zip(steps, states, gradient_norms, strict=True):
        limit = step.params.grad_clip_norm
        if limit > 0:
            gradient.mul_(torch.where(norm > limit, limit / (norm + 1e-6), torch.ones_like(norm)))
    counts = torch.tensor([float(step.num_steps) for step in steps]).to(states[0][0].device, non_blocking=True).unbind()
    for params in dict.fromkeys(step.params for step in steps):
        indices = [index for index, step in enumerate(steps) if step.params == params]
        weights, exp_avgs, exp_avg_sqs, gradients = ([states[index][part] for index in indices] for part in range(4))
        _fused_adamw(weights, gradients, exp_avgs, exp_avg_sqs, [counts[index] for index in indices], params)
    norms = []
    for before, (weights_now, *_), gradient_norm in zip(kept, states, gradient_norms, strict=True):
        torch.sub(before.state[0], weights_now, out=before.change)
        update, adapter = torch.linalg.vector_norm(before.change), torch.linalg.vector_norm(weights_now)
        norms.append(torch.stack((gradient_norm, update, adapter)))
    outcomes: list[StepNorms | Exception] = []
    for step, before, three in zip(steps, kept, torch.stack(norms).tolist(), strict=True):
        outcomes.append(_outcome(*three))
        if isinstance(outcomes[-1], NonFiniteStepError):
            before.restore(step.row)
        step.row.refresh()
    return outcomes


def _outcome(gradient: float, update: float, adapter: float) -> StepNorms | Exception:
    """Return the outcome of a step with these norms."""
    if not math.isfinite(gradient):
        return NonFiniteStepError(f"the gradient's norm is {gradient}")
    if not math.isfinite(adapter):
        return NonFiniteStepError(f"the norm of the weights would be {adapter}")
    return StepNorms(gradient=gradient, update=update, adapter=adapter)


def _state(row: Row) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return weights, first and second moment and gradient (P,) of a trained row."""
    assert row.exp_avg is not None
    assert row.exp_avg_sq is not None
    assert row.grad is not None
    return row.weights, row.exp_avg, row.exp_avg_sq, row.grad


@torch.no_grad()
def adamw_step(row: Row, params: AdamParams, num_steps: int) -> StepNorms:
    """Take one step in place and use the gradient up. `num_steps` includes this step (bias correction).

    Same definition as `torch.optim.AdamW` after `torch.nn.utils.clip_grad_norm_`. Raises NonFiniteStepError.
    """
    weights, exp_avg, exp_avg_sq, gradient = _state(row)
    norm = _norm(gradient)
    if not math.isfinite(norm):
        raise NonFiniteStepError(f"the gradient's norm is {norm}")
    if 0 < params.grad_clip_norm < norm:
        gradient.mul_(params.grad_clip_norm / (norm + 1e-6))
    state = (weights, exp_avg, exp_avg_sq)
    before = [vector.clone() for vector in state]
    count = torch.tensor(float(num_steps), device=weights.device)
    _fused_adamw([weights], [gradient], [exp_avg], [exp_avg_sq], [count], params)
    adapter_norm = _norm(weights)
    if not math.isfinite(adapter_norm):
        for vector, old in zip(state, before, strict=True):
            vector.copy_(old)
        raise NonFiniteStepError(f"the norm of the weights would be {adapter_norm}")
    row.refresh()
    return StepNorms(gradient=norm, update=_norm(before[0].sub_(weights)), adapter=adapter_norm)


def _norm(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector))


def _fused_adamw(
    weights: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    num_steps: list[Tensor],
    params: AdamParams,
) -> None:
    torch._fused_adamw_(
        weights,
        gradients,
        exp_avgs,
        exp_avg_sqs,
        [],
        num_steps,
        amsgrad=False,
        lr=params.learning_rate,
        beta1=params.beta1,
        beta2=params.beta2,
        weight_decay=params.weight_decay,
        eps=params.eps,
        maximize=False,
        grad_scale=None,
        found_inf=None,
    )
