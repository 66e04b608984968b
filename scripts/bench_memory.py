"""Measure the peak memory of a training pass against its tokens and the vocabulary.

    python scripts/bench_memory.py                       # a table, and a picture in memory.png
    python scripts/bench_memory.py --picture /tmp/m.png
    python scripts/bench_memory.py --quick               # a small model, for a test

Every case has a process of its own, which loads a random Qwen3, runs a short pass for what is made once, sets the
kernel's record of its largest resident size back, and runs one forward_backward of four tenants in one pass. What the
record then is above the size before that pass is the figure. Beside it stand the engine's own estimate, from which it
decides what fits, and what the logits of all tokens alone would take, which the engine never holds. Linux only.
"""

from __future__ import annotations

import os

os.environ.setdefault("GOMP_SPINCOUNT", "20000")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import argparse
import ctypes
import multiprocessing
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from workers.engine import EngineConfig, TrainingEngine
from workers.memory import Load, PassMemory
from workers.messages import AdapterInstall, AdapterSpec, Batch, Datum, PassItem

Way = Literal["off", "on"]
"""Whether layers run again in the backward."""

NUM_TENANTS = 4
SEQUENCE_TOKENS_MAX = 256
RANK = 8
MIB = 1 << 20
COLORS: dict[Way | Literal["logits"], str] = {"off": "#2f6fb0", "on": "#4f9a57", "logits": "#b0524f"}
LABELS: dict[Way | Literal["logits"], str] = {
    "off": "engine, layers keep what they compute",
    "on": "engine, layers run again in the backward",
    "logits": "logits of all tokens alone (calculated; never held)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A random Qwen3."""

    hidden_size: int
    num_layers: int
    num_heads: int
    mlp_size: int


SHAPES = {
    "quick": Shape(hidden_size=128, num_layers=4, num_heads=2, mlp_size=384),
    "27m": Shape(hidden_size=512, num_layers=8, num_heads=8, mlp_size=1536),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One pass of all tenants together."""

    shape: Shape
    vocab_size: int
    num_tokens: int
    recompute: Way


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What a pass took, in bytes."""

    measured: int
    estimated: int


def make_model(case: Case, directory: Path) -> Path:
    """Write the random model of a case."""
    shape = case.shape
    config = Qwen3Config(
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_heads // 2,
        head_dim=64,
        intermediate_size=shape.mlp_size,
        vocab_size=case.vocab_size,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def passes(num_tokens: int, vocab_size: int, prev_seq: int) -> list[PassItem]:
    """Every tenant's forward_backward, together `num_tokens` tokens."""
    rng = np.random.default_rng(num_tokens)
    own = num_tokens // NUM_TENANTS
    lengths = [min(SEQUENCE_TOKENS_MAX, own - begin) for begin in range(0, own, SEQUENCE_TOKENS_MAX)]

    def datum(length: int) -> Datum:
        tokens = rng.integers(0, vocab_size, length + 1).astype(np.int32)
        weights = np.ones(length, dtype=np.float32)
        return Datum(tokens=tokens[:-1], loss_inputs={"target_tokens": tokens[1:], "weights": weights})

    return [
        PassItem(
            op_id=f"{tenant}/{prev_seq + 1}",
            adapter_id=f"tenant{tenant}",
            prev_seq=prev_seq,
            seq=prev_seq + 1,
            chunk_index=0,
            num_chunks=1,
            data=tuple(datum(length) for length in lengths),
            loss_fn="cross_entropy",
            loss_config={},
            backward=True,
        )
        for tenant in range(NUM_TENANTS)
    ]


def measure(case: Case) -> Figure:
    """Load and run a case in this process."""
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as directory:
        config = EngineConfig(
            model=str(make_model(case, Path(directory))), pass_tokens_max=case.num_tokens, recompute=case.recompute
        )
        engine = TrainingEngine(config)
    flags = {"train_attn": True, "train_mlp": True, "train_unembed": True}
    specs = [AdapterSpec(adapter_id=f"tenant{n}", rank=RANK, alpha=32.0, seed=n, **flags) for n in range(NUM_TENANTS)]
    installs = tuple(AdapterInstall(spec=spec, state=None) for spec in specs)
    _run(engine, passes(NUM_TENANTS * 16, case.vocab_size, 0), installs)
    items = passes(case.num_tokens, case.vocab_size, 1)
    ctypes.CDLL(None).malloc_trim(0)  # what was freed while loading is not the pass's to reuse
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    _run(engine, items)
    model = engine.base_model
    load = Load(
        num_tokens=case.num_tokens,
        lengths=[len(datum.tokens) for datum in items[0].data],
        rank=RANK,
        num_adapters=NUM_TENANTS,
        pending_values=sum(engine.bank.entry(spec.adapter_id).layout.num_values for spec in specs),
    )
    memory = PassMemory(model.model, model.config, model.group_shapes)
    estimated = memory.peak_bytes(load, backward=True, recompute=case.recompute == "on")
    return Figure(measured=_status_bytes("VmHWM") - before, estimated=estimated)


def _run(engine: TrainingEngine, items: Sequence[PassItem], installs: tuple[AdapterInstall, ...] = ()) -> None:
    results = engine.run(Batch(epoch=1, cycle_id=0, installs=installs, items=tuple(items))).results
    assert not any(result.error for result in results), results


def _status_bytes(name: str) -> int:
    """A size of this process as the kernel has it: VmRSS now, VmHWM at the most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise OSError(f"/proc/self/status has no {name}; this benchmark needs Linux")


def _measure_into(connection: Connection, case: Case) -> None:
    connection.send(measure(case))


def measure_apart(case: Case) -> Figure:
    """The same in a process that has run nothing before. Raises RuntimeError if it fails."""
    # Forked before any operation of torch has run here, so without its threads, and with the libraries loaded.
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_measure_into, args=(theirs, case))
    process.start()
    theirs.close()
    try:
        figure: Figure = ours.recv()
    except EOFError:
        raise RuntimeError(f"{case} could not be measured; see above") from None
    finally:
        process.join()
    return figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One row of the table."""

    vocab_size: int
    num_tokens: int
    figures: dict[Way, Figure]

    @property
    def logits(self) -> int:
        """Bytes of the logits of all tokens in fp32."""
        return 4 * self.num_tokens * self.vocab_size

    def mebibytes(self, line: Way | Literal["logits"]) -> float:
        """Of a line of the picture."""
        return (self.logits if line == "logits" else self.figures[line].measured) / MIB


def measure_point(shape: Shape, vocab_size: int, num_tokens: int) -> Point:
    """Both ways."""
    figures = {
        way: measure_apart(Case(shape=shape, vocab_size=vocab_size, num_tokens=num_tokens, recompute=way))
        for way in get_args(Way)
    }
    return Point(vocab_size=vocab_size, num_tokens=num_tokens, figures=figures)


def row(point: Point) -> str:
    """A row of the Markdown table."""
    cells = [f"{point.vocab_size:,}", f"{point.num_tokens:,}"]
    for figure in point.figures.values():
        cells += [f"{figure.measured / MIB:,.0f}", f"{figure.estimated / MIB:,.0f}"]
    return f"| {' | '.join([*cells, f'{point.logits / MIB:,.0f}'])} |"


def draw(path: Path, by_tokens: Sequence[Point], by_vocab: Sequence[Point], title: str) -> None:
    """Write the picture: memory against tokens, and against the vocabulary."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    _lines(left, by_tokens, [point.num_tokens for point in by_tokens])
    left.set_xlabel("tokens in the pass")
    left.set_title(f"By tokens (vocabulary {by_tokens[0].vocab_size:,})", loc="left")
    _lines(right, by_vocab, [point.vocab_size for point in by_vocab])
    right.set_xscale("log", base=2)
    right.set_xticks([point.vocab_size for point in by_vocab], [f"{point.vocab_size:,}" for point in by_vocab])
    right.minorticks_off()
    right.set_xlabel("vocabulary")
    right.set_title(f"By vocabulary ({by_vocab[0].num_tokens:,} tokens)", loc="left")
    left.legend(frameon=False, loc="upper left")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _lines(axes: Any, points: Sequence[Point], xs: Sequence[int]) -> None:
    for line, color in COLORS.items():
        style = {"linestyle": "--"} if line == "logits" else {"marker": "o", "markersize": 4}
        axes.plot(xs, [point.mebibytes(line) for point in points], color=color, label=LABELS[line], **style)
    axes.set_ylabel("MiB that the pass adds at its peak")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#e6e6e6")


def main() -> None:
    """Read the command line, measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[1024, 4096, 16384, 65536, 131072])
    parser.add_argument("--picture", type=Path, default=Path("memory.png"))
    parser.add_argument("--quick", action="store_true", help="a small model and few cases")
    args = parser.parse_args()
    name, tokens, vocabularies = "27m", sorted(args.tokens), sorted(args.vocabularies)
    if args.quick:
        name, tokens, vocabularies = "quick", [512, 2048], [1024]
    fixed_vocab, fixed_tokens = vocabularies[min(1, len(vocabularies) - 1)], tokens[len(tokens) // 2]
    wanted = dict.fromkeys([*((fixed_vocab, t) for t in tokens), *((v, fixed_tokens) for v in vocabularies)])
    print("| vocabulary | tokens | layers keep all, MiB | estimated | layers run again, MiB | estimated | all logits |")
    print("|---|---|---|---|---|---|---|")
    points = {}
    for vocab_size, num_tokens in wanted:
        points[vocab_size, num_tokens] = measure_point(SHAPES[name], vocab_size, num_tokens)
        print(row(points[vocab_size, num_tokens]), flush=True)
    shape = SHAPES[name]
    draw(
        args.picture,
        [points[fixed_vocab, num_tokens] for num_tokens in tokens],
        [points[vocab_size, fixed_tokens] for vocab_size in vocabularies],
        f"Peak memory of a pass: random Qwen3, hidden {shape.hidden_size}, {shape.num_layers} layers, rank {RANK}",
    )
    print(f"\nThe picture is in {args.picture}.")


if __name__ == "__main__":
    main()
