"""One packed pass serves all tenants, and allocates no tensor of all tokens by the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.mini_model import build_mini_model
from tests.support.numerics.harness import Driver, make_data, make_spec
from tests.support.numerics.tenants import TENANTS, train
from workers.model.base_model import BaseModel
from workers.training.logits import block_rows_of


def test_sixteen_tenants_take_as_many_base_model_matmuls_as_one(model_directory: Path) -> None:
    driver = Driver(model_directory)
    keys = [f"tenant{number}" for number in range(16)]
    driver.install(*(make_spec(key, 2 ** (number % 6)) for number, key in enumerate(keys)))
    one = driver.num_base_matmuls(driver.backward(keys[0], make_data("cross_entropy", [32] * 16)))
    assert driver.num_base_matmuls(*(driver.backward(key, make_data("cross_entropy", [32])) for key in keys)) == one
    # Seven linears in each of two layers, ten in one of linear attention; a router more in one with experts, and four
    # more in one with a gated expert of all tokens; and the unembedding block by block.
    base_model = driver.engine.base_model
    num_shared = sum(hasattr(layer.mlp, "shared_expert") for layer in base_model.model.model.layers)
    num_linears = 14 + 3 * len(base_model.delta_layers) + len(base_model.expert_layers) + 4 * num_shared
    assert one == num_linears + -(-16 * 32 // block_rows_of(258))


def test_equal_runs_have_the_rows_of_a_pass_in_equal_orders(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So they have equal bits also where a row's bits depend on the others."""
    orders = list[list[int]]()
    forward = BaseModel.forward

    def recording(self: BaseModel, tokens: Tensor, *others: Any, **settings: Any) -> Tensor:
        orders.append(tokens.tolist())
        return forward(self, tokens, *others, **settings)

    monkeypatch.setattr(BaseModel, "forward", recording)
    for _ in range(4):
        train(Driver(qwen3), TENANTS, num_steps=1)
    assert len(orders) == 4
    assert orders[1:] == orders[:-1]


class LargestVocabularyTensor(TorchDispatchMode):
    """Records the most rows of any tensor whose last dimension is the vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.vocab_size = vocab_size
        self.num_rows = 0

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            # A view of the unembedding's weight is not an activation.
            is_weight = isinstance(tensor, torch.Tensor) and tensor.shape[:1] == (64,)
            if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (self.vocab_size,) and not is_weight:
                self.num_rows = max(self.num_rows, tensor.numel() // self.vocab_size)
        return result


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "gspo"])
def test_no_tensor_of_all_tokens_by_the_vocabulary_is_ever_made(tmp_path: Path, loss_fn: str) -> None:
    vocab_size = 1031
    driver = Driver(build_mini_model(tmp_path, "qwen3", vocab_size=vocab_size))
    driver.install(make_spec("a"), make_spec("b"))
    data = make_data(loss_fn, [300, 400])
    with LargestVocabularyTensor(vocab_size) as largest:
        driver.train(driver.backward("a", data, loss_fn), driver.backward("b", data, loss_fn))
    assert 0 < largest.num_rows <= block_rows_of(vocab_size)
