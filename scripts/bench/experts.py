"""Measure a mixture of experts: a layer of them alone, and the training of several tenants together.

    python -m scripts.bench.experts --quick
    python -m scripts.bench.experts                        # two minutes

layer       forward and backward of a layer of experts without adapters, against transformers' grouped products of
            the same weights and rows; and with the adapters of four tenants
padding     the few rows of a decode step, without a backward: padded for each expert to the minimum that the trial of a
            model that is loaded has found, against none, with which bits depend on the company, and against 16
together    eight tenants' steps in one pass against the same steps one after another

The sides alternate on the same rows; their outputs and gradients must agree. Prints Markdown tables.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from scripts.bench.common import (
    Column,
    Effort,
    Results,
    Row,
    measure_alternating,
    parser,
    shown_ratio,
    shown_time,
)
from scripts.bench.models import MIXTURE, Case, Model, add_model_options, open_models
from scripts.bench.sides.training import Fused
from workers.model.expert_products import Dispatch, ExpertLayer
from workers.model.expert_shares import ExpertSegments
from workers.model.segments import Routing, Segment
from workers.rows import AdapterViews, RowLayout

RANK, NUM_TENANTS = 32, 4
TOKENS, QUICK_TOKENS = (64, 256, 1024), (32,)
GOALS = {64: 1.3, 256: 1.1, 1024: 1.1}
"""Most times the duration of transformers' products, by tokens."""
ADDED_AT, ADDED_MAX = 256, 0.5
TOGETHER, QUICK_TOGETHER = Case(8, 1, 64), Case(2, 1, 16)
DECODED, QUICK_DECODED = (4, 32, 128), (4,)
"""Sequences of a decode step."""
PADDED = 16
TOLERANCE = 1e-4
"""Largest difference of the sides, of the largest value."""
LAYER_COLUMNS = (
    Column("tokens", lambda r: f"{r['tokens']:,}"),
    Column("frozen, median (quartiles)", lambda r: shown_time(r["frozen"])),
    Column("transformers, grouped", lambda r: shown_time(r["grouped"])),
    Column("frozen / transformers", lambda r: shown_ratio(r["over_grouped"])),
    Column(f"with {NUM_TENANTS} adapters of rank {RANK}", lambda r: shown_time(r["adapted"])),
    Column("with adapters / frozen", lambda r: shown_ratio(r["over_frozen"])),
)
PADDING_COLUMNS = (
    Column("sequences", lambda r: str(r["sequences"])),
    Column("minimum", lambda r: str(r["minimum"])),
    Column("to the minimum, median (quartiles)", lambda r: shown_time(r["least"])),
    Column("without padding", lambda r: shown_time(r["without"])),
    Column("to the minimum / without", lambda r: shown_ratio(r["over_without"])),
    Column(f"to {PADDED} / without", lambda r: shown_ratio(r["sixteen_over_without"])),
)
TOGETHER_COLUMNS = (
    Column("tenants x sequences x tokens", lambda r: r["case"]),
    Column("together, median (quartiles)", lambda r: shown_time(r["together"])),
    Column("one after another", lambda r: shown_time(r["apart"])),
    Column("one after another / together", lambda r: shown_ratio(r["over_together"])),
)


class Layer:
    """The first layer of experts of an engine's model, with random rows and adapters, and transformers' own."""

    def __init__(self, fused: Fused, model: Model, num_tokens: int) -> None:
        base_model = fused.engine.base_model
        experts = base_model.expert_layers[0]
        generator = torch.Generator().manual_seed(num_tokens)
        self._x, self._dout = torch.randn(2, num_tokens, base_model.hidden_size, generator=generator)
        scores = torch.randn(num_tokens, experts.num_experts, generator=generator)
        self._weights, self._choices = scores.softmax(-1).topk(experts.num_choices)
        self._experts, self._layer = experts, ExpertLayer(experts.weights, 0, 1)
        layout = RowLayout(experts.shapes, RANK, ("mlp",))
        values = torch.randn(NUM_TENANTS, layout.num_values, generator=generator) / base_model.hidden_size
        slab = layout.views(values, torch.zeros_like(values))
        length = num_tokens // NUM_TENANTS
        segments = [
            Segment(
                slot * length,
                (slot + 1) * length,
                AdapterViews(slab, [views and views.row(slot) for views in slab], slot, 1.0),
            )
            for slot in range(NUM_TENANTS)
        ]
        rows_min = base_model.current.rows_min
        self._without = ExpertSegments(Routing((), rows_min), num_tokens, 0, 1)
        self._with = ExpertSegments(Routing(segments, rows_min), num_tokens, 0, 1)
        theirs: Any = AutoModelForCausalLM.from_pretrained(
            model.path, dtype=torch.float32, experts_implementation="grouped_mm"
        )
        self._theirs = theirs.requires_grad_(requires_grad=False).model.layers[0].mlp.experts

    def frozen(self) -> tuple[Tensor, Tensor]:
        """Run forward and backward without adapters; return the output and the gradient of the rows (T, D)."""
        return self._run(self._without)

    def adapted(self) -> tuple[Tensor, Tensor]:
        """Run forward and backward with the adapters."""
        return self._run(self._with)

    @torch.no_grad()
    def _run(self, segments: ExpertSegments) -> tuple[Tensor, Tensor]:
        experts = self._experts
        dispatch = Dispatch(self._choices.numpy(), experts.num_experts, experts.shared.rows_min, self._x.device)
        out, kept = self._layer.forward(self._x, self._weights, dispatch, segments)
        return out, self._layer.backward(self._x, self._weights, kept, self._dout)[0]

    @torch.no_grad()
    def decoded(self, rows_min: int) -> Tensor:
        """Run the forward of a decode step with the adapters, each expert's rows padded to a minimum; return (T, D)."""
        dispatch = Dispatch(self._choices.numpy(), self._experts.num_experts, rows_min, self._x.device)
        return self._layer.forward(self._x, self._weights, dispatch, self._with)[0]

    def grouped(self) -> tuple[Tensor, Tensor]:
        """Run transformers' forward and autograd's backward, of rows and of the choices' weights."""
        x, weights = (tensor.clone().requires_grad_() for tensor in (self._x, self._weights))
        out = self._theirs(x, self._choices, weights)
        dx, _ = torch.autograd.grad(out, (x, weights), self._dout)
        return out.detach(), dx


def measure_layer(model: Model, fused: Fused, num_tokens: int, args: argparse.Namespace) -> Row:
    """Measure the sides of a layer, alternating."""
    layer = Layer(fused, model, num_tokens)
    for own, theirs in zip(layer.frozen(), layer.grouped(), strict=True):
        if float((own - theirs).abs().max()) > TOLERANCE * float(theirs.abs().max()):
            raise SystemExit("the engine's layer and transformers' compute different results")
    sides: dict[str, Callable[[], object]] = {
        "frozen": layer.frozen,
        "grouped": layer.grouped,
        "adapted": layer.adapted,
    }
    timings = measure_alternating(sides, args.effort)
    row: Row = {"tokens": num_tokens} | {name: timing.summary() for name, timing in timings.items()}
    row["over_grouped"] = timings["frozen"].ratio_to(timings["grouped"])
    row["over_frozen"] = timings["adapted"].ratio_to(timings["frozen"])
    return row


def measure_padding(model: Model, fused: Fused, num_rows: int, args: argparse.Namespace) -> Row:
    """Measure a decode step's layer of experts with rows padded and not, alternating."""
    layer = Layer(fused, model, num_rows)
    least = fused.engine.base_model.expert_layers[0].shared.rows_min
    timings = measure_alternating(
        {
            "least": lambda: layer.decoded(least),
            "without": lambda: layer.decoded(1),
            "sixteen": lambda: layer.decoded(PADDED),
        },
        args.effort,
    )
    row: Row = {"sequences": num_rows, "minimum": least}
    row |= {name: timing.summary() for name, timing in timings.items()}
    row["over_without"] = timings["least"].ratio_to(timings["without"])
    row["sixteen_over_without"] = timings["sixteen"].ratio_to(timings["without"])
    return row


def measure_together(model: Model, case: Case, args: argparse.Namespace) -> Row:
    """Measure the steps of several tenants in one pass and one after another, alternating."""
    data = case.data(model.vocab_size)
    together, apart = (Fused(model, [8] * case.num_tenants, args.threads) for _ in range(2))
    together.give(data)
    timings = measure_alternating({"together": together.step, "apart": lambda: apart.step_apart(data)}, args.effort)
    row: Row = {"case": str(case)} | {name: timing.summary() for name, timing in timings.items()}
    row["over_together"] = timings["apart"].ratio_to(timings["together"])
    return row


def main() -> None:
    """Read the command line, measure, print."""
    command = parser(__doc__)
    add_model_options(command, [MIXTURE])
    command.add_argument("--seconds", type=float, default=15.0, help="for each case (at least 5 rounds)")
    args = command.parse_args()
    args.effort = Effort(seconds=0, rounds_min=2, rounds_max=2) if args.quick else Effort(seconds=args.seconds)
    with open_models([*(args.models or [MIXTURE]), *args.also]) as models, Results("experts", args) as results:
        for model in models:
            fused = Fused(model, [8], args.threads)
            table = results.table(f"experts-layer-{model.name}", LAYER_COLUMNS)
            for num_tokens in QUICK_TOKENS if args.quick else TOKENS:
                row = measure_layer(model, fused, num_tokens, args)
                table.add(row)
                if num_tokens in GOALS:
                    what = f"{model.name}: frozen experts of {num_tokens} tokens against transformers' grouped products"
                    results.goal(what, row["over_grouped"]["median"], at_most=GOALS[num_tokens], unit=" x")
                if num_tokens == ADDED_AT:
                    what = f"{model.name}: what adapters add to a layer of experts, of its frozen time"
                    results.goal(what, row["over_frozen"]["median"] - 1, at_most=ADDED_MAX, unit=" x")
            table = results.table(f"experts-padding-{model.name}", PADDING_COLUMNS)
            for num_rows in QUICK_DECODED if args.quick else DECODED:
                table.add(measure_padding(model, fused, num_rows, args))
            table = results.table(f"experts-together-{model.name}", TOGETHER_COLUMNS)
            row = measure_together(model, QUICK_TOGETHER if args.quick else TOGETHER, args)
            table.add(row)
            what = f"{model.name}: {row['case']} against one after another"
            results.goal(what, row["over_together"]["median"], at_least=2.0, unit=" x")


if __name__ == "__main__":
    main()
