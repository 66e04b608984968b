"""The operations of one tenant, drawn from a seed before anything runs, and their requests.

Does not depend on the service. A payload is a function of tenant and sequence number, so that a repeated request is the
same request; a `variant` other than 0 is a different request for the same sequence number.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from tests.support.toy_engine import POISON_TOKEN
from tinkerpool.convert import to_tensor
from tinkerpool.v1 import checkpoints_pb2, sampling_pb2, training_pb2, types_pb2

BAD_TOKEN = 2**20
"""Outside every vocabulary: the request is refused."""
RATES = (1e-4, 1e-3, 0.5)
LOSSES = (types_pb2.LOSS_FUNCTION_CROSS_ENTROPY, types_pb2.LOSS_FUNCTION_IMPORTANCE_SAMPLING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One operation of a script."""

    seq: int
    kind: str
    """The use case; "train_step" takes two sequence numbers."""
    lengths: tuple[int, ...] = ()
    """Tokens of the sequences of a pass."""
    batch: tuple[int, int] | None = None
    """First and last seq of the batch that a forward_backward is marked as part of; None: it is not marked."""
    is_poison: bool = False
    """The engine fails the operation."""
    is_bad: bool = False
    """The service refuses the request permanently."""
    loss: types_pb2.LossFunction.ValueType = LOSSES[0]
    learning_rate: float = 0.0
    name: str = ""
    """The name of a save; empty: a sampler without a name."""
    with_optimizer: bool = False
    overwrite: bool = False
    source: int = 0
    """The save whose checkpoint is loaded."""
    num_samples: int = 0
    """Samples drawn from the saved weights."""

    @property
    def has_contents(self) -> bool:
        """Whether there are different requests for its sequence number."""
        return self.kind != "discard_gradient"

    @property
    def num_seqs(self) -> int:
        """Number of sequence numbers that the step takes."""
        return 2 if self.kind == "train_step" else 1


def draw_script(random: Random, num_steps: int) -> list[Step]:
    """Draw a tenant's operations; the last two apply the pending gradient and save the result."""
    poison = random.choice((0.0, 0.0, 0.1))
    bad = random.choice((0.0, 0.0, 0.08))
    steps: list[Step] = []
    saves: list[int] = []
    seq = 1
    kinds, weights = zip(
        ("forward", 2),
        ("forward_backward", 7),
        ("optim_step", 4),
        ("train_step", 2),
        ("save_state", 2),
        ("load_state", 1),
        ("discard_gradient", 1),
        ("save_weights_for_sampler", 2),
        strict=True,
    )
    for _ in range(num_steps):
        [kind] = random.choices(kinds, weights)
        if kind == "load_state" and not saves:
            kind = "save_state"
        if kind in {"forward_backward", "train_step"} and (num_parts := random.choice((0, 1, 1, 2, 3))):
            batch = (seq, seq + num_parts - 1)
            for part in range(num_parts):
                part_kind = kind if part == num_parts - 1 else "forward_backward"
                steps.append(_draw_pass(random, seq, part_kind, poison, bad, batch))
                seq += steps[-1].num_seqs
            continue
        values: dict[str, Any] = {}
        if kind in {"forward", "forward_backward", "train_step"}:
            steps.append(_draw_pass(random, seq, kind, poison, bad, None))
            seq += steps[-1].num_seqs
            continue
        if kind == "optim_step":
            values["learning_rate"] = random.choice(RATES)
        if kind == "save_state":
            values["name"] = f"c{seq}"
            if saves and random.random() < 0.3:
                values |= {"name": f"c{saves[-1]}", "overwrite": True}
            saves.append(seq)
        if kind == "save_weights_for_sampler":
            values |= {"name": random.choice(("", "", f"s{seq}")), "num_samples": random.randrange(3)}
        if kind == "load_state":
            values |= {"source": random.choice(saves), "with_optimizer": random.random() < 0.5}
        if kind not in {"save_state", "save_weights_for_sampler", "discard_gradient"}:
            values["is_bad"] = random.random() < bad
        step = Step(seq=seq, kind=kind, **values)
        steps.append(step)
        seq += step.num_seqs
    steps.append(Step(seq=seq, kind="optim_step", learning_rate=1e-2))
    steps.append(Step(seq=seq + 1, kind="save_state", name="final"))
    return steps


def _draw_pass(random: Random, seq: int, kind: str, poison: float, bad: float, batch: tuple[int, int] | None) -> Step:
    return Step(
        seq=seq,
        kind=kind,
        lengths=tuple(random.randrange(1, 17) for _ in range(random.choice((1, 1, 2, 4, 6)))),
        batch=batch,
        is_poison=random.random() < poison,
        loss=random.choice(LOSSES),
        learning_rate=random.choice(RATES) if kind == "train_step" else 0.0,
        is_bad=random.random() < bad,
    )


def request_of(step: Step, adapter_id: str, path: str, variant: int = 0) -> Any:
    """Return the request of a step; `path` is the checkpoint of a load."""
    fields: dict[str, Any] = {"adapter_id": adapter_id, "seq": step.seq}
    if step.batch is not None:
        first, last = step.batch
        fields["batch"] = training_pb2.Batch(first_seq=first, num_requests=last - first + 1)
    data = [_datum(step, index, length, variant) for index, length in enumerate(step.lengths)]
    rate = step.learning_rate + (0.25 if variant else 0.0)
    adam = types_pb2.AdamParams(learning_rate=-1.0 if step.is_bad else rate)
    match step.kind:
        case "forward":
            return training_pb2.ForwardRequest(**fields, data=data, loss_function=step.loss)
        case "forward_backward":
            return training_pb2.ForwardBackwardRequest(**fields, data=data, loss_function=step.loss)
        case "train_step":
            return training_pb2.TrainStepRequest(**fields, data=data, loss_function=step.loss, adam=adam)
        case "optim_step":
            return training_pb2.OptimStepRequest(**fields, adam=adam)
        case "discard_gradient":
            return training_pb2.DiscardGradientRequest(**fields)
        case "save_state":
            name = f"{step.name}-other" if variant else step.name
            return checkpoints_pb2.SaveStateRequest(**fields, name=name, overwrite=step.overwrite)
        case "save_weights_for_sampler":
            name = f"s{step.seq}-other" if variant else step.name
            return checkpoints_pb2.SaveWeightsForSamplerRequest(**fields, name=name)
        case "load_state":
            path = f"{path}-absent" if step.is_bad else path
            return training_pb2.LoadStateRequest(
                **fields, path=path, with_optimizer=step.with_optimizer is not bool(variant)
            )
    raise AssertionError(step.kind)


def sample_request_of(step: Step, sampler_id: str, number: int, variant: int = 0) -> sampling_pb2.SampleRequest:
    """Return a request for a sample from the weights that a step saved; `number` counts from 1."""
    return sampling_pb2.SampleRequest(
        sampler_id=sampler_id,
        seq=number,
        prompt=to_tensor(np.array([1 + step.seq % 50, number], np.int32)),
        num_samples=1 + number % 2,
        include_prompt_logprobs=number % 2 == 0,
        params=sampling_pb2.SamplingParams(max_tokens=3 + step.seq % 6, seed=7 * step.seq + number + 1000 * variant),
    )


def _datum(step: Step, index: int, length: int, variant: int) -> types_pb2.Datum:
    tokens = (np.arange(length, dtype=np.int32) + 7 * step.seq + 3 * index + variant) % 60
    if index == len(step.lengths) - 1:
        if step.is_poison:
            tokens[-1] = POISON_TOKEN
        if step.is_bad:
            tokens[-1] = BAD_TOKEN
    floats = to_tensor(np.full(length, 0.5, np.float32))
    names = ("weights",) if step.loss == LOSSES[0] else ("logprobs", "advantages")
    return types_pb2.Datum(
        tokens=to_tensor(tokens),
        loss_inputs={"target_tokens": to_tensor((tokens + variant) % 60)} | dict.fromkeys(names, floats),
    )
