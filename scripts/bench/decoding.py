"""Show where a decode step's time goes: in the engine with an adapter and without, and in transformers' `generate`.

    python -m scripts.bench.decoding --quick
    python -m scripts.bench.decoding
    python -m scripts.bench.decoding --models 4m --prompts 8

A batch of prompts of one adapter, or of the base model alone, draws a token each per step. A step's time is the
difference between drawing many tokens and drawing few, so prompts are not in it; the sides take turns. By kind of work
it is the difference of two runs under torch's profiler, which counts the time of every operator without that of those
it calls; what no operator accounts for is Python, dispatch and waiting. Prints Markdown tables.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any, NamedTuple

from scripts.bench.common import (
    Column,
    Effort,
    Results,
    Row,
    Timing,
    parser,
    shown_ms,
    shown_ratio,
    shown_time,
    turn_about,
)
from scripts.bench.models import Model, add_model_options, chosen_models, open_models
from scripts.bench.sides.samplers import Ask, EngineSampler, Generate, Prompts

# isort: split
import torch  # after bench_models, which sets torch's threads up

from scripts.bench.kinds import Kinds, profiled
from workers.sampling import drawing, sampler

DRAWING = "drawing"
"""The engine draws in NumPy, which torch's profiler does not see: it is marked by this name."""
KINDS: Kinds = (
    (DRAWING, ("multinomial", "log_softmax", "exponential", "argmax", "isin")),
    ("attention", ("attention", "aten::bmm", "_softmax", "amax")),
    ("activation", ("silu", "gelu", "sigmoid")),
    ("norms", ("linalg_vector_norm", "rsqrt", "aten::pow", "aten::mean")),
    ("products and sums of activations", ("aten::mul", "aten::add", "aten::sub", "aten::div", "aten::neg")),
    ("copies", ("copy", "aten::cat", "clone", "fill", "zero", "index", "embedding", "pad", "gather", "where")),
)
SIDES = ("engine", "base", "generate")
FEW, MANY = 16, 48
"""Tokens drawn in the two runs of a side."""
PROMPT_TOKENS = 32
COLUMNS = (
    Column("model", lambda r: r["model"]),
    Column("kind of work", lambda r: r["kind"]),
    Column("engine", lambda r: shown_ms(r["engine_s"])),
    Column("engine, base model", lambda r: shown_ms(r["base_s"])),
    Column("`generate`", lambda r: shown_ms(r["generate_s"])),
)
STEP_COLUMNS = (
    Column("model", lambda r: r["model"]),
    Column("sequences", lambda r: str(r["sequences"])),
    Column("engine, a step", lambda r: shown_time(r["engine"])),
    Column("engine, a step of the base model", lambda r: shown_time(r["base"])),
    Column("`generate`, a step", lambda r: shown_time(r["generate"])),
    Column("base model / engine", lambda r: shown_ratio(r["base_over_engine"])),
    Column("`generate` / engine", lambda r: shown_ratio(r["generate_over_engine"])),
)


class Spent(NamedTuple):
    """By a step, on a kind of work."""

    seconds: float
    calls: float
    """Of operators."""


class Bench:
    """One model's sides; engine and `generate` sample from the same weights."""

    def __init__(self, model: Model, args: argparse.Namespace) -> None:
        self.model = model
        self.num_prompts: int = args.prompts
        self._prompts = Prompts(model.vocab_size)
        self._engine = EngineSampler(model, 1, args.threads)
        weights = self._engine.fused.weights()[0]
        self._generates = {count: Generate(model, weights, count) for count in (FEW, MANY)}
        for generate in self._generates.values():
            generate.use_threads(args.threads)

    def step(self, effort: Effort) -> Row:
        """A step's time on every side, without a profiler."""
        sides = {f"{side} {count}": partial(self._draw, side, count) for side in SIDES for count in (FEW, MANY)}
        timings = turn_about(sides, effort)
        steps = {}
        for side in SIDES:
            pairs = zip(timings[f"{side} {FEW}"].seconds, timings[f"{side} {MANY}"].seconds, strict=True)
            steps[side] = Timing(tuple((many_s - few_s) / (MANY - FEW) for few_s, many_s in pairs))
        ratios = {f"{side}_over_engine": steps[side].ratio_to(steps["engine"]) for side in SIDES[1:]}
        row: Row = {"model": self.model.name, "sequences": self.num_prompts, **ratios}
        return row | {side: step.summary() for side, step in steps.items()}

    def kinds(self) -> list[Row]:
        """A step's time on every side by kind of work, under the profiler; the engine's longest comes first."""
        by_side = {side: self._by_kind(side) for side in SIDES}
        nothing = Spent(0.0, 0.0)
        names = sorted(set().union(*by_side.values()), key=lambda kind: -by_side["engine"].get(kind, nothing).seconds)
        rows: list[Row] = []
        for kind in names:
            row: Row = {"model": self.model.name, "kind": kind}
            for side, spent in by_side.items():
                row[f"{side}_s"], row[f"{side}_calls"] = spent.get(kind, nothing)
            rows.append(row)
        return rows

    def _draw(self, side: str, count: int) -> None:
        """Draw so many tokens after each of new prompts."""
        prompts = self._prompts.draw_many(self.num_prompts, PROMPT_TOKENS)
        if side == "generate":
            self._generates[count].sample(prompts)
            return
        tenant = 0 if side == "engine" else None
        self._engine.sample([Ask(prompt=prompt, num_tokens=count, tenant=tenant) for prompt in prompts])

    def _by_kind(self, side: str) -> dict[str, Spent]:
        """What a step takes by kind of work: the more of many tokens."""
        few, many = (profiled(partial(self._draw, side, count), KINDS) for count in (FEW, MANY))
        return {
            kind: Spent(
                (spent_s - few.seconds.get(kind, 0.0)) / (MANY - FEW),
                (many.calls.get(kind, 0) - few.calls.get(kind, 0)) / (MANY - FEW),
            )
            for kind, spent_s in many.seconds.items()
        }


def _mark_drawing() -> None:
    """Let the profiler see what the engine draws in NumPy."""
    draw_rows = drawing.draw_rows

    def marked(*args: Any) -> list[int]:
        with torch.profiler.record_function(DRAWING):
            return draw_rows(*args)

    vars(sampler)["draw_rows"] = marked


def main() -> None:
    """Read the command line, measure, print."""
    command = parser(__doc__)
    add_model_options(command)
    command.add_argument("--prompts", type=int, default=32, help="sequences of the batch")
    args = command.parse_args()
    effort = Effort(seconds=0, rounds_min=2, rounds_max=2) if args.quick else Effort(seconds=15)
    _mark_drawing()
    with Results("decoding", args) as results, open_models(chosen_models(args)) as models:
        steps = results.table("decoding-steps", STEP_COLUMNS)
        benches = [Bench(model, args) for model in models]
        for bench in benches:
            steps.add(bench.step(effort))
        kinds = results.table("decoding-kinds", COLUMNS)
        for bench in benches:
            for row in bench.kinds():
                kinds.add(row)


if __name__ == "__main__":
    main()
