"""How far rounding alone moves log-probabilities that a naive model computes in fp32.

Linear attention divides its outputs by their norms. Where an output is small because large terms cancel, that turns the
rounding of the terms into a far larger relative difference, so no constant number of roundings bounds the difference of
two correct evaluations. The model runs again with every result of a function rounded at random, which shows the tokens
for which that is so. Not for models with a router: a token near a tie goes to another expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.support.numerics.naive import NaiveModel

NUM_DRAWS = 3
NUM_TERMS = 64
"""Of the sums in the tests' models, about: their hidden size. A sum of so many terms is rounded as often, and moves by
as many roundings as the root of that number, if these are independent."""
MOVE = 2 * 2.0**-24 * NUM_TERMS**0.5
"""Of a result, at most. Twice: the twin's values are rounded, and so are those that it is compared with."""
COPIES = frozenset({"cat", "clone", "contiguous", "float", "index_select", "pad", "repeat_interleave", "to", "type_as"})
"""Functions that round nothing."""


class RandomRounding(TorchFunctionMode):
    """Moves every new fp32 value in its block by up to `MOVE` of it, at random."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in COPIES or not isinstance(out, Tensor) or out.dtype != torch.float32:
            return out
        storages = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
        if out.untyped_storage().data_ptr() in storages:
            return out  # a view, or an operand changed in place
        return out * (1 + MOVE * (2 * torch.rand(out.shape, generator=self._generator) - 1))


@torch.no_grad()
def rounding_tolerances(
    model: NaiveModel, tokens: Sequence[int], num_drawn: int, temperature: float
) -> NDArray[np.float64]:
    """Return how far apart each of the last `num_drawn` tokens' log-probabilities may be by rounding (num_drawn,)."""

    def logprobs() -> Tensor:
        logits = model.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -num_drawn - 1 : -1]
        drawn = torch.tensor(tokens[-num_drawn:])[:, None]
        found: Tensor = (logits.double() / temperature).log_softmax(-1).gather(1, drawn)[:, 0]
        return found

    expected, farthest = logprobs(), torch.zeros(num_drawn, dtype=torch.float64)
    for seed in range(NUM_DRAWS):
        with RandomRounding(seed):
            moved = logprobs()
        farthest = torch.maximum(farthest, (moved - expected).abs())
    return farthest.numpy()
