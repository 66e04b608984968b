"""Measure the engine against sequential PEFT: the same tenants, models and tokens, turn about in one process.

    python scripts/bench_engine.py                          # a random Qwen3 of 4M parameters
    python scripts/bench_engine.py --shape 27m
    python scripts/bench_engine.py --model DIR --tenants 1 8 --seqs 4 --tokens 128

One step is a forward_backward and an optimizer step of every tenant. Sequential PEFT is what a careful user would
write: one base model, an adapter and an AdamW per tenant, `set_adapter`, forward, backward, step, one tenant after
another. The two sides alternate, step by step, and medians are compared. Prints a Markdown table.
"""

from __future__ import annotations

import os

# Before torch is imported: two threads that spin a little are fastest on quiet cores and bearable on busy ones.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import argparse
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from workers.engine import EngineConfig, TrainingEngine
from workers.messages import (
    AdamParams,
    AdapterInstall,
    AdapterSpec,
    Batch,
    Datum,
    OptimStepItem,
    PassItem,
)

SHAPES = {"4m": (256, 4, 4, 2, 768, 4096), "27m": (512, 8, 8, 4, 1536, 4096)}
"""Hidden size, layers, heads, key-value heads, MLP size, vocabulary; heads of 64."""
PARAMS = AdamParams(learning_rate=1e-3, beta2=0.95, eps=1e-8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What all tenants do in one step."""

    num_tenants: int
    num_seqs: int
    num_tokens: int
    rank: int

    @property
    def total_tokens(self) -> int:
        """Tokens trained in a step."""
        return self.num_tenants * self.num_seqs * self.num_tokens


def make_model(shape: str, directory: Path) -> Path:
    """Write a random Qwen3 of a named shape."""
    hidden, layers, heads, kv_heads, mlp, vocab = SHAPES[shape]
    config = Qwen3Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64,
        intermediate_size=mlp,
        vocab_size=vocab,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def make_data(case: Case, vocab_size: int, tenant: int) -> tuple[Datum, ...]:
    """A tenant's sequences: random tokens, next-token targets."""
    rng = np.random.default_rng(tenant)
    data = []
    for _ in range(case.num_seqs):
        tokens = rng.integers(0, vocab_size, case.num_tokens + 1).astype(np.int32)
        weights = np.ones(case.num_tokens, dtype=np.float32)
        data.append(Datum(tokens=tokens[:-1], loss_inputs={"target_tokens": tokens[1:], "weights": weights}))
    return tuple(data)


class Fused:
    """The engine, driven as the coordinator drives it: one batch of passes, one of steps."""

    def __init__(self, model: Path, case: Case, data: Sequence[tuple[Datum, ...]], num_threads: int) -> None:
        config = EngineConfig(model=str(model), num_slots=max(16, case.num_tenants), num_threads=num_threads)
        self.engine = TrainingEngine(config)
        self.keys = [f"tenant{tenant}" for tenant in range(case.num_tenants)]
        self.data = data
        self.seq = 0
        flags = {"train_attn": True, "train_mlp": True, "train_unembed": True}
        specs = [AdapterSpec(adapter_id=key, rank=case.rank, alpha=32.0, seed=1, **flags) for key in self.keys]
        self._run(installs=tuple(AdapterInstall(spec=spec, state=None) for spec in specs))

    def _run(self, **fields: Any) -> None:
        results = self.engine.run(Batch(epoch=1, cycle_id=0, **fields)).results
        assert not any(result.error for result in results), results

    def step(self) -> None:
        """Every tenant's forward_backward in one pass, then every tenant's step."""
        passes = [
            PassItem(
                op_id="",
                adapter_id=key,
                prev_seq=self.seq,
                seq=self.seq + 1,
                chunk_index=0,
                num_chunks=1,
                data=data,
                loss_fn="cross_entropy",
                loss_config={},
                backward=True,
            )
            for key, data in zip(self.keys, self.data, strict=True)
        ]
        self._run(items=tuple(passes))
        place: dict[str, Any] = {"op_id": "", "prev_seq": self.seq + 1, "seq": self.seq + 2, "params": PARAMS}
        self._run(items=tuple(OptimStepItem(adapter_id=key, **place) for key in self.keys))
        self.seq += 2


class SequentialPeft:
    """One adapter after another on one base model."""

    def __init__(self, model: Path, case: Case, data: Sequence[tuple[Datum, ...]]) -> None:
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        leaves = {
            name.rpartition(".")[2] for name, module in base.named_modules() if isinstance(module, torch.nn.Linear)
        }
        self.keys = [f"tenant{tenant}" for tenant in range(case.num_tenants)]
        config = peft.LoraConfig(r=case.rank, lora_alpha=32, target_modules=sorted(leaves), task_type="CAUSAL_LM")
        self.model: Any = peft.get_peft_model(base, config, adapter_name=self.keys[0])
        for key in self.keys[1:]:
            self.model.add_adapter(key, config)
        self.model.train()
        self.tokens = [torch.from_numpy(np.stack([datum.tokens for datum in part])).long() for part in data]
        self.targets = [
            torch.from_numpy(np.stack([datum.loss_inputs["target_tokens"] for datum in part])).long() for part in data
        ]
        self.optimizers = []
        for key in self.keys:
            parameters = [p for name, p in self.model.named_parameters() if f".{key}." in name]
            self.optimizers.append(
                torch.optim.AdamW(
                    parameters,
                    lr=1e-3,
                    betas=(PARAMS.beta1, PARAMS.beta2),
                    eps=PARAMS.eps,
                    weight_decay=0.0,
                    fused=True,
                )
            )

    def step(self) -> None:
        """Every tenant in turn: switch, forward, backward, step."""
        for key, tokens, targets, optimizer in zip(self.keys, self.tokens, self.targets, self.optimizers, strict=True):
            self.model.set_adapter(key)
            logits = self.model(input_ids=tokens, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def measure(sides: Sequence[Callable[[], None]], num_rounds: int, warm_up: int) -> list[list[float]]:
    """Seconds of each side, round by round, turn about."""
    times: list[list[float]] = [[] for _ in sides]
    for round_number in range(-warm_up, num_rounds):
        for side, seconds in zip(sides, times, strict=True):
            begin_s = time.perf_counter()
            side()
            if round_number >= 0:
                seconds.append(time.perf_counter() - begin_s)
    return times


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face directory; without it a random Qwen3 of --shape")
    parser.add_argument("--shape", choices=SHAPES, default="4m")
    parser.add_argument("--tenants", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--seqs", type=int, default=1, help="sequences per tenant and step")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per sequence")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
    transformers.utils.logging.disable_progress_bar()
    print(
        f"{time.strftime('%Y-%m-%d')}, {platform.machine()} {torch.backends.cpu.get_cpu_capability()}, "
        f"{args.threads} threads of {os.cpu_count()} cores, torch {torch.__version__}, peft {peft.__version__}, "
        f"{args.model or 'random Qwen3 ' + args.shape}, rank {args.rank}, fp32, median of {args.rounds}\n"
    )
    print("| tenants x sequences x tokens | sequential PEFT | fused | ratio | fused tokens/s |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        model = args.model or make_model(args.shape, Path(directory))
        for num_tenants in args.tenants:
            case = Case(num_tenants=num_tenants, num_seqs=args.seqs, num_tokens=args.tokens, rank=args.rank)
            vocab_size = int(transformers.AutoConfig.from_pretrained(model).vocab_size)
            data = [make_data(case, vocab_size, tenant) for tenant in range(num_tenants)]
            fused, sequential = Fused(model, case, data, args.threads), SequentialPeft(model, case, data)
            times = measure([sequential.step, fused.step], args.rounds, warm_up=2)
            slow, fast = (statistics.median(seconds) for seconds in times)
            print(
                f"| {num_tenants} x {args.seqs} x {args.tokens} | {slow * 1e3:.0f} ms | {fast * 1e3:.0f} ms "
                f"| {slow / fast:.2f} | {case.total_tokens / fast:,.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
