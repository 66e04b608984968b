"""Budgets of the counted cases, and what each case takes today. Imports no torch.

Two groups: `sampling`, a decode step that stays on the device; and `training`, fused kernels of passes, loss and
optimizer. Tests hold every count to what it is today, so that it can only fall: whoever lowers one lowers its number
here. A budget that is met is today's number.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from scripts.bench.common import Row

Group = Literal["sampling", "training"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """One number of one case."""

    group: Group
    model: str
    case: str
    key: str
    """Of the row."""
    unit: str
    scale: float = 1.0
    """The row's number is divided by it."""
    most: float
    """The budget."""
    today: float
    """What the case takes today, in the same unit."""
    reason: str = ""
    """Why a budget is open."""

    def measured(self, row: Row) -> float:
        """Return the row's number in the budget's unit."""
        return float(row[self.key]) / self.scale

    def is_current(self, row: Row) -> bool:
        """Return whether `today` is the row's number, rounded up."""
        return self.measured(row) <= self.today <= 1.01 * self.measured(row)

    def is_met(self, row: Row) -> bool:
        """Return whether the row is within the budget."""
        return self.measured(row) <= self.most


def rows_with_budgets(rows: Iterable[Row]) -> list[tuple[Budget, Row]]:
    """Return each budget whose case was counted, with the case's row."""
    by_case = {(row["model"], row["case"]): row for row in rows if "kernels" in row}
    found = ((budget, by_case.get((budget.model, budget.case))) for budget in BUDGETS)
    return [(budget, row) for budget, row in found if row is not None]


GB, KIB = 1e9, 1024.0
DECODE, DECODE_ADAPTERS = "decode 32, no adapter, 128 tokens", "decode 32, 8 adapters, 128 tokens"
DECODE_LONG, PREFILL = "decode 8, 8 adapters, 8,192 tokens", "first prefill of 32 x 128"


HYBRID, MIXTURE, PASSES = "9b-hybrid@4", "30b-a3b@4", "passes 8 x 4 x 64"
LOGITS_IN_MEMORY = (
    "logits go through memory: products with the unembedding take 0.94 GB, kernels that read them twice and write a "
    "gradient 0.47; for the adapter they read B for 0.16, and the kernel of B's gradient moves 0.27"
)

SUMS_IN_MEMORY = (
    "adapters' kernels read what a library's product has written, and write it again; a product of our own with the "
    "adapters in it would not, but ours, of exact mode, is slower than the library's by more than that takes"
)


def _sampling(
    model: str, case: str, key: str, unit: str, most: float, today: float, scale: float = 1.0, reason: str = ""
) -> Budget:
    return Budget(
        group="sampling", model=model, case=case, key=key, unit=unit, scale=scale, most=most, today=today, reason=reason
    )


def _training(
    model: str, case: str, key: str, unit: str, most: float, today: float, scale: float = 1.0, reason: str = ""
) -> Budget:
    return Budget(
        group="training", model=model, case=case, key=key, unit=unit, scale=scale, most=most, today=today, reason=reason
    )


BUDGETS: tuple[Budget, ...] = (
    _sampling("0.6b", DECODE, "layer_kernels", "kernels a layer", 12, 8),
    _sampling("0.6b", DECODE, "waits", "waits", 1, 1),
    _sampling("0.6b", DECODE, "to_host_bytes", "KiB to the host", 64, 1, KIB),
    _sampling("0.6b", DECODE_ADAPTERS, "layer_kernels", "kernels a layer", 20, 12),
    _sampling("0.6b", DECODE_ADAPTERS, "waits", "waits", 1, 1),
    _sampling("0.6b", DECODE_ADAPTERS, "to_host_bytes", "KiB to the host", 64, 1, KIB),
    _sampling("0.6b", DECODE_LONG, "layer_kernels", "kernels a layer", 20, 12),
    _sampling("0.6b", DECODE_LONG, "waits", "waits", 1, 1),
    _sampling("0.6b", DECODE_LONG, "to_host_bytes", "KiB to the host", 64, 0.25, KIB),
    _sampling("0.6b", PREFILL, "layer_kernels", "kernels a layer", 24, 9),
    _sampling("0.6b", PREFILL, "waits", "waits", 1, 1),
    _sampling("0.6b", PREFILL, "to_host_bytes", "KiB to the host", 64, 1, KIB),
    _sampling("8b", DECODE, "layer_kernels", "kernels a layer", 12, 8),
    _sampling("8b", DECODE, "waits", "waits", 1, 1),
    _sampling("8b", DECODE_ADAPTERS, "layer_kernels", "kernels a layer", 20, 12),
    _sampling("8b", DECODE_ADAPTERS, "waits", "waits", 1, 1),
    _sampling("8b", DECODE_LONG, "layer_kernels", "kernels a layer", 20, 12),
    _sampling("8b", DECODE_LONG, "waits", "waits", 1, 1),
    _sampling("8b", PREFILL, "layer_kernels", "kernels a layer", 24, 9),
    _sampling("8b", PREFILL, "waits", "waits", 1, 1),
    _training("0.6b", "passes 8 x 4 x 64", "kernels", "kernels", 1400, 1052),
    _training("0.6b", "passes 8 x 4 x 64", "bytes", "GB", 32, 37.1, GB, reason=SUMS_IN_MEMORY),
    _training("0.6b", "passes 64 x 1 x 64", "kernels", "kernels", 1600, 1078),
    _training("0.6b", "passes 64 x 1 x 64", "bytes", "GB", 60, 77.3, GB, reason=SUMS_IN_MEMORY),
    _training("8b", "passes 8 x 4 x 64", "kernels", "kernels", 1800, 1340),
    _training("8b", "passes 8 x 4 x 64", "bytes", "GB", 125, 155.3, GB, reason=SUMS_IN_MEMORY),
    _training("0.6b", "loss of 512 rows", "bytes", "GB", 1.3, 1.86, GB, reason=LOGITS_IN_MEMORY),
    _training("0.6b", "optimizer 8 x 4 x 64", "bytes_a_value", "bytes a value", 40, 34.2),
    _training("0.6b", "optimizer 8 x 4 x 64", "kernels", "kernels", 2, 2),
    _training("0.6b", "optimizer 8 x 4 x 64", "waits", "waits", 1, 1),
    _training("0.6b", "optimizer 64 x 1 x 64", "kernels", "kernels", 2, 2),
    _training("0.6b", "optimizer 64 x 1 x 64", "waits", "waits", 1, 1),
    _sampling(HYBRID, DECODE, "layer_kernels", "kernels a layer", 24, 22.5),
    _sampling(HYBRID, DECODE, "waits", "waits", 1, 1),
    _sampling(HYBRID, DECODE_ADAPTERS, "layer_kernels", "kernels a layer", 32, 32),
    _sampling(HYBRID, DECODE_ADAPTERS, "waits", "waits", 1, 1),
    _sampling(HYBRID, DECODE_ADAPTERS, "to_host_bytes", "KiB to the host", 64, 1, KIB),
    _training(HYBRID, PASSES, "layer_kernels", "kernels a layer", 400, 201.8),
    _training(HYBRID, PASSES, "waits", "waits", 1, 1),
    _training(HYBRID, PASSES, "bytes", "GB", 60, 51.4, GB),
    _sampling(MIXTURE, DECODE, "layer_kernels", "kernels a layer", 60, 58),
    _sampling(MIXTURE, DECODE, "waits", "waits", 1, 1),
    _sampling(MIXTURE, DECODE_ADAPTERS, "layer_kernels", "kernels a layer", 70, 70),
    _sampling(MIXTURE, DECODE_ADAPTERS, "waits", "waits", 1, 1),
    _sampling(MIXTURE, DECODE_ADAPTERS, "to_host_bytes", "KiB to the host", 64, 1, KIB),
    _training(MIXTURE, PASSES, "layer_kernels", "kernels a layer", 400, 126),
    _training(MIXTURE, PASSES, "waits", "waits", 1, 1),
    _training(MIXTURE, PASSES, "bytes", "GB", 60, 36.6, GB),
)
