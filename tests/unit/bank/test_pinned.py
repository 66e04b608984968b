"""Pinned memory of just the size of vectors, with a stand-in for CUDA's calls; and the order of copies on streams."""

from __future__ import annotations

import errno
import gc
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch

from workers.bank.pinned import PinnedBuffers
from workers.bank.transfers import CudaTransfers


@dataclass
class FakeCuda:
    """Pins nothing, but records it; refuses more than `most` bytes at a time."""

    pinned: dict[int, int] = field(default_factory=dict)
    most: int = 1 << 40

    def cudaHostRegister(self, address: int, size: int, _: int) -> int:  # noqa: N802 (CUDA's name)
        if size > self.most:
            return 2
        assert address not in self.pinned
        self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.pinned[address]
        return 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr("torch.cuda.cudart", lambda: fake)
    return fake


@dataclass
class Late:
    """A transfer that is done once the host has waited for it."""

    is_done: bool = False
    num_waits: int = 0

    def wait_on_host(self) -> None:
        self.is_done = True
        self.num_waits += 1


def vector(num_values: int) -> torch.Tensor:
    return torch.arange(float(num_values))


def test_a_vector_takes_its_own_size_and_not_the_next_power_of_two(cuda: FakeCuda) -> None:
    buffers = PinnedBuffers()
    taken = buffers.take(vector(5000))
    assert list(cuda.pinned.values()) == [20_000]
    assert buffers.num_bytes == 20_000
    assert (taken.dtype, taken.shape) == (torch.float32, (5000,))
    assert taken in buffers
    assert vector(5000) not in buffers


def test_memory_is_used_again_once_no_tensor_has_it(cuda: FakeCuda) -> None:
    buffers = PinnedBuffers()
    first = buffers.take(vector(64))
    part = first[8:16]
    address = first.data_ptr()
    del first
    gc.collect()
    assert buffers.take(vector(64)).data_ptr() != address, "a view has the memory still"
    del part
    gc.collect()
    assert {buffers.take(vector(64)).data_ptr() for _ in range(3)} <= cuda.pinned.keys()
    assert len(cuda.pinned) == 2


def test_memory_is_used_again_when_its_last_transfer_is_done(cuda: FakeCuda) -> None:
    buffers, running = PinnedBuffers(), Late()
    buffers.note(buffers.take(vector(64)), running)  # and dropped
    done = buffers.take(vector(64))
    assert running.num_waits == 1, "there was no other buffer"
    first, second = buffers.take(vector(64)), Late()
    address = done.data_ptr()
    buffers.note(first, second)
    del first, done
    assert buffers.take(vector(64)).data_ptr() == address
    assert second.num_waits == 0, "one that is done comes first"


def test_free_memory_of_other_sizes_is_unpinned_before_more_is_pinned(cuda: FakeCuda) -> None:
    buffers, running = PinnedBuffers(), Late()
    buffers.note(buffers.take(vector(1000)), running)
    kept = buffers.take(vector(3000))
    buffers.take(vector(500))
    assert sorted(cuda.pinned.values()) == [2000, 12_000]
    assert running.num_waits == 1
    assert kept in buffers


def test_all_memory_is_unpinned_with_the_bank_and_its_last_tensor(cuda: FakeCuda) -> None:
    buffers, running = PinnedBuffers(), Late()
    kept = buffers.take(vector(32))
    buffers.note(buffers.take(vector(64)), running)  # and dropped
    del buffers
    gc.collect()
    assert len(cuda.pinned) == 2, "a tensor is still there, and keeps all"
    del kept
    gc.collect()
    assert not cuda.pinned
    assert running.num_waits == 1


def test_memory_that_cannot_be_pinned_is_out_of_memory_and_the_next_launch_does_not_hear_of_it(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda.most, told = 100, list[str]()

    def launch(*_: int, device: str) -> None:
        told.append(device)
        raise torch.AcceleratorError("resource already mapped")

    monkeypatch.setattr("torch.zeros", launch)
    with pytest.raises(MemoryError, match="400 bytes"):
        PinnedBuffers().take(vector(100))
    assert told == ["cuda"]


class Recorder:
    """Stands in for `torch.cuda`'s streams and events: records what each stream waits for and copies."""

    def __init__(self) -> None:
        self.names = iter(("down", "up"))
        self.current = "compute"
        self.log: list[tuple[str, str]] = []
        """Stream, and what it does."""
        self.num_events = 0

    def stream(self, _: object = None) -> SimpleNamespace:
        name = next(self.names)
        return SimpleNamespace(
            name=name,
            device="cuda",
            wait_stream=lambda other: self.log.append((name, f"after {other.name}")),
            wait_event=lambda event: self.log.append((name, f"after {event.place}")),
        )

    def event(self) -> SimpleNamespace:
        event = SimpleNamespace(place="", query=lambda: True, synchronize=lambda: None)

        def record(stream: SimpleNamespace) -> None:
            event.place = f"{stream.name} {sum(name == stream.name and 'copy' in what for name, what in self.log)}"

        event.record = record
        return event

    @contextmanager
    def within(self, stream: SimpleNamespace) -> Iterator[None]:
        self.current, before = stream.name, self.current
        yield
        self.current = before


def test_the_directions_run_side_by_side_and_a_row_is_filled_one_vector_behind(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    monkeypatch.setattr("torch.cuda.Stream", recorder.stream)
    monkeypatch.setattr("torch.cuda.Event", recorder.event)
    monkeypatch.setattr("torch.cuda.stream", recorder.within)
    monkeypatch.setattr("torch.cuda.current_stream", lambda _: SimpleNamespace(name="compute"))

    def write(target: torch.Tensor, source: torch.Tensor | None) -> None:
        recorder.log.append((recorder.current, "copy"))
        target.copy_(torch.zeros_like(target) if source is None else source)

    monkeypatch.setattr("workers.bank.transfers.write", write)
    transfers = CudaTransfers(torch.device("cuda"))
    row = [vector(8) + number for number in range(3)]
    copies, emptied = transfers.to_host(row[:2])
    assert [copy.tolist() for copy in copies] == [vector.tolist() for vector in row[:2]]
    recorder.log.append(("host", "both are queued"))
    filled = transfers.to_device([(row[0], copies[1]), (row[1], None), (row[2], vector(8))], emptying=emptied)
    transfers.to_host(row, filled)
    assert recorder.log == [
        ("down", "after compute"),
        ("down", "copy"),
        ("down", "copy"),
        ("host", "both are queued"),
        ("up", "after compute"),
        ("up", "after down 1"),
        ("up", "copy"),
        ("up", "after down 2"),
        ("up", "copy"),
        ("up", "after down 2"),  # no copy of this vector: after all
        ("up", "copy"),
        ("up", "after down 2"),  # so that nobody writes what is copied to the host and was not copied from it
        ("down", "after compute"),
        ("down", "after up 3"),
        ("down", "copy"),
        ("down", "copy"),
        ("down", "copy"),
    ]
    assert [vector.tolist() for vector in row] == [copies[1].tolist(), [0.0] * 8, vector(8).tolist()]


def test_zeros_for_the_device_are_pinned_on_its_own_gpu_and_others_if_no_more_can_be(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered = list[object]()

    @contextmanager
    def device(chosen: object) -> Iterator[None]:
        entered.append(chosen)
        yield

    monkeypatch.setattr("torch.cuda.Stream", lambda _: None)
    monkeypatch.setattr("torch.cuda.device", device)
    transfers = CudaTransfers(torch.device("cuda:1"))
    used = transfers.host_zeros(64)
    used.fill_(7.0)
    del used
    gc.collect()
    again = transfers.host_zeros(64)
    assert (again.tolist(), len(cuda.pinned)) == ([0.0] * 64, 1)
    assert set(map(str, entered)) == {"cuda:1"}
    cuda.most = 0
    monkeypatch.setattr("workers.bank.pinned._forget_error", lambda: None)
    other = transfers.host_zeros(64)
    assert (other.dtype, other.tolist()) == (torch.float32, [0.0] * 64)
    assert other.data_ptr() not in cuda.pinned


def test_memory_that_cannot_be_mapped_is_said_to_be_short(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what needs it gets memory that is not pinned."""

    def refuse(*_: int) -> NoReturn:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("workers.bank.pinned.mmap.mmap", refuse)
    with pytest.raises(MemoryError, match="256 bytes of host memory cannot be mapped"):
        PinnedBuffers().take(vector(64))
    assert not cuda.pinned


@dataclass
class Asked:
    """A transfer that is done, and takes a while to say so."""

    @property
    def is_done(self) -> bool:
        time.sleep(0.001)
        return True

    def wait_on_host(self) -> None:
        return


def test_threads_that_take_memory_at_once_get_different_buffers(cuda: FakeCuda) -> None:
    buffers = PinnedBuffers()
    taken = [buffers.take(vector(64)) for _ in range(8)]
    for each in taken:
        buffers.note(each, Asked())
    del taken, each
    gc.collect()
    with ThreadPoolExecutor(8) as threads:
        again = list(threads.map(lambda _: buffers.take(vector(64)), range(8)))
    assert {each.data_ptr() for each in again} == cuda.pinned.keys()
