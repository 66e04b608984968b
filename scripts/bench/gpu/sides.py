"""The sides of the GPU benchmark: the fused engine and sequential PEFT."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import peft
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from scripts.bench.gpu.cases import Case
from workers.bank.entries import Slab
from workers.contract.messages import (
    AdamParams,
    AdapterInstall,
    AdapterSpec,
    Batch,
    ErrorCode,
    Item,
    OptimStepItem,
    PassItem,
)
from workers.contract.settings import EngineSettings
from workers.engine import TrainingEngine

PARAMS = AdamParams(learning_rate=1e-4, beta2=0.95, eps=1e-8)


class Side(Protocol):
    """A measured side."""

    def on_device(self) -> AbstractContextManager[None]:
        """Return a context in which the side's tensors are on the device."""

    def step(self) -> None:
        """Run every tenant's forward_backward and optimizer step."""

    def held_bytes(self) -> int:
        """Return the memory of weights and adapters with their moments and gradients, between two steps."""


class Fused:
    """Implements `Side`: the engine, driven as the coordinator drives it.

    One batch of passes, in canonical chunks, and one of steps.
    """

    def __init__(self, settings: EngineSettings, case: Case, rank: int) -> None:
        self.engine = TrainingEngine(settings)
        self.keys = [f"tenant{tenant}" for tenant in range(case.num_tenants)]
        info = self.engine.info
        chunk_seqs = max(1, info.chunk_tokens // case.num_tokens)
        self.chunks = []
        for data in case.data(info.vocab_size):
            self.chunks.append([data[start : start + chunk_seqs] for start in range(0, len(data), chunk_seqs)])
        self.seq = 0
        flags = {"train_attn": True, "train_mlp": True, "train_unembed": True}
        specs = [AdapterSpec(adapter_id=key, rank=rank, alpha=32.0, seed=1, **flags) for key in self.keys]
        self._run(installs=tuple(AdapterInstall(spec=spec, state=None) for spec in specs))

    def _run(self, **fields: Any) -> None:
        results = self.engine.run(Batch(epoch=1, cycle_id=0, **fields)).results
        errors = [result.error for result in results if result.error]
        if any(error.code is ErrorCode.OUT_OF_MEMORY for error in errors):
            raise MemoryError
        assert not errors, errors

    def on_device(self) -> AbstractContextManager[None]:
        """Return an empty context: the bank stays on the device."""
        return nullcontext()

    def held_bytes(self) -> int:
        """See `Side`."""
        bank, slabs = self.engine.bank, set[Slab]()
        for key in self.keys:
            row = bank.entry(key).row
            if row is not None:
                slabs.add(row.slab)
        buffers = [
            buffer for slab in slabs for buffer in (slab.weights, slab.grad, slab.compute, *(slab.moments or ()))
        ]
        return num_bytes([*self.engine.base_model.model.parameters(), *buffers])

    def step(self) -> None:
        """Run every tenant's forward_backward, then every tenant's step."""
        self.run_passes()
        self.run_steps()

    def run_passes(self) -> None:
        """Run every tenant's forward_backward."""
        seqs: dict[str, Any] = {"op_id": "", "prev_seq": self.seq, "seq": self.seq + 1}
        passes: list[Item] = [
            PassItem(
                **seqs,
                adapter_id=key,
                chunk_index=index,
                num_chunks=len(chunks),
                data=data,
                loss_fn="cross_entropy",
                loss_config={},
                backward=True,
            )
            for key, chunks in zip(self.keys, self.chunks, strict=True)
            for index, data in enumerate(chunks)
        ]
        self._run(items=tuple(passes))
        self.seq += 1

    def run_steps(self) -> None:
        """Run every tenant's optimizer step."""
        seqs: dict[str, Any] = {"op_id": "", "prev_seq": self.seq, "seq": self.seq + 1, "params": PARAMS}
        self._run(items=tuple(OptimStepItem(adapter_id=key, **seqs) for key in self.keys))
        self.seq += 1


class SequentialPeft:
    """Implements `Side`: one adapter after another on one base model."""

    def __init__(
        self,
        model: Path,
        case: Case,
        rank: int,
        device: torch.device,
        weights: dict[str, torch.Tensor],
        *,
        is_compiled: bool = False,
    ) -> None:
        """`weights`: the base model's tensors by name, on the device; they are used without a copy.

        `is_compiled`: torch compiles a layer, twice for each tenant: `set_adapter` changes its code, and what the first
        layer gets needs no gradient.
        """
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="sdpa")
        left = base.load_state_dict(weights, strict=False, assign=True)  # without norms: the engine's are separate
        assert not left.unexpected_keys, left
        base.to(device)
        linears = [name for name, module in base.named_modules() if isinstance(module, torch.nn.Linear)]
        leaves = sorted({name.rpartition(".")[2] for name in linears})
        self.device = device
        self.keys = [f"tenant{tenant}" for tenant in range(case.num_tenants)]
        config = peft.LoraConfig(r=rank, lora_alpha=32, target_modules=leaves, task_type="CAUSAL_LM")
        self.model: Any = peft.get_peft_model(base, config, adapter_name=self.keys[0])
        for key in self.keys[1:]:
            self.model.add_adapter(key, config)
        self.model.train()
        if is_compiled:
            torch.compiler.reset()  # another case has other shapes
            torch._dynamo.config.recompile_limit = 2 * case.num_tenants
            for layer in base.model.layers:
                layer.compile()
        data = case.data(int(base.config.vocab_size))
        self.tokens = [self._stacked([datum.tokens for datum in part]) for part in data]
        self.targets = [self._stacked([datum.loss_inputs["target_tokens"] for datum in part]) for part in data]
        self.optimizers = [
            torch.optim.AdamW(
                [parameter for name, parameter in self.model.named_parameters() if f".{key}." in name],
                lr=PARAMS.learning_rate,
                betas=(PARAMS.beta1, PARAMS.beta2),
                eps=PARAMS.eps,
                weight_decay=0.0,
                fused=True,
            )
            for key in self.keys
        ]
        self._move(torch.device("cpu"))

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Hold adapters and moments on the device until the block ends; otherwise they are in host memory."""
        self._move(self.device)
        try:
            yield
        finally:
            self._move(torch.device("cpu"))

    def _move(self, device: torch.device) -> None:
        for optimizer in self.optimizers:
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.data = parameter.data.to(device)
                state = optimizer.state[parameter]
                state.update({name: value.to(device) for name, value in state.items()})

    def held_bytes(self) -> int:
        """See `Side`."""
        moments = [
            value for optimizer in self.optimizers for state in optimizer.state.values() for value in state.values()
        ]
        return num_bytes([*self.model.parameters(), *moments])

    def _stacked(self, rows: Sequence[NDArray[Any]]) -> torch.Tensor:
        return torch.from_numpy(np.stack(rows)).long().to(self.device)

    def step(self) -> None:
        """Run every tenant in turn: switch, forward, backward, step."""
        for key, tokens, targets, optimizer in zip(self.keys, self.tokens, self.targets, self.optimizers, strict=True):
            self.model.set_adapter(key)
            with torch.autocast(self.device.type, torch.bfloat16):
                logits = self.model(input_ids=tokens, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def num_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Return the memory of the tensors' storages; a shared storage counts once."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
