"""Pictures of the benchmarks' results, from the rows that the benchmarks write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
INK = "#333333"
COLORS = {
    "packed": "#c4c4c4",
    "limit": "#9a9a9a",
    "fused": "#2f6fb0",
    "peft": "#d1802b",
    "processes": "#4f9a57",
    "service": "#9a63a8",
}
LABELS = {
    "packed": "only the base model's matmuls, packed",
    "limit": "limit: the same with torch's matmul",
    "fused": "fused: one pass for all tenants",
    "peft": "sequential PEFT",
    "processes": "one process per tenant",
}


def draw(results: Mapping[str, dict[str, Any]], folder: Path) -> list[Path]:
    """Draw a picture for each item with results; return the pictures' paths."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": INK})
    pictures: dict[str, Callable[[Any, Mapping[str, dict[str, Any]]], bool]] = {
        "bench-engine": _engine,
        "bench-service": _service,
        "bench-memory": _memory,
        "bench-sampling": _sampling,
    }
    drawn = []
    for name, picture in pictures.items():
        figure = plt.figure(layout="constrained")
        if picture(figure, results):
            path = folder / f"{name}.png"
            figure.savefig(path, dpi=110)
            drawn.append(path)
        plt.close(figure)
    return drawn


def _rows(results: Mapping[str, dict[str, Any]], item: str, prefix: str) -> dict[str, Rows]:
    """Return an item's non-empty tables with this prefix, by name."""
    tables = results.get(item, {}).get("tables", {})
    return {name: table["rows"] for name, table in tables.items() if name.startswith(prefix) and table["rows"]}


def _engine(figure: Any, results: Mapping[str, dict[str, Any]]) -> bool:
    """Draw tokens per second against the number of tenants: a row per model, a column per tokens of a tenant."""
    tables = _rows(results, "engine", "engine-")
    if not tables:
        return False
    widths = sorted({row["tokens_per_tenant"] for rows in tables.values() for row in rows})
    figure.set_size_inches(3.1 * len(widths) + 0.6, 2.6 * len(tables) + 0.9)
    axes = figure.subplots(len(tables), len(widths), squeeze=False)
    for line, (name, rows) in zip(axes, tables.items(), strict=True):
        top = max(row["tokens"] / row[side]["median_s"] for row in rows for side in LABELS if side in row)
        for column, (axis, width) in enumerate(zip(line, widths, strict=True)):
            chosen = [row for row in rows if row["tokens_per_tenant"] == width]
            _curves(axis, chosen)
            axis.set_ylim(0, 1.08 * top)
            if column:
                axis.set_yticklabels([])
            else:
                axis.set_ylabel(f"{name.removeprefix('engine-')}\ntokens per second")
        line[0].yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    for axis, width in zip(axes[0], widths, strict=True):
        axis.set_title(f"{width} tokens per tenant", loc="left", fontsize=9.5)
    for axis in axes[-1]:
        axis.set_xlabel("tenants")
    handles = {h.get_label(): h for axis in axes.flat for h in axis.get_lines() if not h.get_label().startswith("_")}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), frameon=False)
    figure.suptitle(
        "Training throughput of all tenants (median, quartiles shaded)", x=0.01, ha="left", fontweight="bold"
    )
    return True


def _curves(axis: Any, rows: Rows) -> None:
    """Draw one panel: a line per side, on a logarithmic axis of tenants."""
    for side, label in LABELS.items():
        having = [row for row in rows if side in row]
        tenants = [row["tenants"] for row in having]
        speeds = [row["tokens"] / row[side]["median_s"] for row in having]
        low, high = ([row["tokens"] / row[side]["quartiles_s"][end] for row in having] for end in (1, 0))
        style = "--" if side in ("limit", "packed") else "-"
        axis.plot(tenants, speeds, style, marker="o", ms=3.5, color=COLORS[side], label=label, lw=1.8)
        axis.fill_between(tenants, low, high, color=COLORS[side], alpha=0.15, lw=0)
    ticks = [2**power for power in range(6)]
    axis.set_xscale("log", base=2)
    axis.set_xlim(0.9, 36)
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.grid(axis="y", color="#eeeeee")
    axis.set_axisbelow(b=True)
    if not rows:
        axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, ha="center", color="#aaaaaa")


def _service(figure: Any, results: Mapping[str, dict[str, Any]]) -> bool:
    """Draw the latency that each way adds to a step (left) and throughput against sequential PEFT (right)."""
    latency = _rows(results, "service", "service-latency").get("service-latency", [])
    throughput = _rows(results, "service", "service-throughput").get("service-throughput", [])
    if not latency or not throughput:
        return False
    figure.set_size_inches(12.5, 0.95 + 0.62 * max(len(latency), len(throughput)) + 1.0)
    left, right = figure.subplots(1, 2)
    _added_latency(left, latency)
    _service_bars(right, throughput)
    return True


def _added_latency(axis: Any, rows: Rows) -> None:
    """Draw milliseconds in addition to the engine's, by way, and the goals."""
    ways = {"in process": "#a9c4e0", "gRPC": "#6b9bcb", "Ray": "#2f6fb0"}
    for index, (way, color) in enumerate(ways.items()):
        positions = [position + (index - 1) * 0.26 for position in range(len(rows))]
        added = [1e3 * row[way]["added_s"] for row in rows]
        label = "gRPC and Ray" if way == "Ray" else way
        axis.barh(positions, added, 0.24, color=color, label=label)
        for position, value in zip(positions, added, strict=True):
            axis.text(max(value, 0), position, f" {value:.1f}", va="center", fontsize=7.5, color=INK)
    for goal, way in ((10, "in process"), (20, "Ray")):
        axis.axvline(goal, color=ways[way], ls=":", lw=1.4, zorder=0, label=f"goal for a lone tenant, {way}: {goal} ms")
    labels = [f"{row['model']}, {row['case']}\n{1e3 * row['engine']['p50_s']:,.0f} ms on the engine" for row in rows]
    axis.set_yticks(range(len(rows)), labels)
    axis.set_ylim(len(rows) - 0.5, -0.7)
    axis.margins(x=0.12)
    axis.set_xlabel("milliseconds")
    axis.set_title("Latency that the service adds to a step of all tenants (median)", loc="left", fontsize=9.5, pad=12)
    _legend_below(axis)


def _service_bars(axis: Any, rows: Rows) -> None:
    """Draw tokens per second of engine, service and PEFT."""
    sides = {"engine": ("engine alone", "#9a9a9a"), "service": ("gRPC and Ray", "#2f6fb0")}
    sides["peft"] = ("sequential PEFT", COLORS["peft"])
    for index, (side, (label, color)) in enumerate(sides.items()):
        positions = [position + (index - 1) * 0.26 for position in range(len(rows))]
        axis.barh(positions, [row["tokens"] / row[side]["median_s"] for row in rows], 0.24, color=color, label=label)
    for position, row in enumerate(rows):
        speed = row["tokens"] / row["service"]["median_s"]
        axis.text(speed, position, f" {row['over_peft']['median']:.2f} x PEFT", va="center", fontsize=8, color=INK)
    axis.set_yticks(range(len(rows)), [f"{row['model']}\n{row['case']}" for row in rows])
    axis.invert_yaxis()
    axis.margins(x=0.18)
    axis.set_xlabel("tokens per second")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.set_title("All tenants, pipelined (tenants x sequences x tokens)", loc="left", fontsize=9.5)
    _legend_below(axis)


def _legend_below(axis: Any) -> None:
    axis.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3)


def _memory(figure: Any, results: Mapping[str, dict[str, Any]]) -> bool:
    """Draw the peak memory of a pass against its tokens (left) and against the vocabulary (right)."""
    tables = _rows(results, "memory", "memory-")
    if len(tables) < 2:
        return False
    by_tokens, by_vocab = tables["memory-tokens"], tables["memory-vocabulary"]
    figure.set_size_inches(11, 4.2)
    left, right = figure.subplots(1, 2)
    _memory_lines(left, by_tokens, "tokens")
    left.set_xlabel("tokens in the pass")
    left.set_title(f"By tokens (vocabulary {by_tokens[0]['vocab_size']:,})", loc="left", fontsize=9.5)
    _memory_lines(right, by_vocab, "vocab_size")
    right.set_xlabel("vocabulary")
    right.set_title(f"By vocabulary ({by_vocab[0]['tokens']:,} tokens)", loc="left", fontsize=9.5)
    for axis in (left, right):
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    left.legend(frameon=False, loc="upper left")
    shape = by_tokens[0]
    figure.suptitle(
        f"Peak memory of a pass: {shape['model']}, hidden {shape['hidden_size']}, {shape['layers']} layers, "
        f"rank {shape['rank']}", x=0.01, ha="left", fontweight="bold",
    )  # fmt: skip
    return True


def _memory_lines(axis: Any, rows: Rows, against: str) -> None:
    """Draw mebibytes of both modes, and of the logits."""
    lines = {
        "engine, activations kept": ("#2f6fb0", "-", [row["kept"]["measured_bytes"] for row in rows]),
        "engine, activations recomputed": ("#4f9a57", "-", [row["recomputed"]["measured_bytes"] for row in rows]),
        "logits of all tokens (calculated; never allocated)": ("#b0524f", "--", [row["logits_bytes"] for row in rows]),
    }
    for label, (color, style, sizes) in lines.items():
        marker = "o" if style == "-" else ""
        axis.plot(
            [row[against] for row in rows], [size / (1 << 20) for size in sizes], style, color=color, label=label,
            marker=marker, ms=4,
        )  # fmt: skip
    axis.set_ylabel("MiB that the pass adds at its peak")
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    axis.grid(axis="y", color="#eeeeee")


def _sampling(figure: Any, results: Mapping[str, dict[str, Any]]) -> bool:
    """Draw tokens sampled per second: one adapter's batch (left), co-batched tenants (right)."""
    batch = _rows(results, "sampling", "sampling-batch").get("sampling-batch", [])
    co_batched = _rows(results, "sampling", "sampling-co-batched").get("sampling-co-batched", [])
    if not batch or not co_batched:
        return False
    figure.set_size_inches(12.5, 1.9 + 0.8 * max(len(batch), 0.6 * len(co_batched)))
    left, right = figure.subplots(1, 2)
    sides = {
        "base": ("engine, base model", COLORS["limit"]),
        "lora": ("engine, one adapter", COLORS["fused"]),
        "generate": ("generate, PEFT", COLORS["peft"]),
        "continuous": ("continuous batching, PEFT", "#e8bd8f"),
    }
    _speed_bars(left, batch, sides, {"lora": lambda row: f"{row['over_generate']['median']:.2f} x generate"})
    left.set_yticks(range(len(batch)), [row["model"] for row in batch])
    left.set_title(
        f"One adapter, {batch[0]['prompts']} prompts of {batch[0]['prompt_tokens']} tokens", loc="left", fontsize=9.5
    )
    sides = {
        "co_batched": ("co-batched tenants", COLORS["fused"]),
        "in_turn": ("one tenant after another", "#a9c4e0"),
    }
    _speed_bars(right, co_batched, sides, {"co_batched": lambda row: f"{row['ratio']['median']:.2f} x"})
    right.set_yticks(range(len(co_batched)), [f"{row['model']}\n{row['case']}" for row in co_batched])
    right.set_title("Tenants with an adapter each (tenants x sequences of each)", loc="left", fontsize=9.5)
    return True


def _speed_bars(
    axis: Any,
    rows: Rows,
    sides: Mapping[str, tuple[str, str]],
    notes: Mapping[str, Callable[[dict[str, Any]], str]],
) -> None:
    """Draw horizontal bars of tokens per second, one group per row, with a note at one side's bar."""
    height = 0.8 / len(sides)
    for index, (side, (label, color)) in enumerate(sides.items()):
        positions = [position + (index - (len(sides) - 1) / 2) * height for position in range(len(rows))]
        speeds = [row["tokens"] / row[side]["median_s"] for row in rows]
        axis.barh(positions, speeds, 0.92 * height, color=color, label=label)
        for position, speed, row in zip(positions, speeds, rows, strict=True):
            note = f"  ({notes[side](row)})" if side in notes else ""
            axis.text(speed, position, f" {speed:,.0f}{note}", va="center", fontsize=8, color=INK)
    axis.invert_yaxis()
    axis.margins(x=0.3)
    axis.set_xlabel("tokens drawn per second")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)
