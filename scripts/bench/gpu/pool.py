"""Measure a whole pool on a GPU, through gRPC: tokens per second, swaps, publishing, the loss of a worker, bits.

    python -m scripts.bench.gpu.pool                        # a random Qwen3 of 0.6B, a worker of Ray
    python -m scripts.bench.gpu.pool --pool local           # without Ray
    python -m scripts.bench.gpu.pool --device cpu --shape tiny --pool local --tenants 2 --many 3 --slots 2

The last one is a smoke test. Three pools serve one after another, each with its log on disk and one worker. Every
tenant has a client and an adapter.

steps       all tenants train at the same time, each in a pipelined loop: it submits a forward_backward and its
            optim_step before it awaits the step before. First with a bank slot for each tenant, in turns with the
            engine alone, in this process; then more tenants than slots, so that every cycle swaps adapters, relative
            to the pool before. These two pools do not alternate
first token a tenant takes a step, publishes its weights, and samples a token after a prompt of 16: the time from the
            call of `save_weights_and_get_sampling_client` to the token, without other load
bits        with `--exact`: a tenant trains alone, then beside others, then all of them once more while the worker is
            killed halfway. Losses are compared, and the SHA-256 of weights and moments. In a local pool the worker is a
            thread of the coordinator: the process of both is killed and started again

The time after the kill is that until a step finishes again, of any tenant. Prints Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from scripts.bench.models import Case, Model, open_models  # before torch is imported: it configures threads

# isort: split

import torch

from scripts.bench.common import Effort, Timing, measure_alternating
from scripts.bench.gpu.run import chosen_device, make_parser, print_head
from scripts.bench.gpu.sides import Fused
from scripts.bench.sides.pools import ADAM, Tenants, serve_arguments, to_user_data
from scripts.embedded_pool import EmbeddedPool, embedded_pool
from scripts.pool_process import free_port
from scripts.reliability.chaos.checks import checkpoint_files
from tinkerpool import ServiceClient, TrainingClient, types
from workers.contract.settings import EngineSettings

NUM_SEQS, NUM_TOKENS = 4, 64
"""Of a tenant's step."""
STEPS = 6
"""Steps of a pipelined block. The first overlaps with no other."""
PROMPT = types.ModelInput.from_ints(list(range(1, 17)))
PUBLISHED = 25
"""Measured versions."""
NEIGHBOURS = 7
EXACT_RANK, EXACT_STEPS = 8, 8
CACHE_SHARE = 0.05
"""Of the free memory for keys and values: the engine in this process needs memory, too."""


@contextlib.contextmanager
def serving(model: Model, args: argparse.Namespace, *options: str) -> Iterator[tuple[EmbeddedPool, list[str]]]:
    """Start a pool on a port that stays the same when it is started again; yield it with its arguments."""
    gpu = ["--gpus", "1"] if args.pool == "ray" and args.device == "cuda" else ["--device", args.device]
    ports = ["--port", str(free_port()), "--no-http", "--no-metrics", "--cache-share", str(CACHE_SHARE)]
    arguments = [*serve_arguments(model, args), *gpu, *ports, *options]
    with embedded_pool(arguments) as pool:
        yield pool, arguments


@contextlib.contextmanager
def clients_of(pool: EmbeddedPool, number: int) -> Iterator[list[ServiceClient]]:
    """Open a client for each of these many tenants."""
    with contextlib.ExitStack() as stack:
        keys = [pool.create_key(f"tenant-{index}") for index in range(number)]
        yield [stack.enter_context(ServiceClient(pool.url, key)) for key in keys]


def run_steps(engine: Fused) -> None:
    """Run a block of steps on the engine alone."""
    for _ in range(STEPS):
        engine.step()


def measure_steps(
    pool: EmbeddedPool, model: Model, case: Case, args: argparse.Namespace, *, with_engine: bool
) -> dict[str, Timing]:
    """Measure blocks of steps through gRPC, in turns with those of the engine alone; then delete the adapters."""
    with clients_of(pool, case.num_tenants) as clients:
        tenants = Tenants(clients, model.name, args.rank, case.data(model.vocab_size))
        sides: dict[str, Callable[[], object]] = {"pool": lambda: tenants.train(STEPS)}
        if with_engine:
            sides["engine"] = partial(run_steps, engine_alone(model, case, args))
        timings = measure_alternating(sides, Effort(seconds=0, rounds_min=args.rounds, rounds_max=args.rounds))
        for client, training in zip(clients, tenants.trainings, strict=True):
            client.create_rest_client().delete_training_run(training.model_id).result()
    return timings


def print_steps(case: Case, num_slots: int, timings: dict[str, Timing], unswapped: Timing | None = None) -> None:
    """Print a row of the first table."""
    steps_ms = [1e3 * seconds / STEPS for seconds in timings["pool"].seconds]
    rates = {side: case.total_tokens * STEPS / timing.median_s for side, timing in timings.items()}
    engine = ("", "")
    if "engine" in rates:
        engine = (f"{rates['engine']:,.0f}", f"{timings['engine'].ratio_to(timings['pool'])['median']:.2f}")
    of_unswapped = f"{unswapped.median_s / timings['pool'].median_s:.2f}" if unswapped else ""
    print(
        f"| {case} | {num_slots} | {statistics.median(steps_ms):.1f} ({min(steps_ms):.1f}-{max(steps_ms):.1f}) "
        f"| {rates['pool']:,.0f} | {engine[0]} | {engine[1]} | {of_unswapped} |",
        flush=True,
    )


def engine_alone(model: Model, case: Case, args: argparse.Namespace) -> Fused:
    """Return the engine in this process, with an adapter for each tenant."""
    settings = EngineSettings(
        model_path=str(model.path), num_slots=case.num_tenants, device=args.device, cache_bytes_max=0
    )
    return Fused(settings, case, args.rank)


def measure_first_token(pool: EmbeddedPool, model: Model, args: argparse.Namespace) -> Timing:
    """Measure the time from publishing weights to the first token that is sampled from them."""
    case = Case(1, NUM_SEQS, NUM_TOKENS)
    with clients_of(pool, 1) as clients:
        tenants = Tenants(clients, model.name, args.rank, case.data(model.vocab_size))
        [training] = tenants.trainings
        params = types.SamplingParams(max_tokens=1, temperature=0.0)

        def publish() -> None:
            [_] = training.save_weights_and_get_sampling_client().sample_stream(PROMPT, 1, params)

        effort = Effort(seconds=0, rounds_min=PUBLISHED, rounds_max=PUBLISHED)
        return measure_alternating({"step": tenants.step, "publish": publish}, effort, in_order=True)["publish"]


@dataclass(frozen=True, slots=True)
class Trained:
    """What tenants have after a number of steps."""

    losses: list[list[float]]
    """By tenant and step."""
    states: list[dict[str, str]]
    """By tenant: the SHA-256 of each file of the last checkpoint, weights and moments among them."""
    pause_s: float
    """From the kill until a step finished again; 0 without a kill."""


def train(pool: EmbeddedPool, model: Model, num_tenants: int, kill: Callable[[], None] | None = None) -> Trained:
    """Train new adapters, equal in every call, and save them. `kill` is called when half of the steps have finished."""
    data = Case(num_tenants, NUM_SEQS, NUM_TOKENS).data(model.vocab_size)
    killed_s: list[float] = []
    ended_s: list[float] = []

    async def run(training: TrainingClient, batch: Sequence[types.Datum]) -> list[float]:
        losses = []
        for _ in range(EXACT_STEPS):
            passed, stepped = training.forward_backward(batch, "cross_entropy"), training.optim_step(ADAM)
            losses.append((await passed).metrics["loss:sum"])
            await stepped
            ended_s.append(time.perf_counter())
            if kill is not None and len(ended_s) == num_tenants * EXACT_STEPS // 2:
                killed_s.append(ended_s[-1])
                await asyncio.to_thread(kill)
        return losses

    async def run_all() -> list[list[float]]:
        return await asyncio.gather(
            *(run(each, to_user_data(part)) for each, part in zip(trainings, data, strict=True))
        )

    with clients_of(pool, num_tenants) as clients:
        trainings = [
            client.create_lora_training_client(model.name, rank=EXACT_RANK, seed=number).result()
            for number, client in enumerate(clients)
        ]
        losses = asyncio.run(run_all())
        paths = [training.save_state("last").result().path for training in trainings]
    states = [checkpoint_files(pool.data_dir, path) for path in paths]
    return Trained(losses, states, _longest_pause_s(killed_s, ended_s))


def _longest_pause_s(killed_s: Sequence[float], ended_s: Sequence[float]) -> float:
    """Return the time from the kill to the end of the longest pause after it.

    The first step after the kill may have been committed before it.
    """
    if not killed_s:
        return 0.0
    [kill_s] = killed_s
    pauses = pairwise([kill_s, *sorted(end_s for end_s in ended_s if end_s > kill_s)])
    return max(pauses, key=lambda pause: pause[1] - pause[0])[1] - kill_s


def kill_worker(pool: EmbeddedPool, arguments: Sequence[str]) -> None:
    """`kill -9` the worker. If it is a thread of the coordinator, kill that and start it again."""
    [worker] = pool.status().workers
    if worker.pid != pool.pid:
        os.kill(worker.pid, signal.SIGKILL)
        return
    pool.kill()
    pool.begin(*arguments)
    pool.wait_ready()


def print_bits(pool: EmbeddedPool, arguments: Sequence[str], model: Model, killed: str) -> None:
    """Train in exact mode alone, beside neighbours, and through a kill; print what differs."""
    alone = train(pool, model, 1)
    beside = train(pool, model, 1 + NEIGHBOURS)
    disturbed = train(pool, model, 1 + NEIGHBOURS, lambda: kill_worker(pool, arguments))
    is_lone_equal = alone.losses == beside.losses[:1] and alone.states == beside.states[:1]
    is_disturbed_equal = disturbed.losses == beside.losses and disturbed.states == beside.states
    print(
        f"| exact mode: a tenant alone and beside {NEIGHBOURS}, bits of losses, weights and moments | "
        f"{shown_equal(is_lone_equal)} |"
    )
    print(f"| `kill -9` of {killed}: until a step finished again | {disturbed.pause_s:.1f} s |")
    print(
        f"| exact mode: {1 + NEIGHBOURS} tenants through that kill and undisturbed, the same bits | "
        f"{shown_equal(is_disturbed_equal)} |",
        flush=True,
    )


def shown_equal(is_equal: bool) -> str:
    """Say whether bits are equal."""
    return "equal" if is_equal else "**different**"


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, measure, print."""
    parser = make_parser(__doc__)
    parser.set_defaults(rounds=3)
    parser.add_argument("--tenants", nargs="+", type=int, default=[8, 32], help="with a bank slot each")
    parser.add_argument("--many", type=int, default=24, help="tenants of the case with swaps")
    parser.add_argument("--slots", type=int, default=16, help="bank slots in the case with swaps")
    parser.add_argument("--pool", choices=("ray", "local"), default="ray", help="local: the worker is a thread")
    parser.add_argument("--threads", type=int, default=0, help="of the worker; 0: the cores")
    args = parser.parse_args(arguments)
    device = chosen_device(parser, args)
    if args.slots >= args.many:
        parser.error(f"--many {args.many} tenants on --slots {args.slots}: nothing would be swapped")
    cases = [Case(number, NUM_SEQS, NUM_TOKENS) for number in sorted({*args.tenants, args.many})]
    [many] = [case for case in cases if case.num_tenants == args.many]
    print_head(args, device, f"pool {args.pool}, blocks of {STEPS} steps")
    with open_models([args.shape], args.scratch) as [model]:
        print(
            "| tenants x sequences x tokens | bank slots | ms a step | tokens/s | engine alone, tokens/s "
            "| of the engine | of the speed with a slot each |\n|---|---|---|---|---|---|---|"
        )
        num_slots = cases[-1].num_tenants
        timings: dict[Case, dict[str, Timing]] = {}
        with serving(model, args, "--slots", str(num_slots)) as (pool, _):
            for case in cases:
                with_engine = case.num_tenants in args.tenants
                timings[case] = measure_steps(pool, model, case, args, with_engine=with_engine)
                print_steps(case, num_slots, timings[case])
                gc.collect()  # or the next engine would be beside this one
                if device.type == "cuda":
                    torch.cuda.empty_cache()
            first_token = measure_first_token(pool, model, args)
        with serving(model, args, "--slots", str(args.slots)) as (pool, _):
            swapped = measure_steps(pool, model, many, args, with_engine=False)
            print_steps(many, args.slots, swapped, timings[many]["pool"])
        print("\n| what | measured |\n|---|---|")
        print(
            f"| from publishing weights to the first token, median and p99 of {PUBLISHED} "
            f"| {first_token.median_s * 1e3:.1f} ms, {first_token.quantile(0.99) * 1e3:.1f} ms |",
            flush=True,
        )
        with serving(model, args, "--exact") as (pool, own):
            print_bits(
                pool, own, model, "the worker" if args.pool == "ray" else "coordinator and worker, started again"
            )


if __name__ == "__main__":
    main()
