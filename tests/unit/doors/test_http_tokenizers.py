"""Tokenizers written as directories for clients on the same machine."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from random import Random
from typing import Any

import pytest

from coordinator.doors.http.tokenizers import write_tokenizers
from tests.simulation.disk import SimDisk
from tests.support.doors.fake_service import FakeService
from tinkerpool.v1 import sessions_pb2

FILES = {"tokenizer.json": b"{" + b" " * 1000 + b"}", "tokenizer_config.json": b"{}"}
ROOT = Path("/tokenizers")


class PowerCut(Exception):
    """Stands for a loss of power."""


@pytest.mark.parametrize("num_operations", range(12))
def test_a_tokenizer_is_complete_or_absent_after_a_power_cut(num_operations: int) -> None:
    for seed in range(20):
        left = [num_operations]

        def count(_operation: str, _name: str, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise PowerCut

        disk = SimDisk(ROOT.parent, Random(seed), count)
        with contextlib.suppress(PowerCut):
            write(disk)
        disk.power_cut(0.5)
        left[0] = 1000
        for name in disk.names(ROOT) if ROOT.name in disk.names(ROOT.parent) else ():
            assert name.startswith(".writing-") or contents(disk, ROOT / name) == FILES
        assert contents(disk, write(disk)) == FILES


def write(disk: SimDisk) -> Path:
    """Write the tokenizer of a model; return its directory."""
    capabilities = sessions_pb2.GetCapabilitiesResponse(base_models=[sessions_pb2.BaseModel(name="org/model")])
    tokenizer = sessions_pb2.GetTokenizerResponse(files=FILES)
    service: Any = FakeService(get_capabilities=capabilities, get_tokenizer=tokenizer)
    return asyncio.run(write_tokenizers(service, ROOT, disk))["org/model"]


def contents(disk: SimDisk, folder: Path) -> dict[str, bytes]:
    """Return a folder's files."""
    return {name: disk.read(folder / name) for name in disk.names(folder)}
