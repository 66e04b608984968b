"""`models`: what a pool would make of a base model, before it is served."""

from __future__ import annotations

import dataclasses
from json import dumps
from typing import Annotated, Literal

import typer

from coordinator.base_models import resolve_model
from coordinator.cli.options import check_libraries, help_of
from tinkerpool.cli import show
from tinkerpool.cli.connection import JsonOption
from tinkerpool.cli.show import CliError
from workers.contract.adapted_modules import adapter_params, leaf_names
from workers.contract.model_descriptions import ModelDescription, ModelFacts
from workers.contract.protocols import PoolStartError
from workers.contract.settings import Dtype, PoolConfig

MODELS_HELP = (
    "Say what a pool would make of a base model: is its family tested, what is trained, and how many adapters fit.\n\n"
    "Reads the model's config.json and not its weights, and starts nothing. The exit code is 1 if a pool would refuse "
    "the model; the reason says what to take instead.\n\n"
    "Example:  tinkerpool models /models/Qwen3-0.6B --dtype bfloat16"
)


def models(
    model: Annotated[
        str,
        typer.Argument(
            metavar="DIR", help="A Hugging Face directory, or a name that 'tinkerpool serve --model' takes, too."
        ),
    ],
    device: Annotated[
        Literal["cpu", "cuda"], typer.Option("--device", help="What a worker on this machine computes on.")
    ] = "cpu",
    dtype: Annotated[Dtype, typer.Option("--dtype", help=help_of(PoolConfig, "dtype"))] = "auto",
    slots: Annotated[int, typer.Option("--slots", min=0, help=help_of(PoolConfig, "num_slots"))] = 0,
    json: JsonOption = False,
) -> None:
    """Describe a base model; exit with 1 if a pool would refuse it. Raises CliError."""
    check_libraries()
    from workers.pool.factory import describe_model

    try:
        config = PoolConfig(
            models=(resolve_model(model, 1),), kind="local", device=device, dtype=dtype, num_slots=slots
        )
        description = describe_model(config)
    except (ValueError, OSError, PoolStartError) as error:
        raise CliError(str(error)) from None
    if json:
        print(dumps(dataclasses.asdict(description), indent=2))
    else:
        _show(description)
    if description.problems:
        raise typer.Exit(1)


def _show(description: ModelDescription) -> None:
    family = description.family or "a family without a name"
    if description.title:
        show.say(f"{family}: {description.title}, a tested family. Of small models of it are tested:")
        for test in description.tests:
            show.say(f"  {test}")
    elif description.facts is not None:
        show.say(
            f"{family}: not a tested family. A pool compares its forward with the model's own when it starts, and "
            "refuses the model if they differ."
        )
    if description.facts is not None:
        _show_facts(description.facts)
    for problem in description.problems:
        show.say(f"REFUSED: {problem}")


def _show_facts(facts: ModelFacts) -> None:
    show.say(
        f"{show.count(facts.num_params)} parameters in {facts.num_layers} layers, {show.count(facts.vocab_size)} "
        f"tokens in the vocabulary. In a worker it takes {show.size(facts.model_bytes)} at most, in {facts.dtype}; "
        f"{show.size(facts.free_bytes)} are free."
    )
    if facts.model_bytes > facts.free_bytes:
        show.say("note: that is more than is free on this machine; serve it on a larger one")
    show.console.print()
    show.table(
        "What is trained",
        ("option", "linears", "number", "parameters/rank"),
        [
            (
                f"train_{kind}",
                ", ".join(leaf_names(facts.modules, kind)),
                str(sum(module.kind == kind for module in facts.modules)),
                show.count(adapter_params(facts.modules, kind)),
            )
            for kind in dict.fromkeys(module.kind for module in facts.modules)
        ],
        right="number parameters/rank",
    )
    show.console.print()
    show.table(
        "An adapter of all of these",
        ("rank", "parameters", "file", "worker", "slots"),
        [
            (
                str(each.rank),
                show.count(each.num_params),
                show.size(each.file_bytes),
                show.size(each.worker_bytes),
                str(each.num_slots),
            )
            for each in facts.adapters
        ],
        right="rank parameters file worker slots",
    )
    show.say("file: its weights; worker: with moments and gradient; slots: how many such adapters are ready at a time")
    show.console.print()
    show.say(
        f"Refused: ranks above {facts.max_rank}, sequences of more than {show.count(facts.max_seq_len)} tokens, images "
        "and sound."
    )
    if facts.has_tied_unembedding:
        show.say(
            "note: embedding and unembedding are one matrix (tied). A merged export of an adapter with train_unembed "
            "has two"
        )
