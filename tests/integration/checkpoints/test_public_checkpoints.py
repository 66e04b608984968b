"""What other tenants have of a public checkpoint, and what they keep when its owner makes it private again."""

from __future__ import annotations

from pathlib import Path

from coordinator.base.errors import Code
from coordinator.service.checkpoints import ARCHIVE
from tests.support.toy_pool import ToyPool, refusal, running_pool, sample_request
from tinkerpool.v1 import checkpoints_pb2
from tinkerpool.v1 import operations_pb2 as ops_pb

SUCCEEDED = ops_pb.OPERATION_STATE_SUCCEEDED


async def publish(pool: ToyPool) -> str:
    """Save a state of alice with metadata, and publish it; return its path."""
    path = (await pool.save(await pool.adapter(), 1, "shared", user_metadata={"note": "x"})).save_state.path
    await pool.set_access(path, is_public=True)
    return path


async def metadata_of(pool: ToyPool, path: str, tenant: str) -> dict[str, str]:
    request = checkpoints_pb2.GetCheckpointRequest(path=path)
    found = await pool.service.get_checkpoint(await pool.principal(tenant), request)
    return dict(found.checkpoint.user_metadata)


async def test_only_the_owner_of_a_public_checkpoint_sees_and_copies_its_metadata(pool: ToyPool) -> None:
    path = await publish(pool)
    seen = [await metadata_of(pool, path, tenant) for tenant in ("alice", "bob")]
    copy = checkpoints_pb2.CopyCheckpointRequest(path=path, request_id="copy")
    copied = [await pool.service.copy_checkpoint(await pool.principal(tenant), copy) for tenant in ("alice", "bob")]
    kept = [
        await metadata_of(pool, each.checkpoint.path, tenant)
        for each, tenant in zip(copied, ("alice", "bob"), strict=True)
    ]
    assert seen == kept == [{"note": "x"}, {}]


async def test_a_running_download_by_another_tenant_ends_when_the_checkpoint_becomes_private(pool: ToyPool) -> None:
    path = await publish(pool)
    bob, alice = await pool.principal("bob"), await pool.principal()
    files = [await pool.service.file_for_tinker(each, path, 1, ARCHIVE) for each in (bob, alice)]
    theirs, own = (file.read(0, file.num_bytes) for file in files)
    export = pool.service.export_checkpoint(bob, checkpoints_pb2.ExportCheckpointRequest(path=path))
    for reading in (theirs, own, export):
        assert await anext(reading)
    await pool.set_access(path, is_public=False)
    assert {(await refusal(anext(each))).reason for each in (theirs, export)} == {"NOT_FOUND"}
    assert len([piece async for piece in own]) > 1


async def test_samplers_of_others_take_no_new_samples_of_a_private_checkpoint_and_accepted_ones_finish(
    pool: ToyPool,
) -> None:
    path = await publish(pool)
    own, other = await pool.session(), await pool.session("bob")
    of_alice, of_bob = await pool.sampler(own, model_path=path), await pool.sampler(other, "bob", model_path=path)
    copied = await pool.adapter("bob", from_path=path)
    pool.hold()
    accepted = await pool.sample(of_bob, 1, "bob")
    await pool.set_access(path, is_public=False)
    refused = await refusal(pool.service.sample(await pool.principal("bob"), sample_request(of_bob, 2)))
    again = await pool.sample(of_bob, 1, "bob")
    own_sample = await pool.sample(of_alice, 1)
    await pool.release()
    [finished] = await pool.wait(accepted, tenant="bob")
    [of_owner] = await pool.wait(own_sample)
    [trained] = await pool.wait(await pool.forward_backward(copied, 1, 4, tenant="bob"), tenant="bob")
    await pool.set_access(path, is_public=True)
    [later] = await pool.wait(await pool.sample(of_bob, 2, "bob"), tenant="bob")
    assert (refused.code, refused.reason) == (Code.FAILED_PRECONDITION, "CHECKPOINT_UNPUBLISHED")
    assert refused.operation == ""
    assert again == accepted
    assert [each.state for each in (finished, of_owner, trained, later)] == [SUCCEEDED] * 4


async def test_a_sample_that_was_accepted_before_its_checkpoint_became_private_completes_after_a_crash(
    tmp_path: Path,
) -> None:
    async with running_pool(tmp_path, is_crash=True) as pool:
        path = await publish(pool)
        sampler = await pool.sampler(await pool.session("bob"), "bob", model_path=path)
        pool.hold()
        accepted = await pool.sample(sampler, 1, "bob")
        await pool.set_access(path, is_public=False)
    async with running_pool(tmp_path) as pool:
        await pool.take_over("bob")
        [finished] = await pool.wait(accepted, tenant="bob")
    assert finished.state == SUCCEEDED
