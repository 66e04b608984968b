"""Measure sequences of mixed lengths: packed without padding, against the same padded to a rectangle.

    python -m scripts.bench.lengths --quick
    python -m scripts.bench.lengths
    python -m scripts.bench.lengths --models 27m --tenants 8 --seqs 8

Lengths are 16 to 512 tokens and skewed, as texts are: most are short, a few are long (log-uniform, squared towards the
short end). All sides train the same tokens and take turns:

packed  the engine as it is: only tokens that there are
padded  the same engine, every sequence filled up to the longest of all with tokens of weight 0: what a rectangular
        batch computes
PEFT    one tenant after another, each padded to its own longest, with an attention mask: what a careful user does

Their losses must agree, and the script stops if not. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from scripts.bench.common import Column, Effort, Results, Row, check_losses, parser, shown_ratio, shown_time, turn_about
from scripts.bench.models import Model, add_model_options, chosen_models, open_models, random_data
from scripts.bench.sides.training import Fused, SequentialPeft
from workers.contract.messages import Datum

RANK = 8
SHORTEST, LONGEST = 16, 512


def skewed_lengths(rng: np.random.Generator, num_seqs: int, longest: int) -> list[int]:
    """Lengths of a tenant's sequences, most of them near the shortest."""
    shares = rng.random(num_seqs) ** 2  # squared: half of them below a quarter of the way
    return [round(SHORTEST * (longest / SHORTEST) ** share) for share in shares]


def padded_to(data: tuple[Datum, ...], length: int) -> tuple[Datum, ...]:
    """The same sequences, filled up at the end with tokens that count for nothing."""

    def fill(datum: Datum) -> Datum:
        missing = length - len(datum.tokens)
        inputs: dict[str, Any] = {name: np.pad(array, (0, missing)) for name, array in datum.loss_inputs.items()}
        return Datum(tokens=np.pad(datum.tokens, (0, missing)), loss_inputs=inputs)

    return tuple(map(fill, data))


def measure(model: Model, args: argparse.Namespace) -> Row:
    """One model's row."""
    rng = np.random.default_rng(0)
    lengths = [skewed_lengths(rng, args.seqs, args.longest) for _ in range(args.tenants)]
    lengths[0][0] = args.longest  # so that the rectangle is as wide in every run
    data = [random_data(tenant, part, model.vocab_size) for tenant, part in enumerate(lengths)]
    ranks = [RANK] * args.tenants
    packed, padded = Fused(model, ranks, args.threads), Fused(model, ranks, args.threads)
    peft = SequentialPeft(model, ranks, packed.weights())
    packed.give(data)
    padded.give([padded_to(part, args.longest) for part in data])
    peft.give(data)
    losses = packed.step()
    differences = [check_losses(losses, padded.step()), check_losses(losses, peft.step())]
    timings = turn_about({"packed": packed.step, "padded": padded.step, "peft": peft.step}, args.effort)
    num_tokens = sum(map(sum, lengths))
    return {
        "model": model.name,
        "tenants": args.tenants,
        "seqs": args.seqs,
        "tokens": num_tokens,
        "mean_length": num_tokens / (args.tenants * args.seqs),
        "padded_tokens": args.tenants * args.seqs * args.longest,
        "peft_tokens": sum(args.seqs * max(part) for part in lengths),
        "loss_difference": max(differences),
        "over_padded": timings["padded"].ratio_to(timings["packed"]),
        "over_peft": timings["peft"].ratio_to(timings["packed"]),
        **{name: timing.summary() for name, timing in timings.items()},
    }


def main() -> None:
    """Read the command line, measure, print."""
    command = parser(__doc__)
    add_model_options(command)
    command.add_argument("--tenants", type=int, help="default: 4")
    command.add_argument("--seqs", type=int, default=4, help="sequences of each tenant")
    command.add_argument("--longest", type=int, help="tokens of the longest sequence; default: 512")
    command.add_argument("--seconds", type=float, default=8.0, help="for each row (at least 5 rounds in any case)")
    args = command.parse_args()
    args.effort = Effort(seconds=0, rounds_min=2, rounds_max=2) if args.quick else Effort(seconds=args.seconds)
    args.tenants = args.tenants or (2 if args.quick else 4)
    args.longest = args.longest or (64 if args.quick else LONGEST)
    if args.longest < SHORTEST:
        command.error(f"--longest is {args.longest}; the shortest sequence has {SHORTEST} tokens")
    with open_models(chosen_models(args)) as models, Results("lengths", args) as results:
        table = results.table(
            "lengths",
            (
                Column("model", lambda r: r["model"]),
                Column("tenants x sequences", lambda r: f"{r['tenants']} x {r['seqs']}"),
                Column("tokens (mean length)", lambda r: f"{r['tokens']:,} ({r['mean_length']:.0f})"),
                Column("rows when padded", lambda r: f"{r['padded_tokens']:,}"),
                Column("packed", lambda r: shown_time(r["packed"])),
                Column("padded", lambda r: shown_time(r["padded"])),
                Column("PEFT", lambda r: shown_time(r["peft"])),
                Column("padded / packed", lambda r: shown_ratio(r["over_padded"])),
                Column("PEFT / packed", lambda r: shown_ratio(r["over_peft"])),
            ),
        )
        for model in models:
            table.add(measure(model, args))


if __name__ == "__main__":
    main()
