"""The probe of a loaded model: the packed forward must give the log-probabilities of the model's own code.

Does not depend on adapters.

Main invariant: a model with a feature that the packed forward lacks is refused, even if the feature is not known here.

Dimensions: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workers.model.pretrained import UnsupportedModelError

LENGTHS = (24, 11)
"""Tokens of the probe's two sequences, unless the model takes fewer."""
TOLERANCE = 1e-4
"""Largest difference of log-probabilities in fp32."""
ROUNDINGS_PER_LAYER = 16
"""How often a layer rounds to 8 bits in bf16 from input to output: seven linears, two to four norms, rotary embedding,
attention, activation and residual sums. Two forwards may round each differently, and the errors add up as those of
independent values do."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Two sequences, with the log-probabilities of the model's own code."""

    tokens: Tensor
    """(N,) both sequences, one after the other."""
    lengths: list[int]
    num_layers: int
    logprobs: list[Tensor]
    """(length, V) of each sequence, fp32."""

    @classmethod
    @torch.no_grad()
    def of(cls, model: Any, max_seq_len: int) -> Probe:
        """Run the model's own forward, before any layer is replaced."""
        lengths = [min(length, max_seq_len) for length in LENGTHS]
        num_tokens = min(int(model.get_input_embeddings().num_embeddings), model.get_output_embeddings().out_features)
        tokens = (torch.arange(sum(lengths), device=model.device) * 7919 + 13) % num_tokens
        logprobs = [
            model(input_ids=part.unsqueeze(0), use_cache=False).logits[0].float().log_softmax(-1)
            for part in tokens.split(lengths)
        ]
        return cls(tokens, lengths, int(model.config.num_hidden_layers), logprobs)

    def check(self, logits_of: Callable[[Tensor, Tensor, list[int]], Tensor], dtype: torch.dtype) -> None:
        """Compare the packed forward: tokens and positions (N,), int64, and lengths -> logits (N, V).

        Raises UnsupportedModelError if they differ by more than rounding in the model's `dtype` explains.
        """
        positions = torch.cat([torch.arange(length, device=self.tokens.device) for length in self.lengths])
        actual = logits_of(self.tokens, positions, self.lengths).float().log_softmax(-1)
        for logprobs, own in zip(actual.split(self.lengths), self.logprobs, strict=True):
            difference, tolerance = self._difference(logprobs, own, dtype)
            if not difference <= tolerance:
                raise UnsupportedModelError(
                    f"the fused pass gives other log-probabilities than the model's own code (by {difference:.2g}, "
                    f"allowed are {tolerance:.2g}); this architecture has a feature that is not supported"
                )

    def _difference(self, logprobs: Tensor, own: Tensor, dtype: torch.dtype) -> tuple[float, float]:
        """Return the difference of log-probabilities (N, V) from the model's own, and the tolerance.

        In fp32 the largest difference. In bf16, in which two roundings of one value may be 2^-8 of it apart, the root
        mean square of the differences, as a fraction of that of the log-probabilities around their mean.
        """
        if dtype == torch.float32:
            return float((logprobs - own).abs().max()), TOLERANCE
        spread = (own - own.mean(-1, keepdim=True)).square().mean().sqrt()
        difference = (logprobs - own).square().mean().sqrt() / spread
        return float(difference), 2.0**-8 * (ROUNDINGS_PER_LAYER * self.num_layers) ** 0.5
