"""Random products of few rows, by their kernel and by torch's operations."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from workers.model.fused_runs import ForwardRun

EPS = 1e-5
WIDTH, FEATURES = 200, 90
"""Two steps of a sum; some blocks of columns, the last one not whole."""


@dataclass(frozen=True)
class FewProduct:
    """Operands of `few_rows.MULTIPLY_FEW`."""

    x: Tensor
    """(N, D); with gaps between rows."""
    weight: Tensor
    """(F, D), or (2 F, D) of a gate."""
    bias: Tensor | None = None
    norm: Tensor | None = None
    added: Tensor | None = None
    is_gated: bool = False

    @classmethod
    def of(
        cls, num_rows: int, dtype: torch.dtype, way: str, d_in: int = WIDTH, d_out: int = FEATURES, device: str = "cpu"
    ) -> FewProduct:
        """Draw them: alone, with a bias, behind a norm, added to values, or gated behind a norm."""
        generator = torch.Generator().manual_seed(num_rows)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype)

        return cls(
            drawn(num_rows, d_in + 8)[:, :d_in],
            drawn(d_out, d_in),
            drawn(d_out) if way in {"bias", "gated"} else None,
            1 + drawn(d_in) / 4 if way in {"norm", "gated"} else None,
            drawn(num_rows, d_out) if way == "added" else None,
            is_gated=way == "gated",
        )

    def of_rows(self, rows: slice) -> FewProduct:
        """Return the product of some rows alone."""
        return replace(self, x=self.x[rows], added=None if self.added is None else self.added[rows])

    def run(self) -> Tensor:
        """Return the result by the kernel, in the dtype of x."""
        out = self._out()
        self._launch(out, self.x.new_empty(1, len(self.x), 0, dtype=torch.float32), (None,) * 4, 1)
        return out

    def shrunk(self, run: ForwardRun, group: int, num_linears: int) -> Tensor:
        """Return xa (N, M), fp32, as the kernel leaves it: NaN where it has written nothing."""
        xa = self.x.new_full((1, len(self.x), num_linears * run.tables.rank_max), math.nan, dtype=torch.float32)
        self._launch(self._out(), xa, (*run.of_group(group), run.tables.scalings), num_linears)
        return xa[0]

    def one_by_one(self) -> Tensor:
        """Return the same as `run`, by torch's operations in fp32."""
        rows, bias = self.x.float(), None if self.bias is None else self.bias.float()
        if self.norm is not None:
            rows = F.rms_norm(rows, self.norm.shape, self.norm.float(), EPS)
        y = F.linear(rows, self.weight.float(), bias)
        if self.is_gated:
            gate, up = y.chunk(2, 1)
            y = F.silu(gate) * up
        return y if self.added is None else y + self.added.float()

    def _out(self) -> Tensor:
        if self.added is not None:
            return self.added.clone()
        width = len(self.weight) // 2 if self.is_gated else len(self.weight)
        return self.x.new_full((len(self.x), width), math.nan)

    def _launch(self, out: Tensor, xa: Tensor, tables: tuple[Tensor | None, ...], num_linears: int) -> None:
        is_added = self.added is not None
        torch.ops.tinkerpool.multiply_few(
            out, xa, self.x, self.weight, self.bias, self.norm, EPS, is_added, self.is_gated, *tables, num_linears
        )
