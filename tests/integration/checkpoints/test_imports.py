"""Imports through the use cases of a running pool: repeats, limits, full disks, ends of sessions, crashes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from coordinator.base.errors import Code
from coordinator.checkpoints.states import States
from coordinator.storage.disk import RealDisk
from coordinator.storage.folders import TemporaryFile
from tests.support.adapters import PREFIX, AdapterFiles, adapter_files, random_tensors
from tests.support.faults import DISK_FULL, failing, held
from tests.support.toy_engine import digest, toy_model_info
from tests.support.toy_pool import ToyPool, refusal, running_pool
from tinkerpool.v1 import adapters_pb2, checkpoints_pb2, imports_pb2, limits_pb2

ADAPTED = toy_model_info().modules[:2]
FILES = adapter_files(ADAPTED, rank=4)
SAVE_BYTES = 4 * 3 * 4 * 5
"""What the save of such an import reserves: weights and two moments, of the modules `attn` and `mlp` at rank 4."""


def upload_of(session: str, **values: Any) -> imports_pb2.CreateUploadRequest:
    fields = {"upload_id": "u", "adapter_config": json.dumps(FILES.config), "weights_header": FILES.header} | values
    return imports_pb2.CreateUploadRequest(session_id=session, **fields)


def counted(session: str) -> int:
    """Return the bytes that an upload counts: what its import will save, and its request, which is kept."""
    return SAVE_BYTES + upload_of(session).ByteSize()


async def create(pool: ToyPool, session: str, tenant: str = "alice", **values: Any) -> imports_pb2.Upload:
    response = await pool.service.create_upload(await pool.principal(tenant), upload_of(session, **values))
    upload: imports_pb2.Upload = response.upload
    return upload


async def send(pool: ToyPool, session: str, offset: int = 0, data: bytes = FILES.data, upload_id: str = "u") -> int:
    request = imports_pb2.UploadPartRequest(session_id=session, upload_id=upload_id, offset=offset, data=data)
    return int((await pool.service.upload_part(await pool.principal(), request)).num_bytes)


async def finish(pool: ToyPool, session: str, **values: Any) -> checkpoints_pb2.Checkpoint:
    fields: dict[str, Any] = {"upload_id": "u", "name": "mine", "index": 0} | values
    request = imports_pb2.ImportCheckpointRequest(session_id=session, **fields)
    response = await pool.service.import_checkpoint(await pool.principal(), request)
    checkpoint: checkpoints_pb2.Checkpoint = response.checkpoint
    return checkpoint


async def usage(pool: ToyPool) -> tuple[int, int]:
    """Return the checkpoints, and the bytes of them, that count against the ceilings."""
    tenant_id = (await pool.principal()).tenant_id
    return pool.core.holdings.num_checkpoints(tenant_id), pool.checkpoint_bytes(tenant_id)


async def set_limits(pool: ToyPool, **limits: object) -> None:
    request = limits_pb2.SetTenantLimitsRequest(
        tenant="alice", limits={name: str(value) for name, value in limits.items()}
    )
    await pool.service.set_tenant_limits(await pool.principal(), request)


def temporary(data_dir: Path) -> list[Path]:
    return list((data_dir / "snapshots").glob(".*"))


async def test_an_upload_in_parts_becomes_an_adapter_and_a_checkpoint_which_repeats_return(
    tmp_path: Path, pool: ToyPool
) -> None:
    session = await pool.session()
    upload = await create(pool, session)
    assert (upload.base_model, upload.rank, upload.alpha, upload.size_bytes) == ("toy", 4, 8.0, len(FILES.data))
    assert (upload.train_attn, upload.train_mlp, upload.train_unembed) == (True, True, False)
    assert await send(pool, session, 0, FILES.data[:30]) == 30
    assert (await create(pool, session)).num_bytes == 30
    assert await send(pool, session, 10, FILES.data[10:30]) == 30, "the upload has these bytes"
    assert await send(pool, session, 30, FILES.data[30:]) == len(FILES.data)
    values: dict[str, Any] = {"user_metadata": {"from": "elsewhere"}, "adapter_name": "from elsewhere"}
    checkpoint = await finish(pool, session, **values)
    assert checkpoint.path == f"tinker://{session}:train:0/weights/mine"
    assert (checkpoint.rank, checkpoint.seq, dict(checkpoint.user_metadata)) == (4, 1, {"from": "elsewhere"})
    assert checkpoint.adapter_name == "from elsewhere"
    assert await finish(pool, session, **values) == checkpoint
    assert (await refusal(finish(pool, session, adapter_name="a/b"))).code is Code.INVALID_ARGUMENT
    assert (await refusal(finish(pool, session, name="other"))).reason == "ADAPTER_EXISTS"
    assert (await refusal(send(pool, session))).code is Code.NOT_FOUND, "the upload is gone"
    assert temporary(tmp_path) == []
    adapter = checkpoint.adapter_id
    assert pool.spec_of(adapter).alpha == 8.0
    chain = pool.chain(adapter)
    await pool.wait(await pool.forward_backward(adapter, 2, 3), await pool.optim_step(adapter, 3))
    assert pool.chain(adapter) != chain


async def test_an_adapter_larger_than_any_workers_memory_is_refused_before_its_data_comes(tmp_path: Path) -> None:
    async with running_pool(tmp_path, engine_values=[{"bank_bytes_max": 300}]) as pool:
        refused = await refusal(create(pool, await pool.session()))
        assert (refused.code, refused.reason) == (Code.INVALID_ARGUMENT, "ADAPTER_TOO_LARGE")


async def test_a_crash_keeps_the_import_and_drops_unfinished_uploads(tmp_path: Path) -> None:
    async with running_pool(tmp_path, is_crash=True) as pool:
        session = await pool.session()
        await create(pool, session)
        await send(pool, session)
        checkpoint = await finish(pool, session)
        chain = pool.chain(checkpoint.adapter_id)
        await create(pool, session, upload_id="left")
        await send(pool, session, upload_id="left")
        assert len(temporary(tmp_path)) == 1
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        assert temporary(tmp_path) == []
        assert await finish(pool, session) == checkpoint
        assert (await refusal(send(pool, session, upload_id="left"))).code is Code.NOT_FOUND
        assert (await create(pool, session, upload_id="left")).num_bytes == 0
        await pool.wait(await pool.forward_backward(checkpoint.adapter_id, 2, 3))
        assert pool.chain(checkpoint.adapter_id) == chain


async def test_a_rank_between_two_is_kept_and_an_adapter_of_its_checkpoint_can_be_created(pool: ToyPool) -> None:
    files = adapter_files(ADAPTED, rank=12)
    session = await pool.session()
    await pool.principal()
    await set_limits(pool, ranks="8,16")  # it takes the room of rank 16
    await create(pool, session, adapter_config=json.dumps(files.config), weights_header=files.header)
    await send(pool, session, 0, files.data)
    checkpoint = await finish(pool, session)
    assert checkpoint.rank == 12
    alice = await pool.principal()
    request = adapters_pb2.CreateAdapterRequest(session_id=session, index=1, from_path=checkpoint.path)
    copy = (await pool.service.create_adapter(alice, request)).adapter
    assert (copy.rank, copy.alpha, copy.train_unembed) == (12, 8.0, False)
    fresh = adapters_pb2.CreateAdapterRequest(session_id=session, index=2, base_model="toy", rank=12)
    assert (await refusal(pool.service.create_adapter(alice, fresh))).reason == "RANK_NOT_ALLOWED"


async def test_calls_at_the_same_time_make_one_upload_one_adapter_and_one_checkpoint(pool: ToyPool) -> None:
    session = await pool.session()
    await asyncio.gather(*(create(pool, session) for _ in range(5)))
    assert await usage(pool) == (1, counted(session))
    await asyncio.gather(*(send(pool, session) for _ in range(5)))
    first, *others = await asyncio.gather(*(finish(pool, session) for _ in range(5)))
    assert others == [first] * 4
    assert (await usage(pool))[0] == 1


async def test_the_same_request_id_gives_the_same_checkpoint(pool: ToyPool) -> None:
    session = await pool.session()
    await create(pool, session)
    await send(pool, session)
    checkpoint = await finish(pool, session, index=None, request_id="r")
    assert await finish(pool, session, index=None, request_id="r") == checkpoint
    assert "request_id" in (await refusal(finish(pool, session, index=None))).message


async def test_an_import_whose_adapter_was_deleted_is_refused(pool: ToyPool) -> None:
    session = await pool.session()
    await create(pool, session)
    await send(pool, session)
    await pool.delete_adapter((await finish(pool, session)).adapter_id)
    assert (await refusal(finish(pool, session))).reason == "ADAPTER_DELETED"


async def test_parts_that_do_not_follow_are_refused_with_the_offset_to_go_on_from(pool: ToyPool) -> None:
    session = await pool.session()
    await create(pool, session)
    await send(pool, session, 0, FILES.data[:30])
    for offset, data in ((31, b"x"), (29, b"xy"), (-1, b"x")):
        refused = await refusal(send(pool, session, offset, data))
        assert (refused.reason, refused.metadata) == ("UPLOAD_OFFSET", {"num_bytes": "30"})
    for offset, data in ((30, b""), (30, FILES.data), (2**62, b"x")):
        assert (await refusal(send(pool, session, offset, data))).code is Code.INVALID_ARGUMENT
    assert (await refusal(finish(pool, session))).reason == "UPLOAD_INCOMPLETE"
    await send(pool, session, 30, FILES.data[30:])
    await finish(pool, session)


async def test_the_base_model_is_the_one_that_is_named_or_meant_or_the_only_one(tmp_path: Path) -> None:
    def named(name: str) -> str:
        return json.dumps(FILES.config | {"base_model_name_or_path": name})

    async with running_pool(tmp_path / "two", engine_values=[{"name": "toy"}, {"name": "org/Other"}]) as pool:
        session = await pool.session()
        assert (
            await create(pool, session, upload_id="1", adapter_config=named("/models/other"))
        ).base_model == "org/Other"
        meant = await create(pool, session, upload_id="2", adapter_config=named("org/Other"), base_model="toy")
        assert meant.base_model == "toy"
        assert "'org/Other'" in meant.notes[0]
        refused = await refusal(create(pool, session, upload_id="3", adapter_config=named("unknown")))
        assert refused.message.endswith("name one of toy, org/Other")
    async with running_pool(tmp_path / "one") as pool:
        upload = await create(pool, await pool.session(), adapter_config=named("unknown"))
        assert (upload.base_model, "'unknown'" in upload.notes[0]) == ("toy", True)


async def test_an_id_with_other_content_is_refused(pool: ToyPool) -> None:
    session = await pool.session()
    await create(pool, session)
    other = json.dumps(FILES.config | {"lora_alpha": 9})
    assert (await refusal(create(pool, session, adapter_config=other))).reason == "UPLOAD_EXISTS"
    for upload_id in ("", "../u", "a/b", "x" * 129):
        assert (await refusal(create(pool, session, upload_id=upload_id))).code is Code.INVALID_ARGUMENT


async def test_an_adapter_that_does_not_fit_is_refused_before_its_data_and_leaves_nothing(
    tmp_path: Path, pool: ToyPool
) -> None:
    session = await pool.session()
    refused = await refusal(create(pool, session, adapter_config=json.dumps(FILES.config | {"use_dora": True})))
    assert (refused.code, refused.reason) == (Code.INVALID_ARGUMENT, "NOT_IMPORTABLE")
    assert (await refusal(create(pool, session, weights_header="{}"))).reason == "NOT_IMPORTABLE"
    assert (await refusal(create(pool, session, base_model="absent"))).code is Code.NOT_FOUND
    assert await usage(pool) == (0, 0)
    assert temporary(tmp_path) == []


async def test_a_value_that_is_not_finite_is_refused_and_ends_the_upload(tmp_path: Path, pool: ToyPool) -> None:
    tensors = random_tensors(ADAPTED, 4)
    tensors[PREFIX + ADAPTED[1].B_name][0, 1] = np.nan
    bad = AdapterFiles(FILES.config, safetensors.numpy.save(tensors, {"format": "pt"}))
    session = await pool.session()
    await create(pool, session, weights_header=bad.header)
    await send(pool, session, 0, bad.data)
    refused = await refusal(finish(pool, session))
    assert (refused.reason, ADAPTED[1].B_name in refused.message) == ("NOT_IMPORTABLE", True)
    assert await usage(pool) == (0, 0)
    assert temporary(tmp_path) == []
    assert session not in str(list(pool.core.registry.logs))


async def test_uploads_count_as_what_their_imports_will_save(pool: ToyPool) -> None:
    session, other = await pool.session(), await pool.session()
    one = counted(session)
    rows = pool.store.tenants.row_bytes(pool.tenant_id())
    await set_limits(pool, checkpoints_max=2, stored_bytes_max=rows + 2 * one + 1)
    await create(pool, session)
    await create(pool, other)
    assert await usage(pool) == (2, 2 * one)
    assert (await refusal(create(pool, session, upload_id="third"))).reason == "CHECKPOINT_QUOTA"
    await set_limits(pool, checkpoints_max=3)
    assert (await refusal(create(pool, session, upload_id="third"))).reason == "STORAGE_QUOTA"
    await pool.finish_session(other)
    assert await usage(pool) == (1, one)
    await set_limits(pool, checkpoints_max=1, stored_bytes_max="")
    await send(pool, session)
    await finish(pool, session)  # the place is its own
    assert (await usage(pool))[0] == 1
    await set_limits(pool, checkpoints_max=9, stored_bytes_max="", adapters_max=1)
    assert (await refusal(create(pool, session, upload_id="next"))).reason == "ADAPTER_QUOTA"
    await set_limits(pool, adapters_max=9, ranks="8,16")
    assert (await refusal(create(pool, session, upload_id="next"))).reason == "RANK_NOT_PERMITTED"


async def test_a_full_disk_refuses_the_part_and_the_import_and_both_can_be_repeated(
    tmp_path: Path, pool: ToyPool
) -> None:
    session = await pool.session()
    await create(pool, session)
    with failing(RealDisk, "write_piece", DISK_FULL):
        assert (await refusal(create(pool, session, upload_id="next"))).reason == "DISK"
        assert (await usage(pool))[0] == 1
        refused = await refusal(send(pool, session))
    assert (refused.reason, refused.code) == ("DISK", Code.RESOURCE_EXHAUSTED)
    assert str(tmp_path) not in refused.message
    await send(pool, session)
    with failing(RealDisk, "write", DISK_FULL):
        assert (await refusal(finish(pool, session))).reason == "DISK"
    with failing(TemporaryFile, "read", OSError(5, "Input/output error")):
        assert (await refusal(finish(pool, session))).reason == "DISK"
    with failing(pool.folders.checkpoints, "write", DISK_FULL):
        assert (await refusal(finish(pool, session))).reason == "DISK", "its adapter was made"
    checkpoint = await finish(pool, session)
    await pool.finish_session(session)
    assert await finish(pool, session) == checkpoint


async def test_a_part_is_refused_with_a_delay_below_the_floor_of_free_space(
    pool: ToyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await pool.session()
    await create(pool, session)
    with monkeypatch.context() as patch:
        patch.setattr(RealDisk, "free", lambda _disk, _folder: 0)  # the disk of the tests has room
        refused = await refusal(send(pool, session))
    assert (refused.reason, refused.code, refused.retry_delay_s) == ("STORAGE", Code.RESOURCE_EXHAUSTED, 10.0)
    assert await send(pool, session) == len(FILES.data)


async def test_the_end_of_a_session_waits_for_a_write_and_removes_its_uploads(tmp_path: Path, pool: ToyPool) -> None:
    session = await pool.session()
    await create(pool, session)
    await send(pool, session, 0, FILES.data[:30])
    with held(RealDisk, "write_piece") as writing:
        part = asyncio.create_task(send(pool, session, 30, FILES.data[30:]))
        await writing.until_begun()
        ending = asyncio.create_task(pool.finish_session(session))
        await asyncio.sleep(0.05)
        assert len(temporary(tmp_path)) == 1
    await part
    await ending
    assert temporary(tmp_path) == []
    assert await usage(pool) == (0, 0)
    assert (await refusal(create(pool, session))).reason == "SESSION_ENDED"


async def test_another_tenants_upload_is_not_found_and_not_changed(pool: ToyPool) -> None:
    session, eve = await pool.session(), await pool.principal("eve")
    await create(pool, session)
    part = imports_pb2.UploadPartRequest(session_id=session, upload_id="u", data=b"x")
    importing = imports_pb2.ImportCheckpointRequest(session_id=session, upload_id="u", name="x", index=0)
    assert (await refusal(pool.service.upload_part(eve, part))).code is Code.NOT_FOUND
    assert (await refusal(pool.service.import_checkpoint(eve, importing))).code is Code.NOT_FOUND
    assert (await refusal(create(pool, session, "eve"))).code is Code.NOT_FOUND
    assert (await create(pool, session)).num_bytes == 0


@pytest.mark.parametrize("name", ["", "../x", ".hidden", "x" * 129])
async def test_a_name_that_could_be_a_path_is_refused_before_an_adapter_is_made(name: str, pool: ToyPool) -> None:
    session = await pool.session()
    await create(pool, session)
    await send(pool, session)
    assert (await refusal(finish(pool, session, name=name))).code is Code.INVALID_ARGUMENT
    assert not pool.core.registry.logs
    await finish(pool, session)


async def test_what_the_worker_receives_is_the_upload(pool: ToyPool) -> None:
    received = []
    write_start = States.write_start

    async def watched(self: States, log: Any, state: Any) -> Any:
        received.append(state.weights)
        return await write_start(self, log, state)

    session = await pool.session()
    await create(pool, session)
    await send(pool, session)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(States, "write_start", watched)
        checkpoint = await finish(pool, session)
    assert pool.chain(checkpoint.adapter_id) == digest(received[0])
    state, expected = safetensors.numpy.load(received[0]), safetensors.numpy.load(FILES.weights)
    assert state.keys() == expected.keys()
    assert all(np.array_equal(state[name], values) for name, values in expected.items())
