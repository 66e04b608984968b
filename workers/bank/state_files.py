"""An adapter's state as safetensors files; PEFT loads the weights as `adapter_model.safetensors`.

Does not depend on where files are stored, or on sequence numbers.

Main invariant: a file is checked completely (names, shapes, types, finite values) before any value is used. A row that
is written and read back has the same bits.

Dimensions: P values of a row, r rank, D inputs, F outputs.
"""

from __future__ import annotations

import errno
import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.bank.entries import MOMENTS, VECTORS, HostRow
from workers.bank.transfers import Transfer, host_zeros
from workers.contract.contents import LARGE_BYTES, Content, whole
from workers.contract.messages import AdapterSpec, AdapterState
from workers.rows import RowLayout

PEFT_PREFIX = "base_model.model."
GRADIENT_PREFIX = f"grad.{PEFT_PREFIX}"
LENGTH_BYTES = 8
"""A file begins with the length of its head in so many bytes."""
VALUE_BYTES = 4
HEADS_KEPT = 256
"""Shapes of files whose heads are kept: those of ranks and kinds of modules that are in use."""


class DamagedStateError(ValueError):
    """The bytes are not a state, or contradict themselves."""


class OtherAdapterError(ValueError):
    """The state is valid, but of an adapter with another rank or other modules."""


class NonFiniteGradientError(ArithmeticError):
    """The pending gradient is infinite or not a number; in a file it would look like damage."""


def is_large(layout: RowLayout) -> bool:
    """Return whether files of such rows are made when they are read, from vectors that must stay as they are."""
    return VALUE_BYTES * layout.num_values > LARGE_BYTES


def weights_file(layout: RowLayout, spec: AdapterSpec, host: HostRow) -> Content:
    """Return weights (P,) as a safetensors file; see `is_large`.

    Names are `base_model.model.<module>.lora_A.weight` (r, D) and `.lora_B.weight` (F, r).
    """
    assert host.weights is not None
    return _file(layout, host, _named(layout, spec, host.weights, PEFT_PREFIX))


def optimizer_file(layout: RowLayout, spec: AdapterSpec, host: HostRow) -> Content:
    """Return both moments as a safetensors file: the weights' names after `exp_avg.` and `exp_avg_sq.`; None: zeros."""
    matrices: dict[str, NDArray[np.float32]] = {}
    for moment, values in zip(MOMENTS, (host.exp_avg, host.exp_avg_sq), strict=True):
        flat = torch.zeros(layout.num_values) if values is None else values
        matrices |= _named(layout, spec, flat, f"{moment}.{PEFT_PREFIX}")
    return _file(layout, host, matrices)


def gradient_file(layout: RowLayout, spec: AdapterSpec, host: HostRow) -> Content:
    """Return a pending gradient (P,) as a safetensors file: the weights' names after `grad.`.

    Raises NonFiniteGradientError: a pass can succeed although the gradient overflowed, and only its step reports that.
    """
    assert host.grad is not None
    host.wait()
    if not bool(torch.isfinite(host.grad).all()):
        raise NonFiniteGradientError("the pending gradient has values that are not finite and was not saved")
    return _file(layout, host, _named(layout, spec, host.grad, GRADIENT_PREFIX))


@dataclass(frozen=True, slots=True)
class _FileKind:
    """One of a state's files."""

    what: str
    """As messages call it."""
    prefixes: Mapping[str, str]
    """What the names of each vector's matrices begin with, by the vector's name in `VECTORS`."""


WEIGHTS = _FileKind("weights", {"weights": PEFT_PREFIX})
OPTIMIZER = _FileKind("optimizer state", {moment: f"{moment}.{PEFT_PREFIX}" for moment in MOMENTS})
GRADIENT = _FileKind("gradients", {"grad": GRADIENT_PREFIX})


def read_state(
    layout: RowLayout, spec: AdapterSpec, weights: Content, optimizer: Content | None, gradient: Content | None = None
) -> HostRow:
    """Return the vectors (P,) of files. Raises DamagedStateError, OtherAdapterError; the message is for the user."""
    vectors: dict[str, Tensor] = {}
    for content, kind in ((weights, WEIGHTS), (optimizer, OPTIMIZER), (gradient, GRADIENT)):
        if isinstance(content, ReadContent):
            vectors |= content.vectors
        elif content is not None:
            vectors |= _read(layout, spec, content, kind, host_zeros)
    return HostRow(*map(vectors.get, VECTORS))


class ReadContent:
    """Implements `LargeContent` for a content whose vectors (P,) have been read, and which is not needed any more."""

    def __init__(self, num_bytes: int, vectors: Mapping[str, Tensor]) -> None:
        """Stand for a content of so many bytes; `vectors` have their names in `VECTORS`."""
        self.vectors = vectors
        self._num_bytes = num_bytes

    def __len__(self) -> int:
        return self._num_bytes

    def read(self, start: int, num_bytes: int) -> bytes:
        """See `LargeContent`: `read_state` takes the vectors, and nothing else needs the content."""
        raise AssertionError("the content has been read into vectors")


def read_ahead(
    layout: RowLayout, spec: AdapterSpec, state: AdapterState, empty: Callable[[int], Tensor]
) -> AdapterState:
    """Return a state of which `read_state` need not read anything. Raises as that does.

    May run in any thread; most of the time it does not hold the interpreter's lock. `empty` gives zeros (P,).
    """

    def read(content: Content, kind: _FileKind) -> ReadContent:
        return ReadContent(len(content), _read(layout, spec, content, kind, empty))

    return replace(
        state,
        weights=read(state.weights, WEIGHTS),
        optimizer=None if state.optimizer is None else read(state.optimizer, OPTIMIZER),
        gradient=None if state.gradient is None else read(state.gradient, GRADIENT),
    )


def _named(layout: RowLayout, spec: AdapterSpec, flat: Tensor, prefix: str) -> dict[str, NDArray[np.float32]]:
    return {prefix + name: matrix for name, matrix in layout.matrices(flat.cpu().numpy(), spec.rank)}


def _file(layout: RowLayout, host: HostRow, matrices: dict[str, NDArray[np.float32]]) -> Content:
    """Return the file that the library writes, in a small part of its time: it writes one file of these shapes."""
    head, names = _head(tuple((name, matrix.shape) for name, matrix in matrices.items()))
    ordered = [matrices[name] for name in names]
    if is_large(layout):
        return LateFile(head, ordered, host.transfer)
    return b"".join([head, *(np.ascontiguousarray(matrix).data for matrix in ordered)])


class LateFile:
    """Implements `LargeContent` by the matrices of a file, which are copied when they are read, by the reader's thread.

    So an engine goes on with other work while a large state is on its way to the disk.
    """

    def __init__(self, head: bytes, matrices: Sequence[NDArray[np.float32]], filling: Transfer | None) -> None:
        """Take what the file begins with, and its matrices in order; `filling` may still fill these."""
        self._head = head
        self._matrices = matrices
        self._filling = filling
        self._ends = list(accumulate((matrix.nbytes for matrix in matrices), initial=len(head)))
        """Where the head ends, and each matrix."""

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, start: int, num_bytes: int) -> bytes:
        """See `LargeContent`."""
        try:
            if self._filling is not None:
                self._filling.wait_on_host()
        except RuntimeError as error:
            raise OSError(errno.EIO, f"a state was lost with its GPU: {error}") from error
        end = start + num_bytes
        parts: list[bytes | memoryview] = [self._head[start:end]]
        first = max(bisect_right(self._ends, start) - 1, 0)
        for number in range(first, bisect_left(self._ends, end)):
            begin = self._ends[number]
            parts.append(_bytes_of(self._matrices[number], max(start - begin, 0), end - begin))
        return b"".join(parts)


def _bytes_of(matrix: NDArray[np.float32], start: int, end: int) -> memoryview:
    """Return some bytes of a matrix (r, D) or (F, r), or of a stack of them, row after row."""
    row_bytes = matrix[0].nbytes
    first = start // row_bytes
    rows = np.ascontiguousarray(matrix[first : -(-min(end, matrix.nbytes) // row_bytes)])
    return rows.data.cast("B")[start - first * row_bytes : end - first * row_bytes]


@lru_cache(HEADS_KEPT)
def _head(shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> tuple[bytes, list[str]]:
    """Return what a file of such matrices begins with, and their names in the order in which they follow."""
    zeros = {name: np.zeros(shape, np.float32) for name, shape in shapes}
    file: bytes = safetensors.numpy.save(zeros, {"format": "pt"})
    num_bytes = LENGTH_BYTES + int.from_bytes(file[:LENGTH_BYTES], "little")
    entries = json.loads(file[LENGTH_BYTES:num_bytes])
    return file[:num_bytes], sorted(zeros, key=lambda name: entries[name]["data_offsets"])


def _read(
    layout: RowLayout, spec: AdapterSpec, content: Content, kind: _FileKind, empty: Callable[[int], Tensor]
) -> dict[str, Tensor]:
    """Return the vectors (P,) of a file, after all checks."""
    vectors = {name: empty(layout.num_values) for name in kind.prefixes}
    targets = {name: _named(layout, spec, vectors[name], prefix) for name, prefix in kind.prefixes.items()}
    try:
        file = whole(content)
    except OSError as error:
        raise _unreadable(kind) from error
    found = _views(file, {name: each.shape for part in targets.values() for name, each in part.items()})
    if found is None:
        found = _loaded(file, kind)
        for vector, prefix in kind.prefixes.items():
            own = found if len(kind.prefixes) == 1 else {n: m for n, m in found.items() if n.startswith(f"{vector}.")}
            _check(own, targets[vector], prefix, spec, kind.what)
        if len(found) != sum(map(len, targets.values())):
            raise DamagedStateError(f"the {kind.what} has tensors that are neither exp_avg nor exp_avg_sq")
    for part in targets.values():
        for name, target in part.items():
            target[...] = found[name]
    for vector, part in targets.items():
        if not np.isfinite(vectors[vector].numpy()).all():
            name = next(name for name, matrix in part.items() if not np.isfinite(matrix).all())
            raise DamagedStateError(f"{name} in the {kind.what} has values that are not finite")
    return vectors


def _views(file: bytes, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, NDArray[np.float32]] | None:
    """Return the matrices of a file that begins as the library begins one of these shapes; None: it does not.

    Most files do. The library would copy all of a file, and hold the interpreter's lock meanwhile.
    """
    head, names = _head(tuple(shapes.items()))
    num_values = sum(math.prod(shape) for shape in shapes.values())
    if not file.startswith(head) or len(file) != len(head) + VALUE_BYTES * num_values:
        return None
    values, begin = np.frombuffer(file, np.float32, num_values, len(head)), 0
    found = {}
    for name in names:
        end = begin + math.prod(shapes[name])
        found[name] = values[begin:end].reshape(shapes[name])
        begin = end
    return found


def _loaded(file: bytes, kind: _FileKind) -> dict[str, NDArray[Any]]:
    """Return what the library finds in a file."""
    try:
        matrices: dict[str, NDArray[Any]] = safetensors.numpy.load(file)
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise _unreadable(kind) from error
    return matrices


def _unreadable(kind: _FileKind) -> DamagedStateError:
    return DamagedStateError(f"the {kind.what} cannot be read as a safetensors file")


def _check(
    found: Mapping[str, NDArray[Any]],
    expected: Mapping[str, NDArray[np.float32]],
    prefix: str,
    spec: AdapterSpec,
    what: str,
) -> None:
    """Raise unless named matrices have the names, shapes and dtype of these."""
    if found.keys() != expected.keys():
        missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
        is_subset = bool(found) and not (missing and extra) and all(name.startswith(prefix) for name in found)
        message = (
            f"the {what} adapt other modules than this adapter"
            f"{f'; missing {missing[0]}' if missing else ''}{f'; not expected {extra[0]}' if extra else ''}"
        )
        raise (OtherAdapterError if is_subset else DamagedStateError)(message)
    ranks = {matrix.shape[0] for name, matrix in found.items() if ".lora_A." in name and matrix.ndim == 2}
    if len(ranks) == 1 and ranks != {spec.rank}:
        raise OtherAdapterError(
            f"the {what} are of rank {ranks.pop()}, this adapter has rank {spec.rank}; create one of the same rank"
        )
    for name, target in expected.items():
        matrix = found[name]
        if matrix.shape != target.shape or matrix.dtype != np.float32:
            raise DamagedStateError(
                f"{name} in the {what} is {matrix.dtype} of shape {matrix.shape}, "
                f"expected float32 of shape {target.shape}"
            )
