"""Counts what the device and the host would do: kernels, bytes, FLOP, waits, copies, and the memory that is in use.

Of the workers it knows the size of a copy that does not wait; it names the lines of theirs that wait.

Main invariants: an operation that has a CUDA kernel is counted as that kernel, never as the parts that fake tensors
would take it apart into. An operation that `costs` does not have raises.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.fake_cuda import costs, hardware
from tests.support.fake_cuda.costs import Call
from workers.host.input_block import COPY_BYTES_MAX

ROOT = Path(__file__).resolve().parents[3]
READS = {"aten::_local_scalar_dense", "aten::equal", "aten::allclose"}
"""Operations whose result is a number on the host: each waits for the device."""
WAITING = {"aten::nonzero", "aten::masked_select"}
"""Operations whose result's shape is known only when the device has computed it."""


@dataclass(slots=True)
class Group:
    """All calls of one operation."""

    num_kernels: int = 0
    num_bytes: int = 0
    flops: float = 0.0
    device_s: float = 0.0


@dataclass(slots=True)
class Counts:
    """What one stretch of work took."""

    num_operations: int = 0
    """Calls of the host that launch something."""
    num_kernels: int = 0
    num_bytes: int = 0
    flops: float = 0.0
    device_s: float = 0.0
    waits: Counter[str] = field(default_factory=Counter)
    """What waits for the device, with file and line."""
    to_host_bytes: int = 0
    to_device_bytes: int = 0
    copies_s: float = 0.0
    """Of the copies between host and device for which the host waits."""
    peak_bytes: int = 0
    """Most memory that was in use beyond what was in use at the beginning."""
    kept_bytes: int = 0
    """Memory that a forward left in use for its backward, where a case notes it."""
    by_operation: dict[str, Group] = field(default_factory=dict)
    kernels_by_line: Counter[str] = field(default_factory=Counter)
    """Kernels by the line of the workers that launched them, and its caller."""

    @property
    def num_waits(self) -> int:
        """How often the host waits for the device."""
        return sum(self.waits.values())

    @property
    def host_s(self) -> float:
        """Predicted time of the host, on which the device waits where it is longer than its own."""
        waits_s = hardware.WAIT_S * self.num_waits + self.copies_s
        return hardware.HOST_OPERATION_S * self.num_operations + waits_s

    @property
    def predicted_s(self) -> float:
        """Predicted time: that of the slower of device and host."""
        return max(self.device_s, self.host_s)


class Counting(TorchDispatchMode):
    """Counts while it is entered, inside a `FakeTensorMode`; see `stretch`."""

    def __init__(self, bytes_max: int) -> None:
        """Fail as a device with so much memory does: by torch.OutOfMemoryError."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._bytes_max = bytes_max
        self._counts: list[Counts] = []
        self._live: dict[int, int] = {}
        self._live_bytes = 0
        self._begin_bytes: list[int] = []
        self._pinned = weakref.WeakSet[Any]()

    @contextmanager
    def stretch(self) -> Iterator[Counts]:
        """Count the work in this block; stretches may nest."""
        counts = Counts()
        self._counts.append(counts)
        self._begin_bytes.append(self._live_bytes)
        try:
            yield counts
        finally:
            self._counts.remove(counts)
            self._begin_bytes.pop()

    @contextmanager
    def record(self, counts: Counts) -> Iterator[None]:
        """Count the work in this block here alone: it is captured, and does not run.

        Raises AssertionError if it waits, or copies between host and device, as no graph can.
        """
        stretches, self._counts = self._counts, [counts]
        begin_bytes, self._begin_bytes = self._begin_bytes, [self._live_bytes]
        try:
            yield
        finally:
            self._counts, self._begin_bytes = stretches, begin_bytes
        assert not counts.waits, counts.waits
        assert not counts.to_device_bytes, f"{counts.to_device_bytes} bytes are copied to the device in a graph"
        assert not counts.to_host_bytes

    def replay(self, recorded: Counts) -> None:
        """Count captured work: the device does all of it, the host launches it once."""
        for counts in self._counts:
            counts.num_operations += 1
            counts.kernels_by_line += recorded.kernels_by_line
            _add(counts, recorded)
            for name, group in recorded.by_operation.items():
                _add(counts.by_operation.setdefault(name, Group()), group)

    @property
    def live_bytes(self) -> int:
        """Bytes of all tensors on the device now."""
        return self._live_bytes

    def wait(self, why: str) -> None:
        """Count a wait of the host."""
        if self._counts:
            text = f"{why} at {_caller()}"
            for counts in self._counts:
                counts.waits[text] += 1

    def note_read(self, tensor: Tensor) -> None:
        """Count a `tolist` of a tensor on the device."""
        self.wait("tolist")
        for counts in self._counts:
            counts.to_host_bytes += tensor.numel() * tensor.element_size()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name
        if name not in costs.RULES and name not in READS and _is_composite(func):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if name.startswith("prim::"):
            return func(*args, **kwargs)
        if name == "aten::is_pinned":
            return args[0].untyped_storage() in self._pinned
        is_pinned = bool(kwargs.pop("pin_memory", None)) or name == "aten::_pin_memory"
        if name == "aten::_pin_memory":
            func, args, kwargs = torch.ops.aten.clone.default, args[:1], {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name in READS:
            return self._read(func, args, kwargs, tensors)
        result = func(*args, **kwargs)
        if is_pinned:
            self._pinned.add(result.untyped_storage())
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if not any(tensor.device.type == "cuda" for tensor in (*tensors, *results)):
            return result
        self._track(results)
        if not self._counts:
            return result
        call = Call(func, args, kwargs, result)
        self._note_waits(call, tensors, results)
        self._add(call, costs.cost_of(call))
        return result

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """Return a value of the host: what is known of it, else one."""
        if tensors[0].device.type == "cuda":
            self.wait(func._schema.name)
            if self._counts:
                call = Call(func, args, kwargs, None)
                self._add(call, costs.cost_of(call))
        else:
            try:
                return func(*args, **kwargs)
            except DataDependentOutputException:
                pass
        return _one(tensors[0].dtype) if func._schema.name == "aten::_local_scalar_dense" else True

    def _add(self, call: Call, cost: costs.Cost) -> None:
        if not cost.num_kernels:
            return
        device_s = hardware.kernel_seconds(cost.num_kernels, cost.num_bytes, cost.flops, is_attention=cost.is_attention)
        line = _caller()
        for counts in self._counts:
            counts.num_operations += 1
            group = counts.by_operation.setdefault(call.name.removeprefix("aten::"), Group())
            for into in (counts, group):
                into.num_kernels += cost.num_kernels
                into.num_bytes += cost.num_bytes
                into.flops += cost.flops
                into.device_s += device_s
            counts.kernels_by_line[line] += cost.num_kernels

    def _note_waits(self, call: Call, tensors: list[Tensor], results: list[Tensor]) -> None:
        name = call.name
        if name in WAITING:
            self.wait(name)
        elif name in {"aten::index", "aten::index_put_", "aten::_index_put_impl_"}:
            for index in call.argument("indices"):
                if index is None:
                    continue
                # ATen/native/IndexingUtils.h: `index.to(device)`; a mask becomes indices by nonzero.
                if index.device.type != "cuda":
                    self._copy(index, index, is_blocking=True, is_to_host=False)
                if index.dtype in {torch.bool, torch.uint8}:
                    self.wait("a mask as an index")
        elif name in {"aten::_to_copy", "aten::copy_"}:
            source, target = (tensors[0], results[0]) if name == "aten::_to_copy" else (tensors[1], tensors[0])
            if source.device.type != target.device.type:
                is_to_host = target.device.type == "cpu"
                host = target if is_to_host else source
                # A copy to memory that is not pinned returns when it is done, whatever was asked for.
                is_pinned = host.untyped_storage() in self._pinned
                # A copy from such memory returns at once if it is small: it is kept in the command.
                size = source.numel() * source.element_size()
                can_return = is_pinned or (not is_to_host and size <= COPY_BYTES_MAX)
                is_blocking = not (call.argument("non_blocking") and can_return)
                self._copy(source, host, is_blocking=is_blocking, is_to_host=is_to_host)

    def _copy(self, source: Tensor, host: Tensor, *, is_blocking: bool, is_to_host: bool) -> None:
        size = source.numel() * source.element_size()
        if is_blocking:
            self.wait(f"a copy to the {'host' if is_to_host else 'device'}")
        is_pinned = host.untyped_storage() in self._pinned
        for counts in self._counts:
            counts.to_host_bytes += size if is_to_host else 0
            counts.to_device_bytes += 0 if is_to_host else size
            if is_blocking:
                counts.copies_s += size / (hardware.PINNED_BANDWIDTH if is_pinned else hardware.COPY_BANDWIDTH)

    def _track(self, results: list[Tensor]) -> None:
        """Count the memory of new storages until they are freed."""
        for tensor in results:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if tensor.device.type != "cuda" or key in self._live:
                continue
            size = storage.nbytes()
            if self._live_bytes + size > self._bytes_max:
                raise torch.OutOfMemoryError(f"CUDA out of memory: {self._live_bytes} bytes are in use, {size} more")
            self._live[key] = size
            self._live_bytes += size
            weakref.finalize(storage, self._free, key)
        for counts, begin in zip(self._counts, self._begin_bytes, strict=True):
            counts.peak_bytes = max(counts.peak_bytes, self._live_bytes - begin)

    def _free(self, key: int) -> None:
        self._live_bytes -= self._live.pop(key, 0)


def _add(into: Counts | Group, more: Counts | Group) -> None:
    into.num_kernels += more.num_kernels
    into.num_bytes += more.num_bytes
    into.flops += more.flops
    into.device_s += more.device_s


_COMPOSITE: dict[Any, bool] = {}


def _is_composite(func: Any) -> bool:
    """Return whether the operation is made of others on a GPU as well, by its registrations on a CPU."""
    if func not in _COMPOSITE:
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        name = func.name()
        is_composite = name.startswith("aten::") and has(name, "CompositeImplicitAutograd")
        _COMPOSITE[func] = is_composite and not has(name, "CPU")
    return _COMPOSITE[func]


def _one(dtype: torch.dtype) -> bool | int | float:
    if dtype == torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1


def _caller() -> str:
    """Return the innermost two lines of the workers: `file:line`, called at `file:line`."""
    frame: FrameType | None = sys._getframe(2)
    lines = list[str]()
    workers = str(ROOT / "workers")
    while frame is not None and len(lines) < 2:
        name = frame.f_code.co_filename
        if name.startswith(workers):
            lines.append(f"{name[len(str(ROOT)) + 1 :]}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines)
