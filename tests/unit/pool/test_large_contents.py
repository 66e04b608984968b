"""Large contents of states move piece by piece beside the messages, and arrive whole."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from workers.contract.contents import LARGE_BYTES, PIECE_BYTES, FileContent, Spool, whole
from workers.contract.messages import (
    AdapterInstall,
    AdapterSpec,
    AdapterState,
    Batch,
    BatchResult,
    ItemResult,
    LoadItem,
    SampleRequest,
    SamplerVersion,
    SamplingParams,
)
from workers.pool.actor import pack, unpack
from workers.pool.large_contents import AT_ONCE, Aside, fetch, send

SPEC = AdapterSpec(adapter_id="a", rank=8, alpha=16.0, seed=3, train_attn=True, train_mlp=True, train_unembed=False)
SMALL, LARGE = b"small", os.urandom(LARGE_BYTES + PIECE_BYTES + 7)
STATE = AdapterState(weights=LARGE, optimizer=LARGE[1:], num_steps=4, applied_seq=9, fingerprint="toy", gradient=SMALL)


class Worker:
    """The other end of the calls; it notes how many bytes each of them moved."""

    def __init__(self) -> None:
        self.aside = Aside()
        self.sizes = list[int]()

    async def call(self, method: str, /, *arguments: Any) -> Any:
        reply = getattr(self.aside, method)(*unpack(pack(arguments)))
        moved = [each for each in (*arguments, reply) if isinstance(each, bytes)]
        self.sizes += map(len, moved)
        return reply


def in_a_file(content: bytes, folder: Path) -> FileContent:
    spool = Spool(folder)
    spool.append(content)
    return spool.content()


@pytest.mark.parametrize("place", [lambda content, _: content, in_a_file], ids=["in memory", "in a file"])
async def test_states_arrive_whole_in_messages_of_small_size(
    tmp_path: Path, place: Callable[[bytes, Path], bytes | FileContent]
) -> None:
    state, worker = replace(STATE, weights=place(LARGE, tmp_path)), Worker()
    load = LoadItem(op_id="o", adapter_id="a", prev_seq=1, seq=2, state=state, with_optimizer=True)
    batch = Batch(epoch=1, cycle_id=1, installs=(AdapterInstall(spec=SPEC, state=state),), items=(load,))
    packed = pack(await send(batch, worker.call))
    assert len(packed) < PIECE_BYTES
    assert max(worker.sizes) == PIECE_BYTES
    arrived = worker.aside.put_back(unpack(packed))
    expected = Batch(
        epoch=1, cycle_id=1, installs=(AdapterInstall(spec=SPEC, state=STATE),), items=(replace(load, state=STATE),)
    )
    assert arrived == expected
    version = SamplerVersion(key="v", spec=SPEC, state=state)
    request = SampleRequest(op_id="s", version=version, prompt=None, num_samples=1, params=SamplingParams(max_tokens=1))  # type: ignore[arg-type] # no prompt, which has no equality
    sample = worker.aside.put_back(unpack(pack(await send(request, worker.call))))
    assert sample == replace(request, version=replace(version, state=STATE))


async def test_states_of_a_result_are_in_files_and_the_worker_drops_them(tmp_path: Path) -> None:
    worker = Worker()
    result = BatchResult(
        epoch=1,
        cycle_id=1,
        incarnation="w0",
        results=(ItemResult(op_id="o"), ItemResult(op_id="p", state=STATE)),
        wall_s=0.0,
    )
    packed = pack(worker.aside.take_out(result))
    assert len(packed) < PIECE_BYTES
    fetched = await fetch(unpack(packed), worker.call, tmp_path)
    assert max(worker.sizes) == PIECE_BYTES < PIECE_BYTES * AT_ONCE
    state = fetched.results[1].state
    assert state is not None
    assert isinstance(state.weights, FileContent)
    assert state.optimizer is not None
    assert (whole(state.weights), whole(state.optimizer), state.gradient) == (LARGE, LARGE[1:], SMALL)
    assert fetched.results[0] is not None
    with pytest.raises(KeyError):
        await worker.call("piece", "0", 0)


async def test_a_message_without_large_contents_is_handed_on_as_it_is() -> None:
    batch = Batch(
        epoch=1, cycle_id=1, installs=(AdapterInstall(spec=SPEC, state=replace(STATE, weights=SMALL, optimizer=None)),)
    )
    worker = Worker()
    assert await send(batch, worker.call) is batch
    assert worker.sizes == []


async def test_a_full_disk_leaves_a_state_in_memory_for_its_writer_to_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(**_: object) -> NoReturn:
        raise OSError(28, "No space left on device")

    worker = Worker()
    result = BatchResult(
        epoch=1, cycle_id=1, incarnation="w0", results=(ItemResult(op_id="p", state=STATE),), wall_s=0.0
    )
    sent = worker.aside.take_out(result)
    monkeypatch.setattr(tempfile, "TemporaryFile", full)  # no disk is full on demand
    assert await fetch(sent, worker.call, tmp_path) == result


async def test_a_state_that_cannot_be_read_arrives_short_and_not_as_another(tmp_path: Path) -> None:
    path, worker = tmp_path / "file", Worker()
    path.write_bytes(LARGE)
    state = replace(STATE, weights=FileContent(path.open("rb")), optimizer=None)
    os.truncate(path, PIECE_BYTES)
    batch = Batch(epoch=1, cycle_id=1, installs=(AdapterInstall(spec=SPEC, state=state),))
    arrived = worker.aside.put_back(await send(batch, worker.call)).installs[0].fetch()
    assert arrived is not None
    assert len(arrived.weights) < len(LARGE)
