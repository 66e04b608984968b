"""Train three tenants at the same time on one small pool: all of tinkerpool in a few minutes.

    make demo
    make demo MODEL=DIR      # on another Hugging Face causal language model

Starts a pool (as `tinkerpool serve` does: Ray on this machine, SQLite in a temporary folder), creates a key for each of
three tenants, and trains them over gRPC, each in a thread of this process: supervised fine-tuning, reinforcement
learning, and a custom loss. Then measures the cost of a step by the way a loop submits it. Writes a picture of the
cycles, the adapters as PEFT directories, and all figures to demo-output/. Stops the pool at the end, also after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from coordinator.base_models import DEFAULT_MODEL, resolve_model
from scripts.demo.clock import NUM_OTHERS, measure_latency, measure_loops
from scripts.demo.plots import Curve, draw
from scripts.demo.report import console, print_strong, report_clock, report_files, report_tenants
from scripts.demo.tenants import TENANTS, Scribe, Settings, Tenant
from scripts.embedded_pool import EmbeddedPool, embedded_pool
from scripts.pool_process import PoolEnded
from tinkerpool import ServiceClient, types
from tinkerpool.v1 import pool_pb2
from workers.contract.settings import num_cores
from workers.pool.environment import thread_environment

OUTPUT = Path(__file__).resolve().parents[2] / "demo-output"
REFRESH_S = 0.1
LINE_EVERY_S = 15.0
"""Interval of the lines of text that replace the progress bars without a terminal."""


class DemoError(Exception):
    """A tenant failed; the message has its traceback."""


class CycleRecorder:
    """Collects every cycle of the pool, with an administrator's key."""

    def __init__(self, admin: ServiceClient) -> None:
        self.cycles: list[pool_pb2.Cycle] = []
        self._rest = admin.create_rest_client()
        threading.Thread(target=self._watch, name="cycles", daemon=True).start()

    def _watch(self) -> None:
        with contextlib.suppress(Exception):  # the pool has stopped
            for cycle in self._rest.watch_cycles():
                self.cycles.append(cycle)

    def of(self, tenants: Sequence[str]) -> list[pool_pb2.Cycle]:
        """Return the recorded cycles with any of these tenants."""
        return [c for c in list(self.cycles) if any(entry.tenant in tenants for entry in c.entries)]


def train(pool: EmbeddedPool, tenants: Sequence[Tenant]) -> None:
    """Run all tenants at the same time, with a progress bar each. Raises DemoError if one fails."""
    barrier = threading.Barrier(len(tenants))
    threads = [threading.Thread(target=t.run, args=(barrier,), name=t.name, daemon=True) for t in tenants]
    for thread in threads:
        thread.start()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TextColumn("{task.fields[now]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        tasks = [progress.add_task(f"{t.name:7}", total=t.num_steps, now="preparing") for t in tenants]
        is_running, next_line = True, time.monotonic() + LINE_EVERY_S
        while is_running:
            pool.check()
            is_running = any(thread.is_alive() for thread in threads)
            for tenant, task in zip(tenants, tasks, strict=True):
                if tenant.points:
                    last = tenant.points[-1]
                    now = f"{tenant.measure} {last.value:6.3f}   cycle {last.cycle}"
                    progress.update(task, completed=last.step, now=now)
            if not console.is_terminal and time.monotonic() > next_line:
                next_line += LINE_EVERY_S
                console.print(" | ".join(f"{t.name} {len(t.points)}/{t.num_steps}" for t in tenants))
            time.sleep(REFRESH_S)
    for tenant in tenants:
        if tenant.error and "BrokenBarrierError" not in tenant.error:
            raise DemoError(f"{tenant.name} failed:\n{tenant.error}")


@contextlib.contextmanager
def demo_pool(serve_arguments: Sequence[str]) -> Iterator[EmbeddedPool]:
    """Run a pool until the block ends, with a spinner until it is ready."""
    with contextlib.ExitStack() as stack:
        with console.status("Starting a pool ...") as spinner:
            pool = stack.enter_context(embedded_pool(serve_arguments, lambda line: spinner.update(_dim(line))))
        yield pool


def _dim(line: str) -> str:
    return f"Starting a pool ... [dim]{line[:90].replace('[', '(')}[/dim]"


def prepare(output: Path, num_threads: int) -> None:
    """Empty the folder for results, and set this process's environment as a worker's, for its engine."""
    os.environ |= thread_environment(num_threads)
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    if output.exists():
        shutil.rmtree(output)
    output.mkdir(parents=True)


def run(args: argparse.Namespace) -> None:
    """Run the whole demo."""
    started = time.perf_counter()
    model = resolve_model(args.model, args.workers)
    num_threads = args.threads or max(1, num_cores() // args.workers)
    prepare(args.output, num_threads)
    arguments = ["--model", args.model, "--workers", str(args.workers), "--pool", args.pool]
    arguments += ["--threads", str(num_threads)]
    with demo_pool(arguments) as pool, contextlib.ExitStack() as clients:

        def connect(api_key: str) -> ServiceClient:
            return clients.enter_context(ServiceClient(pool.url, api_key))

        admin = connect(pool.admin_key)
        served = admin.get_server_capabilities().supported_models[0]
        settings = Settings.of(served, args.seed, is_quick=args.quick)
        print_strong(
            f"A pool is ready at {pool.url}",
            f" after {time.perf_counter() - started:.0f} s: {served.model_name}, "
            f"{served.num_params / 1e6:.1f} million parameters, {args.workers} worker(s) "
            + ("in Ray" if args.pool == "ray" else "in the pool's process"),
        )
        print_strong("Watch it", f" in a browser: {pool.http_url}/ui/ with the key {pool.admin_key}")
        recorder = CycleRecorder(admin)
        keys = {kind.name: pool.create_key(kind.name) for kind in TENANTS}
        tenants: list[Tenant] = [kind(connect(keys[kind.name]), served.model_name, settings) for kind in TENANTS]
        print_strong(f"{len(tenants)} tenants train at the same time", ", each with a key and an adapter of its own:")
        for tenant in tenants:
            console.print(Text(f"  {tenant.name:7} {tenant.task}"))
        train(pool, tenants)
        cycles = recorder.of([tenant.name for tenant in tenants])
        report_tenants(tenants)
        for tenant, kind in zip(tenants, TENANTS, strict=True):
            rest = connect(keys[kind.name]).create_rest_client()
            rest.export_checkpoint(tenant.checkpoint, args.output / "adapters" / tenant.name).result()

        batch = clock_batch(tenants)
        others = [connect(keys[kind.name]) for kind in TENANTS[:NUM_OTHERS]]
        with console.status("Measuring loops ..."):
            costs = measure_loops(admin, others, served.model_name, settings.rank, batch, settings.clock_steps)
            latency = measure_latency(admin, model, num_threads, settings.rank, batch, settings.clock_steps)
        report_clock(costs, latency)
        usage = admin.create_rest_client().get_usage().result()

    num_shared = sum(len(cycle.entries) > 1 for cycle in cycles)
    seconds = time.perf_counter() - started
    title = (
        f"tinkerpool: {len(tenants)} tenants train on one {served.model_name}, together in {num_shared} clock cycles"
    )
    curves = [Curve(tenant=t.name, task=t.task, measure=t.measure, points=t.points) for t in tenants]
    draw(args.output / "demo.png", cycles, curves, costs, title)
    summary = {
        "model": served.model_name,
        "seed": args.seed,
        "num_cycles": len(cycles),
        "num_shared_cycles": num_shared,
        "tenants": {t.name: {"results": t.results, "values": [point.value for point in t.points]} for t in tenants},
        "clock": [asdict(cost) for cost in costs],
        "latency": asdict(latency),
        "tokens": {f"{row.tenant} {row.kind}": row.num_tokens for row in usage.rows},
        "seconds": seconds,
    }
    (args.output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print_strong(
        "\nDone",
        f" in {seconds:.0f} s: {len(cycles)} cycles, {num_shared} of them shared; the pool is stopped.",
    )
    report_files(args.output, [tenant.name for tenant in tenants])


def clock_batch(tenants: Sequence[Tenant]) -> list[types.Datum]:
    """Return a small batch of the supervised tenant."""
    [scribe] = [tenant for tenant in tenants if isinstance(tenant, Scribe)]
    return scribe.first_data(8)


def main() -> int:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a Hugging Face directory (default: the shipped model)")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder for the results; replaced")
    parser.add_argument("--quick", action="store_true", help="few steps, for tests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--threads", type=int, default=0, help="threads of each worker (default: cores divided by workers)"
    )
    parser.add_argument("--pool", choices=("ray", "local"), default="ray")
    args = parser.parse_args()
    try:
        run(args)
    except (DemoError, PoolEnded) as error:
        console.print(Text(f"Error: {error}", style="red"))
        return 1
    except KeyboardInterrupt:
        console.print("Interrupted; the pool is stopped.")
        return 130
    return 0
