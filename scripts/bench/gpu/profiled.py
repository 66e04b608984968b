"""Say where a step's time goes on a GPU: each kernel's launches and time, and how long the device waits for the host.

    python -m scripts.bench.gpu.profiled                          # a random Qwen3 of 0.6B: training and decoding
    python -m scripts.bench.gpu.profiled --shape 8b --cases 8x4x64 --batches 32

For each case a table of the kernels that take most time, by the profiler's trace of the device, which has those of
graphs too. Above it the time of a step on the clock, without the profiler, and the time that the device was busy in a
traced one. Needs torch and transformers, not ray. Prints Markdown.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch.profiler import ProfilerActivity, profile

from scripts.bench.gpu.cases import Case
from scripts.bench.gpu.decode import Decoding
from scripts.bench.gpu.run import chosen_device, make_parser, print_head, random_model, seconds_of
from scripts.bench.gpu.sides import Fused
from workers.contract.settings import EngineSettings
from workers.engine import TrainingEngine

STEPS = 3
"""Of a profile."""
NAME_CHARS_MAX = 96


@dataclass(frozen=True, slots=True)
class Profile:
    """What a step takes, per step."""

    wall_s: float
    """Without the profiler."""
    busy_s: float
    """Of the device, in kernels and copies."""
    launches: Counter[str]
    """By name; of all steps."""
    seconds: Counter[str]
    """By name; of all steps."""

    @property
    def num_kernels(self) -> int:
        """Kernels of a step, without copies and fills."""
        return round(sum(n for name, n in self.launches.items() if not is_copy(name)) / STEPS)

    @property
    def num_copies(self) -> int:
        """Copies and fills of a step."""
        return round(sum(n for name, n in self.launches.items() if is_copy(name)) / STEPS)


def is_copy(name: str) -> bool:
    """Return whether an event of the device is a copy or a fill."""
    return name.startswith(("Memcpy", "Memset"))


def profile_of(step: Callable[[], object], device: torch.device) -> Profile:
    """Profile `step` after warm-ups."""
    for _ in range(3):
        step()
    wall_s = statistics.median(seconds_of(step, device) for _ in range(5))
    launches, seconds = Counter[str](), Counter[str]()
    if device.type == "cuda":
        with profile(activities=[ProfilerActivity.CUDA]) as traced:
            for _ in range(STEPS):
                step()
            torch.cuda.synchronize(device)
        for event in traced.events() or ():
            if event.device_type.name == "CUDA":
                launches[event.name] += 1
                seconds[event.name] += event.time_range.elapsed_us() / 1e6
    return Profile(wall_s, sum(seconds.values()) / STEPS, launches, seconds)


def print_profile(name: str, own: Profile, num_rows: int) -> None:
    """Print one case."""
    print(
        f"\n**{name}**: {own.wall_s * 1e3:.2f} ms a step, device busy {own.busy_s * 1e3:.2f} ms "
        f"({own.busy_s / own.wall_s:.0%}), {own.num_kernels:,} kernels, {own.num_copies} copies and fills\n"
    )
    print("| kernel | a step | ms a step | us each |")
    print("|---|---|---|---|")
    for kernel, seconds in own.seconds.most_common(num_rows):
        count = own.launches[kernel]
        short = kernel.replace("|", "/")[:NAME_CHARS_MAX]
        print(
            f"| `{short}` | {count / STEPS:,.0f} | {seconds / STEPS * 1e3:.3f} | {seconds / count * 1e6:.1f} |",
            flush=True,
        )


def profile_training(case: Case, model: Path, args: argparse.Namespace, *, exact: bool = False) -> None:
    """Profile a training step of every tenant: passes and optimizer."""
    settings = EngineSettings(
        model_path=str(model),
        num_slots=max(16, case.num_tenants),
        device=args.device,
        exact=exact,
        pass_tokens_max=args.pass_tokens,
        cache_bytes_max=0,
    )
    fused = Fused(settings, case, args.rank)
    device, mode = torch.device(args.device), ", exact" if exact else ""
    print_profile(f"training {case}{mode}", profile_of(fused.step, device), args.kernels)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, profile, print."""
    parser = make_parser(__doc__)
    parser.add_argument("--cases", nargs="*", type=Case.read, default=[Case(8, 4, 64)])
    parser.add_argument("--batches", nargs="*", type=int, default=[32], help="sequences of decode steps")
    parser.add_argument("--adapters", nargs="*", type=int, default=[0, 8], help="different ones in a decode step")
    parser.add_argument("--exact", action="store_true", help="exact mode as well")
    parser.add_argument("--pass-tokens", type=int, default=8192, help="rows of one packed pass of the engine")
    parser.add_argument("--kernels", type=int, default=25, help="rows of a table")
    args = parser.parse_args(arguments)
    device = chosen_device(parser, args)
    transformers.utils.logging.disable_progress_bar()
    print_head(args, device, "profiled")
    with random_model(args, device) as model:
        for case in args.cases:
            for exact in (False, True) if args.exact else (False,):
                profile_training(case, model, args, exact=exact)
        if args.batches:
            decoding = Decoding(TrainingEngine(EngineSettings(model_path=str(model), device=args.device)), args.rank)
            for num_seqs in args.batches:
                for num_adapters in args.adapters:
                    with decoding.begun(num_seqs, num_adapters) as step:
                        own = profile_of(step, device)
                    print_profile(f"decode {num_seqs} sequences, {num_adapters} adapters", own, args.kernels)


if __name__ == "__main__":
    main()
