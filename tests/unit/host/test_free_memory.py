"""Free memory by the system's figures: the machine's, and those of the process's control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from workers.host import free_memory
from workers.host.allocator import keep_freed_memory, kept_bytes, without_holes
from workers.host.free_memory import PLENTY_BYTES, MemoryShare, free_bytes, free_host_bytes

GIB = 1 << 30


def write(root: Path, files: dict[str, object]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def machine(root: Path, groups: str) -> Path:
    """Write the files of a machine with 8 GiB available, and of a process in these control groups."""
    meminfo = "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB"
    return write(root, {"proc/meminfo": meminfo, "proc/self/cgroup": groups})


def group(folder: str, limit: object, usage: int, inactive: int = 0, *, version: int = 2) -> dict[str, object]:
    if version == 1:
        root, names = "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        stat = f"cache 5\ntotal_inactive_file {inactive}"
    else:
        root, names = "sys/fs/cgroup", ("memory.max", "memory.current")
        stat = f"file 5\ninactive_file {inactive}"
    values = (limit, usage, stat)
    return {f"{root}/{folder}/{name}": v for name, v in zip((*names, "memory.stat"), values, strict=True)}


def test_without_groups_the_free_memory_is_that_of_the_machine(tmp_path: Path) -> None:
    assert free_host_bytes(machine(tmp_path, "0::/")) == 8 * GIB


def test_without_a_figure_of_the_machine_all_its_memory_counts_as_free(tmp_path: Path) -> None:
    assert free_host_bytes(tmp_path) == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("version", [1, 2])
def test_a_groups_limit_counts_less_its_use_and_cached_files_are_free(tmp_path: Path, version: int) -> None:
    groups = {1: "4:cpu,cpuacct:/x\n3:memory:/pod/box", 2: "0::/pod/box"}[version]
    write(machine(tmp_path, groups), group("pod/box", 4 * GIB, 3 * GIB, GIB // 2, version=version))
    assert free_host_bytes(tmp_path) == GIB + GIB // 2


def test_the_tightest_of_nested_groups_counts(tmp_path: Path) -> None:
    write(machine(tmp_path, "0::/pod/box"), group("pod/box", "max", 0) | group("pod", 5 * GIB, 3 * GIB))
    assert free_host_bytes(tmp_path) == 2 * GIB


def test_in_a_container_the_group_at_the_top_counts(tmp_path: Path) -> None:
    write(machine(tmp_path, "0::/host/path/of/it"), group(".", 3 * GIB, GIB))
    assert free_host_bytes(tmp_path) == 2 * GIB


def test_version_1_s_number_for_unlimited_is_no_limit(tmp_path: Path) -> None:
    write(machine(tmp_path, "3:memory:/box"), group("box", (1 << 63) - 4096, GIB, version=1))
    assert free_host_bytes(tmp_path) == 8 * GIB


def test_a_group_beyond_its_limit_has_no_free_memory(tmp_path: Path) -> None:
    write(machine(tmp_path, "0::/box"), group("box", GIB, 2 * GIB))
    assert free_host_bytes(tmp_path) == 0


@pytest.mark.parametrize(
    ("free", "kept", "counted"), [(5, 1, 6), (7, 3, PLENTY_BYTES // GIB), (8, 3, 8), (100, 3, 100)]
)
def test_the_librarys_free_blocks_are_counted_only_where_memory_may_be_short(
    monkeypatch: pytest.MonkeyPatch, free: int, kept: int, counted: int
) -> None:
    """Counting them in every pass would be slow. Patched: a machine with this much free memory."""
    num_counts = 0

    def count() -> int:
        nonlocal num_counts
        num_counts += 1
        return kept * GIB

    monkeypatch.setattr(free_memory, "free_host_bytes", lambda: free * GIB)
    monkeypatch.setattr(free_memory, "kept_bytes", count)
    assert free_bytes(torch.device("cpu")) == counted * GIB
    assert num_counts == (free * GIB < PLENTY_BYTES)


def test_freed_memory_that_the_library_keeps_is_measured() -> None:
    keep_freed_memory()
    tensors = [torch.ones(1 << 18) for _ in range(16)]  # 1 MiB each: from the heap
    before = kept_bytes()
    last = tensors.pop()  # stays at the heap's end
    del tensors
    assert kept_bytes() - before > 8 << 20
    assert float(last[0]) == 1


@pytest.mark.slow
def test_where_memory_is_short_the_heap_does_not_grow() -> None:
    """Each freed tensor is returned to the system, also below memory in use."""
    keep_freed_memory()
    with without_holes():
        filling = [torch.ones(1 << 18) for _ in range(64)]  # takes the free blocks of the heap
        before = kept_bytes()
        tensors = [torch.ones(1 << 18) for _ in range(16)]
        last = tensors.pop()
        del tensors
        assert kept_bytes() - before < 1 << 20
        del filling
    assert float(last[0]) == 1
    tensors = [torch.ones(1 << 18) for _ in range(600)]
    before = kept_bytes()
    last = tensors.pop()
    del tensors
    assert kept_bytes() - before > 8 << 20, "outside of the block the library keeps freed memory"
    assert float(last[0]) == 1


def test_free_memory_of_this_machine_is_plausible() -> None:
    assert 1 << 20 < free_bytes(torch.device("cpu")) < 1 << 50


def test_promised_memory_is_not_free() -> None:
    share = MemoryShare(torch.device("cpu"), 0.5, measure=lambda _: 100)
    share.promise(30)
    share.promise(20)
    assert share.free_bytes() == 30
