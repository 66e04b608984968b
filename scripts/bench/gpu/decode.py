"""Measure sampling on a GPU: tokens per second, part of the memory bandwidth's bound, time to the first tokens.

    python -m scripts.bench.gpu.decode                            # a random Qwen3 of 0.6B; 1, 32 and 128 sequences
    python -m scripts.bench.gpu.decode --shape 8b --batches 32
    python -m scripts.bench.gpu.decode --device cpu --shape tiny --batches 1 4   # a smoke test

Every sequence has a prompt of its own. The sides take turns: the base model without an adapter, all sequences with one
adapter, and eight adapters in one batch. A round begins the requests, runs decode steps until each sequence has its
first token (the time to the first tokens), and then measures decode steps.

The bound of a step is the time to read its bytes at the bandwidth of a large copy in the same run: all weights of the
linears once, those of the adapters in the batch, and the keys and values of all sequences. Needs torch and
transformers, not ray. Prints Markdown.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers

from scripts.bench.gpu.cases import decode_bytes
from scripts.bench.gpu.run import chosen_device, make_parser, print_head, random_model, seconds_of
from workers.contract.messages import (
    AdapterSpec,
    SampleRequest,
    SampleResult,
    SamplerVersion,
    SamplingParams,
    TokenEvent,
)
from workers.contract.settings import EngineSettings
from workers.engine import TrainingEngine

BATCHES = (1, 32, 128)
SIDES = {"base model": 0, "one adapter": 1, "8 adapters": 8}
"""Adapters in a batch."""
PROMPT_TOKENS = 128
STEPS = 32
"""Measured decode steps of a round."""
TOKENS_MAX = 256
"""Tokens that a sequence may draw: more than it does until the others have begun, and in the steps."""


def copy_bandwidth(device: torch.device) -> float:
    """Measure the bytes per second that a large copy reads and writes."""
    num_bytes = 4 << 30 if device.type == "cuda" else 64 << 20
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * num_bytes / statistics.median(seconds_of(lambda: target.copy_(source), device) for _ in range(10))


@dataclass(slots=True)
class Measured:
    """The measurements of a side, in seconds."""

    first_tokens_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    """Of a round: the median of its steps."""
    num_keys: list[float] = field(default_factory=list)
    """Keys of a sequence in a step, on average over a round."""


class Decoding:
    """An engine with adapters to sample from."""

    def __init__(
        self, engine: TrainingEngine, rank: int, prompt_tokens: int = PROMPT_TOKENS, top_p: float = 1.0
    ) -> None:
        self._engine = engine
        self._prompt_tokens = prompt_tokens
        self._top_p = top_p
        self.num_keys = 0.0
        self._rng = np.random.default_rng(0)
        self._num_requests = 0
        flags = {"train_attn": True, "train_mlp": True, "train_unembed": True}
        self._keys = [f"version-{number}" for number in range(max(SIDES.values()))]
        for number, key in enumerate(self._keys):
            spec = AdapterSpec(adapter_id=key, rank=rank, alpha=32.0, seed=number, **flags)
            engine.bank.add(key, spec, is_trained=False)

    def run(self, num_seqs: int, num_adapters: int, measured: Measured) -> None:
        """Run one round, and add it to what was measured."""
        begin_s = time.perf_counter()
        with self.begun(num_seqs, num_adapters) as step:
            measured.first_tokens_s.append(time.perf_counter() - begin_s)
            measured.num_keys.append(self.num_keys + STEPS / 2)
            steps_s = []
            for _ in range(STEPS):
                begin_s = time.perf_counter()
                num_drawn = len(step())
                steps_s.append(time.perf_counter() - begin_s)
                if num_drawn != num_seqs:
                    raise RuntimeError(f"a decode step drew {num_drawn} tokens of {num_seqs} sequences")
            measured.step_s.append(statistics.median(steps_s))

    @contextmanager
    def begun(self, num_seqs: int, num_adapters: int) -> Iterator[Callable[[], list[str]]]:
        """Begin `num_seqs` requests; once all draw, yield what runs a step and returns the names of those that drew.

        `num_keys` then says how many keys a sequence has, on average.
        """
        keys = self._keys[:num_adapters] or [""]
        waiting = {self._start(keys[number % len(keys)]) for number in range(num_seqs)}
        names, num_drawn = set(waiting), 0
        while waiting:
            drawn = self._draw()
            num_drawn += len(drawn)
            waiting.difference_update(drawn)
        self.num_keys = self._prompt_tokens + num_drawn / num_seqs
        yield self._draw
        for name in names:
            self._engine.cancel_sample(name)
        while self._engine.can_decode():
            self._engine.decode_step()

    def _draw(self) -> list[str]:
        return [event.op_id for event in self._step() if isinstance(event, TokenEvent)]

    def _start(self, key: str) -> str:
        self._num_requests += 1
        name = f"sample-{self._num_requests}"
        self._engine.start_sample(
            SampleRequest(
                op_id=name,
                scope=name,
                version=SamplerVersion(key=key),
                prompt=self._rng.integers(0, self._engine.info.vocab_size, self._prompt_tokens).astype(np.int32),
                num_samples=1,
                params=SamplingParams(max_tokens=TOKENS_MAX, seed=self._num_requests, top_p=self._top_p),
                stream=True,
            )
        )
        return name

    def _step(self) -> Sequence[Any]:
        """Run a decode step and return its events; the engine has then read the tokens from the device."""
        events = self._engine.decode_step()
        failed = [event.error for event in events if isinstance(event, SampleResult) and event.error is not None]
        if failed:
            raise RuntimeError(f"the engine failed: {failed[0].message}")
        return events


def measure(decoding: Decoding, num_seqs: int, num_rounds: int) -> dict[str, Measured]:
    """Measure every side `num_rounds` times, in turn, after a warm-up."""
    measured = {name: Measured() for name in SIDES}
    for number in range(1 + num_rounds):
        for name, num_adapters in SIDES.items():
            decoding.run(num_seqs, num_adapters, measured[name] if number else Measured())
    return measured


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, measure, print."""
    parser = make_parser(__doc__)
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES, help="sequences in a decode step")
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS, help="of every sequence")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--cache-gib", type=float, default=16.0, help="most memory for keys and values")
    args = parser.parse_args(arguments)
    device = chosen_device(parser, args)
    transformers.utils.logging.disable_progress_bar()
    bandwidth = copy_bandwidth(device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    print_head(
        args,
        device,
        f"prompts of {args.prompt_tokens}, top_p {args.top_p:g}, bandwidth of a copy {bandwidth / 1e9:,.0f} GB/s",
    )
    print(
        "| sequences | side | ms a decode step | tokens/s | of the bandwidth's bound | time / base model "
        "| ms to all first tokens |"
    )
    print("|---|---|---|---|---|---|---|")
    with random_model(args, device) as model:
        settings = EngineSettings(
            model_path=str(model), num_slots=16, device=args.device, cache_bytes_max=int(args.cache_gib * 2**30)
        )
        decoding = Decoding(TrainingEngine(settings), args.rank, args.prompt_tokens, args.top_p)
        config = transformers.AutoConfig.from_pretrained(model)
        for num_seqs in args.batches:
            measured = measure(decoding, num_seqs, args.rounds)
            base_s = statistics.median(measured["base model"].step_s)
            for name, own in measured.items():
                step_s = statistics.median(own.step_s)
                num_bytes = decode_bytes(
                    config,
                    num_seqs=num_seqs,
                    num_tokens=statistics.mean(own.num_keys),
                    num_adapters=min(SIDES[name], num_seqs),
                    rank=args.rank,
                    width=2 if device.type == "cuda" else 4,
                )
                print(
                    f"| {num_seqs} | {name} | {step_s * 1e3:.2f} ({min(own.step_s) * 1e3:.2f}-"
                    f"{max(own.step_s) * 1e3:.2f}) | {num_seqs / step_s:,.0f} | {num_bytes / bandwidth / step_s:.2f} "
                    f"| {step_s / base_s:.2f} | {statistics.median(own.first_tokens_s) * 1e3:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
