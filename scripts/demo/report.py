"""The demo's report on the terminal: figures, examples and the cost of a step."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from scripts.demo.clock import AddedLatency, LoopCost
from scripts.demo.tenants import Judge, Poet, Scribe, Tenant
from scripts.terminal import shown_path

console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def report_tenants(tenants: Sequence[Tenant]) -> None:
    """Print the numbers of every tenant, and its samples before and after."""
    for tenant in tenants:
        print_strong(f"\n{tenant.name}", f" - {tenant.task}")
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
    """Print the clock demonstration as a table."""
    print_strong("\nThe clock", " - the cost of a step, by the way the loop submits it")
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2))
    for column in ("  loop", "cycles per step", "ms per step"):
        table.add_column(column, justify="left" if column.endswith("loop") else "right")
    for cost in costs:
        others = f"with {cost.num_others} others" if cost.num_others else "alone"
        table.add_row(f"  {cost.loop}, {others}", f"{cost.cycles_per_step:.2f}", f"{1e3 * cost.seconds_per_step:.1f}")
    console.print(table)
    console.print(
        f"  A step takes {1e3 * latency.engine_s:.1f} ms on the engine alone and {1e3 * latency.service_s:.1f} ms "
        f"through the service, durable: {1e3 * (latency.service_s - latency.engine_s):.1f} ms added."
    )


def print_strong(strong: str, rest: str = "") -> None:
    """Print a line with a bold beginning."""
    console.print(Text(strong, style="bold") + Text(rest))


def report_files(output: Path, tenants: Sequence[str]) -> None:
    """Print the files that the demo has written."""
    console.print(Text(f"  {shown_path(output / 'demo.png')}  the picture of the cycles"))
    console.print(Text(f"  {shown_path(output / 'adapters')}  PEFT directories: {', '.join(tenants)}"))
    console.print(Text(f"  {shown_path(output / 'summary.json')}  all figures"))
