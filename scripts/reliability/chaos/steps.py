"""The tenants' steps: each is a pure function of (tenant, step), so that two runs submit the same operations.

Does not depend on the pool, the clock or the kills. A round is `ROUND` steps of different kinds and ends with a
`save_state`. A tenant stops at the end of a round, so its last checkpoint holds its weights and moments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinkerpool import types

ROUND = 12
"""Steps in a round."""
CHECKPOINTS_KEPT = 3
"""Checkpoint names, used in rotation: each save overwrites an older checkpoint."""
SAMPLER_TTL_S = 86400
"""Of published weights: longer than any run."""
FIRST_TOKEN = 2
"""Lower ids are end of text and padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One tenant: its adapter, and the behaviour of its program."""

    name: str
    rank: int
    seed: int
    """Of the initial weights and of all its data."""
    losses: tuple[types.LossFnType, ...]
    """Used in rotation, one per step."""
    num_data_max: int
    """Maximum number of sequences in a batch."""
    num_tokens_max: int
    """Maximum number of tokens in a sequence."""
    num_ahead: int
    """Steps submitted before the oldest is awaited. 0: await each step before the next; -1: each operation."""
    load_every: int
    """Load the last checkpoint every so many rounds; 0: never."""
    train_attn: bool = True
    train_mlp: bool = True


PROFILES = (
    Profile(
        name="careful", rank=4, seed=11, losses=("cross_entropy",),
        num_data_max=2, num_tokens_max=24, num_ahead=-1, load_every=2,
    ),
    Profile(
        name="steady", rank=8, seed=22, losses=("cross_entropy", "importance_sampling", "dro"),
        num_data_max=3, num_tokens_max=40, num_ahead=0, load_every=3,
    ),
    Profile(
        name="hasty", rank=16, seed=33, losses=("ppo", "cross_entropy", "gspo"),
        num_data_max=2, num_tokens_max=48, num_ahead=5, load_every=0, train_mlp=False,
    ),
    Profile(
        name="bulky", rank=2, seed=44, losses=("cispo", "cross_entropy"),
        num_data_max=10, num_tokens_max=64, num_ahead=1, load_every=4, train_attn=False,
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A forward or forward_backward."""

    method: str
    """`forward` or `forward_backward`."""
    data: Sequence[types.Datum]
    loss: types.LossFnType


@dataclass(frozen=True, slots=True, kw_only=True)
class Custom:
    """A forward_backward with `custom_loss`."""

    data: Sequence[types.Datum]


@dataclass(frozen=True, slots=True, kw_only=True)
class Optim:
    """An optimizer step."""

    adam: types.AdamParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """A forward_backward and its optimizer step in one message."""

    data: Sequence[types.Datum]
    loss: types.LossFnType
    adam: types.AdamParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """A checkpoint, possibly under the name of an older one."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Loading a checkpoint."""

    name: str
    with_optimizer: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Publishing weights, with or without (empty) a name, and sampling from them."""

    name: str
    prompt: types.ModelInput
    params: types.SamplingParams


Action = Pass | Custom | Optim | Train | Save | Load | Sample


def num_seqs(action: Action) -> int:
    """Return how many sequence numbers the action takes."""
    return 2 if isinstance(action, Custom | Train) else 1


def actions_of(profile: Profile, step: int, vocab_size: int) -> list[Action]:
    """Return the actions of step `step` (from 0), in order."""
    rng = np.random.default_rng((profile.seed, step))
    round_index, kind = divmod(step, ROUND)
    loss = profile.losses[step % len(profile.losses)]
    adam = types.AdamParams(
        learning_rate=1e-3 * (1 + step % 3), weight_decay=0.01 * (step % 2), grad_clip_norm=1.0 if step % 4 else 0.0
    )

    def batch(of: types.LossFnType = loss) -> list[types.Datum]:
        num_data = int(rng.integers(1, profile.num_data_max + 1))
        return [_datum(rng, of, int(rng.integers(2, profile.num_tokens_max + 1)), vocab_size) for _ in range(num_data)]

    def passed(method: str = "forward_backward") -> Pass:
        return Pass(method=method, data=batch(), loss=loss)

    match kind:
        case 2:
            return [passed(), passed(), passed(), Optim(adam=adam)]
        case 3:
            return [passed("forward"), passed(), Optim(adam=adam)]
        case 5:
            return [passed(), passed("forward"), passed(), Optim(adam=adam)]
        case 6:
            name = f"sampler-{round_index}" if round_index % 2 else ""
            prompt = types.ModelInput.from_ints(rng.integers(FIRST_TOKEN, vocab_size, 5))
            params = types.SamplingParams(max_tokens=10, temperature=1.0, seed=step)
            return [passed(), Optim(adam=adam), Sample(name=name, prompt=prompt, params=params)]
        case 7:
            return [Custom(data=batch("cross_entropy")), Optim(adam=adam)]
        case 8 if profile.load_every and round_index % profile.load_every == 1:
            load = Load(name=_checkpoint(round_index - 1), with_optimizer=round_index % 2 == 0)
            return [passed(), load, passed(), Optim(adam=adam)]
        case 4 | 9 | 10:
            return [Train(data=batch(), loss=loss, adam=adam)]
        case 11:
            return [Train(data=batch(), loss=loss, adam=adam), Save(name=_checkpoint(round_index))]
        case _:
            return [passed(), Optim(adam=adam)]


def custom_loss(
    data: list[types.Datum], logprobs: list[NDArray[np.float32]]
) -> tuple[float, list[NDArray[np.float32]], dict[str, float]]:
    """Return half the squared distance of every log-probability from -3, and its gradient."""
    gradients = [array + np.float32(3) for array in logprobs]
    return math.fsum(float(np.square(g).sum()) / 2 for g in gradients), gradients, {}


def last_checkpoint(num_steps: int) -> str:
    """Return the checkpoint that ends the last of `num_steps` steps, a whole number of rounds."""
    assert num_steps > 0, "no checkpoint was saved"
    assert num_steps % ROUND == 0, f"step {num_steps} is in the middle of a round"
    return _checkpoint(num_steps // ROUND - 1)


def _checkpoint(round_index: int) -> str:
    return f"round-{round_index % CHECKPOINTS_KEPT}"


def _datum(rng: np.random.Generator, loss: types.LossFnType, num_tokens: int, vocab_size: int) -> types.Datum:
    tokens = rng.integers(FIRST_TOKEN, vocab_size, num_tokens + 1)
    inputs: dict[str, Any] = {"target_tokens": tokens[1:]}
    if loss == "cross_entropy":
        inputs["weights"] = rng.integers(0, 2, num_tokens).astype(np.float32)
    else:
        inputs["logprobs"] = -rng.uniform(6, 10, num_tokens).astype(np.float32)
        inputs["advantages"] = rng.uniform(0, 1, num_tokens).astype(np.float32)
    return types.Datum(types.ModelInput.from_ints(tokens[:-1]), inputs)
