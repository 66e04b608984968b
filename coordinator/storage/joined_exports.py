"""The PEFT directory of an adapter whose base model has several adapted modules in one linear of transformers.

PEFT adapts transformers' linears, and loads an adapter of modules that it does not find without a word. So modules that
transformers joins become one: A is theirs, one below the other (n r, D), B has theirs in blocks (F, n r), with zeros
beside them. Rank and alpha of the linear are n times the adapter's, so scaling is the same.

Of the experts of a layer PEFT adapts two parameters, `gate_up_proj` and `down_proj`: A has the experts' As one below
the other (E n r, D), and each row of B (F, n r E) has for every rank the column of each expert. The factor that all
experts share is there E times. `down_proj`'s matrices are named after the experts, those of `gate_up_proj` after their
`base_layer`. Rows of gates and ups alternate where transformers has them so.

Does not depend on the disk. Main invariant: values keep their bytes, and no more of a file is in memory than a piece,
or a row if that is longer.

Dimensions: n modules in a linear, r rank, D inputs, F outputs of the linear, E experts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from coordinator.storage.exports import LENGTH_BYTES, head_of
from workers.contract.adapted_modules import AdaptedModule, JoinedRows, peft_name_of_experts

Joined = Mapping[str, JoinedRows]
"""Where transformers has the modules that it joins, by the last parts of their names."""
_A, _B = ".lora_A.weight", ".lora_B.weight"
_DENSE_LINEARS = {"gate_proj", "up_proj", "down_proj"}
_ITEM_BYTES = 4
"""States are in fp32."""


def to_joined(modules: Iterable[AdaptedModule]) -> Joined:
    """Return what `modules` say. Those of the same last part are in the same place in every layer."""
    return {module.leaf_name: module.joined for module in modules if module.joined is not None}


def dump_joined(joined: Joined) -> dict[str, Any]:
    """Return an object for JSON."""
    return {leaf: asdict(rows) for leaf, rows in joined.items()}


def load_joined(value: Mapping[str, Any]) -> Joined:
    """Return what `dump_joined` was given."""
    return {leaf: JoinedRows(**rows) for leaf, rows in value.items()}


def joined_config(config: dict[str, Any], joined: Joined) -> dict[str, Any]:
    """Return an `adapter_config.json` with transformers' linears in place of the modules that they join."""
    in_place = {leaf: joined[leaf] for leaf in config["target_modules"] if leaf in joined}
    counts = Counter(rows.linear for rows in in_place.values())
    modules = {leaf for leaf in config["target_modules"] if leaf not in joined}
    modules |= {rows.linear for rows in in_place.values() if not rows.is_of_experts}
    parameters = {f"experts.{rows.linear}" for rows in in_place.values() if rows.is_of_experts}
    if parameters:
        # PEFT would take dense linears of these names for the experts', and adapt none of them.
        parameters |= {f"{leaf}.weight" for leaf in modules & _DENSE_LINEARS}
        modules -= _DENSE_LINEARS
    several = {linear: count for linear, count in sorted(counts.items()) if count > 1}
    changed = {
        "target_modules": sorted(modules),
        "rank_pattern": {linear: count * config["r"] for linear, count in several.items()},
        "alpha_pattern": {linear: count * config["lora_alpha"] for linear, count in several.items()},
    }
    if parameters:
        changed["target_parameters"] = sorted(parameters)
    return config | changed


@dataclass(frozen=True, slots=True)
class _Rows:
    """Consecutive rows of a stored matrix as rows of a wider one, with zeros before and after; of bytes."""

    begin: int
    """In the data of the stored file."""
    num_rows: int
    row_bytes: int
    zeros_before: int = 0
    zeros_after: int = 0

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self._wide_row_bytes

    @property
    def _wide_row_bytes(self) -> int:
        return self.zeros_before + self.row_bytes + self.zeros_after

    def pieces(self, read: Callable[[int, int], bytes], piece_bytes: int) -> Iterator[tuple[bytes, int]]:
        step = max(1, piece_bytes // self._wide_row_bytes)
        for first in range(0, self.num_rows, step):
            num_rows = min(step, self.num_rows - first)
            data = read(self.begin + first * self.row_bytes, num_rows * self.row_bytes)
            rows = np.frombuffer(data, np.uint8).reshape(num_rows, self.row_bytes)
            wide = np.pad(rows, ((0, 0), (self.zeros_before, self.zeros_after))).tobytes()
            for start in range(0, len(wide), piece_bytes):  # a row may be longer than a piece
                yield wide[start : start + piece_bytes], len(data) if start == 0 else 0


@dataclass(frozen=True, slots=True)
class _Columns:
    """The Bs of all experts of a layer, (E or 1, F, r) each as stored, in a wider matrix (n F, n r E)."""

    begins: tuple[int, ...]
    """In the data of the stored file, of each of the n modules."""
    num_stored: int
    """E or 1."""
    num_experts: int
    num_rows: int
    """F."""
    rank: int
    is_interleaved: bool
    """Whether a row of each module is followed by the same of the next, instead of all of them by all others."""

    @property
    def num_bytes(self) -> int:
        return len(self.begins) * self.num_rows * self._wide_row_bytes

    @property
    def _wide_row_bytes(self) -> int:
        return len(self.begins) * self.rank * self.num_experts * _ITEM_BYTES

    def pieces(self, read: Callable[[int, int], bytes], piece_bytes: int) -> Iterator[tuple[bytes, int]]:
        numbers, row_bytes = range(len(self.begins)), self.rank * _ITEM_BYTES
        for together in (numbers,) if self.is_interleaved else [(number,) for number in numbers]:
            step = max(1, piece_bytes // (len(together) * self._wide_row_bytes))
            for first in range(0, self.num_rows, step):
                num_rows = min(step, self.num_rows - first)
                wide = np.zeros((num_rows, len(together), len(numbers), self.rank, self.num_experts), np.float32)
                for place, number in enumerate(together):
                    for expert in range(self.num_stored):
                        begin = self.begins[number] + (expert * self.num_rows + first) * row_bytes
                        rows = np.frombuffer(read(begin, num_rows * row_bytes), np.float32)
                        columns = slice(expert, expert + 1) if self.num_stored > 1 else slice(None)
                        wide[:, place, number, :, columns] = rows.reshape(num_rows, self.rank, 1)
                data, num_read = wide.tobytes(), len(together) * self.num_stored * num_rows * row_bytes
                for start in range(0, len(data), piece_bytes):  # a row may be longer than a piece
                    yield data[start : start + piece_bytes], num_read if start == 0 else 0


class JoinedWeights:
    """The `adapter_model.safetensors` for PEFT of a stored one."""

    def __init__(self, head: bytes, joined: Joined) -> None:
        """Take the length and header of the stored file."""
        self._stored_head_bytes = len(head)
        self._rows: list[_Rows | _Columns] = []
        self._header: dict[str, Any] = {}
        self._end = 0
        parts: dict[str, dict[str, dict[str, Any]]] = {}
        """By the A or B of a linear: the stored matrices that it joins, by the last parts of their modules' names."""
        for name, entry in json.loads(head[LENGTH_BYTES:]).items():
            matrix = _A if name.endswith(_A) else _B
            parent, _, leaf = name.removesuffix(matrix).rpartition(".")
            if leaf in joined:
                parts.setdefault(f"{parent}.{joined[leaf].linear}{matrix}", {})[leaf] = entry
            elif name == "__metadata__":
                self._header[name] = entry
            else:
                num_rows, num_columns = entry["shape"]
                rows = _Rows(entry["data_offsets"][0], num_rows, num_columns * _ITEM_BYTES)
                self._add(name, entry["shape"], [rows])
        for name, entries in parts.items():
            leaves = sorted(entries, key=lambda leaf: joined[leaf].begin)
            add = self._add_A if name.endswith(_A) else self._add_B
            if joined[leaves[0]].is_of_experts:
                stem = name.removesuffix(_A).removesuffix(_B)
                num_experts = max(parts[stem + matrix][leaves[0]]["shape"][0] for matrix in (_A, _B))
                add_of_experts = self._add_A_of_experts if name.endswith(_A) else self._add_B_of_experts
                add_of_experts(
                    peft_name_of_experts(stem) + name.removeprefix(stem),
                    [(entries[leaf], joined[leaf]) for leaf in leaves],
                    num_experts,
                )
            else:
                add(name, [(entries[leaf], joined[leaf]) for leaf in leaves])
        self._head = head_of(self._header)

    @property
    def num_bytes(self) -> int:
        """Bytes of the file."""
        return len(self._head) + self._end

    def pieces(self, read: Callable[[int, int], bytes], piece_bytes: int) -> Iterator[tuple[bytes, int]]:
        """Yield the file, in pieces, each with the number of bytes that were read for it.

        `read` returns so many bytes of the stored file from a place on.
        """
        for start in range(0, len(self._head), piece_bytes):
            yield self._head[start : start + piece_bytes], 0

        def read_data(begin: int, num_bytes: int) -> bytes:
            return read(self._stored_head_bytes + begin, num_bytes)

        for rows in self._rows:
            yield from rows.pieces(read_data, piece_bytes)

    def _add(self, name: str, shape: list[int], rows: Sequence[_Rows | _Columns]) -> None:
        begin = self._end
        self._end += sum(each.num_bytes for each in rows)
        self._rows += rows
        self._header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, self._end]}

    def _add_A(self, name: str, parts: list[tuple[dict[str, Any], JoinedRows]]) -> None:  # noqa: N802 - A is the matrix
        rank, d_in = parts[0][0]["shape"]
        begins = [entry["data_offsets"][0] for entry, _ in parts]
        rows = [_Rows(begin, rank, d_in * _ITEM_BYTES) for begin in begins]
        self._add(name, [len(parts) * rank, d_in], rows)

    def _add_A_of_experts(  # noqa: N802 - A is the matrix
        self, name: str, parts: list[tuple[dict[str, Any], JoinedRows]], num_experts: int
    ) -> None:
        num_stored, rank, d_in = parts[0][0]["shape"]
        part_bytes = rank * d_in * _ITEM_BYTES
        rows = [
            _Rows(part["data_offsets"][0] + (expert * part_bytes if num_stored > 1 else 0), rank, d_in * _ITEM_BYTES)
            for expert in range(num_experts)
            for part, _ in parts
        ]
        self._add(name, [num_experts * len(parts) * rank, d_in], rows)

    def _add_B_of_experts(  # noqa: N802 - B is the matrix
        self, name: str, parts: list[tuple[dict[str, Any], JoinedRows]], num_experts: int
    ) -> None:
        num_stored, num_rows, rank = parts[0][0]["shape"]
        begins = tuple(part["data_offsets"][0] for part, _ in parts)
        is_interleaved = parts[0][1].width < num_rows
        columns = _Columns(begins, num_stored, num_experts, num_rows, rank, is_interleaved)
        self._add(name, [len(parts) * num_rows, len(parts) * rank * num_experts], [columns])

    def _add_B(self, name: str, parts: list[tuple[dict[str, Any], JoinedRows]]) -> None:  # noqa: N802 - B is the matrix
        row_bytes = parts[0][0]["shape"][1] * _ITEM_BYTES
        placed: list[tuple[range, _Rows]] = []
        for number, (entry, joined) in enumerate(parts):
            begin, before, after = entry["data_offsets"][0], number * row_bytes, (len(parts) - 1 - number) * row_bytes
            for run in joined.runs(entry["shape"][0]):
                placed.append((run, _Rows(begin, len(run), row_bytes, before, after)))
                begin += len(run) * row_bytes
        placed.sort(key=lambda item: item[0].start)
        num_rows = sum(len(run) for run, _ in placed)
        assert num_rows == placed[-1][0].stop, "an adapter lacks a part of a linear"
        rank = len(parts) * parts[0][0]["shape"][1]
        self._add(name, [num_rows, rank], [rows for _, rows in placed])
