"""Measure the peak memory of a training pass against its tokens and against the vocabulary.

    python -m scripts.bench.memory --quick
    python -m scripts.bench.memory
    python -m scripts.bench.memory --tokens 8192 16384 --vocabularies 4096 --threads 8

Every case runs in its own process, which loads a random Qwen3, runs a short pass (for allocations that happen once),
resets the kernel's record of its peak resident size, and runs one forward_backward of four tenants in one pass. The
figure is the new peak minus the size before that pass. For comparison: the engine's estimate, from which it decides
whether a pass fits, and the size of all tokens' logits, which the engine never holds. Linux only. The processes are
forked, so this process must not run a torch operation before.
"""

from __future__ import annotations

import functools
import multiprocessing
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

from scripts.bench.common import Column, Results, Row, parser
from scripts.bench.models import SHAPES, random_data, write_random_model
from workers.contract.messages import AdapterInstall, AdapterSpec, Batch, PassItem
from workers.contract.settings import EngineSettings
from workers.engine import TrainingEngine
from workers.host.allocator import without_holes
from workers.training.memory import USED_FRACTION, Load, PassMemory

NUM_TENANTS = 4
SEQUENCE_TOKENS_MAX = 256
RANK = 8
MIB = 1 << 20
MODES: dict[str, Literal["off", "on"]] = {"kept": "off", "recomputed": "on"}
"""By name in the rows: whether the backward recomputes activations instead of keeping them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One pass of all tenants together."""

    shape: str
    """One of `SHAPES`."""
    vocab_size: int
    num_tokens: int
    """Of all tenants together."""
    recompute: Literal["off", "on"]
    num_threads: int


def passes(num_tokens: int, vocab_size: int, prev_seq: int) -> list[PassItem]:
    """Return every tenant's forward_backward, `num_tokens` tokens in total."""
    own = num_tokens // NUM_TENANTS
    lengths = [min(SEQUENCE_TOKENS_MAX, own - begin) for begin in range(0, own, SEQUENCE_TOKENS_MAX)]
    return [
        PassItem(
            op_id=f"{tenant}/{prev_seq + 1}",
            adapter_id=f"tenant{tenant}",
            prev_seq=prev_seq,
            seq=prev_seq + 1,
            chunk_index=0,
            num_chunks=1,
            data=random_data(tenant, lengths, vocab_size),
            loss_fn="cross_entropy",
            loss_config={},
            backward=True,
        )
        for tenant in range(NUM_TENANTS)
    ]


def measure(case: Case) -> Row:
    """Run a case in this process; return the measured bytes of its pass and the engine's estimate."""
    with tempfile.TemporaryDirectory() as directory:
        with without_holes():  # a worker creates no model, so its heap has no holes
            model = write_random_model(case.shape, Path(directory), vocab_size=case.vocab_size)
        settings = EngineSettings(
            model_path=str(model),
            num_threads=case.num_threads,
            pass_tokens_max=case.num_tokens,
            recompute=case.recompute,
            cache_bytes_max=0,
        )
        engine = TrainingEngine(settings)
    flags = {"train_attn": True, "train_mlp": True, "train_unembed": True}
    specs = [AdapterSpec(adapter_id=f"tenant{n}", rank=RANK, alpha=32.0, seed=n, **flags) for n in range(NUM_TENANTS)]
    installs = tuple(AdapterInstall(spec=spec, state=None) for spec in specs)
    _run(engine, passes(NUM_TENANTS * 16, case.vocab_size, 0), installs)
    items = passes(case.num_tokens, case.vocab_size, 1)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = _status_bytes("VmRSS")
    _run(engine, items)
    base_model = engine.base_model
    load = Load(
        num_tokens=case.num_tokens,
        lengths=[len(datum.tokens) for datum in items[0].data],
        rank=RANK,
        num_adapters=NUM_TENANTS,
        pending_values=sum(engine.bank.entry(spec.adapter_id).layout.num_values for spec in specs),
    )
    memory = PassMemory(base_model)
    estimated = memory.peak_bytes(load, backward=True, recompute=case.recompute == "on")
    return {"measured_bytes": _status_bytes("VmHWM") - before, "estimated_bytes": estimated}


def _run(engine: TrainingEngine, items: Sequence[PassItem], installs: tuple[AdapterInstall, ...] = ()) -> None:
    results = engine.run(Batch(epoch=1, cycle_id=0, installs=installs, items=tuple(items))).results
    assert not any(result.error for result in results), results


def _status_bytes(name: str) -> int:
    """Return a size of this process in the kernel's record: VmRSS (current) or VmHWM (peak)."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise OSError(f"/proc/self/status has no {name}; this benchmark needs Linux")


def _measure_into(connection: Connection, case: Case) -> None:
    connection.send(measure(case))


def measure_in_new_process(case: Case) -> Row:
    """Run a case in a fresh process. Raises RuntimeError if it fails."""
    # Forked with the libraries loaded, but before torch runs anything and starts threads.
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_measure_into, args=(theirs, case))
    process.start()
    theirs.close()
    try:
        figures: Row = ours.recv()
    except EOFError:
        raise RuntimeError(f"{case} could not be measured; its error is above") from None
    finally:
        process.join()
    return figures


def measure_point(shape: str, num_threads: int, vocab_size: int, num_tokens: int) -> Row:
    """Measure one row: both modes, and the bytes of the logits of all tokens in fp32."""
    hidden_size, num_layers, *_ = SHAPES[shape]
    row: Row = {
        "model": shape,
        "hidden_size": hidden_size,
        "layers": num_layers,
        "rank": RANK,
        "vocab_size": vocab_size,
        "tokens": num_tokens,
        "logits_bytes": 4 * num_tokens * vocab_size,
    }
    for name, mode in MODES.items():
        row[name] = measure_in_new_process(
            Case(shape=shape, vocab_size=vocab_size, num_tokens=num_tokens, recompute=mode, num_threads=num_threads)
        )
    return row


def columns() -> tuple[Column, ...]:
    """Return the columns of both tables."""
    return (
        Column("model", lambda r: r["model"]),
        Column("vocabulary", lambda r: f"{r['vocab_size']:,}"),
        Column("tokens", lambda r: f"{r['tokens']:,}"),
        Column("activations kept", lambda r: _mebibytes(r["kept"]["measured_bytes"])),
        Column("estimated", lambda r: _mebibytes(r["kept"]["estimated_bytes"])),
        Column("activations recomputed", lambda r: _mebibytes(r["recomputed"]["measured_bytes"])),
        Column("estimated", lambda r: _mebibytes(r["recomputed"]["estimated_bytes"])),
        Column("logits of all tokens", lambda r: _mebibytes(r["logits_bytes"])),
    )


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.0f} MiB"


def main() -> None:
    """Read the command line, measure, print."""
    command = parser(__doc__)
    command.add_argument(
        "--tokens", type=int, nargs="+", help="of a pass, with the smallest vocabulary (default: 512 to 8,192)"
    )
    command.add_argument(
        "--vocabularies", type=int, nargs="+", help="with the middle one of --tokens (default: 4,096 to 131,072)"
    )
    args = command.parse_args()
    tokens = sorted(args.tokens or ([512, 2048] if args.quick else [512, 1024, 2048, 4096, 8192]))
    vocabularies = sorted(args.vocabularies or ([1024] if args.quick else [4096, 32768, 131072]))
    if tokens[0] < NUM_TENANTS:
        command.error(f"--tokens has {tokens[0]}; each of the {NUM_TENANTS} tenants needs one")
    point = functools.cache(functools.partial(measure_point, "4m" if args.quick else "27m", args.threads))
    with Results("memory", args) as results:
        sweeps = {
            "memory-tokens": [(vocabularies[0], num_tokens) for num_tokens in tokens],
            "memory-vocabulary": [(vocab_size, tokens[len(tokens) // 2]) for vocab_size in vocabularies],
        }
        for name, cases in sweeps.items():
            table = results.table(name, columns())
            for vocab_size, num_tokens in cases:
                table.add(point(vocab_size, num_tokens))
        figures = [row[mode] for table in results.tables for row in table.rows for mode in MODES]
        worst = max(USED_FRACTION * figure["measured_bytes"] / figure["estimated_bytes"] for figure in figures)
        results.goal(
            "memory: peak of a pass against the memory that the engine requires for it, the worst",
            worst,
            at_most=1,
            unit=" x",
        )


if __name__ == "__main__":
    main()
