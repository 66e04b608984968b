"""The figures of attacks: what was measured, which goals it missed, as JSON and as a Markdown table. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from scripts.attack.attack import Attack
from scripts.attack.neighbour import KINDS, NEW_GRPC, NEW_HTTP, Phase
from scripts.attack.pool import STOP_LIMIT_S
from scripts.attack.probe import LoopFigures

CPU_MS_MAX = 100.0
"""Processor time of one callback of the coordinator's event loop."""
MEMORY_GROWTH_MAX = 600_000_000
"""Bytes that the coordinator may take above its idle size."""
LOG_BYTES_SHOWN = 100_000
CYCLE_MS_MAX = 2000.0
"""One cycle's budget: `cycle_s_max`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Measurements of one attack. Times in milliseconds unless named otherwise; memory in bytes."""

    attack: str
    scale: float
    attack_s: float
    solo: Mapping[str, tuple[float, float] | None]
    """p50 and p99 of the neighbour's calls alone, by kind."""
    attacked: Mapping[str, tuple[float, float] | None]
    failures: Mapping[str, int]
    """Calls of the neighbour under attack that failed or were refused, by kind."""
    reasons: Mapping[str, int]
    idle_bytes: int
    peak_bytes: int
    after_bytes: int
    stopped_at_bytes: int
    """Memory at which the attack was stopped; 0: it was not."""
    longest_cpu_ms: float
    """Processor time of the longest callback of the coordinator's event loop."""
    longest_name: str
    longest_collection_ms: float
    longest_cpu_ms_solo: float
    stall_ms: float
    """The longest time for which the event loop started no timer, by the clock."""
    stall_ms_p999: float
    stop_s: float | None
    """From SIGTERM to the coordinator's end; None: it did not end, or it had ended before."""
    exit_code: int | None
    """Of a coordinator that ended under the attack."""
    log_bytes: int
    tally: Mapping[str, int]
    note: str

    def missed(self) -> list[str]:
        """Return the goals that the pool missed, as short texts."""
        goals = {
            "processor time": self.longest_cpu_ms <= CPU_MS_MAX,
            "memory": self.peak_bytes <= self.idle_bytes + MEMORY_GROWTH_MAX,
            "coordinator ended": self.exit_code is None,
            "stop": self.stop_s is not None and self.stop_s <= STOP_LIMIT_S,
            "neighbour's calls": not self.failures,
        }
        for kind in KINDS:
            solo, attacked = self.solo.get(kind), self.attacked.get(kind)
            if kind not in (NEW_HTTP, NEW_GRPC) and solo and attacked:
                goals[f"p99 of a {kind}"] = attacked[1] <= 2 * solo[1] + CYCLE_MS_MAX
        return [goal for goal, is_met in goals.items() if not is_met]


def figures_of(
    attack: Attack,
    scale: float,
    *,
    phases: tuple[Phase, Phase],
    loops: tuple[LoopFigures, LoopFigures],
    memory_bytes: tuple[int, int, int],
    more: Mapping[str, Any],
) -> Figures:
    """Return the figures: neighbour and event loop alone and under attack; memory idle, at its peak and after."""
    (solo, attacked), (solo_loop, loop) = phases, loops
    late_ms = sorted(loop.late_ms)
    return Figures(
        attack=attack.name,
        scale=scale,
        solo=_percentiles(solo),
        attacked=_percentiles(attacked),
        failures=dict(attacked.failures),
        reasons=dict(attacked.reasons.most_common(5)),
        idle_bytes=memory_bytes[0],
        peak_bytes=memory_bytes[1],
        after_bytes=memory_bytes[2],
        longest_cpu_ms=loop.longest_cpu_ms,
        longest_name=loop.longest_name,
        longest_collection_ms=loop.longest_collection_ms,
        longest_cpu_ms_solo=solo_loop.longest_cpu_ms,
        stall_ms=late_ms[-1] if late_ms else 0.0,
        stall_ms_p999=late_ms[int(len(late_ms) * 0.999)] if late_ms else 0.0,
        **more,
    )


def table(all_figures: Iterable[Figures]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield (
        "| attack | step p50 / p99, ms | save p50 / p99, ms | sample p50 / p99, ms | failed calls | memory, MB "
        "| longest callback, ms | stall, ms | stop, s | missed |"
    )
    yield "|---" * 10 + "|"
    for figures in all_figures:
        cells = [f"`{figures.attack}`"]
        cells += [_change(figures.solo.get(kind), figures.attacked.get(kind)) for kind in KINDS[:3]]
        cells += [
            ", ".join(f"{num} {kind}" for kind, num in figures.failures.items()) or "0",
            _memory(figures),
            f"{figures.longest_cpu_ms:,.0f}",
            f"{figures.stall_ms:,.0f}",
            "killed" if figures.stop_s is None else f"{figures.stop_s:.1f}",
            ", ".join(figures.missed()) or "-",
        ]
        yield f"| {' | '.join(cells)} |"


def comparison(before: Mapping[str, Figures], after: Mapping[str, Figures]) -> Iterator[str]:
    """Yield the lines of a Markdown table of two versions, by the name of the attack. A goal that is missed is bold."""
    yield "| attack | before | after |"
    yield "|---|---|---|"
    for name in {**before, **after}:
        cells = [_sentence(found) if (found := version.get(name)) else "not measured" for version in (before, after)]
        yield f"| `{name}` | {' | '.join(cells)} |"


def details(figures: Figures) -> Iterator[str]:
    """Yield what the table has no room for."""
    yield f"  {figures.attack_s:.0f} s of attack; the pool's answers: {_counts(figures.tally) or 'none'}"
    yield f"  longest callback: {figures.longest_name} ({figures.longest_cpu_ms_solo:.0f} ms alone)"
    yield f"  longest garbage collection: {figures.longest_collection_ms:.0f} ms"
    yield f"  stall p99.9 {figures.stall_ms_p999:,.0f} ms; log {figures.log_bytes:,} bytes"
    for kind in (NEW_HTTP, NEW_GRPC):
        yield f"  {kind}: {_change(figures.solo.get(kind), figures.attacked.get(kind))} ms"
    if figures.reasons:
        yield f"  failed: {_counts(figures.reasons)}"
    if figures.note:
        yield f"  {figures.note}"


def _sentence(figures: Figures) -> str:
    """Return the figures in one cell of a table."""
    missed = figures.missed()
    parts = []
    for kind in KINDS[:3]:
        solo, attacked = figures.solo.get(kind), figures.attacked.get(kind)
        change = f"{solo[1]:,.0f} to {attacked[1]:,.0f} ms" if solo and attacked else "none ended"
        parts.append((f"p99 of a {kind}", f"{kind} {change}"))
    num_failed = sum(figures.failures.values())
    parts += [
        ("neighbour's calls", f"{num_failed} failed" if num_failed else ""),
        ("memory", f"{figures.idle_bytes / 1e6:,.0f} to {figures.peak_bytes / 1e6:,.0f} MB"),
        ("processor time", f"callback {figures.longest_cpu_ms:,.0f} ms"),
        ("", f"late {figures.stall_ms:,.0f} ms"),
        ("coordinator ended", "" if figures.exit_code is None else f"coordinator ended ({figures.exit_code})"),
        ("stop", f"stop {figures.stop_s:.1f} s" if figures.stop_s is not None else "no stop"),
        ("", f"log {figures.log_bytes / 1e6:,.1f} MB" if figures.log_bytes > LOG_BYTES_SHOWN else ""),
        ("", figures.note),
    ]
    return "; ".join(f"**{text}**" if goal in missed else text for goal, text in parts if text)


def _percentiles(phase: Phase) -> dict[str, tuple[float, float] | None]:
    found = {kind: (phase.percentile_ms(kind, 50), phase.percentile_ms(kind, 99)) for kind in KINDS}
    return {kind: (p50, p99) if p50 is not None and p99 is not None else None for kind, (p50, p99) in found.items()}


def _change(solo: tuple[float, float] | None, attacked: tuple[float, float] | None) -> str:
    return f"{_pair(solo)} -> {_pair(attacked)}"


def _pair(pair: tuple[float, float] | None) -> str:
    return f"{pair[0]:,.0f} / {pair[1]:,.0f}" if pair else "none"


def _memory(figures: Figures) -> str:
    sizes = (figures.idle_bytes, figures.peak_bytes, figures.after_bytes)
    text = " -> ".join(f"{size / 1e6:,.0f}" for size in sizes)
    return f"{text} (stopped)" if figures.stopped_at_bytes else text


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {num:,}" for name, num in counts.items())
