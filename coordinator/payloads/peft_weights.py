"""Plans the import of a PEFT adapter from its configuration and the header of its weights, and makes the weights of a
state of its tensors.

Where transformers joins modules in one linear, an adapter of the linear is taken apart: each module gets its rows of B,
and A as it is; or its rows of A and its block of B, where an export put the modules' own matrices together.

An adapter adapts all modules of a kind (`train_attn`, ...) or none, so a plan adds the kind's modules that the adapter
lacks. They begin as in a new adapter: A from the seed, B = 0, which adds exactly nothing to what the adapter computes.

Main invariants: names, shapes, types and places of all tensors are checked before a value is read, and each byte of the
file belongs to exactly one tensor. Ranks and alpha are kept. Values become fp32 without rounding, and are finite.

Dimensions: r rank, D inputs, F outputs, n modules in a linear.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.base.errors import ServiceError
from coordinator.payloads.peft_config import PeftConfig, load_object, not_importable
from workers.contract.adapted_modules import AdaptedModule, ModuleKind, initial_A, leaf_names, peft_name_of_experts
from workers.contract.messages import AdapterSpec, ModelInfo

Array = NDArray[np.float32]
_Read = Callable[[int, int], bytes]
"""Returns so many bytes of the data from a place on."""
PREFIX = "base_model.model."
"""What PEFT puts before the names of modules."""
_RENAMED = (
    (re.compile(rf"^{re.escape(PREFIX)}model\.language_model\."), f"{PREFIX}model."),
    (re.compile(rf"^{re.escape(PREFIX)}model\.unembed_tokens\."), f"{PREFIX}lm_head."),
    (re.compile(rf"^({re.escape(PREFIX)}model\.layers\.\d+)\.attn\."), r"\1.self_attn."),
)
"""Beginnings of names, and what the pool has in their place: of the text model inside a model that can see, as PEFT
adapts it; of the unembedding, and of attention in gpt-oss, as the Tinker service calls them."""
HEADER_BYTES, ENTRY_BYTES = 64 << 10, 512
"""Most bytes of a header: this many for its metadata, and for each matrix of the base model's modules. PEFT's entries
have less than 200; what is longer would only hold the interpreter while it is parsed."""
READ_BYTES = 4 << 20
"""Bytes of a tensor that are converted at a time: a multiple of every item size."""
_ITEM_BYTES: Mapping[str, int] = {"F32": 4, "F16": 2, "BF16": 2}
_NAMES_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A linear of transformers' model that the adapter adapts, or one of the modules that the pool has in its place."""

    name: str
    """Full name."""
    rank: int
    """The adapter's, or n times that: then `modules` have matrices of their own in it."""
    modules: tuple[AdaptedModule, ...]
    """What the pool adapts of it, in the order of its rows."""

    @property
    def is_joined(self) -> bool:
        """Whether the pool has several modules in its place."""
        return len(self.modules) > 1

    @property
    def leaf_name(self) -> str:
        """The last part of its name."""
        return self.name.rpartition(".")[2]

    @property
    def num_experts(self) -> int:
        """Experts of a layer, if it is PEFT's parameter of them; else 0."""
        module = self.modules[0]
        return max(module.num_As, module.num_Bs) if module.is_of_experts and self.name != module.name else 0

    @property
    def matrices(self) -> tuple[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...]]]:
        """The names of A and B in the file, with their shapes."""
        module = self.modules[0]
        if num_experts := self.num_experts:
            name = PREFIX + peft_name_of_experts(self.name)
            d_out = sum(module.d_out for module in self.modules)
            return (
                (f"{name}.lora_A.weight", (num_experts * self.rank, module.d_in)),
                (f"{name}.lora_B.weight", (d_out, self.rank * num_experts)),
            )
        if module.is_of_experts:
            return (PREFIX + module.A_name, module.A_shape(self.rank)), (
                PREFIX + module.B_name,
                module.B_shape(self.rank),
            )
        whole = AdaptedModule(
            name=self.name,
            kind=self.modules[0].kind,
            d_in=self.modules[0].d_in,
            d_out=sum(module.d_out for module in self.modules),
        )
        return (PREFIX + whole.A_name, (self.rank, whole.d_in)), (PREFIX + whole.B_name, (whole.d_out, self.rank))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """The place of a tensor in the data behind the header."""

    dtype: str
    begin: int
    num_bytes: int

    def rows(self, rows: range, num_columns: int) -> Tensor:
        """Return the place of consecutive rows."""
        row_bytes = num_columns * _ITEM_BYTES[self.dtype]
        return Tensor(dtype=self.dtype, begin=self.begin + rows.start * row_bytes, num_bytes=len(rows) * row_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A matrix of the state: A (r, D) or B (F, r) of a module, or those of experts."""

    name: str
    """As in a state's file."""
    shape: tuple[int, ...]
    sources: tuple[Tensor, ...]
    """Its rows in the file, one after another; empty: the adapter lacks the module."""
    seeded_as: str
    """The name by which `initial_A` draws a new A; empty: B, which begins with zeros."""
    first_column: int = 0
    """Which of a row's columns in the file is the first; others than the matrix's must be zero."""
    num_columns: int = 0
    """Columns of a row in the file; 0: as many as the matrix has."""
    num_experts: int = 0
    """The file has PEFT's matrix of so many experts, `num_columns` ranks each; 0: it has no more than a module's."""
    row_step: int = 1
    """Of experts, which rows of a source are the matrix's: each so many, from the first on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportPlan:
    """A checked adapter: what its state will have, and where each value comes from."""

    base_model: str
    rank: int
    alpha: float
    kinds: tuple[ModuleKind, ...]
    matrices: tuple[Matrix, ...]
    num_bytes: int
    """Bytes of the data behind the header."""
    notes: tuple[str, ...]
    """Sentences for the person who imports."""

    def spec(self, seed: int) -> AdapterSpec:
        """Return the spec of its adapter, which has no id yet."""
        return AdapterSpec(
            adapter_id="",
            rank=self.rank,
            alpha=self.alpha,
            seed=seed,
            train_attn="attn" in self.kinds,
            train_mlp="mlp" in self.kinds,
            train_unembed="unembed" in self.kinds,
        )


def plan_import(config: PeftConfig, header: str, model: ModelInfo) -> ImportPlan:
    """Return the plan of an adapter for a base model. Raises ServiceError, which names the first difference."""
    if config.rank > model.max_rank:
        raise not_importable(
            f"adapter_config.json has r = {config.rank}: {model.name} takes ranks up to {model.max_rank}"
        )
    adapted = _adapted(config, model)
    tensors, num_bytes = _checked_tensors(config, header, adapted, model)
    kinds = tuple(dict.fromkeys(linear.modules[0].kind for linear in adapted))
    found = {matrix.name: matrix for linear in adapted for matrix in _matrices(linear, config.rank, tensors)}
    lacking = {
        matrix.name: matrix
        for module in model.modules
        for matrix in _matrices(Linear(name=module.name, rank=config.rank, modules=(module,)), config.rank, {})
        if module.kind in kinds
    }
    return ImportPlan(
        base_model=model.name,
        rank=config.rank,
        alpha=config.alpha,
        kinds=kinds,
        matrices=tuple((lacking | found).values()),
        num_bytes=num_bytes,
        notes=tuple(_notes(config, adapted, kinds, model)),
    )


def state_weights(plan: ImportPlan, seed: int, read: _Read) -> Iterator[bytes]:
    """Yield the weights of the state, a safetensors file in fp32, piece by piece; at most a matrix is in memory.

    `read` returns so many bytes of the data from a place on. Raises ServiceError for a value that is not finite, and
    what `read` raises.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for matrix in plan.matrices:
        begin, end = end, end + math.prod(matrix.shape) * _ITEM_BYTES["F32"]
        header[matrix.name] = {"dtype": "F32", "shape": matrix.shape, "data_offsets": (begin, end)}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)  # tensors begin at a multiple of eight bytes
    yield len(head).to_bytes(8, "little") + head
    for matrix in plan.matrices:
        for values in _values(matrix, seed, read):
            flat = values.astype("<f4", copy=False).reshape(-1)
            for start in range(0, flat.size, READ_BYTES // _ITEM_BYTES["F32"]):
                yield flat[start : start + READ_BYTES // _ITEM_BYTES["F32"]].tobytes()


def _values(matrix: Matrix, seed: int, read: _Read) -> Iterator[Array]:
    """Yield the values of a matrix, piece by piece."""
    if not matrix.sources:
        if matrix.seeded_as:
            yield initial_A(seed, matrix.seeded_as, *matrix.shape)
        else:
            yield np.zeros(matrix.shape, np.float32)
        return
    if matrix.num_experts:
        yield from (_As_of_experts if matrix.seeded_as else _Bs_of_experts)(matrix, read)
        return
    num_columns = matrix.num_columns or matrix.shape[-1]
    own = slice(matrix.first_column, matrix.first_column + matrix.shape[-1])
    for source in matrix.sources:
        step = READ_BYTES - READ_BYTES % (num_columns * _ITEM_BYTES[source.dtype])
        for start in range(0, source.num_bytes, step):
            rows = _finite(matrix, source, start, min(step, source.num_bytes - start), read).reshape(-1, num_columns)
            _check_zeros(matrix, rows[:, own], rows)
            yield np.ascontiguousarray(rows[:, own])


def _As_of_experts(matrix: Matrix, read: _Read) -> Iterator[Array]:  # noqa: N802 - A is the matrix
    """Yield the As (r, D) of experts, expert by expert, or the one that all of them share."""
    num_stored, rank, d_in = matrix.shape
    (source,) = matrix.sources
    shared: Array | None = None
    for expert in range(matrix.num_experts):
        first = expert * matrix.num_columns + matrix.first_column
        place = source.rows(range(first, first + rank), d_in)
        values = _finite(matrix, place, 0, place.num_bytes, read)
        if num_stored > 1 or shared is None:
            shared = values
            yield values
        elif not np.array_equal(values, shared):
            raise _not_shared(matrix)


def _Bs_of_experts(matrix: Matrix, read: _Read) -> Iterator[Array]:  # noqa: N802 - B is the matrix
    """Yield the Bs (E or 1, F, r) of experts."""
    num_stored, num_rows, rank = matrix.shape
    (source,) = matrix.sources
    found = np.empty(matrix.shape, np.float32)
    own = slice(matrix.first_column, matrix.first_column + rank)
    row_bytes = matrix.num_columns * matrix.num_experts * _ITEM_BYTES[source.dtype]
    step = max(1, READ_BYTES // (matrix.row_step * row_bytes))
    for first in range(0, num_rows, step):
        count = min(step, num_rows - first)
        num_read = (count - 1) * matrix.row_step + 1
        values = _finite(matrix, source, first * matrix.row_step * row_bytes, num_read * row_bytes, read)
        wide = values.reshape(num_read, matrix.num_columns, matrix.num_experts)[:: matrix.row_step]
        _check_zeros(matrix, wide[:, own], wide)
        of_experts = wide[:, own].transpose(2, 0, 1)
        if num_stored == 1 and not (of_experts == of_experts[:1]).all():
            raise _not_shared(matrix)
        found[:, first : first + count] = of_experts[:num_stored]
    yield found


def _not_shared(matrix: Matrix) -> ServiceError:
    return not_importable(
        f"{matrix.name} differs between experts in the adapter's file: the pool adapts experts as the Tinker service "
        "does, which share the factor on the side of the hidden states. Train without target_parameters, or in a pool"
    )


def _finite(matrix: Matrix, source: Tensor, start: int, num_bytes: int, read: _Read) -> Array:
    """Return values of a source, all of them finite. Raises ServiceError."""
    values = _to_float32(read(source.begin + start, num_bytes), source.dtype)
    if not np.isfinite(values).all():
        raise not_importable(f"{matrix.name} has values that are infinite or not a number: train it again")
    return values


def _check_zeros(matrix: Matrix, own: Array, rows: Array) -> None:
    """Raise ServiceError unless rows are zero in all but a module's own columns."""
    if np.count_nonzero(own) != np.count_nonzero(rows):
        raise not_importable(
            f"the rows of {matrix.name} in the adapter's file are not zero in other modules' columns: it was "
            "trained on after its export, which only an adapter of a larger rank could hold. Train the "
            "exported checkpoint in a pool, or a new adapter in PEFT, without rank_pattern and alpha_pattern"
        )


def _to_float32(data: bytes, dtype: str) -> Array:
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.frombuffer(data, "<f2" if dtype == "F16" else "<f4").astype(np.float32, copy=False)


def _matrices(linear: Linear, rank: int, tensors: Mapping[str, Tensor]) -> Iterator[Matrix]:
    """Yield A and B of a linear's modules; without their tensors, as the adapter lacks them."""
    (A_name, _), (B_name, _) = linear.matrices
    A, B = tensors.get(A_name), tensors.get(B_name)
    has_blocks = linear.rank != rank
    for number, module in enumerate(linear.modules):
        if module.is_of_experts:
            yield from _matrices_of_experts(linear, module, number * rank if has_blocks else 0, rank, A, B)
            continue
        own_A = range(number * rank, (number + 1) * rank) if has_blocks else range(rank)
        own_B: tuple[range, ...] = (range(module.d_out),)
        if linear.is_joined and module.joined is not None:
            own_B = module.joined.runs(module.d_out)
        yield Matrix(
            name=PREFIX + module.A_name,
            shape=(rank, module.d_in),
            sources=() if A is None else (A.rows(own_A, module.d_in),),
            seeded_as=module.A_name,
        )
        yield Matrix(
            name=PREFIX + module.B_name,
            shape=(module.d_out, rank),
            sources=() if B is None else tuple(B.rows(run, linear.rank) for run in own_B),
            seeded_as="",
            first_column=number * rank if has_blocks else 0,
            num_columns=linear.rank,
        )


def _matrices_of_experts(
    linear: Linear, module: AdaptedModule, first_column: int, rank: int, A: Tensor | None, B: Tensor | None
) -> Iterator[Matrix]:
    """Yield A and B of a module of experts, of PEFT's matrices or of the module's own."""
    row_step = 1
    if B is not None and linear.num_experts and module.joined is not None:
        first, *others = module.joined.runs(module.d_out)
        if others:
            row_step = others[0].start - first.start
        B = B.rows(range(first.start, (others or [first])[-1].stop), linear.rank * linear.num_experts)
    for name, shape, source, seeded_as in (
        (module.A_name, module.A_shape(rank), A, module.A_name),
        (module.B_name, module.B_shape(rank), B, ""),
    ):
        yield Matrix(
            name=PREFIX + name,
            shape=shape,
            sources=() if source is None else (source,),
            seeded_as=seeded_as,
            first_column=first_column if linear.num_experts else 0,
            num_columns=linear.rank if linear.num_experts else 0,
            num_experts=linear.num_experts,
            row_step=1 if seeded_as else row_step,
        )


def _adapted(config: PeftConfig, model: ModelInfo) -> list[Linear]:
    """Return what the targets name: by a full name, or by its end, as in PEFT."""
    every: dict[str, tuple[AdaptedModule, ...]] = {}
    for module in model.modules:
        every[module.linear_name] = (*every.get(module.linear_name, ()), module)
        every[module.name] = (module,)
    found, adapted, owners = set[str](), list[Linear](), dict[str, str]()
    for name, modules in every.items():
        own_ends = _ends(name)
        if not modules[0].is_of_experts:  # beside experts PEFT adapts dense linears as parameters
            own_ends |= _ends(f"{name}.weight")
        if ends := own_ends.intersection(config.targets):
            found |= ends
            rank = _rank_of(name, len(modules), config)
            adapted.append(Linear(name=name, rank=rank, modules=tuple(sorted(modules, key=_first_row))))
            for module in modules:
                if (other := owners.setdefault(module.name, name)) != name:
                    raise not_importable(
                        f"target_modules names {other} and {name}, one of which is in the other: name one"
                    )
    for target in config.targets:
        if target not in found:
            names = dict.fromkeys(module.linear_name.rpartition(".")[2] for module in model.modules)
            raise not_importable(
                f"target_modules names {target[:200]!r}, which the pool does not adapt in {model.name}: it adapts "
                f"{', '.join(list(names)[:_NAMES_SHOWN])}. Train with these modules only{_other_model(config, model)}"
            )
    ends = {end for linear in adapted if linear.is_joined for end in _ends(linear.name)}
    for setting, pattern in (("rank_pattern", config.rank_pattern), ("alpha_pattern", config.alpha_pattern)):
        for name in pattern:
            if name not in ends:
                raise _not_uniform(setting, name)
    return adapted


def _first_row(module: AdaptedModule) -> int:
    return module.joined.begin if module.joined else 0


def _ends(name: str) -> set[str]:
    """Return what may name a module: its full name and the ends of it."""
    parts = name.split(".")
    return {".".join(parts[start:]) for start in range(len(parts))}


def _rank_of(name: str, num_modules: int, config: PeftConfig) -> int:
    """Return the rank of a linear with so many modules. Raises ServiceError unless it is one that they can have."""
    ends = _ends(name)
    rank = next((value for end, value in config.rank_pattern.items() if end in ends), config.rank)
    alpha = next((value for end, value in config.alpha_pattern.items() if end in ends), config.alpha)
    for factor in (1, num_modules):
        if (rank, alpha) == (factor * config.rank, factor * config.alpha):
            return factor * config.rank
    raise _not_uniform("rank_pattern" if rank != config.rank else "alpha_pattern", name)


def _not_uniform(setting: str, name: str) -> ServiceError:
    return not_importable(
        f"adapter_config.json has a {setting} for {name[:200]!r}: train with one rank and one alpha for all modules"
    )


def _checked_tensors(
    config: PeftConfig, header: str, adapted: Sequence[Linear], model: ModelInfo
) -> tuple[dict[str, Tensor], int]:
    """Return the tensors of a header by name, and their bytes together, after all checks."""
    longest = HEADER_BYTES + 2 * len(model.modules) * ENTRY_BYTES
    if len(header) > longest:
        raise not_importable(
            f"the header of adapter_model.safetensors has {len(header)} characters, and an adapter of {model.name} "
            f"needs at most {longest}: save the adapter alone, with PEFT's save_pretrained"
        )
    found = load_object(header, "the header of adapter_model.safetensors")
    found.pop("__metadata__", None)
    entries: dict[str, Any] = {}
    own_names = {name for linear in adapted for name, _ in linear.matrices}
    for given, entry in found.items():
        name = given if given in own_names else _renamed(given)
        if name in entries:
            raise not_importable(
                f"adapter_model.safetensors has {name} twice, once as {given[:200]}: remove one, or save it again"
            )
        entries[name] = entry
    tensors: dict[str, Tensor] = {}
    for linear in adapted:
        for name, shape in linear.matrices:
            if name not in entries:
                raise _missing(name, linear, set(entries) - set(tensors), config, model)
            tensors[name] = _tensor(name, entries[name], shape, config, model)
    for name in entries:
        if name not in tensors:
            raise _unexpected(name)
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].begin):
        if tensor.begin != end:
            raise not_importable(
                f"{name} begins at byte {tensor.begin}, and the tensor before it ends at {end}: "
                "adapter_model.safetensors is damaged; copy it again"
            )
        end += tensor.num_bytes
    return tensors, end


def _renamed(name: str) -> str:
    """Return what the pool calls a tensor that PEFT or the Tinker service has written."""
    for pattern, replacement in _RENAMED:
        name = pattern.sub(replacement, name)
    return name


def _tensor(name: str, entry: Any, shape: tuple[int, ...], config: PeftConfig, model: ModelInfo) -> Tensor:
    """Return the tensor of an entry of the header, after checks of shape, type and size."""
    try:
        dtype, found, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise not_importable(
            f"{name} has no type, shape and place in the header of adapter_model.safetensors"
        ) from None
    if found != shape:
        raise not_importable(_other_shape(name, found, shape, config, model))
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise not_importable(
            f"{name} is of type {str(dtype)[:20]}: save the adapter in float32, bfloat16 or float16, not quantized"
        )
    num_bytes = math.prod(shape) * _ITEM_BYTES[dtype]
    if type(begin) is not int or type(end) is not int or begin < 0 or end - begin != num_bytes:
        raise not_importable(f"{name} does not have the {num_bytes} bytes of its shape and type: copy the file again")
    return Tensor(dtype=dtype, begin=begin, num_bytes=num_bytes)


def _other_shape(
    name: str, found: tuple[Any, ...], shape: tuple[int, ...], config: PeftConfig, model: ModelInfo
) -> str:
    shown = f"{name} has the shape {list(found[:_NAMES_SHOWN])}, expected {list(shape)}"
    is_A = name.endswith(".lora_A.weight")
    rank = found[0 if is_A else -1] if len(found) == 2 else None
    if rank != config.rank and len(found) == 2 and found[1 if is_A else 0] == shape[1 if is_A else 0]:
        return f"{shown}: adapter_config.json has r = {config.rank}, so it belongs to other weights"
    return f"{shown} for {model.name}: it was trained on another base model{_other_model(config, model)}"


def _missing(name: str, linear: Linear, others: set[str], config: PeftConfig, model: ModelInfo) -> ServiceError:
    other = f"; it has {min(others)[:200]!r}" if others else ""
    return not_importable(
        f"adapter_model.safetensors lacks {name}, though target_modules names {linear.leaf_name}{other}. An adapter "
        f"has both matrices of a module, in every layer of {model.name}, under PEFT's names: save it with PEFT's "
        f"save_pretrained{_other_model(config, model)}"
    )


def _unexpected(name: str) -> ServiceError:
    shown = name[:200]
    if "lora_magnitude_vector" in name:
        return not_importable(f"{shown} is of DoRA: train without DoRA, or merge the adapter into its base model")
    if ".lora_" not in name:
        return not_importable(
            f"{shown} is a whole weight, not LoRA's: save with save_pretrained(DIR, save_embedding_layers=False), "
            "without modules_to_save and biases"
        )
    return not_importable(f"{shown} is of a module that target_modules does not name: PEFT would ignore it; remove it")


def _other_model(config: PeftConfig, model: ModelInfo) -> str:
    """Return a half sentence if the configuration names another base model."""
    if is_same_model(config.base_model, model.name):
        return ""
    return f". Its configuration names the base model {config.base_model[:200]!r}: import it into a pool that serves it"


def is_same_model(hint: str, name: str) -> bool:
    """Return whether a configuration may mean a base model: by the last part of its name or path, or without one."""
    return not hint or hint.rstrip("/").rpartition("/")[2].lower() == name.rpartition("/")[2].lower()


def _notes(
    config: PeftConfig, adapted: Sequence[Linear], kinds: Sequence[ModuleKind], model: ModelInfo
) -> Iterator[str]:
    if not is_same_model(config.base_model, model.name):
        yield (
            f"The configuration names the base model {config.base_model[:200]!r}, and the pool's is {model.name!r}. "
            "All shapes fit; the adapter computes what it did only if the weights are the same."
        )
    modules = [module for linear in adapted for module in linear.modules]
    has = {module.name for module in modules}
    for kind in kinds:
        if lacks := leaf_names((module for module in model.modules if module.name not in has), kind):
            partial = leaf_names(modules, kind)
            shown = (f"{name} (in some layers)" if name in partial else name for name in lacks)
            yield (
                f"The adapter lacks {', '.join(shown)}, which train_{kind} trains too. They begin with B = 0, so the "
                "adapter computes what it did until it is trained further."
            )
    shared = {
        linear.leaf_name: ", ".join(module.leaf_name for module in linear.modules)
        for linear in adapted
        if linear.rank == config.rank and linear.is_joined
    }
    for name, parts in shared.items():
        yield (
            f"The adapter has one A for {name}; the pool adapts {parts} in its place, each with an A of its own. Each "
            "begins with that A, so the adapter computes what it did, and has more to train."
        )
    if config.dropout:
        yield f"The adapter was trained with lora_dropout {config.dropout:g}; the pool trains without dropout."
