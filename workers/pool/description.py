"""Describes a base model without its weights: what a worker would adapt, what that takes, and why it would refuse.

The model is made on torch's meta device, and its linears are replaced as in a worker. What only its weights show, the
probe among it, is left to the start of a pool.

Main invariant: modules, shapes, limits and bytes are those of the worker that the same settings make; tests compare.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from workers.bank.entries import Kind
from workers.bank.slabs import Slabs
from workers.contract.adapted_modules import RANK_CLASSES, AdaptedModule, adapter_params
from workers.contract.model_descriptions import AdapterMemory, ModelDescription, ModelFacts
from workers.contract.settings import EngineSettings
from workers.engine import bank_bytes_max, host_bytes_max, sampler_limits
from workers.host.free_memory import MemoryShare
from workers.model.families import TESTED, TESTS
from workers.model.files import check_files, find_directory
from workers.model.frozen_products import PACKED_PARAMS_MAX
from workers.model.linears import CurrentPass, LinearGroup
from workers.model.pretrained import (
    READS_TEXT_ALONE,
    UnsupportedModelError,
    has_tied_unembedding,
    load_without_weights,
    max_rank,
    max_seq_len,
)
from workers.model.replacement import adapted_modules, decoder_layers, replace_products
from workers.rows import GroupShape, RowLayout
from workers.selftest.loading import dtype_of

PACKED_COPIES = 2
"""Copies of packed weights beside the weights themselves: see `frozen_products`."""


def describe(settings: EngineSettings) -> ModelDescription:
    """Return what a worker with these settings would make of its base model.

    Raises OSError if there is no `config.json`, ValueError if it has no object of JSON.
    """
    directory = find_directory(settings.model_path)
    family = _family(directory / "config.json")
    problems, facts = [], None
    try:
        facts = _facts(directory, settings)
    except UnsupportedModelError as error:
        problems.append(str(error))
    try:
        check_files(directory)
    except OSError as error:
        problems.append(str(error))
    tested = TESTED.get(READS_TEXT_ALONE.get(family, family))
    return ModelDescription(
        family=family,
        title="" if tested is None else tested.title,
        tests=() if tested is None else TESTS,
        problems=problems,
        facts=facts,
    )


def _family(config: Path) -> str:
    try:
        return str(dict(json.loads(config.read_text(encoding="utf-8"))).get("model_type", ""))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{config} is not the config of a model: {error}") from None


def _facts(directory: Path, settings: EngineSettings) -> ModelFacts:
    """Return the facts of a model. Raises UnsupportedModelError."""
    dtype, device = dtype_of(settings), torch.device(settings.device)
    model = load_without_weights(directory, dtype)
    config = model.config
    num_params = sum(parameter.numel() for parameter in model.parameters())
    layers = replace_products(model, CurrentPass())
    modules = adapted_modules(model, layers)
    decoder_layers(model, int(config.num_hidden_layers))
    model_bytes = _model_bytes(num_params, layers.linears, dtype, device)
    free_bytes = MemoryShare(device, settings.memory_share).free_bytes()
    return ModelFacts(
        num_params=num_params,
        num_layers=int(config.num_hidden_layers),
        vocab_size=layers.shapes[-1].d_outs[0],
        max_seq_len=max_seq_len(config),
        max_rank=max_rank(config),
        has_tied_unembedding=has_tied_unembedding(model),
        dtype=str(dtype).removeprefix("torch."),
        modules=modules,
        model_bytes=model_bytes,
        free_bytes=free_bytes,
        adapters=_adapters(
            layers.shapes, modules, settings, max_rank(config), _room(settings, free_bytes - model_bytes)
        ),
    )


def _adapters(
    shapes: Sequence[GroupShape],
    modules: Sequence[AdaptedModule],
    settings: EngineSettings,
    rank_max: int,
    room: int,
) -> tuple[AdapterMemory, ...]:
    """Return what adapters of all modules take, and how many fit into `room` bytes."""
    kinds = tuple(dict.fromkeys(module.kind for module in modules))
    slabs = Slabs(settings.num_slots, torch.device(settings.device), dtype_of(settings))
    found = []
    for rank in (rank for rank in RANK_CLASSES if rank <= rank_max):
        num_params = rank * adapter_params(modules, *kinds)
        row_bytes = slabs.row_bytes(Kind(RowLayout(shapes, rank, kinds), is_trained=True))
        found.append(
            AdapterMemory(
                rank=rank,
                num_params=num_params,
                file_bytes=torch.float32.itemsize * num_params,
                worker_bytes=row_bytes,
                num_slots=min(settings.num_slots, room // row_bytes),
            )
        )
    return tuple(found)


def _model_bytes(num_params: int, groups: Sequence[LinearGroup], dtype: torch.dtype, device: torch.device) -> int:
    num_packed = sum(weight.numel() for group in groups for weight in group.weights)
    can_pack = device.type == "cpu" and dtype == torch.float32 and num_packed <= PACKED_PARAMS_MAX
    return dtype.itemsize * (num_params + (PACKED_COPIES * num_packed if can_pack else 0))


def _room(settings: EngineSettings, free_bytes: int) -> int:
    """Return the bytes for adapters in a worker whose device has so many free bytes when the model is loaded."""
    free_bytes = max(0, free_bytes)
    if torch.device(settings.device).type == "cpu":
        return host_bytes_max(settings, free_bytes)
    return bank_bytes_max(free_bytes - sampler_limits(settings).cache_bytes(free_bytes))
