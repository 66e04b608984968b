"""What an operation of torch costs on a CUDA device: launches, bytes of memory traffic, FLOP.

Nothing is guessed. An operation with torch's tag `pointwise` is one kernel over its operands. Every other one stands in
the table, with the CUDA source whose launches were counted; a kernel of our own is declared by `declare`, from its
grid. An operation in none of these raises `UncountedOperation`.

Bytes are what a kernel must move between memory and chip: each element of an operand once, unless the source reads it
again. A broadcast operand counts once. Launches are kernels; a copy within the device is one too, a memset is none.

Does not depend on the workers.

Dimensions of products: M rows, K summed, N columns, S groups or batches. Of attention: T rows, S sequences, L tokens of
the longest, H query heads, E head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

INT_MAX = 2**31 - 1


class UncountedOperation(BaseException):
    """The operation is neither pointwise, nor in the table, nor declared.

    Not an Exception: an engine turns those into results of requests.
    """


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one operation."""

    num_kernels: int = 0
    num_bytes: int = 0
    flops: float = 0.0
    is_attention: bool = False


@dataclass(frozen=True)
class Call:
    """An operation with its arguments and its result."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    @property
    def name(self) -> str:
        """The name without the overload: `aten::add`."""
        return str(self.func._schema.name)

    def argument(self, name: str) -> Any:
        """Return an argument by its name in the schema; its default if it was not given."""
        for place, declared in enumerate(self.func._schema.arguments):
            if declared.name == name:
                if name in self.kwargs:
                    return self.kwargs[name]
                if place < len(self.args) and not declared.kwarg_only:
                    return self.args[place]
                return declared.default_value
        raise KeyError(name)

    @cached_property
    def read(self) -> list[Tensor]:
        """The tensors on the device that are read. An `out` is not, nor what is overwritten whole."""
        return [
            tensor
            for declared, value in self._given()
            for tensor in _on_device(value)
            if not declared.is_out and not (declared.name == "self" and self.name in OVERWRITING)
        ]

    @cached_property
    def written(self) -> list[Tensor]:
        """The tensors on the device that are written: results, each once."""
        written = list(_on_device(self.result))
        for declared, value in self._given():
            if declared.alias_info is not None and declared.alias_info.is_write:
                written += _on_device(value)
        return list({id(tensor): tensor for tensor in written}.values())

    def _given(self) -> Iterator[tuple[Any, Any]]:
        for declared in self.func._schema.arguments:
            value = self.argument(declared.name)
            if value is not None:
                yield declared, value

    @property
    def traffic(self) -> int:
        """The bytes of all that is read, and of all that is written."""
        return sum(map(num_bytes, self.read)) + sum(map(num_bytes, self.written))


Rule = Callable[[Call], Cost]

OVERWRITING = {"aten::copy_", "aten::fill_", "aten::zero_", "aten::normal_", "aten::uniform_"}
"""Operations that write `self` without reading it."""


def num_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements; a broadcast dimension counts once."""
    return tensor.element_size() * prod(
        size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride
    )


def num_pieces(tensors: list[Tensor]) -> int:
    """Return how many kernels a pointwise operation is: one, unless offsets need more than 32 bits.

    ATen/native/TensorIterator.cpp: `with_32bit_indexing` halves the dimension with the largest extent.
    """
    if sum(map(_extent, tensors)) <= INT_MAX:
        return 1
    shape = list(torch.broadcast_shapes(*(tensor.shape for tensor in tensors)))
    strides = [[step * tensor.element_size() for step in tensor.expand(shape).stride()] for tensor in tensors]
    return _pieces_of(shape, strides)


def _extent(tensor: Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * (1 + sum((size - 1) * step for size, step in steps if size))


def _pieces_of(shape: list[int], strides: list[list[int]]) -> int:
    extents = [[(size - 1) * step for size, step in zip(shape, steps, strict=True)] for steps in strides]
    if prod(shape) <= INT_MAX and all(1 + sum(extent) <= INT_MAX for extent in extents):
        return 1
    widest = max(range(len(shape)), key=lambda place: max(extent[place] for extent in extents))
    first = shape[widest] // 2
    halves = ([*shape[:widest], size, *shape[widest + 1 :]] for size in (first, shape[widest] - first))
    return sum(_pieces_of(half, strides) for half in halves)


def _on_device(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.device.type == "cuda"]


def cost_of(call: Call) -> Cost:
    """Return the cost of an operation on tensors of the device. Raises UncountedOperation."""
    rule = RULES.get(call.name)
    if rule is not None:
        return rule[0](call)
    if is_view(call.func):
        return Cost()
    if torch.Tag.pointwise in call.func.tags:
        return pointwise(call)
    raise UncountedOperation(
        f"{call.name} is not counted yet: find its launches in torch's CUDA sources and add a rule with that source to "
        "tests/support/fake_cuda/costs.py; for a kernel of our own use `declare`"
    )


def is_view(func: Any) -> bool:
    """Return whether an operation only returns views of its arguments."""
    return any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)


def declare(name: str, rule: Rule, source: str) -> None:
    """Add the cost of a kernel of our own, `namespace::name`; `source`: what proves the number of launches."""
    assert name not in RULES, f"{name} is declared already"
    RULES[name] = rule, source


# ------------------------------------------------------------------ rules


def nothing(_: Call) -> Cost:
    """An operation of the host."""
    return Cost()


def pointwise(call: Call) -> Cost:
    """One kernel over all operands."""
    return Cost(num_pieces([*call.read, *call.written]), call.traffic)


def kernels(number: int) -> Rule:
    """A fixed number of kernels, which move each operand once."""
    return lambda call: Cost(number, call.traffic)


def copied(call: Call) -> Cost:
    """A copy or conversion within the device.

    From and to the host it is no kernel, but for gathering a tensor with gaps before, or spreading it after.
    """
    tensors = [leaf for leaf in tree_leaves((call.args, call.result)) if isinstance(leaf, Tensor)]
    if {tensor.device.type for tensor in tensors} == {"cuda"}:
        return Cost(num_pieces([*call.read, *call.written]), call.traffic)
    with_gaps = [tensor for tensor in (*call.read, *call.written) if not tensor.is_contiguous()]
    return Cost(len(with_gaps), 2 * sum(map(num_bytes, with_gaps)))


def written_only(call: Call) -> Cost:
    """A new tensor that is filled."""
    tensors = call.written
    return Cost(num_pieces(tensors), sum(map(num_bytes, tensors)))


def filled_twice(call: Call) -> Cost:
    """A new matrix is filled whole, and then its diagonal."""
    (out,) = call.written
    return Cost(2, num_bytes(out) + len(out) * out.element_size())


def picked(call: Call) -> Cost:
    """Elements that indices name are read, and written to the result."""
    return Cost(1, sum(map(num_bytes, call.read[1:])) + 2 * sum(map(num_bytes, call.written)))


def searched(call: Call) -> Cost:
    """One kernel, in which each value reads as many of its row's sorted elements as halving it takes."""
    row, values = call.argument("sorted_sequence"), call.argument("self")
    num_read = row.shape[-1].bit_length() * values.numel()
    return Cost(1, num_bytes(values) + sum(map(num_bytes, call.written)) + num_read * row.element_size())


def sorted_rows(call: Call) -> Cost:
    """Rows of at most 4,096 values are copied, numbered and sorted.

    Fewer than 128 longer ones are numbered, sorted together, then by row, and taken apart.
    """
    source = call.args[0]
    width = source.shape[call.argument("dim")]
    if width <= SMALL_SORT_VALUES:
        return Cost(3, call.traffic)
    num_values, num_rows = source.numel(), source.numel() // width
    if not 2 <= num_rows < ROWS_SORTED_TOGETHER or num_values > RADIX_VALUES_MAX:
        raise UncountedOperation(f"{call.name} of {num_rows} rows of {width} values is not counted yet")
    key_bytes = source.element_size()
    values = _radix_sorted(num_values, key_bytes, SORT_PLACE_BYTES, 8 * key_bytes)
    rows = _radix_sorted(num_values, SORT_PLACE_BYTES, 0, (num_rows - 1).bit_length())
    places = 2 * num_values * SORT_PLACE_BYTES  # written once, read once
    return Cost(2 + values.num_kernels + rows.num_kernels, places + values.num_bytes + rows.num_bytes + call.traffic)


def _radix_sorted(num_values: int, key_bytes: int, value_bytes: int, num_bits: int) -> Cost:
    """Keys are read for all digits' counts, which are added up; then each digit moves all keys and values."""
    num_digits = -(-num_bits // RADIX_BITS)
    moved = 2 * num_digits * (key_bytes + value_bytes)
    return Cost(2 + num_digits, num_values * (key_bytes + moved))


RADIX_BITS, RADIX_VALUES_MAX = 8, 1 << 28
"""Of a digit of CUB's radix sort; and the values that one of its kernels sorts."""
ROWS_SORTED_TOGETHER = 128
"""From so many rows on each is a segment of another sort of CUB's."""
SORT_PLACE_BYTES = 8
"""Of a value's row and its place in the row."""
SMALL_SORT_VALUES = 4096


def largest(call: Call) -> Cost:
    """Each row's largest values are gathered, then sorted in place. Long rows are sorted whole, or by many blocks."""
    if call.args[0].shape[call.argument("dim")] > SMALL_TOPK_VALUES:
        raise UncountedOperation(f"{call.name} of more than {SMALL_TOPK_VALUES} values is not counted yet")
    return Cost(2, call.traffic + 2 * sum(map(num_bytes, call.written)))


SMALL_TOPK_VALUES = 399
"""Rows of at most so many values are one block's, however many they are: `should_use_multiblock`."""


def filled_rows(call: Call) -> Cost:
    """One value is written to the rows that an index names."""
    rows, index = call.args[0], call.argument("index")
    of_row = rows.element_size() * prod(rows.shape[call.argument("dim") + 1 :])
    return Cost(1, num_bytes(index) + index.numel() * of_row)


def put(call: Call) -> Cost:
    """Values are written to places that indices name."""
    if call.argument("accumulate"):
        raise UncountedOperation(f"{call.name} that adds, by sorting, is not counted yet")
    _refuse_fixed_order(call)
    values = call.argument("values")
    places = [tensor for tensor in call.argument("indices") if tensor is not None]
    count = prod(torch.broadcast_shapes(*(place.shape for place in places)))
    kept = prod(size for size, index in zip(call.args[0].shape[len(places) :], call.args[0].shape, strict=False))
    num_values = max(values.numel(), count * kept)
    return Cost(1, sum(map(num_bytes, _on_device(places))) + num_bytes(values) + num_values * values.element_size())


def scattered(call: Call) -> Cost:
    """A source is written to places that indices name."""
    index, source = call.argument("index"), call.argument("src")
    return Cost(1, num_bytes(index) + 2 * num_bytes(source))


def scattered_into_copy(call: Call) -> Cost:
    """The tensor is copied, then a source is written to places that indices name."""
    return Cost(2, 2 * num_bytes(call.args[0]) + scattered(call).num_bytes)


def scattered_rows(call: Call) -> Cost:
    """A source's rows are written to the places that an index names."""
    _refuse_fixed_order(call)
    index, source = call.argument("index"), call.argument("source")
    return Cost(1, num_bytes(index) + 2 * num_bytes(source))


def added(call: Call) -> Cost:
    """A source is added to places that indices name, which are read and written."""
    _refuse_fixed_order(call)
    source = call.read[-1]
    return Cost(1, sum(map(num_bytes, call.read[1:])) + 2 * num_bytes(source))


def _refuse_fixed_order(call: Call) -> None:
    if torch.are_deterministic_algorithms_enabled():
        raise UncountedOperation(f"{call.name} by deterministic algorithms, which sort, is not counted yet")


def bags(call: Call) -> Cost:
    """Each bag sums the rows that its indices name, each read once more for every bag that has it."""
    weight, indices = call.args[:2]
    out = call.result[0]
    num_read = indices.numel() * out.shape[1] * weight.element_size()
    return Cost(1, sum(map(num_bytes, call.read[1:])) + num_read + num_bytes(out))


def triangular(call: Call) -> Cost:
    """The right sides are copied into the result, and matrices that the library cannot read. Then one call of the
    library with two arrays of pointers, or one for each of few large matrices."""
    matrices, sides = call.args[:2]
    size = matrices.shape[-1]
    num_matrices = prod(sides.shape[:-2])
    if size > TRIANGULAR_MAX:
        raise UncountedOperation(f"{call.name} of more than {TRIANGULAR_MAX} unknowns is not counted yet")
    is_copied = not (matrices.is_contiguous() or matrices.mT.is_contiguous())
    number = num_matrices if num_matrices <= 8 and size >= 64 else 3
    copies = 2 * num_bytes(sides) + (2 * num_bytes(matrices) if is_copied else 0)
    return Cost(1 + is_copied + number, call.traffic + copies, float(num_matrices) * size * size * sides.shape[-1])


TRIANGULAR_MAX = 512
"""Unknowns up to which cuBLAS solves batches."""


def padded(call: Call) -> Cost:
    """The result is filled whole, then the input is copied into it."""
    (source,), (out,) = call.read, call.written
    return Cost(2, num_bytes(out) + 2 * num_bytes(source))


def joined(call: Call) -> Cost:
    """Kernels over many operands each; operands of several dtypes are copied one by one."""
    tensors, (out,) = call.read, call.written
    if len(tensors) == 1 or any(tensor.dtype != out.dtype for tensor in tensors) or num_pieces([out]) > 1:
        return Cost(len(tensors), call.traffic)
    most = 128 if all(tensor.is_contiguous() for tensor in tensors) else 64
    return Cost(-(-len(tensors) // most), call.traffic)


def softmax(call: Call) -> Cost:
    """One kernel. It reads a row that does not fit into shared memory three times: maximum, sum, result."""
    logits = call.read[0]
    row_bytes = logits.shape[call.argument("dim")] * logits.element_size()
    return Cost(1, call.traffic + (2 * num_bytes(logits) if row_bytes > SHARED_BYTES else 0))


SHARED_BYTES = 48 << 10
"""Shared memory of a block without opting in for more: `sharedMemPerBlock` of an H100."""


def scan(call: Call) -> Cost:
    """One kernel for many rows; a single row is the vendor's scan, whose state another kernel initialises.

    Another dtype is converted first.
    """
    source, out = call.args[0], call.result
    is_single = source.numel() == source.shape[call.argument("dim")]
    is_converted = source.dtype != out.dtype
    return Cost(1 + is_single + is_converted, call.traffic + (2 * num_bytes(out) if is_converted else 0))


def rms_norm(call: Call) -> Cost:
    """One kernel; two where rows cannot be read four values at a time; and a copy of rows that are not contiguous."""
    rows = call.argument("input")
    number = 1 if rows.shape[-1] % 4 == 0 else 2
    if rows.is_contiguous():
        return Cost(number, call.traffic)
    return Cost(number + 1, call.traffic + 2 * num_bytes(rows))


def rms_norm_backward(call: Call) -> Cost:
    """One kernel for the gradient of the input; that of the weight, of a varying number of kernels, is not counted."""
    if call.argument("output_mask")[1]:
        raise UncountedOperation(f"{call.name} with a gradient of the weight is not counted yet")
    return Cost(1, call.traffic)


def product(call: Call) -> Cost:
    """One product of the vendor's library, of matrices or of batches, added to something or not.

    What it is added to is copied into the result first, unless it is the result, or a vector for all rows of a matrix.
    """
    left, right = call.read[-2:]
    operands, number = [left, right, *call.written], 1
    addend = call.argument("self") if "add" in call.name else None
    if addend is not None and call.argument("beta") != 0:
        operands.append(addend)
        is_result = any(addend is tensor for tensor in call.written)
        if not is_result and addend.ndim > 1:
            number, operands = 2, [*operands, *call.written]
    return Cost(number, sum(map(num_bytes, operands)), 2.0 * left.numel() * right.shape[-1])


def grouped_product(call: Call) -> Cost:
    """A kernel that prepares pointers and sizes, and one that multiplies all groups.

    (M, K) x (S, K, N), each row with its group's matrix; or (M, K) x (K, N), whose K is cut into groups.
    """
    left, right = call.args[:2]
    return Cost(2, call.traffic, 2.0 * left.numel() * right.shape[-1])


def attention_forward(call: Call) -> Cost:
    """One kernel; a query sees half of the longest sequence on average.

    Over pages too, if keys are not split; it reads the keys of every sequence, which are taken to be as many as those
    of the longest, but at most `keys_max`. Only a causal call has queries that see fewer.
    """
    query, table = call.args[0], call.argument("block_table")
    if table is None:
        return Cost(1, call.traffic, 4.0 * query.numel() * call.argument("max_q") / 2, is_attention=True)
    if call.argument("num_splits") != 1:
        raise UncountedOperation(f"{call.name} that splits keys, and joins their results, is not counted yet")
    pages, num_queries = call.args[1], call.argument("max_q")
    num_keys = most_keys(call.argument("max_k"))
    if num_queries == 1 and query.shape[1] > pages.shape[2] and call.argument("window_size_right") != 0:
        raise UncountedOperation(f"{call.name} that swaps heads and rows, by copies, is not counted yet")
    num_seen = num_keys - num_queries / 2 if call.argument("is_causal") else num_keys
    read = 2 * len(table) * num_keys * num_bytes(pages[0, 0])
    operands = sum(map(num_bytes, [query, table, *call.written]))
    return Cost(1, read + operands, 4.0 * query.numel() * num_seen, is_attention=True)


_KEYS_MAX: list[int] = []


def most_keys(number: int) -> int:
    """Return how many keys of a sequence a call reads that has room for so many."""
    return min([number, *_KEYS_MAX])


@contextmanager
def keys_max(number: int) -> Iterator[None]:
    """Let attention over pages read at most so many keys of a sequence in this block.

    A graph names the most keys that its sequences may have; only its inputs' values say how many they have.
    """
    _KEYS_MAX.append(number)
    try:
        yield
    finally:
        _KEYS_MAX.pop()


def attention_backward(call: Call) -> Cost:
    """Sums of dout out, with clearing the fp32 gradient of queries; the gradients; the conversion of that of queries.

    Where query heads share keys, the gradients of keys and values of all query heads are summed by two more kernels.
    Deterministic algorithms clear a buffer for each of several splits first.
    """
    query, key = call.args[1:3]
    ends, longest = call.argument("cum_seq_q"), call.argument("max_q")
    num_seqs, (num_rows, num_heads, width) = len(ends) - 1, query.shape
    splits = 1
    number = 3
    if torch.are_deterministic_algorithms_enabled():
        splits = -(-DETERMINISTIC_BLOCKS // (num_seqs * num_heads))
        number += 1
    buffer_bytes = 4 * splits * (num_rows + 128 * num_seqs) * num_heads * width
    traffic = call.traffic + 4 * buffer_bytes  # cleared, read and written by sums, converted
    if key.shape[1] != num_heads:
        number += 2
        traffic += 2 * 2 * num_bytes(query)  # gradients of key and value of all heads: written, read
    return Cost(number, traffic, 10.0 * query.numel() * longest / 2, is_attention=True)


DETERMINISTIC_BLOCKS = 132
"""Processors of an H100, by which flash attention chooses its splits."""
CHUNK_VALUES, BLOCKS_MAX, TENSORS_MAX = 65_536, 2240, 252
"""Of a launch that takes many tensors: ATen/native/cuda/MultiTensorApply.cuh, four lists, CUDA 12.1 or newer."""


def fused_adamw(call: Call) -> Cost:
    """Launches over chunks of all tensors; reads four vectors and writes three, and the steps."""
    weights: list[Tensor] = call.args[0]
    number = num_tensors = num_blocks = 0
    for tensor in weights:
        num_tensors += 1
        num_chunks = -(-tensor.numel() // CHUNK_VALUES)
        for chunk in range(num_chunks):
            num_blocks += 1
            is_last = chunk == num_chunks - 1
            if num_blocks == BLOCKS_MAX or (is_last and num_tensors == TENSORS_MAX):
                number, num_blocks, num_tensors = number + 1, 0, 0 if is_last else 1
    return Cost(number + bool(num_blocks), 7 * sum(map(num_bytes, weights)))


ATEN = "aten/src/ATen/native/"
RULES: dict[str, tuple[Rule, str]] = {}


def _table(source: str, rule: Rule, *names: str) -> None:
    RULES.update({f"aten::{name}": (rule, ATEN + source) for name in names})


_table("TensorFactories.cpp: allocates", nothing, "empty", "empty_like", "empty_strided", "new_empty",
       "new_empty_strided")  # fmt: skip
_table("cuda/CUDAScalar.cu: a copy to the host", nothing, "_local_scalar_dense")
_table("cuda/Equal.cpp: a comparison and a reduction", kernels(2), "equal")
_table("TensorShape.cpp: a view", nothing, "_unsafe_view", "unbind", "lift_fresh")
_table("cuda/Copy.cu: copy_kernel_cuda, a copy of memory or one kernel", copied, "_to_copy", "copy_", "clone")
_table("cuda/FillKernel.cu", written_only, "fill_", "zero_", "zeros", "zeros_like", "new_zeros", "ones", "ones_like",
       "new_ones", "full", "full_like", "new_full", "scalar_tensor")  # fmt: skip
_table("cuda/TensorFactories.cu: eye_out_cuda", filled_twice, "eye")
_table("cuda/RangeFactories.cu", written_only, "arange")
_table("PadNd.cpp: constant_pad_nd fills and copies", padded, "constant_pad_nd")
_table("TensorShape.cpp: zeros, and a copy into them", padded, "select_backward", "slice_backward")
_table("cuda/ReduceSumProdKernel.cu, ReduceMaxValuesKernel.cu, ReduceArgMaxKernel.cu, ReduceNormKernel.cu by "
       "Reduce.cuh: one kernel; its blocks' counters are cleared by a memset", kernels(1),
       "sum", "amax", "aminmax", "argmax", "all", "any", "mean", "linalg_vector_norm")  # fmt: skip
_table("cuda/Indexing.cu, IndexKernel.cu", picked, "index", "index_select", "embedding")
_table("cuda/ScatterGatherKernel.cu", picked, "gather")
_table("cuda/ScatterGatherKernel.cu", added, "scatter_add_")
_table("cuda/ScatterGatherKernel.cu", scattered, "scatter_")
_table("TensorAdvancedIndexing.cpp: scatter_impl; cuda/ScatterGatherKernel.cu", scattered_into_copy, "scatter")
_table(
    "cuda/Sort.cpp: sort_cuda_kernel, should_use_small_sort; cuda/SortStable.cu: segmented_sort_pairs_by_full_sort; "
    "CUB's dispatch_radix_sort.cuh: InvokeOnesweep",
    sorted_rows,
    "sort",
)
_table("cuda/TensorTopK.cpp: topk_out_cuda; TensorTopK.cu: gatherTopK; Sort.cu: sortKeyValueInplace", largest, "topk")
_table("cuda/IndexKernel.cu: index_fill_kernel", filled_rows, "index_fill_")
_table("cuda/IndexKernel.cu: index_copy_kernel", scattered_rows, "index_copy_")
_table("cuda/EmbeddingBag.cu: EmbeddingBag_updateOutputKernel_sum_mean", bags, "_embedding_bag_forward_only",
       "_embedding_bag")  # fmt: skip
_table("BatchLinearAlgebra.cpp: linalg_solve_triangular_out; cuda/linalg/BatchLinearAlgebra.cpp: "
       "triangular_solve_kernel; BatchLinearAlgebraLibBlas.cpp: apply_triangular_solve_batched", triangular,
       "linalg_solve_triangular")  # fmt: skip
_table("cuda/IndexKernel.cu: flip_kernel", kernels(1), "flip")
_table("cuda/BinaryDivFloorKernel.cu", pointwise, "floor_divide")
_table("cuda/TriangularOps.cu: triu_tril_kernel", kernels(1), "triu", "tril", "triu_", "tril_")
_table("cuda/Bucketization.cu: searchsorted_cuda_contiguous", searched, "searchsorted")
_table("cuda/Indexing.cu: index_add_cuda_impl", added, "index_add_")
_table("cuda/IndexKernel.cu: index_put_kernel, without accumulation", put, "index_put_", "_index_put_impl_")
_table("cuda/Shape.cu: cat_out_cuda, parallel_cat", joined, "cat", "stack")
_table("cuda/SoftMax.cu: host_softmax, cunn_SoftMaxForward", softmax, "_log_softmax", "log_softmax", "_softmax")
_table("cuda/SoftMax.cu: host_softmax_backward", kernels(1), "_softmax_backward_data")
_table("cuda/ScanUtils.cuh: scan_dim; ATen/cuda/cub.cuh", scan, "cumsum")
_table("cuda/Blas.cpp: one call of cuBLAS, which may split its sum over two kernels", product,
       "mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_")  # fmt: skip
_table("cuda/GroupMM.cu: prepare_grouped_gemm_data and CUTLASS", grouped_product, "_grouped_mm")
_table("transformers/cuda/flash_attn/flash_api.cpp: mha_varlen_fwd, run_mha_fwd", attention_forward,
       "_flash_attention_forward")  # fmt: skip
_table("transformers/cuda/flash_attn/flash_bwd_launch_template.h and flash_api.cpp: mha_varlen_bwd", attention_backward,
       "_flash_attention_backward")  # fmt: skip
_table("cuda/fused_adamw_impl.cu by MultiTensorApply.cuh", fused_adamw, "_fused_adamw_")
_table("cuda/layer_norm_kernel.cu: RmsNormKernelImplInternal", rms_norm, "_fused_rms_norm")
_table("cuda/layer_norm_kernel.cu: LayerNormBackwardKernelImplInternal", rms_norm_backward, "_fused_rms_norm_backward")
