"""Loads a base model: runs the trials that decide how it computes, and finds the longest sequence that it can train."""

from __future__ import annotations

import logging

import torch

from workers.contract.adapted_modules import rank_class
from workers.contract.settings import EngineSettings
from workers.model.base_model import BaseModel
from workers.selftest.library_delta import tried_rule
from workers.selftest.loss_kernels import check_losses
from workers.selftest.row_invariance import find_numerics
from workers.selftest.sequence_invariance import requests_can_share
from workers.selftest.training_kernels import check_attention, check_training_kernels
from workers.training.memory import Load
from workers.training.passes import PassRunner

logger = logging.getLogger(__name__)


def load_base_model(settings: EngineSettings) -> BaseModel:
    """Return a base model that has passed its trials. Raises UnsupportedModelError, OSError."""
    base_model = BaseModel(
        settings.model_path,
        name=settings.model_name,
        device=settings.device,
        dtype=dtype_of(settings),
        exact=settings.exact,
    )
    base_model.use(find_numerics(base_model))
    if base_model.numerics.are_sequences_alone:
        logger.warning("%s computes linear attention one sequence at a time, which is slower", base_model.name)
    if settings.exact and base_model.device.type == "cuda" and not requests_can_share(base_model):
        logger.warning("%s attends to each request alone in exact mode, which is slower", base_model.name)
        base_model.attend_alone()
    if settings.linear_attention == "fla" and base_model.delta_layers:
        if settings.exact:
            logger.warning("%s: in exact mode linear attention is ours", base_model.name)
        else:
            base_model.library_rule = tried_rule(base_model)
    check_attention(base_model)
    base_model.probe()
    check_training_kernels(base_model)
    check_losses(base_model)
    return base_model


def dtype_of(settings: EngineSettings) -> torch.dtype:
    """Return the dtype of the base model's weights and activations."""
    is_cuda = torch.device(settings.device).type == "cuda"
    is_bf16 = settings.dtype == "bfloat16" or (settings.dtype == "auto" and is_cuda)
    return torch.bfloat16 if is_bf16 else torch.float32


def fitting_tokens(passes: PassRunner) -> int | None:
    """Return the most tokens of a sequence that can be trained, by an adapter of the largest rank.

    None: any length that the model takes. The same limit holds for a canonical chunk. Raises ValueError if there is no
    memory for a pass at all.
    """
    base_model = passes.base_model
    longest = max(base_model.max_seq_len, base_model.chunk_tokens)
    rank = rank_class(base_model.max_rank)
    fitting = passes.room.num_fitting(
        lambda num_tokens: Load(num_tokens=num_tokens, lengths=[num_tokens], rank=rank),
        longest,
        backward=True,
        recompute=passes.room.recompute != "off",
    )
    if fitting == longest:
        return None
    if fitting == 0:
        raise ValueError(f"{base_model.name} is loaded, but there is no memory for a pass: give the worker more")
    logger.warning("%s: memory is short; longer sequences than %d tokens are refused", base_model.name, fitting)
    return fitting
