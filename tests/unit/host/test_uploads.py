"""Uploads of several arrays at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from workers.host.input_block import ALIGNMENT, COPY_BYTES_MAX
from workers.host.uploads import all_on_device, on_device


class Copies(TorchDispatchMode):
    """Counts copies, and notes the bytes of the largest."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_copies = self.bytes_max = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.num_copies += 1
            self.bytes_max = max(self.bytes_max, args[1].nbytes)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(("num_values", "num_copies"), [(5, 1), (3 * COPY_BYTES_MAX // 8, 4)])
def test_arrays_arrive_by_as_few_copies_as_do_not_wait(num_values: int, num_copies: int) -> None:
    arrays: list[NDArray[Any]] = [
        np.arange(num_values, dtype=np.int64).reshape(1, -1),
        np.arange(3, dtype=np.int32),
        np.zeros((0, 3), np.int32),
        np.arange(6, dtype=np.float32).reshape(2, 3).T,
    ]
    with Copies() as copies:
        tensors = all_on_device(arrays, torch.device("cpu"))
    for array, tensor in zip(arrays, tensors, strict=True):
        assert torch.equal(tensor, torch.from_numpy(array.copy()))
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % ALIGNMENT == 0
    assert copies.num_copies == num_copies
    assert copies.bytes_max <= COPY_BYTES_MAX


def test_large_values_are_sent_in_parts_that_do_not_wait() -> None:
    values = np.arange(5 * COPY_BYTES_MAX // 16, dtype=np.int64).reshape(5, -1)
    with Copies() as copies:
        tensor = on_device(values, torch.device("meta"))
    assert (tensor.shape, tensor.dtype) == (values.shape, torch.int64)
    assert (copies.num_copies, copies.bytes_max) == (3, COPY_BYTES_MAX)
    assert on_device(torch.zeros(()).expand(1), torch.device("meta")).shape == (1,), "whatever its strides"
