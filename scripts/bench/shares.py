"""Measure the shares of a worker's time that a training tenant and a sampling tenant get.

    python -m scripts.bench.shares --quick
    python -m scripts.bench.shares                        # some minutes
    python -m scripts.bench.shares --models 4m --windows 10

Starts a pool, reached through gRPC. One tenant trains on 4 x 64 tokens with three steps in flight, so the worker always
has a step to run. Another keeps 8 sample requests in flight on its own adapter, of 16 prompt tokens and 32 drawn, so
the worker always has a token to draw. In consecutive windows of 10 seconds: the engine time charged to each
(`tinkerpool usage`), which should be equal, and the time between two tokens of a streamed request. Prints a Markdown
table.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from scripts.bench.common import Column, Results, Row, Timing, parser, shown_ms
from scripts.bench.models import Case, Model, add_model_options, chosen_models, open_models
from scripts.bench.sides.pools import ADAM, serve_arguments, to_user_data
from scripts.embedded_pool import embedded_pool
from tinkerpool import APIFuture, SamplingClient, ServiceClient, TrainingClient, types

RANK = 8
CASE = Case(num_tenants=1, num_seqs=4, num_tokens=64)
TRAINER, SAMPLER = "trains", "samples"
STEPS_IN_FLIGHT = 3
SAMPLES_IN_FLIGHT = 8
PROMPT = types.ModelInput.from_ints(list(range(1, 17)))
NUM_TOKENS = 32
DEVIATION_MAX = 0.1
"""Largest deviation of a tenant's share from one half."""


class Streamed:
    """One tenant's samples: a constant number in flight, one of them streamed."""

    def __init__(self, sampling: SamplingClient) -> None:
        self.gaps_s: list[float] = []
        """Between two tokens of the streamed request, since the list was last cleared."""
        self._sampling = sampling
        self._params = types.SamplingParams(max_tokens=NUM_TOKENS, stop=[])

    async def run(self, done: threading.Event) -> None:
        """Sample until `done` is set."""
        loops = [self._sample(done) for _ in range(SAMPLES_IN_FLIGHT - 1)]
        await asyncio.gather(self._stream(done), *loops)

    async def _sample(self, done: threading.Event) -> None:
        while not done.is_set():
            await self._sampling.sample(PROMPT, 1, self._params)

    async def _stream(self, done: threading.Event) -> None:
        while not done.is_set():
            last_s = None
            async for _ in self._sampling.sample_stream(PROMPT, 1, self._params):
                now_s = time.perf_counter()
                if last_s is not None:
                    self.gaps_s.append(now_s - last_s)
                last_s = now_s


@contextlib.contextmanager
def busy(training: TrainingClient, batch: list[types.Datum], streamed: Streamed) -> Iterator[None]:
    """Let one tenant train and one sample until the block ends. Raises their errors."""
    done = threading.Event()
    errors: list[BaseException] = []

    def train() -> None:
        halves: deque[APIFuture[Any]] = deque()
        while not done.is_set():
            halves += (training.forward_backward(batch, "cross_entropy"), training.optim_step(ADAM))
            while len(halves) > 2 * STEPS_IN_FLIGHT:
                halves.popleft().result()
        for half in halves:
            half.result()

    def sample() -> None:
        asyncio.run(streamed.run(done))

    def recording_errors(work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 (raised after the threads have ended)
            errors.append(error)

    threads = [threading.Thread(target=recording_errors, args=(work,)) for work in (train, sample)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


def engine_seconds(admin: ServiceClient) -> dict[str, float]:
    """Return the engine time charged so far, by tenant."""
    totals = {TRAINER: 0.0, SAMPLER: 0.0}
    for row in admin.create_rest_client().get_usage().result().rows:
        if row.tenant in totals:
            totals[row.tenant] += row.engine_seconds
    return totals


def measure(model: Model, args: argparse.Namespace) -> Row:
    """Measure one model's row."""
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(embedded_pool(serve_arguments(model, args)))

        def client(key: str) -> ServiceClient:
            return stack.enter_context(ServiceClient(pool.url, key))

        admin = client(pool.admin_key)
        trainer, sampler = (client(pool.create_key(name)) for name in (TRAINER, SAMPLER))
        training = trainer.create_lora_training_client(model.name, rank=RANK).result()
        batch = to_user_data(CASE.data(model.vocab_size)[0])
        adapter = sampler.create_lora_training_client(model.name, rank=RANK).result()
        streamed = Streamed(adapter.save_weights_and_get_sampling_client())
        windows: list[dict[str, float]] = []

        def window() -> None:
            before, began_s = engine_seconds(admin), time.perf_counter()
            time.sleep(args.seconds)
            after, wall_s = engine_seconds(admin), time.perf_counter() - began_s
            windows.append({"wall_s": wall_s} | {name: after[name] - before[name] for name in after})

        with busy(training, batch, streamed):
            time.sleep(min(2.0, args.seconds))
            streamed.gaps_s.clear()
            for _ in range(args.windows):
                window()
        return row_of(model, windows, streamed.gaps_s)


def row_of(model: Model, windows: Sequence[dict[str, float]], gaps_s: Sequence[float]) -> Row:
    """Summarize the windows. Raises RuntimeError if a tenant was charged nothing."""
    if any(min(window[TRAINER], window[SAMPLER]) == 0 for window in windows):
        raise RuntimeError(f"a window was too short: one tenant was charged nothing in it: {windows}")
    shares = Timing(tuple(window[SAMPLER] / (window[SAMPLER] + window[TRAINER]) for window in windows))
    gaps = Timing(tuple(gaps_s))
    return {
        "model": model.name,
        "windows": windows,
        "charged": Timing(tuple((w[SAMPLER] + w[TRAINER]) / w["wall_s"] for w in windows)).median_s,
        "sampling_share": shares.median_s,
        "sampling_shares": [min(shares.seconds), max(shares.seconds)],
        "deviation": max(abs(share - 0.5) / 0.5 for share in shares.seconds),
        "gap_p50_s": gaps.median_s,
        "gap_p99_s": gaps.quantile(0.99),
        "gap_max_s": max(gaps_s),
    }


def _shown_shares(row: Row) -> str:
    low, high = row["sampling_shares"]
    return f"{row['sampling_share']:.1%} ({low:.1%} - {high:.1%})"


def main() -> None:
    """Read the command line, measure, print."""
    command = parser(__doc__)
    add_model_options(command)
    command.add_argument("--pool", choices=("ray", "local"), default="ray", help="local: threads stand in for Ray")
    command.add_argument("--seconds", type=float, help="of a window; default: 10")
    command.add_argument("--windows", type=int, help="default: 3")
    args = command.parse_args()
    args.seconds = args.seconds or (2.0 if args.quick else 10.0)
    args.windows = args.windows or (1 if args.quick else 3)
    with open_models(chosen_models(args)) as models, Results("shares", args) as results:
        table = results.table(
            "shares",
            (
                Column("model", lambda r: r["model"]),
                Column("sampling's share of engine time (windows)", _shown_shares),
                Column("charged part of all time", lambda r: f"{r['charged']:.0%}"),
                Column(
                    "between two tokens, p50 / p99",
                    lambda r: f"{shown_ms(r['gap_p50_s'])} / {shown_ms(r['gap_p99_s'])}",
                ),
                Column("longest", lambda r: shown_ms(r["gap_max_s"])),
            ),
        )
        for model in models:
            row = measure(model, args)
            table.add(row)
            what = f"{model.name}: sampling during training, the largest deviation of a share from one half"
            results.goal(what, row["deviation"], at_most=DEVIATION_MAX)


if __name__ == "__main__":
    main()
