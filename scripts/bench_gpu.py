"""Measure the engine on a GPU: tokens per second, part of the matmul peak, ratio to sequential PEFT, memory.

    python scripts/bench_gpu.py                                   # a random Qwen3 of 0.6B, three cases
    python scripts/bench_gpu.py --shape 8b --cases 8x4x64 16x4x512
    python scripts/bench_gpu.py --exact                           # exact mode beside the default: what it costs
    python scripts/bench_gpu.py --device cpu --shape tiny --cases 2x1x16   # shows that the script works; no figures

A case is tenants x sequences x tokens. One step is a forward_backward and an optimizer step of every tenant. Sequential
PEFT is what a careful user would write: one bf16 base model, an fp32 adapter and a fused AdamW per tenant, autocast,
`set_adapter`, forward, backward, step, one tenant after another, no compilation. The sides alternate, step by step;
medians are compared. The peak is that of a large bf16 matmul in the same run. Needs torch, transformers and peft, not
ray. Prints Markdown.
"""

from __future__ import annotations

import argparse
import gc
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
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, Qwen3Config

from workers.engine import EngineConfig, TrainingEngine
from workers.messages import AdamParams, AdapterInstall, AdapterSpec, Batch, Datum, Item, OptimStepItem, PassItem

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 512,
        "tie_word_embeddings": True,
    },
    "0.6b": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12_288,
        "vocab_size": 151_936,
        "tie_word_embeddings": False,
    },
}
"""Of Qwen3; the weights are random."""
CASES = ("8x4x64", "16x4x512", "4x1x8192")
PARAMS = AdamParams(learning_rate=1e-4, beta2=0.95, eps=1e-8)


@dataclass(frozen=True, slots=True)
class Case:
    """What all tenants do in one step."""

    num_tenants: int
    num_seqs: int
    num_tokens: int

    @classmethod
    def read(cls, text: str) -> Case:
        """From "tenants x sequences x tokens", without blanks. Raises ValueError."""
        return cls(*(int(part) for part in text.split("x")))

    @property
    def total_tokens(self) -> int:
        """Tokens trained in a step."""
        return self.num_tenants * self.num_seqs * self.num_tokens

    def __str__(self) -> str:
        return f"{self.num_tenants} x {self.num_seqs} x {self.num_tokens}"


def train_flops_per_token(config: Any, num_tokens: int, rank: int) -> float:
    """What a trained token must cost, in sequences of `num_tokens`: 4N + 6P + attention.

    N are the weights of all linears (forward, and backward to the inputs: 2N each), P those of the adapter (forward,
    backward to inputs and to weights). Attention is causal: a token sees half of its sequence on average; scores and
    values are two products forward, and five backward, of which flash attention computes one again.
    """
    query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    hidden, mlp = config.hidden_size, config.intermediate_size
    linears = [
        (hidden, query),
        (hidden, key),
        (hidden, key),
        (query, hidden),
        (hidden, mlp),
        (hidden, mlp),
        (mlp, hidden),
    ]
    layers = config.num_hidden_layers
    base = layers * sum(d_in * d_out for d_in, d_out in linears) + hidden * config.vocab_size
    adapter = rank * (layers * sum(d_in + d_out for d_in, d_out in linears) + hidden + config.vocab_size)
    attention = layers * 7 * 2 * query * num_tokens / 2
    return float(4 * base + 6 * adapter + attention)


def matmul_peak(device: torch.device) -> float:
    """FLOP/s of a large product of random bf16 matrices (fp32 on a CPU)."""
    is_gpu = device.type == "cuda"
    size, dtype = (8192, torch.bfloat16) if is_gpu else (512, torch.float32)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    times = measure([lambda: left @ right], device, num_rounds=10, warm_up=5)[0]
    return 2.0 * size**3 / statistics.median(times)


def write_model(shape: str, directory: Path, device: torch.device) -> Path:
    """A random Qwen3 of a named shape, as a Hugging Face directory."""
    config = Qwen3Config(**SHAPES[shape], max_position_embeddings=32_768, dtype=torch.bfloat16)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
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
    """The engine, driven as the coordinator drives it: one batch of passes, in canonical chunks, and one of steps."""

    def __init__(self, config: EngineConfig, case: Case, rank: int) -> None:
        self.engine = TrainingEngine(config)
        self.keys = [f"tenant{tenant}" for tenant in range(case.num_tenants)]
        info = self.engine.info
        chunk_seqs = max(1, info.chunk_tokens // case.num_tokens)
        self.chunks = []
        for tenant in range(case.num_tenants):
            data = make_data(case, info.vocab_size, tenant)
            self.chunks.append([data[start : start + chunk_seqs] for start in range(0, len(data), chunk_seqs)])
        self.seq = 0
        flags = {"train_attn": True, "train_mlp": True, "train_unembed": True}
        specs = [AdapterSpec(adapter_id=key, rank=rank, alpha=32.0, seed=1, **flags) for key in self.keys]
        self._run(installs=tuple(AdapterInstall(spec=spec, state=None) for spec in specs))

    def _run(self, **fields: Any) -> None:
        results = self.engine.run(Batch(epoch=1, cycle_id=0, **fields)).results
        assert not any(result.error for result in results), results

    def step(self) -> None:
        """Every tenant's forward_backward, then every tenant's step."""
        place: dict[str, Any] = {"op_id": "", "prev_seq": self.seq, "seq": self.seq + 1}
        passes: list[Item] = [
            PassItem(
                **place,
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
        place = {"op_id": "", "prev_seq": self.seq + 1, "seq": self.seq + 2, "params": PARAMS}
        self._run(items=tuple(OptimStepItem(adapter_id=key, **place) for key in self.keys))
        self.seq += 2


class SequentialPeft:
    """One adapter after another on one base model."""

    def __init__(self, model: Path, case: Case, rank: int, device: torch.device) -> None:
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="sdpa").to(device)
        linears = [name for name, module in base.named_modules() if isinstance(module, torch.nn.Linear)]
        leaves = sorted({name.rpartition(".")[2] for name in linears})
        self.device = device
        self.keys = [f"tenant{tenant}" for tenant in range(case.num_tenants)]
        config = peft.LoraConfig(r=rank, lora_alpha=32, target_modules=leaves, task_type="CAUSAL_LM")
        self.model: Any = peft.get_peft_model(base, config, adapter_name=self.keys[0])
        for key in self.keys[1:]:
            self.model.add_adapter(key, config)
        self.model.train()
        data = [make_data(case, int(base.config.vocab_size), tenant) for tenant in range(case.num_tenants)]
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

    def _stacked(self, rows: Sequence[NDArray[Any]]) -> torch.Tensor:
        return torch.from_numpy(np.stack(rows)).long().to(self.device)

    def step(self) -> None:
        """Every tenant in turn: switch, forward, backward, step."""
        for key, tokens, targets, optimizer in zip(self.keys, self.tokens, self.targets, self.optimizers, strict=True):
            self.model.set_adapter(key)
            with torch.autocast(self.device.type, torch.bfloat16):
                logits = self.model(input_ids=tokens, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def measure(
    sides: Sequence[Callable[[], object]], device: torch.device, num_rounds: int, warm_up: int
) -> list[list[float]]:
    """Seconds of each side, round by round, turn about; each is waited for."""
    times: list[list[float]] = [[] for _ in sides]
    for round_number in range(-warm_up, num_rounds):
        for side, seconds in zip(sides, times, strict=True):
            _wait(device)
            begin_s = time.perf_counter()
            side()
            _wait(device)
            if round_number >= 0:
                seconds.append(time.perf_counter() - begin_s)
    return times


def peak_bytes(side: Callable[[], None], device: torch.device) -> tuple[int, int]:
    """Device memory that was allocated before one more step (of all sides), and what the step added at its peak."""
    if device.type != "cuda":
        return 0, 0
    _wait(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    side()
    _wait(device)
    return before, torch.cuda.max_memory_allocated(device) - before


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bench(case: Case, model: Path, args: argparse.Namespace, peak: float) -> None:
    """Measure one case and print its rows."""
    device = torch.device(args.device)
    num_slots = max(16, case.num_tenants)
    configs = {
        name: EngineConfig(
            model=str(model),
            num_slots=num_slots,
            device=args.device,
            dtype="bfloat16",
            exact=name == "exact",
            pass_tokens_max=args.pass_tokens,
        )
        for name in ("fused", *(["exact"] if args.exact else []))
    }
    sides: dict[str, Fused | SequentialPeft] = {
        name: Fused(config, case, args.rank) for name, config in configs.items()
    }
    if not args.no_peft:
        sides["sequential PEFT"] = SequentialPeft(model, case, args.rank, device)
    times = measure([side.step for side in sides.values()], device, args.rounds, warm_up=3)
    flops = train_flops_per_token(transformers.AutoConfig.from_pretrained(model), case.num_tokens, args.rank)
    fused_s = statistics.median(times[0])
    for (name, side), seconds in zip(sides.items(), times, strict=True):
        median_s = statistics.median(seconds)
        _, added_bytes = peak_bytes(side.step, device)
        print(
            f"| {case} | {name} | {median_s * 1e3:.1f} ({min(seconds) * 1e3:.1f}-{max(seconds) * 1e3:.1f}) "
            f"| {case.total_tokens / median_s:,.0f} | {flops * case.total_tokens / median_s / peak:.2f} "
            f"| {median_s / fused_s:.2f} | {added_bytes / 2**30:.2f} |",
            flush=True,
        )


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--cases", nargs="+", type=Case.read, default=[Case.read(text) for text in CASES])
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--pass-tokens", type=int, default=8192, help="rows of one packed pass of the engine")
    parser.add_argument("--exact", action="store_true", help="measure exact mode as well")
    parser.add_argument("--no-peft", action="store_true", help="leave sequential PEFT out")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scratch", type=Path, help="where the random model is written; 16 GB for 8b")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA GPU here; --device cpu --shape tiny shows that the script works")
    warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
    transformers.utils.logging.disable_progress_bar()
    peak = matmul_peak(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    print(
        f"{time.strftime('%Y-%m-%d')}, {name}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"peft {peft.__version__}, random Qwen3 {args.shape}, rank {args.rank}, bf16, matmul peak "
        f"{peak / 1e12:.1f} TFLOP/s, median (range) of {args.rounds}\n"
    )
    print(
        "| tenants x sequences x tokens | side | ms a step | tokens/s | of the peak | time / fused | GiB a step adds |"
    )
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=args.scratch) as directory:
        model = write_model(args.shape, Path(directory), device)
        for case in args.cases:
            bench(case, model, args, peak)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
