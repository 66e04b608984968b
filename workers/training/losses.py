"""The losses: what a request minimises, as a function of the log-probabilities of its targets.

Depends on log-probabilities and loss inputs of one request (which inputs and options a loss has:
`contract.loss_inputs`); not on logits, models or adapters. Every loss is a sum over tokens and sequences, and
computes its own derivative, so that d(logits) follows without autograd.

Main invariant: a request's loss is computed from its own values, in vectors of its own length. Formulas with p the
log-probability of the target under the adapter, q the one given as `logprobs`, A `advantages`, r = exp(p - q):

    cross_entropy         sum -p w                                                 targets (N,) or (N, K)
    importance_sampling   sum -r A
    ppo                   sum -min(r A, clamp(r, low, high) A)
    cispo                 sum -stop(clamp(r, low, high)) p A
    dro                   sum -(p A - beta / 2 (p - q)^2)
    gspo                  as ppo with r = exp(stop(mean(p - q)) + p - stop(p))
    stable_reinforce      sum -stop(w) A p, w = 1 if A >= 0 else min(1, exp(sum(p - q)))

`stop` is a constant to the gradient. low and high bound the ratio; inputs per token override the options. gspo's mean
is over the sequence, or over the tokens that `sequence_ratio_mask` selects (weighted by it). stable_reinforce sums over
the drawn tokens of the sequence; its p is at the temperature at which the token was drawn (`temperatures`).

Dimensions: N tokens of a request (its sequences concatenated), K targets of a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.contract.loss_inputs import CLIP_BOUNDS, LOSS_RULES, TEMPERATURES, LossRule
from workers.contract.messages import LOGPROBS_TEMPERATURE_MIN, Datum
from workers.host.uploads import on_device

Inputs = Mapping[str, Tensor]
Config = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Terms:
    """A loss at some tokens: value and derivative, shapes as the log-probabilities'."""

    loss: Tensor
    slope: Tensor
    """d(loss) / d(log-probability)."""
    is_clipped: Tensor | None = None
    """Whether the clipping changed a token's gradient; None: the loss does not clip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One loss function."""

    rule: LossRule
    compute: Callable[[Tensor, Inputs, Config], Terms]
    is_local: bool = True
    """Each token's term depends on that token alone; otherwise on its whole sequence."""


def _cross_entropy(p: Tensor, inputs: Inputs, config: Config) -> Terms:
    del config
    slope = -inputs["weights"]
    return Terms(p * slope, slope)


def _importance_sampling(p: Tensor, inputs: Inputs, config: Config) -> Terms:
    del config
    loss = -(torch.exp(p - inputs["logprobs"]) * inputs["advantages"])
    return Terms(loss, loss)


def _clipped(ratio: Tensor, inputs: Inputs, config: Config) -> Terms:
    """Compute -min(r A, clamp(r) A), with dr/dp = r where it is not clipped."""
    advantages = inputs["advantages"]
    free = ratio * advantages
    clipped = _clamp(ratio, inputs, config) * advantages
    loss, is_clipped = -torch.minimum(free, clipped), clipped < free
    return Terms(loss, torch.where(is_clipped, torch.zeros_like(loss), loss), is_clipped)


def _clamp(ratio: Tensor, inputs: Inputs, config: Config) -> Tensor:
    low, high = (inputs[name] if name in inputs else ratio.new_full((), config[name]) for name in CLIP_BOUNDS)
    return torch.clamp(ratio, low, high)


def _ppo(p: Tensor, inputs: Inputs, config: Config) -> Terms:
    return _clipped(torch.exp(p - inputs["logprobs"]), inputs, config)


def _cispo(p: Tensor, inputs: Inputs, config: Config) -> Terms:
    ratio = torch.exp(p - inputs["logprobs"])
    clamped = _clamp(ratio, inputs, config)
    slope = -(clamped * inputs["advantages"])
    return Terms(slope * p, slope, (clamped != ratio) & (inputs["advantages"] != 0))


def _dro(p: Tensor, inputs: Inputs, config: Config) -> Terms:
    advantages, beta = inputs["advantages"], config["beta"]
    distance = p - inputs["logprobs"]
    loss = -(p * advantages - distance.square() * (beta / 2))
    return Terms(loss, distance * beta - advantages)


def _gspo(p: Tensor, inputs: Inputs, config: Config) -> Terms:
    """Compute the terms of one whole sequence."""
    mask = inputs["sequence_ratio_mask"] if "sequence_ratio_mask" in inputs else torch.ones_like(p)
    mean = ((p - inputs["logprobs"]) * mask).sum() / mask.sum()
    return _clipped(torch.exp(mean).expand_as(p), inputs, config)


def _stable_reinforce(p: Tensor, inputs: Inputs, config: Config) -> Terms:
    """Compute the terms of one whole sequence: tapered off-policy REINFORCE (Le Roux et al. 2025, arXiv 2503.14286)."""
    del config
    advantages, is_drawn = inputs["advantages"], inputs[TEMPERATURES] > 0
    log_ratio = torch.where(is_drawn, p - inputs["logprobs"], torch.zeros_like(p)).sum()
    weight = torch.exp(log_ratio.clamp(max=0.0))
    slope = -torch.where(advantages < 0, weight * advantages, advantages) * is_drawn
    return Terms(slope * p, slope)


_COMPUTE: Mapping[str, Callable[[Tensor, Inputs, Config], Terms]] = {
    "cross_entropy": _cross_entropy,
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
    "dro": _dro,
    "gspo": _gspo,
    "stable_reinforce": _stable_reinforce,
}
_OF_SEQUENCES = frozenset({"gspo", "stable_reinforce"})
LOSSES: Mapping[str, Loss] = {
    name: Loss(rule=rule, compute=_COMPUTE[name], is_local=name not in _OF_SEQUENCES)
    for name, rule in LOSS_RULES.items()
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLoss:
    """The loss of one request's chunk, ready to be evaluated."""

    loss: Loss
    config: Config
    targets: Tensor
    """(N, K) int64; K is 1 for plain targets."""
    inputs: Inputs
    """fp32, (N,), or (N, K) for a loss that allows many targets."""
    lengths: tuple[int, ...]
    num_targets: tuple[int | None, ...]
    """Per datum its own K, or None for targets (n,)."""
    temperatures: Tensor | None = None
    """(N, 1): what logits are divided by for log-probabilities; None: by nothing."""

    def to(self, device: torch.device) -> RequestLoss:
        """Return a copy on a device."""
        return replace(
            self,
            targets=on_device(self.targets, device),
            inputs={name: on_device(values, device) for name, values in self.inputs.items()},
            temperatures=None if self.temperatures is None else on_device(self.temperatures, device),
        )

    def has_terms_of(self, other: RequestLoss) -> bool:
        """Return whether the terms of both requests' tokens are one function of log-probabilities and inputs."""
        return (
            self.loss is other.loss
            and self.loss.is_local
            and self.config == other.config
            and self.inputs.keys() == other.inputs.keys()
            and self.targets.shape[1] == other.targets.shape[1]
        )

    def terms(self, logprobs: Tensor, start: int, stop: int) -> Terms:
        """Return the terms of tokens `start` to `stop` from their log-probabilities (stop - start, K). Local losses."""
        return self._evaluate(logprobs, start, stop)

    def sequence_terms(self, logprobs: Tensor) -> Terms:
        """Return the terms of all tokens (N, K), computed sequence by sequence."""
        parts = []
        start = 0
        for length in self.lengths:
            parts.append(self._evaluate(logprobs[start : start + length], start, start + length))
            start += length
        clipped = [part.is_clipped for part in parts if part.is_clipped is not None]
        return Terms(
            torch.cat([part.loss for part in parts]),
            torch.cat([part.slope for part in parts]),
            torch.cat(clipped) if clipped else None,
        )

    def _evaluate(self, logprobs: Tensor, start: int, stop: int) -> Terms:
        inputs = {name: values[start:stop] for name, values in self.inputs.items()}
        if self.loss.rule.allows_many_targets:
            return self.loss.compute(logprobs, inputs, self.config)
        terms = self.loss.compute(logprobs[:, 0], inputs, self.config)
        is_clipped = None if terms.is_clipped is None else terms.is_clipped.unsqueeze(1)
        return Terms(terms.loss.unsqueeze(1), terms.slope.unsqueeze(1), is_clipped)

    def split_logprobs(self, logprobs: Tensor) -> tuple[NDArray[np.float32], ...]:
        """Return log-probabilities (N, K) split per datum, in the shape of its `target_tokens`."""
        parts = logprobs.cpu().numpy()
        results = []
        start = 0
        for length, num_targets in zip(self.lengths, self.num_targets, strict=True):
            part = parts[start : start + length]
            results.append(np.ascontiguousarray(part[:, 0] if num_targets is None else part[:, :num_targets]))
            start += length
        return tuple(results)


def prepare(data: Sequence[Datum], loss_fn: str, loss_config: Config, vocab_size: int) -> RequestLoss:
    """Check a chunk's loss inputs and lay them out. Raises ValueError with what to change; datums count from 0."""
    loss = LOSSES.get(loss_fn)
    if loss is None:
        raise ValueError(f"unknown loss function {loss_fn!r}; expected one of {', '.join(LOSSES)}")
    if not data:
        raise ValueError("the batch is empty; send at least one datum")
    rule = loss.rule
    for index, datum in enumerate(data):
        _check_datum(rule, loss_fn, index, datum, vocab_size)
        for name in rule.optional:
            if (name in datum.loss_inputs) != (name in data[0].loss_inputs):
                raise ValueError(f"{name} is given for some datums only; give it for all of them or for none")
    targets = [np.asarray(datum.loss_inputs["target_tokens"], dtype=np.int64) for datum in data]
    width = max(1 if target.ndim == 1 else target.shape[1] for target in targets)
    inputs = {}
    for name in data[0].loss_inputs:
        if name != "target_tokens":
            values = [np.asarray(datum.loss_inputs[name], dtype=np.float32) for datum in data]
            stacked = _stacked(values, width) if rule.allows_many_targets else np.concatenate(values)
            inputs[name] = torch.from_numpy(stacked)
    return RequestLoss(
        loss=loss,
        config=_checked_config(rule, loss_fn, loss_config),
        targets=torch.from_numpy(_stacked(targets, width)),
        inputs=inputs,
        lengths=tuple(len(datum.tokens) for datum in data),
        num_targets=tuple(None if target.ndim == 1 else target.shape[1] for target in targets),
        temperatures=_temperatures(inputs.get(TEMPERATURES)),
    )


def _temperatures(given: Tensor | None) -> Tensor | None:
    """Return (N, 1) divisors of logits from the tokens' temperatures (N,); None if all of them are 1."""
    if given is None or bool(((given == 0) | (given == 1)).all()):
        return None
    return torch.where(given > 0, given.clamp(min=LOGPROBS_TEMPERATURE_MIN), torch.ones_like(given)).unsqueeze(1)


def _stacked(arrays: Sequence[NDArray[Any]], width: int) -> NDArray[Any]:
    """Concatenate arrays (n,) or (n, k) as (N, width), with zeros to the right: weight zero, target zero."""
    columns = [array.reshape(len(array), -1) for array in arrays]
    if any(array.shape[1] < width for array in columns):  # padding takes longer than all other checks of a short datum
        columns = [np.pad(array, ((0, 0), (0, width - array.shape[1]))) for array in columns]
    return np.concatenate(columns)


def _check_datum(rule: LossRule, loss_fn: str, index: int, datum: Datum, vocab_size: int) -> None:
    """Raise ValueError if a datum does not fit the loss."""
    num_tokens = len(datum.tokens)
    if num_tokens == 0:
        raise ValueError(f"datum {index} has no tokens")
    _check_token_ids(f"datum {index}", datum.tokens, vocab_size)
    unknown = sorted(datum.loss_inputs.keys() - rule.inputs)
    missing = sorted((rule.required | rule.recorded | rule.filled.keys()) - datum.loss_inputs.keys())
    if unknown or missing:
        wrong = f"unknown loss inputs {', '.join(unknown)}" if unknown else f"no {', '.join(missing)}"
        raise ValueError(f"datum {index} has {wrong}; {loss_fn} takes {', '.join(sorted(rule.inputs))}")
    targets = datum.loss_inputs["target_tokens"]
    if targets.ndim not in {1, 2} or len(targets) != num_tokens or targets.size == 0:
        raise ValueError(f"datum {index} has {num_tokens} tokens but target_tokens of shape {targets.shape}")
    if targets.ndim == 2 and not rule.allows_many_targets:
        raise ValueError(f"datum {index} has several targets per token, which only cross_entropy takes")
    _check_token_ids(f"datum {index}, target_tokens", targets, vocab_size)
    for name, values in datum.loss_inputs.items():
        if values.shape != targets.shape:
            raise ValueError(
                f"datum {index}: {name} has shape {values.shape}, expected {targets.shape} as target_tokens"
            )
    mask = datum.loss_inputs.get("sequence_ratio_mask")
    if mask is not None and not float(mask.sum()) > 0:
        raise ValueError(f"datum {index}: sequence_ratio_mask selects no token")


def _check_token_ids(where: str, ids: NDArray[np.generic], vocab_size: int) -> None:
    if ids.dtype.kind not in "iu":
        raise ValueError(f"{where}: token ids have type {ids.dtype}, expected int32")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise ValueError(f"{where}: token id {wrong} is outside the vocabulary of {vocab_size}")


def _checked_config(rule: LossRule, loss_fn: str, config: Config) -> Config:
    """Return the options with defaults filled in. Raises ValueError if one is unknown or makes no sense."""
    unknown = sorted(config.keys() - rule.options.keys())
    if unknown:
        known = ", ".join(rule.options) or "no options"
        raise ValueError(f"unknown option {', '.join(unknown)} of {loss_fn}; it takes {known}")
    merged = {**rule.options, **{name: float(value) for name, value in config.items()}}
    for name, value in merged.items():
        if not math.isfinite(value):
            raise ValueError(f"option {name} of {loss_fn} is {value}; expected a finite number")
    if "clip_low_threshold" in merged and merged["clip_low_threshold"] > merged["clip_high_threshold"]:
        raise ValueError(f"clip_low_threshold of {loss_fn} is above clip_high_threshold; they bound the ratio")
    return merged
