"""Measure the latency that the service adds to a step, and its throughput against sequential PEFT.

    python -m scripts.bench.service --quick
    python -m scripts.bench.service                         # ten minutes; throughput on 4m only
    python -m scripts.bench.service --models 4m --skip-latency
    python -m scripts.bench.service --models 27m --skip-throughput --seconds 60

Latency: 1 tenant with 4 x 64 tokens and 16 tenants with 1 x 64 submit a forward_backward and its optim_step together,
all at the same time, and wait for both. The same step, alternating, on

engine      the engine without a service, in this process
in process  client library, coordinator with its log (two fsyncs a step) and engine in this process, no network
gRPC        the same coordinator, through its gRPC door
Ray         gRPC to a coordinator in its own process, with its engine in a process of Ray: `make up`

The added latency is the step's time minus the engine's time in the same round. An engine inside a service may be faster
or slower than the one without, so for "in process" the time outside its engine is measured as well.

Throughput: pipelined loops of all tenants through gRPC and Ray, against sequential PEFT and the engine alone, in
alternating blocks of steps; client, coordinator, engine and PEFT use the same cores. Prints Markdown tables.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scripts.bench.common import (
    Column,
    Effort,
    Results,
    Row,
    Table,
    Timing,
    measure_alternating,
    parser,
    shown_ms,
    shown_ratio,
)
from scripts.bench.models import Case, Model, add_model_options, chosen_models, open_models
from scripts.bench.sides.pools import LocalService, Tenants, serve_arguments
from scripts.bench.sides.training import Fused, SequentialPeft
from scripts.embedded_pool import EmbeddedPool, embedded_pool
from tinkerpool import ServiceClient
from workers.contract.messages import Datum
from workers.contract.settings import PoolModel

RANK = 8
WAYS = ("engine", "in process", "gRPC", "Ray")
LATENCY_CASES = (Case(num_tenants=1, num_seqs=4, num_tokens=64), Case(num_tenants=16, num_seqs=1, num_tokens=64))
GOALS = {"1 x 4 x 64": 0.9, "8 x 4 x 64": 1.1, "16 x 1 x 64": 2.0}
"""Throughput through gRPC and Ray relative to sequential PEFT, on the 4M shape."""
THROUGHPUT_CASES = (
    Case(num_tenants=1, num_seqs=1, num_tokens=64),
    Case(num_tenants=4, num_seqs=1, num_tokens=64),
    Case(num_tenants=16, num_seqs=1, num_tokens=64),
    Case(num_tenants=32, num_seqs=1, num_tokens=64),
    Case(num_tenants=1, num_seqs=4, num_tokens=64),
    Case(num_tenants=8, num_seqs=4, num_tokens=64),
)
QUICK_CASE = Case(num_tenants=2, num_seqs=1, num_tokens=16)
STEPS_PER_BLOCK = 8
"""Steps of a pipelined block. The first step overlaps with no other, so a longer block reduces its share."""


@dataclass(frozen=True, slots=True)
class Ways:
    """The ways into the two pools of one model."""

    model: Model
    local: LocalService
    ray: EmbeddedPool

    def tenants(self, stack: contextlib.ExitStack, way: str, data: Sequence[tuple[Datum, ...]]) -> Tenants:
        """Create tenants, one per part of the data. The stack closes their clients."""
        names = [f"bench-{index}" for index in range(len(data))]
        clients = [stack.enter_context(self._client(way, name)) for name in names]
        return Tenants(clients, self.model.name, RANK, data)

    def _client(self, way: str, tenant: str) -> ServiceClient:
        match way:
            case "in process":
                return self.local.direct(tenant)
            case "gRPC":
                return self.local.over_grpc(tenant)
            case "Ray":
                return ServiceClient(self.ray.url, self.ray.create_key(tenant))
        raise ValueError(way)


def measure_latency(case: Case, ways: Ways, args: argparse.Namespace) -> Row:
    """Measure a step of all tenants on every way."""
    model = ways.model
    data = case.data(model.vocab_size)
    fused = Fused(model, [RANK] * case.num_tenants, args.threads)
    fused.give(data)
    latencies: dict[str, list[float]] = {way: [] for way in WAYS[1:]}
    outside: list[float] = []
    sides: dict[str, Callable[[], object]] = {"engine": fused.step}
    effort = replace(args.latency_effort, warm_up=2)
    with contextlib.ExitStack() as stack:
        for way, seconds in latencies.items():
            sides[way] = _recorded(ways.tenants(stack, way, data), seconds)
        sides["in process"] = _recording_outside(sides["in process"], ways.local, outside)
        timings = measure_alternating(sides, effort)
    row: Row = {"model": model.name, "case": str(case), "rounds": len(timings["engine"].seconds)}
    for way in WAYS:
        num_warm = effort.warm_up * case.num_tenants
        steps = Timing(tuple(latencies[way][num_warm:])) if way in latencies else timings[way]
        added = [a - b for a, b in zip(timings[way].seconds, timings["engine"].seconds, strict=True)]
        row[way] = {
            "steps": len(steps.seconds),
            "p50_s": steps.median_s,
            "p99_s": steps.quantile(0.99),
            "added_s": Timing(tuple(added)).median_s,
        }
    row["outside_s"] = Timing(tuple(outside[effort.warm_up :])).median_s
    return row


def _recording_outside(step: Callable[[], object], local: LocalService, outside: list[float]) -> Callable[[], None]:
    """Wrap a step in process: record the time outside its engine."""

    def timed() -> None:
        begin_s, before_s = time.perf_counter(), local.engine_s
        step()
        outside.append(time.perf_counter() - begin_s - (local.engine_s - before_s))

    return timed


def _recorded(tenants: Tenants, seconds: list[float]) -> Callable[[], None]:
    return lambda: seconds.extend(tenants.step())


def measure_throughput(case: Case, ways: Ways, args: argparse.Namespace) -> Row:
    """Measure blocks of steps through gRPC and Ray, on the engine alone, and with sequential PEFT."""
    model = ways.model
    data = case.data(model.vocab_size)
    ranks = [RANK] * case.num_tenants
    fused = Fused(model, ranks, args.threads)
    peft = SequentialPeft(model, ranks, fused.weights())
    fused.give(data)
    peft.give(data)
    cycles: list[float] = []

    def steps_of(step: Callable[[], object]) -> Callable[[], None]:
        def block() -> None:
            for _ in range(args.steps):
                step()

        return block

    with contextlib.ExitStack() as stack:
        tenants = ways.tenants(stack, "Ray", data)
        sides: dict[str, Callable[[], object]] = {
            "service": lambda: cycles.extend(tenants.train(args.steps)),
            "engine": steps_of(fused.step),
            "peft": steps_of(peft.step),
        }
        timings = measure_alternating(sides, args.throughput_effort)
    return {
        "model": model.name,
        "case": str(case),
        "tenants": case.num_tenants,
        "tokens": case.total_tokens * args.steps,
        "steps": args.steps,
        "cycles_per_step": Timing(tuple(cycles)).median_s,
        "over_peft": timings["peft"].ratio_to(timings["service"]),
        "of_engine": timings["engine"].ratio_to(timings["service"]),
        **{name: timing.summary() for name, timing in timings.items()},
    }


def _p50_p99(way: str) -> Callable[[Row], str]:
    return lambda row: f"{shown_ms(row[way]['p50_s'])} / {shown_ms(row[way]['p99_s'])}"


def _added(way: str) -> Callable[[Row], str]:
    return lambda row: shown_ms(row[way]["added_s"])


def _tokens_per_s(side: str) -> Callable[[Row], str]:
    return lambda row: f"{row['tokens'] / row[side]['median_s']:,.0f}"


LATENCY_COLUMNS = (
    Column("model", lambda r: r["model"]),
    Column("tenants x sequences x tokens", lambda r: r["case"]),
    *(Column(f"{way}, p50 / p99", _p50_p99(way)) for way in WAYS),
    *(Column(f"{way} adds", _added(way)) for way in WAYS[1:]),
    Column("in process, outside the engine", lambda r: shown_ms(r["outside_s"])),
    Column("steps", lambda r: str(r["Ray"]["steps"])),
)
THROUGHPUT_COLUMNS = (
    Column("model", lambda r: r["model"]),
    Column("tenants x sequences x tokens", lambda r: r["case"]),
    Column("gRPC and Ray, tokens/s", _tokens_per_s("service")),
    Column("engine alone, tokens/s", _tokens_per_s("engine")),
    Column("sequential PEFT, tokens/s", _tokens_per_s("peft")),
    Column("service / PEFT", lambda r: shown_ratio(r["over_peft"])),
    Column("service / engine", lambda r: shown_ratio(r["of_engine"])),
    Column("cycles per step", lambda r: f"{r['cycles_per_step']:.2f}"),
)


@contextlib.contextmanager
def ways_into(model: Model, args: argparse.Namespace) -> Iterator[Ways]:
    """Start both pools on a model."""
    pool_model = PoolModel(name=model.name, path=str(model.path))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-service-")))
        slots = 2 * max(case.num_tenants for case in (*LATENCY_CASES, *THROUGHPUT_CASES))
        ray = stack.enter_context(embedded_pool([*serve_arguments(model, args), "--slots", str(slots)]))
        local = LocalService(folder, pool_model, num_threads=args.threads, num_slots=slots)
        yield Ways(model, stack.enter_context(local), ray)


def add_goals(results: Results, latency: Table, throughput: Table) -> None:
    """Compare the tables with the goals."""
    for row in latency.rows:
        if row["case"] == str(LATENCY_CASES[0]):
            for way, most in (("in process", 10.0), ("Ray", 20.0)):
                what = f"{row['model']}: milliseconds added to a lone tenant's step, {way}"
                results.goal(what, 1e3 * row[way]["added_s"], at_most=most, unit=" ms")
    for row in throughput.rows:
        if row["case"] in GOALS and row["model"] == "4m":
            what = f"{row['model']}: {row['case']} through gRPC and Ray against sequential PEFT"
            results.goal(what, row["over_peft"]["median"], at_least=GOALS[row["case"]], unit=" x")


def main() -> None:
    """Read the command line, measure, print."""
    command = parser(__doc__)
    add_model_options(command)
    command.add_argument("--steps", type=int, help=f"steps of a block; default: {STEPS_PER_BLOCK}")
    command.add_argument("--seconds", type=float, default=8.0, help="for each row (at least 5 rounds)")
    command.add_argument("--pool", choices=("ray", "local"), default="ray", help="local: threads stand in for Ray")
    command.add_argument("--skip-latency", action="store_true")
    command.add_argument("--skip-throughput", action="store_true")
    args = command.parse_args()
    quick = Effort(seconds=0, rounds_min=2, rounds_max=2)
    args.latency_effort = quick if args.quick else Effort(seconds=args.seconds, rounds_max=150)
    args.throughput_effort = quick if args.quick else Effort(seconds=args.seconds)
    args.steps = args.steps or (2 if args.quick else STEPS_PER_BLOCK)
    latency_cases: Sequence[Case] = (QUICK_CASE,) if args.quick else LATENCY_CASES
    throughput_cases: Sequence[Case] = (QUICK_CASE,) if args.quick else THROUGHPUT_CASES
    with open_models(chosen_models(args)) as models, Results("service", args) as results:
        latency = results.table("service-latency", LATENCY_COLUMNS)
        throughput = results.table("service-throughput", THROUGHPUT_COLUMNS)
        for model in models:
            with ways_into(model, args) as ways:
                for case in () if args.skip_latency else latency_cases:
                    latency.add(measure_latency(case, ways, args))
                is_wanted = args.models or model.name not in {"kjv-2m", "27m"}
                for case in throughput_cases if is_wanted and not args.skip_throughput else ():
                    throughput.add(measure_throughput(case, ways, args))
        add_goals(results, latency, throughput)


if __name__ == "__main__":
    main()
