"""Trial of costs: what an item, a step and a move of an adapter take, in tokens of a large pass.

The coordinator plans and charges by these. Ratios count, not seconds, so that they hold whatever else the machine does.
The trial runs small passes: of one adapter with few tokens and with many, and of several adapters with few tokens
each; then steps of these adapters, and their ways out of their slots and into them again. Each part counts by its
fastest run. No result and no bit depends on the costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from workers.bank.bank import Bank
from workers.contract.adapted_modules import COPY_PARAM_BYTES
from workers.contract.messages import AdamParams, AdapterCosts, AdapterSpec, Datum
from workers.host.free_memory import MemoryShare
from workers.model.base_model import BaseModel
from workers.selftest.thread_invariance import trial_item
from workers.training.optim import Step, adamw_step, adamw_steps
from workers.training.passes import PassRunner

NUM_ADAPTERS, RANK = 8, 8
SHORT, LONG, NUM_LONG = 2, 64, 8
"""Tokens of a sequence, and sequences of the item with many tokens."""
ROUNDS, ROUNDS_S = 4, 0.5
"""Rounds of the trial, and the seconds after which no further one begins."""
_TRIED: dict[object, AdapterCosts] = {}
"""Results of trials in this process, by all that times depend on."""


def measured_costs(base_model: BaseModel) -> AdapterCosts:
    """Return the costs of a base model's adapters; zeros if the memory is too small for the trial."""
    sizes = (base_model.group_shapes, base_model.num_params, base_model.head_dim, base_model.delta_shape)
    key = (sizes, torch.get_num_threads(), base_model.device, base_model.dtype, base_model.numerics)
    if key not in _TRIED:
        _TRIED[key] = _Trial(base_model).costs()
        base_model.reset()
    return _TRIED[key]


def evaluated(fastest_s: dict[str, float], num_tokens: int, copy_bytes: int) -> AdapterCosts:
    """Return the costs from the fastest seconds of each part of the trial.

    Args:
        fastest_s: Seconds of "few tokens", "many tokens", "items", "steps" and "moves".
        num_tokens: Tokens that "many tokens" has more than "few tokens".
        copy_bytes: Bytes of one adapter's copy.
    """
    token_s = (fastest_s["many tokens"] - fastest_s["few tokens"]) / num_tokens
    if token_s <= 0:
        return AdapterCosts()
    item = (fastest_s["items"] - fastest_s["few tokens"]) / (NUM_ADAPTERS - 1) / token_s
    step, move = (fastest_s[name] / NUM_ADAPTERS / token_s for name in ("steps", "moves"))
    return AdapterCosts(
        item_tokens=max(0.0, item - step),
        byte_tokens=step / copy_bytes,
        move_byte_tokens=move / copy_bytes,
    )


class _Trial:
    """Adapters in a bank of their own."""

    def __init__(self, base_model: BaseModel) -> None:
        self._base_model = base_model
        self._bank = Bank(base_model.group_shapes, NUM_ADAPTERS, base_model.device, compute_dtype=base_model.dtype)
        self._passes = PassRunner(base_model, self._bank, MemoryShare(base_model.device))
        self._names = [str(number) for number in range(NUM_ADAPTERS)]
        flags = {"train_attn": True, "train_mlp": True, "train_unembed": True}
        for name in self._names:
            spec = AdapterSpec(adapter_id=name, rank=min(RANK, base_model.max_rank), alpha=32.0, seed=1, **flags)
            self._bank.add(name, spec)
        self._has_failed = False
        self._fastest_s: dict[str, float] = {}

    def costs(self) -> AdapterCosts:
        """Run the trial."""
        short, long = min(SHORT * NUM_ADAPTERS, self._base_model.max_seq_len), min(LONG, self._base_model.max_seq_len)
        parts: dict[str, Callable[[], None]] = {
            "few tokens": lambda: self._pass(self._names[:1], [short]),
            "many tokens": lambda: self._pass(self._names[:1], [long] * NUM_LONG),
            "items": lambda: self._pass(self._names, [SHORT]),
            "steps": self._step,
            "moves": self._move,
        }
        began = time.perf_counter()
        for _ in range(ROUNDS):
            for name, part in parts.items():
                self._time(name, part)
            if self._has_failed or time.perf_counter() - began > ROUNDS_S:
                break
        if self._has_failed:
            return AdapterCosts()
        copy_bytes = COPY_PARAM_BYTES * self._bank.entry(self._names[0]).layout.num_values
        return evaluated(self._fastest_s, long * NUM_LONG - short, copy_bytes)

    def _time(self, name: str, part: Callable[[], None]) -> None:
        began = time.perf_counter()
        part()
        if self._base_model.device.type == "cuda":
            torch.cuda.synchronize(self._base_model.device)
        seconds = time.perf_counter() - began
        self._fastest_s[name] = min(seconds, self._fastest_s.get(name, seconds))

    def _pass(self, names: list[str], lengths: list[int]) -> None:
        rng = np.random.default_rng(0)
        data = []
        for length in lengths:
            tokens = rng.integers(0, self._base_model.vocab_size, length).astype(np.int32)
            data.append(
                Datum(tokens=tokens, loss_inputs={"target_tokens": tokens, "weights": np.ones(length, np.float32)})
            )
        outcomes = self._passes.run([self._passes.checked(trial_item(name, data)) for name in names])
        self._has_failed |= any(outcome.part is None for outcome in outcomes)

    def _step(self) -> None:
        params = AdamParams(learning_rate=1e-4)
        rows = self._bank.acquire(self._names)
        for name in self._names:
            self._bank.entry(name).begin_gradient()  # zeros, if no pass has added to it
        if self._base_model.is_deferred:
            adamw_steps([Step(row=row, params=params, num_steps=1) for row in rows])
        else:
            for row in rows:
                adamw_step(row, params, 1)

    def _move(self) -> None:
        for name in self._names:
            self._bank.evict(name)
        self._bank.acquire(self._names)
