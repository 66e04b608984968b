"""The demo's picture: tenants by cycle and worker, the progress of each tenant, and the cost of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.demo.clock import LoopCost
from scripts.demo.tenants import Point
from tinkerpool.v1 import pool_pb2

COLORS = ("#2f6fb0", "#d1802b", "#4f9a57", "#9a63a8", "#b0524f")
INK = "#333333"
CYCLES_SHOWN = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One tenant's progress."""

    tenant: str
    task: str
    measure: str
    points: Sequence[Point]


def draw(
    path: Path, cycles: Sequence[pool_pb2.Cycle], curves: Sequence[Curve], costs: Sequence[LoopCost], title: str
) -> None:
    """Write the picture. `cycles`: the cycles in which the curves' tenants trained, oldest first."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": INK})
    colors = {curve.tenant: COLORS[index % len(COLORS)] for index, curve in enumerate(curves)}
    figure = plt.figure(figsize=(12.5, 10), layout="constrained")
    rows = figure.add_gridspec(3, 1, height_ratios=(1.35, 0.9, 1.15))
    lower = rows[2].subgridspec(1, len(curves) + 1)
    _draw_timeline(figure.add_subplot(rows[0]), shown(cycles, len(curves)), colors)
    _draw_tokens(figure.add_subplot(rows[1]), cycles, colors)
    for index, curve in enumerate(curves):
        _draw_curve(figure.add_subplot(lower[index]), curve, colors[curve.tenant])
    _draw_costs(figure.add_subplot(lower[len(curves)]), costs)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def shown(cycles: Sequence[pool_pb2.Cycle], num_tenants: int) -> Sequence[pool_pb2.Cycle]:
    """Return the consecutive cycles with the most tenants."""

    def num_busy(start: int) -> int:
        window = cycles[start : start + CYCLES_SHOWN]
        numbers = [sum(entry.num_tokens > 0 for entry in cycle.entries) for cycle in window]
        return sum(number + 2 * (number >= num_tenants) for number in numbers)

    starts = range(max(1, len(cycles) - CYCLES_SHOWN + 1))
    best = max(starts, key=lambda start: (num_busy(start), -abs(start - len(cycles) / 3)))
    return cycles[best : best + CYCLES_SHOWN]


def _draw_timeline(axes: Any, cycles: Sequence[pool_pb2.Cycle], colors: Mapping[str, str]) -> None:
    """Draw a lane per tenant and worker: the pass in the tenant's colour, the step phase in black."""
    workers = sorted({entry.worker_id for cycle in cycles for entry in cycle.entries})
    lanes = [(worker, tenant) for worker in workers for tenant in colors]
    origin = start_s(cycles[0]) if cycles else 0.0
    for cycle in cycles:
        begin = 1e3 * (start_s(cycle) - origin)
        in_pass, in_step = 1e3 * cycle.pass_seconds, 1e3 * cycle.step_seconds
        end = begin + in_pass + in_step + 1e3 * cycle.commit_seconds
        axes.axvspan(begin, end, color="#eeeeee" if cycle.cycle_id % 2 else "#f8f8f8", lw=0)
        axes.text((begin + end) / 2, -0.62, str(cycle.cycle_id), ha="center", va="bottom", fontsize=8, color=INK)
        for entry in cycle.entries:
            if entry.tenant not in colors:
                continue
            lane, color = lanes.index((entry.worker_id, entry.tenant)), colors[entry.tenant]
            if entry.num_tokens:
                axes.barh(lane, in_pass, 0.62, begin, color=color)
                axes.text(
                    begin + in_pass / 2, lane, f"{entry.num_tokens}", ha="center", va="center", fontsize=7.5,
                    color="white", clip_on=True,
                )  # fmt: skip
            if entry.is_step:
                axes.barh(lane, max(in_step, 1.0), 0.62, begin + in_pass, color="#222222")
    axes.set_yticks(range(len(lanes)), [f"{tenant}\non {worker}" for worker, tenant in lanes])
    axes.set_ylim(len(lanes) - 0.45, -0.75)
    axes.set_xlabel("milliseconds")
    axes.set_title(
        f"{len(cycles)} clock cycles in a row, with their numbers: in colour a tenant's tokens in the pass that the "
        "cycle's tenants share, in black its optimizer step",
        loc="left", fontsize=9.5,
    )  # fmt: skip
    axes.tick_params(left=False)


def _draw_tokens(axes: Any, cycles: Sequence[pool_pb2.Cycle], colors: Mapping[str, str]) -> None:
    """Draw every cycle of the run as a column."""
    origin = start_s(cycles[0]) if cycles else 0.0
    begins = [start_s(cycle) - origin for cycle in cycles]
    widths = [cycle.pass_seconds + cycle.step_seconds for cycle in cycles]
    bottoms = [0.0] * len(cycles)
    for tenant, color in colors.items():
        tokens = [sum(e.num_tokens for e in cycle.entries if e.tenant == tenant) for cycle in cycles]
        axes.bar(begins, tokens, widths, bottoms, align="edge", color=color, label=tenant, lw=0)
        bottoms = [bottom + more for bottom, more in zip(bottoms, tokens, strict=True)]
    axes.set_title(
        f"All {len(cycles)} cycles in which they trained: tokens in each pass, by tenant", loc="left", fontsize=9.5
    )
    axes.set_xlabel("seconds (in gaps the worker samples)")
    axes.set_ylabel("tokens")
    axes.margins(x=0.005)
    axes.legend(loc="upper right", ncols=len(colors), frameon=False)


def _draw_curve(axes: Any, curve: Curve, color: str) -> None:
    steps, values = [p.step for p in curve.points], [p.value for p in curve.points]
    smooth = [sum(values[max(0, i - 4) : i + 1]) / len(values[max(0, i - 4) : i + 1]) for i in range(len(values))]
    axes.plot(steps, values, color=color, alpha=0.3, lw=1)
    axes.plot(steps, smooth, color=color, lw=2)
    axes.set_title(f"{curve.tenant}: {curve.measure}", loc="left", fontsize=9.5)
    kind, _, goal = curve.task.partition(": ")
    axes.set_xlabel(f"step\n{kind}:\n{goal}")
    axes.margins(x=0.01)


def _draw_costs(axes: Any, costs: Sequence[LoopCost]) -> None:
    labels = [f"{cost.loop}\n{f'with {cost.num_others} others' if cost.num_others else 'alone'}" for cost in costs]
    values = [1e3 * cost.seconds_per_step for cost in costs]
    axes.barh(range(len(costs)), values, 0.6, color=["#777777" if cost.num_others else "#bbbbbb" for cost in costs])
    for index, cost in enumerate(costs):
        axes.text(values[index], index, f" {cost.cycles_per_step:.1f} cycles", va="center", fontsize=8)
    axes.set_yticks(range(len(costs)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.45 * max(values, default=1.0))
    axes.set_title("what a step costs", loc="left", fontsize=9.5)
    axes.set_xlabel("milliseconds per step")
    axes.tick_params(left=False)


def start_s(cycle: pool_pb2.Cycle) -> float:
    """Return when a cycle was planned, in seconds since the Unix epoch."""
    return cycle.start_time.ToNanoseconds() / 1e9
