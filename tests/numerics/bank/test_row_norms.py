"""The norms that an optimizer step leaves with a row bound its next step: other writers of the row drop them."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch

from tests.support.numerics.bank_rows import SHAPES, make_spec
from workers.bank.bank import Bank
from workers.bank.entries import HostRow, Row, RowNorms

KEYS = ("a", "b", "c", "d")


def norms_of(row: Row) -> RowNorms:
    assert row.exp_avg is not None
    return RowNorms(float(row.weights.norm()), float(row.exp_avg.norm()))


def values(bank: Bank, key: str, random: Random) -> HostRow:
    size, scale = bank.entry(key).layout.num_values, 10.0 ** random.randint(-3, 3)
    generator = torch.Generator().manual_seed(random.getrandbits(30))
    return HostRow(*(scale * torch.randn(size, generator=generator).abs() for _ in range(3)))


def step(bank: Bank, key: str, random: Random) -> None:
    (row,), host = bank.acquire([key]), values(bank, key, random)
    for vector, value in ((row.weights, host.weights), (row.exp_avg, host.exp_avg), (row.exp_avg_sq, host.exp_avg_sq)):
        assert vector is not None
        assert value is not None
        vector.copy_(value)
    row.refresh()
    row.norms = norms_of(row)
    bank.entry(key).note_step()


def write(bank: Bank, key: str, random: Random) -> None:
    (row,) = bank.acquire([key])
    row.weights.mul_(random.choice([0.5, 20.0]))
    row.refresh()


def add_again(bank: Bank, key: str, random: Random) -> None:
    bank.remove(key)
    bank.add(key, make_spec(key, rank=bank_rank(key)), random.choice([None, values_of_new(bank, key, random)]))


def values_of_new(bank: Bank, key: str, random: Random) -> HostRow:
    size = bank.layout(make_spec(key, rank=bank_rank(key))).num_values
    return HostRow(torch.full((size,), 10.0 ** random.randint(-2, 2)))


def bank_rank(key: str) -> int:
    return 16 if key == "d" else 8


def publish(bank: Bank, key: str, random: Random) -> None:
    bank.publish(key, f"{key}/{random.randint(0, 1)}")
    bank.acquire([f"{key}/{number}" for number in range(2) if f"{key}/{number}" in bank][:1])


OPERATIONS: dict[str, Callable[[Bank, str, Random], object]] = {
    "a step": step,
    "a direct write": write,
    "add": add_again,
    "acquire": lambda bank, key, _: bank.acquire([key]),
    "evict": lambda bank, key, _: bank.evict(key),
    "leave_only": lambda bank, key, _: bank.leave_only([key]),
    "prefetch": lambda bank, key, _: bank.prefetch([key], []),
    "publish": publish,
    "replace": lambda bank, key, random: bank.replace(key, values(bank, key, random)),
}
"""All by which a row may get values."""
OTHERS = {
    "clear",
    "entry",
    "fits",
    "growth_bytes",
    "host_copy",
    "host_zeros",
    "layout",
    "limit",
    "pin",
    "remove",
    "unpin",
}
"""Methods of the bank by which none does, or which `add_again` calls."""


@pytest.mark.parametrize("rows", [None, 2, 3], ids=["no limit", "room for two rows", "room for three"])
def test_a_row_whose_values_were_written_has_no_norms_but_its_own(rows: int | None) -> None:
    random = Random(1)
    bank = Bank(SHAPES, 3, compute_dtype=torch.bfloat16)
    for key in KEYS:
        bank.add(key, make_spec(key, rank=bank_rank(key)))
    if rows is not None:
        bank.limit(rows * 18 * bank.entry("d").layout.num_values)
    num_known = 0
    for _ in range(400):
        name = random.choice([*OPERATIONS, "a step"])
        OPERATIONS[name](bank, random.choice(KEYS), random)
        for key in KEYS:
            row = bank.entry(key).row
            if row is not None and row.norms is not None:
                assert row.norms == pytest.approx(norms_of(row)), name
                num_known += 1
    assert num_known > 100


def test_every_method_of_the_bank_that_may_write_a_row_is_among_the_operations() -> None:
    methods = {name for name, value in vars(Bank).items() if callable(value) and not name.startswith("_")}
    assert methods == {name for name in OPERATIONS if not name.startswith("a ")} | OTHERS
