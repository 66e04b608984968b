"""The gated delta rule of a pass by `fla` (flash-linear-attention), kernels in Triton for GPUs: an option.

The package computes the rule alone. What is before and behind it (convolutions, coefficients, lengths, norm and gate)
is as in `delta_rule`, over rows instead of chunks. Sampling stays with `delta_rule`.

Does not depend on models, adapters or tenants. Importing this module imports nothing of the package; `rule_of_library`
does, on a GPU where an operator has chosen it.

Main invariant: the kernels get the ends of all sequences, and cut each into chunks at positions of its own. The
package's other ways to compute the rule, some of which divide sequences by how many there are, are switched off before
it is imported. `selftest.library_delta` tries whether a sequence keeps its bits.

Dimensions: T rows of the pass, S sequences, W weights of a convolution, C channels, H key heads, G value heads for each
key head, E key head dimension, P value head dimension, V = H G P.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from workers.host.uploads import on_device
from workers.model.delta_rule import DeltaInputs, DeltaWeights, coefficients, gated, unit

logger = logging.getLogger(__name__)

PACKAGE, VERSION = "fla-core", "0.6.0"
"""The one version that is used: that of the extra `[gpu]`."""
ONE_WAY = "FLA_DISABLE_BACKEND_DISPATCH"
"""The package's switch for its plain kernels alone. It is read once, when the package is imported."""


class Rule(Protocol):
    """`fla.ops.gated_delta_rule.chunk_gated_delta_rule`, as far as it is used. Differentiable."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        scale: float,
        cu_seqlens: Tensor,
        cu_seqlens_cpu: Tensor,
    ) -> tuple[Tensor, Any]:
        """Return the results (1, T, H G, P) of sequences, each from a state of zeros, and something else.

        q and k (1, T, H, E), v (1, T, H G, P), in one dtype; log decays g and strengths beta (1, T, H G), fp32; the
        ends of sequences (S + 1,), from 0, on the device and on the host.
        """


def switch_to_one_way() -> None:
    """Let the package compute in one way only. Call it before anything may import the package, as transformers may."""
    os.environ[ONE_WAY] = "1"


def rule_of_library(device: torch.device, dtype: torch.dtype) -> Rule | None:
    """Return the package's rule for a model in this dtype; None, and a line in the log, if it cannot be used."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        logger.warning("fla computes on GPUs in bfloat16 alone: linear attention is ours")
        return None
    try:
        if version(PACKAGE) != VERSION:
            logger.warning("%s is %s, not %s: linear attention is ours", PACKAGE, version(PACKAGE), VERSION)
            return None
        rule: Rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    except (PackageNotFoundError, ImportError) as error:
        logger.warning("fla is not to be had, so linear attention is ours; the extra tinkerpool[gpu] has it: %s", error)
        return None
    return rule


class LibraryDelta:
    """Implements `packed_delta.Recur` for whole sequences, one after another from row 0. Differentiable."""

    def __init__(self, rule: Rule, lengths: Sequence[int], device: torch.device) -> None:
        self._rule = rule
        self._lengths = list(lengths)
        self._device = device
        self._places: tuple[Tensor, Tensor, Tensor] | None = None

    def __call__(self, layer: int, weights: DeltaWeights, inputs: DeltaInputs) -> Tensor:
        """See `packed_delta.Recur`. The backward runs all of it again: only the inputs are kept."""
        tensors = inputs.tensors()
        if not torch.is_grad_enabled():
            return self._run(weights, *tensors)
        out: Tensor = checkpoint(self._run, weights, *tensors, use_reentrant=False, preserve_rng_state=False)
        return out

    def _run(self, weights: DeltaWeights, *tensors: Tensor) -> Tensor:
        inputs, shape, dtype = DeltaInputs.of(tensors), weights.shape, tensors[0].dtype
        positions, ends, ends_on_host = self._on(len(inputs.gate))
        query, key, value = (
            _convolved(rows, conv, positions) for rows, conv in zip(inputs.qkv, weights.conv, strict=True)
        )
        query, key = (unit(rows.unflatten(1, (shape.num_key_heads, -1))) for rows in (query, key))  # (T, H, E)
        beta, log_decay = coefficients(inputs, weights, None)  # (T, H G) each
        value = value.unflatten(1, (shape.num_value_heads, -1))  # (T, H G, P)
        query, key, value = (part.to(dtype).unsqueeze(0) for part in (query, key, value))
        out, _ = self._rule(
            query,
            key,
            value,
            log_decay.unsqueeze(0),
            beta.unsqueeze(0),
            scale=shape.key_dim**-0.5,
            cu_seqlens=ends,
            cu_seqlens_cpu=ends_on_host,
        )
        return gated(out.squeeze(0).float(), inputs.gate, weights).to(dtype)

    def _on(self, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the positions of rows in their sequences (T, 1), and the ends of sequences on the device and the host.

        Padding rows at the end are one more sequence, so that their results are finite.
        """
        if self._places is None:
            missing = num_rows - sum(self._lengths)
            lengths = torch.tensor([*self._lengths, *([missing] if missing else [])])
            ends = F.pad(lengths.cumsum(0), (1, 0))
            positions = torch.arange(num_rows) - ends[:-1].repeat_interleave(lengths)
            self._places = on_device(positions.unsqueeze(1), self._device), on_device(ends, self._device), ends
        return self._places


def _convolved(rows: Tensor, weights: Tensor, positions: Tensor) -> Tensor:
    """Return SiLU of the convolution of rows (T, C) with weights (W, C): (T, C), fp32; positions (T, 1)."""
    rows = rows.float()
    total = rows * weights[-1]
    for back in range(1, min(len(weights), len(rows))):
        before = F.pad(rows[:-back], (0, 0, back, 0)).masked_fill(positions < back, 0.0)
        total = total + before * weights[-1 - back]
    return F.silu(total)
