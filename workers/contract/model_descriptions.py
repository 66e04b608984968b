"""What a worker would make of a base model, as its files tell without the weights: for people who choose a model.

Data only; a description is made by `workers.pool.factory.describe_model`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workers.contract.adapted_modules import AdaptedModule


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterMemory:
    """What an adapter of all modules takes, if its rank is this one of the rank classes."""

    rank: int
    num_params: int
    file_bytes: int
    """Of its weights in a checkpoint; with optimizer state three times as many."""
    worker_bytes: int
    """In a worker: weights, two moments and a gradient in fp32, padded, with a copy in the base model's dtype."""
    num_slots: int
    """Such adapters that a worker holds ready at a time: its slots, or what its memory has room for if that is less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A base model that a pool can serve, unless its trials at the start refuse it."""

    num_params: int
    num_layers: int
    vocab_size: int
    max_seq_len: int
    max_rank: int
    has_tied_unembedding: bool
    dtype: str
    """Of the base model's weights in the worker."""
    modules: Sequence[AdaptedModule]
    """The linears that adapters adapt."""
    model_bytes: int
    """What the base model takes in a worker, at most."""
    free_bytes: int
    """What is free on the worker's device now."""
    adapters: Sequence[AdapterMemory]
    """For each rank class up to `max_rank`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """A base model, as `tinkerpool models` shows it."""

    family: str
    """The `model_type` of transformers; empty if `config.json` does not say."""
    title: str
    """The family's models, as people call them; empty if the family is not tested."""
    tests: Sequence[str]
    """What small random models of the family are tested for; empty if it is not tested."""
    problems: Sequence[str]
    """Why a pool would not start with the model, each with what to do or take instead; empty if nothing shows."""
    facts: ModelFacts | None
    """None if the architecture is refused."""
