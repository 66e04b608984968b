"""Measure the engine on a GPU: tokens per second, fraction of the matmul peak, ratio to sequential PEFT, memory.

    python -m scripts.bench.gpu                                   # a random Qwen3 of 0.6B, four cases
    python -m scripts.bench.gpu --shape 8b --cases 8x4x64 16x4x512
    python -m scripts.bench.gpu --exact                           # also exact mode, for its cost
    python -m scripts.bench.gpu --compiled-peft                   # also PEFT whose layers torch compiles
    python -m scripts.bench.gpu --device cpu --shape tiny --cases 2x1x16   # a smoke test

A case is tenants x sequences x tokens. One step is a forward_backward and an optimizer step of every tenant. Sequential
PEFT is well-written user code: one bf16 base model, an fp32 adapter and a fused AdamW per tenant, autocast,
`set_adapter`, forward, backward, step, one tenant after another, uncompiled. The sides alternate: each turn has a
warm-up step and some measured steps; medians are compared. The sides use little GPU memory at the same time: PEFT uses
the weight tensors of the engine's base model, and its adapters and moments are in host memory during other turns.
(Exact mode is another engine, with its own weights.) A case that does not fit is reported and left out.

The peak is that of a large bf16 matmul in the same run. The memory held by a side is its weights and adapters with
their moments and gradients, the engine's bank included; PEFT's gradients exist only during a step. Needs torch,
transformers and peft, not ray. Prints Markdown.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import peft
import torch
import transformers

from scripts.bench.gpu.cases import SHAPES, Case, train_flops_per_token, write_model
from scripts.bench.gpu.sides import Fused, SequentialPeft, Side
from workers.contract.settings import EngineSettings
from workers.host.allocator import is_out_of_memory

CASES = ("8x4x64", "16x4x512", "64x1x64", "4x1x8192")
STEPS_A_TURN = 2
"""Measured steps of a turn."""


def matmul_peak(device: torch.device) -> float:
    """Measure the FLOP/s of a large product of random bf16 matrices (fp32 on a CPU)."""
    is_gpu = device.type == "cuda"
    size, dtype = (8192, torch.bfloat16) if is_gpu else (512, torch.float32)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    multiply = partial(torch.matmul, left, right)
    for _ in range(5):
        multiply()
    return 2.0 * size**3 / statistics.median(seconds_of(multiply, device) for _ in range(10))


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Measure the seconds that `work` takes on an otherwise idle device."""
    _wait(device)
    begin_s = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - begin_s


@dataclass(slots=True)
class Measured:
    """The measurements of a side."""

    seconds: list[float]
    held_bytes: int = 0
    added_bytes: int = 0
    """Peak allocation of a step in addition to `held_bytes`; 0 on a CPU, where it is not counted."""


def measure(sides: Sequence[Side], device: torch.device, num_rounds: int) -> list[Measured]:
    """Measure `num_rounds` steps of each side, alternating. The first turn is warm-up."""
    measured = [Measured([]) for _ in sides]
    for turn in range(1 + -(-num_rounds // STEPS_A_TURN)):
        num_left = num_rounds - (turn - 1) * STEPS_A_TURN
        for side, own in zip(sides, measured, strict=True):
            with side.on_device():
                side.step()
                if turn == 0:
                    own.added_bytes = peak_bytes(side.step, device)
                    own.held_bytes = side.held_bytes()
                else:
                    own.seconds += [seconds_of(side.step, device) for _ in range(min(STEPS_A_TURN, num_left))]
    return measured


def peak_bytes(work: Callable[[], None], device: torch.device) -> int:
    """Return the peak device memory of `work`, minus the memory allocated before; 0 on a CPU."""
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
    weights = fused.engine.base_model.model.state_dict()
    if not args.no_peft:
        sides["sequential PEFT"] = SequentialPeft(model, case, args.rank, device, weights)
    if args.compiled_peft:
        sides["compiled PEFT"] = SequentialPeft(model, case, args.rank, device, weights, is_compiled=True)
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
    """Measure one case, or print a line if it does not fit into memory."""
    try:
        bench(case, model, args, peak)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        print(f"| {case} | out of memory, left out | | | | | | |", flush=True)


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of every GPU benchmark."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scratch", type=Path, help="folder for the random model; 16 GB for 8b")
    parser.add_argument("--model", type=Path, help="keep the random model in this folder, for runs of the same shape")
    return parser


@contextmanager
def random_model(args: argparse.Namespace, device: torch.device) -> Iterator[Path]:
    """Yield the directory of a random model of the shape asked for: a kept one, or one that is removed afterwards."""
    if args.model is None:
        with tempfile.TemporaryDirectory(dir=args.scratch) as directory:
            yield write_model(args.shape, Path(directory), device)
    elif (args.model / "config.json").exists():
        yield args.model
    else:
        yield write_model(args.shape, args.model, device)


def chosen_device(parser: argparse.ArgumentParser, args: argparse.Namespace) -> torch.device:
    """Return the device that was asked for. Ends the program if there is none."""
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA GPU here; --device cpu --shape tiny is a smoke test")
    return device


def print_head(args: argparse.Namespace, device: torch.device, conditions: str) -> None:
    """Print the line above a table: date, device, versions, model."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    print(
        f"{time.strftime('%Y-%m-%d')}, {name}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"random Qwen3 {args.shape}, rank {args.rank}, {conditions}, median (range) of {args.rounds}\n"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, measure, print."""
    parser = make_parser(__doc__)
    parser.add_argument("--cases", nargs="+", type=Case.read, default=[Case.read(text) for text in CASES])
    parser.add_argument("--pass-tokens", type=int, default=8192, help="rows of one packed pass of the engine")
    parser.add_argument("--exact", action="store_true", help="measure exact mode as well")
    parser.add_argument("--no-peft", action="store_true", help="without sequential PEFT")
    parser.add_argument("--compiled-peft", action="store_true", help="sequential PEFT also with torch.compile")
    args = parser.parse_args(arguments)
    device = chosen_device(parser, args)
    warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
    transformers.utils.logging.disable_progress_bar()
    peak = matmul_peak(device)
    print_head(args, device, f"peft {peft.__version__}, bf16, matmul peak {peak / 1e12:.1f} TFLOP/s")
    print(
        "| tenants x sequences x tokens | side | ms a step | tokens/s | of the peak | time / fused | GiB held "
        "| GiB a step adds |"
    )
    print("|---|---|---|---|---|---|---|---|")
    with random_model(args, device) as model:
        for case in args.cases:
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            bench_if_it_fits(case, model, args, peak)
