"""Measure the engine on a GPU: tokens per second, part of the matmul peak, ratio to sequential PEFT, memory.

    python -m scripts.bench.gpu                                   # a random Qwen3 of 0.6B, three cases
    python -m scripts.bench.gpu --shape 8b --cases 8x4x64 16x4x512
    python -m scripts.bench.gpu --exact                           # exact mode beside the default: what it costs
    python -m scripts.bench.gpu --device cpu --shape tiny --cases 2x1x16   # shows that the script works; no figures

A case is tenants x sequences x tokens. One step is a forward_backward and an optimizer step of every tenant. Sequential
PEFT is what a careful user would write: one bf16 base model, an fp32 adapter and a fused AdamW per tenant, autocast,
`set_adapter`, forward, backward, step, one tenant after another, no compilation. The sides take turns: in each a step
that does not count and some that do; medians are compared. They share a GPU's memory as little as they can: PEFT works
with the very weights of the engine's base model, and its adapters and moments are in host memory while others have
their turn. (Exact mode is another engine, with weights of its own.) A case that does not fit is said to, and left out.

The peak is that of a large bf16 matmul in the same run. What a side holds are weights and adapters with their moments
and gradients, the engine's bank included; PEFT's gradients come and go with a step. Needs torch, transformers and peft,
not ray. Prints Markdown.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import peft
import torch
import transformers
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, Qwen3Config

from workers.bank.slabs import Slab
from workers.contract.messages import (
    AdamParams,
    AdapterInstall,
    AdapterSpec,
    Batch,
    Datum,
    ErrorCode,
    Item,
    OptimStepItem,
    PassItem,
)
from workers.contract.settings import EngineSettings
from workers.engine import TrainingEngine
from workers.host.allocator import is_out_of_memory

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
STEPS_A_TURN = 2
"""Steps that count, of a side's turn."""


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
    multiply = partial(torch.matmul, left, right)
    for _ in range(5):
        multiply()
    return 2.0 * size**3 / statistics.median(seconds_of(multiply, device) for _ in range(10))


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


class Side(Protocol):
    """What is measured."""

    def awake(self) -> AbstractContextManager[None]:
        """Around a turn."""

    def step(self) -> None:
        """Every tenant's forward_backward and optimizer step."""

    def held_bytes(self) -> int:
        """Memory of weights and adapters, with what belongs to them, between two steps."""


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
        for tenant in range(case.num_tenants):
            data = make_data(case, info.vocab_size, tenant)
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

    def awake(self) -> AbstractContextManager[None]:
        """Nothing to be done: others need little beside the bank."""
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
    """Implements `Side`: one adapter after another on one base model."""

    def __init__(
        self, model: Path, case: Case, rank: int, device: torch.device, weights: dict[str, torch.Tensor]
    ) -> None:
        """`weights` are the base model's by name, on the device; they are used as they are."""
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="sdpa")
        left = base.load_state_dict(weights, strict=False, assign=True)  # without norms: the engine's are other modules
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
        self._move(torch.device("cpu"))

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Adapters and moments are on the device meanwhile, and in host memory otherwise."""
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
        """Every tenant in turn: switch, forward, backward, step."""
        for key, tokens, targets, optimizer in zip(self.keys, self.tokens, self.targets, self.optimizers, strict=True):
            self.model.set_adapter(key)
            with torch.autocast(self.device.type, torch.bfloat16):
                logits = self.model(input_ids=tokens, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def num_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Memory behind tensors; what several share counts once."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """How long work takes on a device that has nothing else to do."""
    _wait(device)
    begin_s = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - begin_s


@dataclass(slots=True)
class Measured:
    """What a side took."""

    seconds: list[float]
    held_bytes: int = 0
    added_bytes: int = 0
    """What a step allocated on top at its peak; 0 on a CPU, which does not count."""


def measure(sides: Sequence[Side], device: torch.device, num_rounds: int) -> list[Measured]:
    """So many steps of each side, turn about; the first turn, which makes what later ones find made, does not count."""
    measured = [Measured([]) for _ in sides]
    for turn in range(1 + -(-num_rounds // STEPS_A_TURN)):
        num_left = num_rounds - (turn - 1) * STEPS_A_TURN
        for side, own in zip(sides, measured, strict=True):
            with side.awake():
                side.step()
                if turn == 0:
                    own.added_bytes = peak_bytes(side.step, device)
                    own.held_bytes = side.held_bytes()
                else:
                    own.seconds += [seconds_of(side.step, device) for _ in range(min(STEPS_A_TURN, num_left))]
    return measured


def peak_bytes(work: Callable[[], None], device: torch.device) -> int:
    """Device memory that work takes at its peak, on top of what was allocated before; 0 on a CPU."""
    if device.type != "cuda":
        work()
        return 0
    _wait(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    _wait(device)
    return torch.cuda.max_memory_allocated(device) - before


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bench(case: Case, model: Path, args: argparse.Namespace, peak: float) -> None:
    """Measure one case and print its rows."""
    device = torch.device(args.device)
    num_slots = max(16, case.num_tenants)
    configs = {
        name: EngineSettings(
            model_path=str(model),
            num_slots=num_slots,
            device=args.device,
            dtype="bfloat16",
            exact=name == "exact",
            pass_tokens_max=args.pass_tokens,
            cache_bytes_max=0,
        )
        for name in ("fused", *(["exact"] if args.exact else []))
    }
    fused = Fused(configs["fused"], case, args.rank)
    sides: dict[str, Side] = {"fused": fused}
    if args.exact:
        sides["exact"] = Fused(configs["exact"], case, args.rank)
    if not args.no_peft:
        weights = fused.engine.base_model.model.state_dict()
        sides["sequential PEFT"] = SequentialPeft(model, case, args.rank, device, weights)
    measured = measure(list(sides.values()), device, args.rounds)
    flops = train_flops_per_token(transformers.AutoConfig.from_pretrained(model), case.num_tokens, args.rank)
    fused_s = statistics.median(measured[0].seconds)
    for name, own in zip(sides, measured, strict=True):
        median_s = statistics.median(own.seconds)
        print(
            f"| {case} | {name} | {median_s * 1e3:.1f} ({min(own.seconds) * 1e3:.1f}-{max(own.seconds) * 1e3:.1f}) "
            f"| {case.total_tokens / median_s:,.0f} | {flops * case.total_tokens / median_s / peak:.2f} "
            f"| {median_s / fused_s:.2f} | {own.held_bytes / 2**30:.2f} | {own.added_bytes / 2**30:.2f} |",
            flush=True,
        )


def bench_if_it_fits(case: Case, model: Path, args: argparse.Namespace, peak: float) -> None:
    """The same, or a line that says that there was no memory for it."""
    try:
        bench(case, model, args, peak)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        print(f"| {case} | out of memory, left out | | | | | | |", flush=True)


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
        "| tenants x sequences x tokens | side | ms a step | tokens/s | of the peak | time / fused | GiB held "
        "| GiB a step adds |"
    )
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=args.scratch) as directory:
        model = write_model(args.shape, Path(directory), device)
        for case in args.cases:
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            bench_if_it_fits(case, model, args, peak)


if __name__ == "__main__":
    main()
