"""Measure what reinforcement loops gain from running at the same time.

    python -m scripts.bench.loops --quick
    python -m scripts.bench.loops                                  # 8 and 32 loops, some minutes
    python -m scripts.bench.loops --models 0.6b --pool local --device cuda   # random weights, on a GPU without Ray

Starts a pool, reached through gRPC. A loop is a tenant with an adapter. In each iteration it publishes its weights,
samples 4 replies of 32 tokens to each of 4 new prompts of 32, scores them, and takes a step on them with
`importance_sampling`, which has to wait for the replies. The sides alternate: all loops at the same time, and one loop
after another, with the same number of iterations of every loop. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Sequence

import numpy as np

from scripts.bench.common import (
    Column,
    Effort,
    Results,
    Row,
    measure_alternating,
    parser,
    shown_ratio,
    shown_time,
)
from scripts.bench.models import Model, add_model_options, chosen_models, open_models
from scripts.bench.sides.pools import ADAM, serve_arguments
from scripts.embedded_pool import embedded_pool
from tinkerpool import Datum, ServiceClient, types
from tinkerpool.recipes.reinforcement import learn_from

RANK = 8
MODELS = ("kjv-2m", "4m")
LOOPS, QUICK_LOOPS = (8, 32), (2,)
ITERATIONS = 2
"""Of each loop in a round: the end of a round, where loops wait for the last one, weighs less."""
PROMPTS, GROUP, PROMPT_TOKENS, NUM_TOKENS = 4, 4, 32, 32
DRAWN_TOKENS = PROMPTS * GROUP * NUM_TOKENS
"""Of one iteration."""
SLOTS = 64
"""As is the default on a CPU, also on a GPU: a loop has its adapter and a published version in the bank."""
RATIO_MIN = 3.0
"""On a GPU, of 8 loops."""


class Loop:
    """One tenant's reinforcement loop."""

    def __init__(self, service: ServiceClient, model: Model, number: int) -> None:
        self._training = service.create_lora_training_client(model.name, rank=RANK, seed=number).result()
        self._rng = np.random.default_rng(number)
        self._vocab_size = model.vocab_size
        self._params = types.SamplingParams(max_tokens=NUM_TOKENS, stop=[])

    async def iterate(self) -> None:
        """Publish, sample, score, step. Raises RuntimeError if a reply ended early: the sides' work would differ."""
        sampler = await self._training.save_weights_and_get_sampling_client_async()
        prompts = self._rng.integers(0, self._vocab_size, (PROMPTS, PROMPT_TOKENS)).tolist()
        groups = await asyncio.gather(*(sampler.sample(prompt, GROUP, self._params) for prompt in prompts))
        data: list[Datum] = []
        for prompt, group in zip(prompts, groups, strict=True):
            data += learn_from(prompt, group.sequences, [float(np.mean(each.tokens)) for each in group.sequences])
        if {len(each.tokens) for group in groups for each in group.sequences} != {NUM_TOKENS} or (
            len(data) != PROMPTS * GROUP
        ):
            raise RuntimeError("a reply ended early, or a group taught nothing")
        passed = self._training.forward_backward(data, "importance_sampling")
        await self._training.optim_step(ADAM)
        await passed


def run_together(loops: Sequence[Loop]) -> None:
    """Run all loops at the same time."""

    async def run(loop: Loop) -> None:
        for _ in range(ITERATIONS):
            await loop.iterate()

    async def run_all() -> None:
        await asyncio.gather(*map(run, loops))

    asyncio.run(run_all())


def run_apart(loops: Sequence[Loop]) -> None:
    """Run one loop after another."""

    async def run_all() -> None:
        for loop in loops:
            for _ in range(ITERATIONS):
                await loop.iterate()

    asyncio.run(run_all())


def measure(model: Model, num_loops: int, args: argparse.Namespace) -> Row:
    """Measure one model's row with a number of loops."""
    device = ["--device", args.device] if args.device else []
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(embedded_pool([*serve_arguments(model, args), *device, "--slots", str(SLOTS)]))
        clients = [
            stack.enter_context(ServiceClient(pool.url, pool.create_key(f"tenant-{number}")))
            for number in range(num_loops)
        ]
        loops = [Loop(client, model, number) for number, client in enumerate(clients)]
        sides = {"together": lambda: run_together(loops), "apart": lambda: run_apart(loops)}
        timings = measure_alternating(sides, args.effort)
    together = timings["together"].summary()
    return {
        "model": model.name,
        "loops": num_loops,
        "gain": timings["apart"].ratio_to(timings["together"]),
        "drawn_per_s": num_loops * ITERATIONS * DRAWN_TOKENS / together["median_s"],
        "together": together,
        "apart": timings["apart"].summary(),
    }


def main() -> None:
    """Read the command line, measure, print."""
    command = parser(__doc__)
    add_model_options(command, MODELS)
    command.add_argument("--loops", nargs="+", type=int, help="default: 8 32")
    command.add_argument("--pool", choices=("ray", "local"), default="ray", help="local: threads stand in for Ray")
    command.add_argument("--device", default="", help="torch device of the worker; default: the processor")
    command.add_argument("--seconds", type=float, default=40.0, help="for each row, with at least --rounds")
    command.add_argument("--rounds", type=int, default=3, help="least number for each row, after one of warm-up")
    args = command.parse_args()
    args.effort = Effort(seconds=args.seconds, rounds_min=args.rounds)
    if args.quick:
        args.effort = Effort(seconds=0, rounds_min=1, rounds_max=1)
    with open_models(chosen_models(args, MODELS)) as models, Results("loops", args) as results:
        table = results.table(
            "loops",
            (
                Column("model", lambda r: r["model"]),
                Column("loops", lambda r: str(r["loops"])),
                Column(f"{ITERATIONS} iterations of each, together", lambda r: shown_time(r["together"])),
                Column("one loop after another", lambda r: shown_time(r["apart"])),
                Column("together, times as fast", lambda r: shown_ratio(r["gain"])),
                Column("tokens drawn / s, together", lambda r: f"{r['drawn_per_s']:,.0f}"),
                Column("rounds", lambda r: str(r["together"]["rounds"])),
            ),
        )
        for model in models:
            for num_loops in args.loops or (QUICK_LOOPS if args.quick else LOOPS):
                row = measure(model, num_loops, args)
                table.add(row)
                if args.device.startswith("cuda") and num_loops == LOOPS[0]:
                    what = f"{model.name}: {num_loops} reinforcement loops together against one after another"
                    results.goal(what, row["gain"]["median"], at_least=RATIO_MIN, unit=" x")


if __name__ == "__main__":
    main()
