"""Training in one process: the fused engine, sequential PEFT, and the base model's matmuls, which bound both.

Depends on the engine and PEFT. Import `scripts.bench.models` first: it configures threads.

Dimensions: T rows of a pass, D inputs and F outputs of a linear layer, S sequences, L tokens of the longest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import peft
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM

from coordinator.payloads.passes import cut_chunks
from scripts.bench.models import Model
from workers.contract.contents import whole
from workers.contract.messages import (
    AdamParams,
    AdapterInstall,
    AdapterSpec,
    AdapterState,
    Batch,
    Datum,
    ItemResult,
    OptimStepItem,
    PassItem,
    SaveItem,
)
from workers.contract.settings import EngineSettings
from workers.engine import TrainingEngine
from workers.model.gated_delta import FROZEN

ADAM = AdamParams(learning_rate=1e-4, beta2=0.95, eps=1e-8)
ALPHA = 32.0
PASS_ROWS_MAX = 8192
"""Rows of the engine's largest pass, and of the largest matmul of the limit."""


class Fused:
    """The engine, driven as the coordinator drives it: one batch of passes, cut into canonical chunks, one of steps."""

    def __init__(
        self,
        model: Model,
        ranks: Sequence[int],
        num_threads: int,
        *,
        num_slots: int | None = None,
    ) -> None:
        """One tenant per rank. Without `num_slots` all of them are resident."""
        slots = max(16, len(ranks)) if num_slots is None else num_slots
        settings = EngineSettings(
            model_path=str(model.path), num_slots=slots, num_threads=num_threads, pass_tokens_max=PASS_ROWS_MAX
        )
        self.engine = TrainingEngine(settings)
        self.keys: list[str] = []
        self._seqs: dict[str, int] = defaultdict(int)
        self._work: list[tuple[str, tuple[Datum, ...]]] = []
        for rank in ranks:
            self.install(rank)

    def install(self, rank: int) -> int:
        """Add a tenant with a new adapter; return its number."""
        key = f"tenant{len(self.keys)}"
        flags = {"train_attn": True, "train_mlp": True, "train_unembed": True}
        spec = AdapterSpec(adapter_id=key, rank=rank, alpha=ALPHA, seed=len(self.keys), **flags)
        self._run(installs=(AdapterInstall(spec=spec, state=None),))
        self.keys.append(key)
        return len(self.keys) - 1

    def step_apart(self, data: Sequence[tuple[Datum, ...]]) -> None:
        """Train each tenant on its data in a step of its own, one after another."""
        for tenant, own in enumerate(data):
            self.give([own], first=tenant)
            self.step()

    def give(self, data: Sequence[tuple[Datum, ...]], first: int = 0) -> None:
        """Train tenant `first + i` on `data[i]` from now on, and no other tenant."""
        self._work = [(self.keys[first + index], part) for index, part in enumerate(data)]

    def add_work(self, tenant: int, data: tuple[Datum, ...]) -> None:
        """Add a tenant's training data to the steps from now on."""
        self._work.append((self.keys[tenant], data))

    def step(self) -> list[float]:
        """Run every tenant's forward_backward in one pass, then every tenant's step; return their summed losses."""
        passes = []
        for key, data in self._work:
            chunks = cut_chunks([len(datum.tokens) for datum in data], self.engine.info.chunk_tokens)
            for index, chunk in enumerate(chunks):
                passes.append(
                    PassItem(
                        op_id=key,
                        adapter_id=key,
                        prev_seq=self._seqs[key],
                        seq=self._seqs[key] + 1,
                        chunk_index=index,
                        num_chunks=len(chunks),
                        data=data[chunk.start : chunk.stop],
                        loss_fn="cross_entropy",
                        loss_config={},
                        backward=True,
                    )
                )
        losses: dict[str, float] = defaultdict(float)
        for result in self._run(items=tuple(passes)):
            losses[result.op_id] += result.metrics["loss:sum"]
        steps = []
        for key, _ in self._work:
            seq = self._seqs[key]
            steps.append(OptimStepItem(op_id="", adapter_id=key, prev_seq=seq + 1, seq=seq + 2, params=ADAM))
            self._seqs[key] = seq + 2
        self._run(items=tuple(steps))
        return [losses[key] for key, _ in self._work]

    def weights(self) -> list[bytes]:
        """Return every tenant's adapter as a safetensors file, with PEFT's names."""
        return [whole(self._save(key).weights) for key in self.keys]

    def publish(self, tenant: int, version: str) -> None:
        """Publish a tenant's current weights under a version key, for sampling."""
        self._save(self.keys[tenant], publish_as=version)

    def _save(self, key: str, *, publish_as: str = "") -> AdapterState:
        seq, self._seqs[key] = self._seqs[key], self._seqs[key] + 1
        item = SaveItem(
            op_id="", adapter_id=key, prev_seq=seq, seq=seq + 1, with_optimizer=False, publish_as=publish_as
        )
        [result] = self._run(items=(item,))
        assert result.state is not None
        return result.state

    def _run(self, **fields: Any) -> tuple[ItemResult, ...]:
        results = self.engine.run(Batch(epoch=1, cycle_id=0, **fields)).results
        errors = [result.error for result in results if result.error is not None]
        if errors:
            raise RuntimeError(f"the engine failed: {errors[0].message}")
        return results


class SequentialPeft:
    """One adapter after another on one base model, with `set_adapter` and a fused AdamW per adapter."""

    def __init__(self, model: Model, ranks: Sequence[int], initial: Sequence[bytes]) -> None:
        """`initial`: every tenant's adapter from `Fused.weights`, so that both sides start with equal weights.

        Of a hybrid PEFT adapts queries, keys and values of linear attention together, with an A of its own: B is zero,
        so that the first losses are equal nevertheless.
        """
        base = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)
        leaves = {
            name.rpartition(".")[2] for name, module in base.named_modules() if isinstance(module, torch.nn.Linear)
        } - set(FROZEN)
        self.keys = [f"tenant{tenant}" for tenant in range(len(ranks))]
        configs = [
            peft.LoraConfig(r=rank, lora_alpha=ALPHA, target_modules=sorted(leaves), task_type="CAUSAL_LM")
            for rank in ranks
        ]
        self.model: Any = peft.get_peft_model(base, configs[0], adapter_name=self.keys[0])
        for key, config in zip(self.keys[1:], configs[1:], strict=True):
            self.model.add_adapter(key, config)
        for key, file in zip(self.keys, initial, strict=True):
            peft.set_peft_model_state_dict(self.model, safetensors.torch.load(file), adapter_name=key)
        self.model.train()
        self.optimizers = []
        for key in self.keys:
            parameters = [p for name, p in self.model.named_parameters() if f".{key}." in name]
            self.optimizers.append(
                torch.optim.AdamW(
                    parameters,
                    lr=ADAM.learning_rate,
                    betas=(ADAM.beta1, ADAM.beta2),
                    eps=ADAM.eps,
                    weight_decay=ADAM.weight_decay,
                    fused=True,
                )
            )
        self._batches: list[tuple[dict[str, Tensor], Tensor]] = []

    def give(self, data: Sequence[tuple[Datum, ...]]) -> None:
        """Train tenant i on `data[i]` from now on; unequal lengths are padded to the tenant's longest."""
        self._batches = [_padded(part) for part in data]

    def step(self) -> list[float]:
        """Run every tenant in turn: switch, forward, backward, step; return their summed losses."""
        losses = []
        is_lone = len(self.keys) == 1
        for key, optimizer, (inputs, targets) in zip(self.keys, self.optimizers, self._batches, strict=False):
            if not is_lone:
                self.model.set_adapter(key)
            logits = self.model(**inputs, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
        return losses


def _padded(data: Sequence[Datum]) -> tuple[dict[str, Tensor], Tensor]:
    """Return model inputs and targets (S, L). There is no mask without padding; padding has target -100."""

    def rectangle(arrays: Sequence[NDArray[Any]], fill: int) -> Tensor:
        out = np.full((len(arrays), max(map(len, arrays))), fill, dtype=np.int64)
        for row, array in zip(out, arrays, strict=True):
            row[: len(array)] = array
        return torch.from_numpy(out)

    lengths = {len(datum.tokens) for datum in data}
    inputs = {"input_ids": rectangle([datum.tokens for datum in data], 0)}
    if len(lengths) > 1:
        inputs["attention_mask"] = rectangle([np.ones_like(datum.tokens) for datum in data], 0)
    return inputs, rectangle([datum.loss_inputs["target_tokens"] for datum in data], -100)


class Limit:
    """Only the base model's matmuls of a training step: x W^T forward and dy W backward.

    By torch's matmul, as in the model itself and in PEFT, or by the engine's frozen products. One call per weight, as
    large as the engine's largest pass allows.
    """

    def __init__(self, fused: Fused, *, of_engine: bool = False) -> None:
        groups = fused.engine.base_model.groups
        self._weights = [weight for group in groups for weight in group.weights]  # (F, D) each
        self._groups = groups if of_engine else None
        self._num_tokens = 0
        self._values: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}

    def give(self, num_tokens: int) -> None:
        """Set the number of tokens of a step."""
        self._num_tokens = num_tokens
        num_rows = min(num_tokens, PASS_ROWS_MAX)
        widths = sorted({width for weight in self._weights for width in weight.shape})
        self._values = {width: torch.randn(num_rows, width) for width in widths}
        self._outputs = {width: torch.empty(num_rows, width) for width in widths}

    @torch.no_grad()
    def step(self) -> None:
        """Compute all matmuls once."""
        for start in range(0, self._num_tokens, PASS_ROWS_MAX):
            num_rows = min(PASS_ROWS_MAX, self._num_tokens - start)
            values = {width: tensor[:num_rows] for width, tensor in self._values.items()}
            if self._groups is not None:
                self._as_the_engine(values)
            else:
                self._as_torch(values, {width: tensor[:num_rows] for width, tensor in self._outputs.items()})

    def _as_torch(self, values: dict[int, Tensor], outputs: dict[int, Tensor]) -> None:
        for weight in self._weights:
            torch.mm(values[weight.shape[1]], weight.t(), out=outputs[weight.shape[0]])
        for weight in reversed(self._weights):
            torch.mm(values[weight.shape[0]], weight, out=outputs[weight.shape[1]])

    def _as_the_engine(self, values: dict[int, Tensor]) -> None:
        assert self._groups is not None
        for group in self._groups:
            group.products.forward(values[group.shape.d_in], [None] * len(group.weights))
        for group in reversed(self._groups):
            group.products.backward([values[width] for width in group.shape.d_outs])


class Memcpy:
    """A copy of fp32 values between two allocated buffers."""

    def __init__(self, num_values: int) -> None:
        self.num_bytes = 4 * num_values
        self._source, self._target = torch.randn(num_values), torch.zeros(num_values)

    def step(self) -> None:
        """Copy the values once."""
        self._target.copy_(self._source)
