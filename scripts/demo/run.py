"""Three tenants train at the same time on one small pool: the whole of tinkerpool in a few minutes.

    make demo
    make demo MODEL=DIR      # on another Hugging Face causal language model

Starts a pool of its own (as `tinkerpool serve` does: Ray on this machine, SQLite in a temporary folder), gives three
tenants a key each, and lets them train over gRPC, each in a thread of this process: supervised fine-tuning,
reinforcement learning, and a loss of one's own. Then it measures what a step costs by how a loop submits it. Leaves a
picture of the cycles, the adapters as PEFT directories, and all figures in demo-output/. The pool is stopped at the
end, also after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from coordinator.base_models import DEFAULT_MODEL, resolve_model
from coordinator.cli import process
from scripts.demo.clock import NUM_COMPANIONS, AddedLatency, LoopCost, measure_latency, measure_loops
from scripts.demo.plots import Curve, draw
from scripts.demo.tenants import TENANTS, Judge, Poet, Scribe, Settings, Tenant
from scripts.terminal import interrupt_at_sigterm, shown_path, uninterrupted
from tinkerpool import ServiceClient, types
from tinkerpool.cli.errors import CliError
from tinkerpool.credentials import read_credentials
from tinkerpool.v1 import pool_pb2, pool_pb2_grpc
from workers.contract.settings import num_cores
from workers.pool.environment import thread_environment

OUTPUT = Path(__file__).resolve().parents[2] / "demo-output"
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
REFRESH_S = 0.1
LINE_EVERY_S = 15.0
"""Where there is no terminal for bars, a line says how far everybody is."""
console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)


class DemoError(Exception):
    """Why the demo could not go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedPool:
    """A pool in a child process."""

    url: str
    api_key: str
    """An administrator's."""
    data_dir: Path

    def check(self) -> None:
        """Raises DemoError if it has ended: clients would wait for its return for ever."""
        if process.running_pid(self.data_dir) is None:
            log = "".join(process.tail(self.data_dir, 20, follow=False))
            raise DemoError(f"the pool has ended; the end of its log:\n{log}")


class CycleRecorder:
    """Collects every cycle of the pool, as an administrator sees them, until it is closed."""

    def __init__(self, admin: ServiceClient) -> None:
        self.cycles: list[pool_pb2.Cycle] = []
        self._rest = admin.create_rest_client()
        threading.Thread(target=self._watch, name="cycles", daemon=True).start()

    def _watch(self) -> None:
        with contextlib.suppress(Exception):  # the pool is gone
            for cycle in self._rest.watch_cycles():
                self.cycles.append(cycle)

    def of(self, tenants: Sequence[str]) -> list[pool_pb2.Cycle]:
        """The cycles so far that any of the tenants was in."""
        return [c for c in list(self.cycles) if any(entry.tenant in tenants for entry in c.entries)]


@contextlib.contextmanager
def embedded_pool(serve_arguments: Sequence[str]) -> Iterator[EmbeddedPool]:
    """A pool in a child process, on a free port, with a data directory that ends with it."""
    with tempfile.TemporaryDirectory(prefix="tinkerpool-demo-") as folder:
        data_dir = Path(folder) / "pool"
        os.environ["TINKERPOOL_HOME"] = folder  # its key is no business of this user's other pools
        try:
            with console.status("Starting a pool ...") as spinner:
                process.start(
                    data_dir,
                    ["--port", "0", *serve_arguments],
                    lambda line: spinner.update(_dim(line)),
                    START_TIMEOUT_S,
                )
            credentials = read_credentials()
            assert credentials is not None
            yield EmbeddedPool(url=credentials.url, api_key=credentials.api_key, data_dir=data_dir)
        except CliError as error:
            raise DemoError(str(error)) from None
        finally:
            with uninterrupted():
                if process.running_pid(data_dir) is not None:
                    process.stop(data_dir, STOP_TIMEOUT_S)


def create_key(pool: EmbeddedPool, tenant: str) -> str:
    """A key for a tenant, over a stub straight from the contract."""
    with grpc.insecure_channel(pool.url.removeprefix("http://")) as channel:
        request = pool_pb2.CreateApiKeyRequest(tenant=tenant)
        metadata = (("authorization", f"Bearer {pool.api_key}"),)
        return str(pool_pb2_grpc.AdminServiceStub(channel).CreateApiKey(request, metadata=metadata).key)


def train(pool: EmbeddedPool, tenants: Sequence[Tenant]) -> None:
    """Run all of them at once, with a progress bar each."""
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


def report_tenants(tenants: Sequence[Tenant]) -> None:
    """Numbers and samples, before and after."""
    for tenant in tenants:
        say(f"\n{tenant.name}", f" - {tenant.task}")
        for line in _figures(tenant):
            console.print(Text("  " + line))
        table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2))
        for column in ("  prompt", "before", "after"):
            table.add_column(column)
        for example in tenant.examples:
            table.add_row(
                Text("  " + example.prompt.rstrip("\n")), Text(example.before.strip()), Text(example.after.strip())
            )
        console.print(table)


def _figures(tenant: Tenant) -> list[str]:
    r = tenant.results
    match tenant:
        case Scribe():
            return [
                f"loss per token {r['loss_start']:.2f} -> {r['loss_end']:.2f}; "
                f"of unseen clauses {r['test_loss_start']:.2f} -> {r['test_loss_end']:.2f}"
            ]
        case Poet():
            return [
                f"mean reward {r['reward_start']:.3f} -> {r['reward_end']:.3f}; KL between sampler and trainer "
                f"(kl_sample_train) {r['kl_sample_train']:.1e}, in a step at most {r['kl_sample_train_max']:.1e}",
                f"{tenant.num_steps} steps: {r['seconds_publishing']:.1f} s publishing, {r['seconds_sampling']:.1f} s "
                f"sampling, {r['seconds_training']:.1f} s training",
            ]
        case Judge():
            return [
                f"preference margin {r['margin_start']:.2f} -> {r['margin_end']:.2f}; "
                f"unseen clauses whose plain ending is likelier {r['accuracy_start']:.0%} -> {r['accuracy_end']:.0%}"
            ]
    raise AssertionError(tenant)


def report_clock(costs: Sequence[LoopCost], latency: AddedLatency) -> None:
    """The clock demonstration as a table."""
    say("\nThe clock", " - what a step costs, by how the loop submits it")
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2))
    for column in ("  loop", "cycles per step", "ms per step"):
        table.add_column(column, justify="left" if column.endswith("loop") else "right")
    for cost in costs:
        company = f"with {cost.company} others" if cost.company else "alone"
        table.add_row(f"  {cost.loop}, {company}", f"{cost.cycles_per_step:.2f}", f"{1e3 * cost.seconds_per_step:.1f}")
    console.print(table)
    console.print(
        f"  A step takes {1e3 * latency.engine_s:.1f} ms on the engine alone and {1e3 * latency.service_s:.1f} ms "
        f"through the service, durable: {1e3 * (latency.service_s - latency.engine_s):.1f} ms added."
    )


def say(strong: str, rest: str = "") -> None:
    """A line whose beginning stands out."""
    console.print(Text(strong, style="bold") + Text(rest))


def run(args: argparse.Namespace) -> None:
    """The whole demo."""
    started = time.perf_counter()
    model = resolve_model(args.model, args.workers)
    num_threads = args.threads or max(1, num_cores() // args.workers)
    os.environ |= thread_environment(num_threads)  # for the engine in this process, as a worker has it
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    if args.output.exists():
        shutil.rmtree(args.output)
    args.output.mkdir(parents=True)
    arguments = ["--model", args.model, "--workers", str(args.workers), "--pool", args.pool]
    arguments += ["--threads", str(num_threads)]
    with embedded_pool(arguments) as pool, contextlib.ExitStack() as clients:

        def connect(api_key: str) -> ServiceClient:
            return clients.enter_context(ServiceClient(pool.url, api_key))

        admin = connect(pool.api_key)
        served = admin.get_server_capabilities().supported_models[0]
        settings = Settings.of(served, args.seed, is_quick=args.quick)
        say(f"A pool is ready at {pool.url}", f" after {time.perf_counter() - started:.0f} s: {served.model_name}, "
            f"{served.num_params / 1e6:.1f} million parameters, {args.workers} worker(s) in Ray")  # fmt: skip
        recorder = CycleRecorder(admin)
        keys = {kind.name: create_key(pool, kind.name) for kind in TENANTS}
        tenants: list[Tenant] = [kind(connect(keys[kind.name]), served.model_name, settings) for kind in TENANTS]
        say(f"{len(tenants)} tenants train at the same time", ", each with a key and an adapter of its own:")
        for tenant in tenants:
            console.print(Text(f"  {tenant.name:7} {tenant.task}"))
        train(pool, tenants)
        cycles = recorder.of([tenant.name for tenant in tenants])
        report_tenants(tenants)
        for tenant, kind in zip(tenants, TENANTS, strict=True):
            rest = connect(keys[kind.name]).create_rest_client()
            rest.export_checkpoint(tenant.checkpoint, args.output / "adapters" / tenant.name).result()

        batch = clock_batch(tenants)
        companions = [connect(keys[kind.name]) for kind in TENANTS[:NUM_COMPANIONS]]
        with console.status("Measuring loops ..."):
            costs = measure_loops(admin, companions, served.model_name, settings.rank, batch, settings.clock_steps)
            latency = measure_latency(admin, model, num_threads, settings.rank, batch, settings.clock_steps)
        report_clock(costs, latency)
        usage = admin.create_rest_client().get_usage().result()

    num_together = sum(len(cycle.entries) > 1 for cycle in cycles)
    title = (
        f"tinkerpool: {len(tenants)} tenants train on one {served.model_name}, together in {num_together} clock cycles"
    )
    curves = [Curve(tenant=t.name, task=t.task, measure=t.measure, points=t.points) for t in tenants]
    draw(args.output / "demo.png", cycles, curves, costs, title)
    summary = {
        "model": served.model_name,
        "seed": args.seed,
        "num_cycles": len(cycles),
        "num_shared_cycles": num_together,
        "tenants": {t.name: {"results": t.results, "values": [point.value for point in t.points]} for t in tenants},
        "clock": [asdict(cost) for cost in costs],
        "latency": asdict(latency),
        "tokens": {f"{row.tenant} {row.kind}": row.num_tokens for row in usage.rows},
        "seconds": time.perf_counter() - started,
    }
    (args.output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    say(
        "\nDone",
        f" in {summary['seconds']:.0f} s: {len(cycles)} cycles, {num_together} of them shared; the pool is stopped.",
    )
    console.print(Text(f"  {shown_path(args.output / 'demo.png')}  the picture of the cycles"))
    console.print(
        Text(f"  {shown_path(args.output / 'adapters')}  PEFT directories: {', '.join(t.name for t in tenants)}")
    )
    console.print(Text(f"  {shown_path(args.output / 'summary.json')}  all figures"))


def clock_batch(tenants: Sequence[Tenant]) -> list[types.Datum]:
    """A small batch of the scribe's."""
    [scribe] = [tenant for tenant in tenants if isinstance(tenant, Scribe)]
    return scribe.some_data(8)


def _dim(line: str) -> str:
    return f"Starting a pool ... [dim]{line[:90].replace('[', '(')}[/dim]"


def main() -> int:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a Hugging Face directory (default: the shipped model)")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder for what it makes; replaced")
    parser.add_argument("--quick", action="store_true", help="a few steps only, for tests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--threads", type=int, default=0, help="threads of each worker (default: the cores, shared out)"
    )
    parser.add_argument("--pool", choices=("ray", "local"), default="ray")
    args = parser.parse_args()
    interrupt_at_sigterm()
    try:
        run(args)
    except DemoError as error:
        console.print(Text(f"Error: {error}", style="red"))
        return 1
    except KeyboardInterrupt:
        console.print("Interrupted; the pool is stopped.")
        return 130
    return 0
