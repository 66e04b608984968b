"""Recorded samples and the passes that use them: over retries, crashes, expiry and deletions."""

from pathlib import Path

import pytest

from coordinator.base.config import CoordinatorConfig
from coordinator.base.errors import Code
from coordinator.payloads.provenance import record_bytes
from coordinator.tenants.principals import Role
from tests.simulation.counts import check_counts
from tests.support.database import query
from tests.support.recorded import PROMPT, recorded_data, recorded_datum, recorded_sample, submit_pass
from tests.support.toy_pool import FakeTime, ToyPool, refusal, running_pool, tokens_of
from tinkerpool.v1 import limits_pb2, training_pb2, types_pb2
from tinkerpool.v1 import operations_pb2 as ops_pb
from workers.contract.messages import PassItem

SUCCEEDED = ops_pb.OPERATION_STATE_SUCCEEDED
DAY_S = 1000.0
"""Of the test that waits for a day."""


async def sampler_and_adapter(pool: ToyPool, tenant: str = "alice") -> tuple[str, str]:
    adapter = await pool.adapter(tenant)
    return await pool.sampler(adapter.partition(":")[0], tenant), adapter


def inputs_at_the_worker(pool: ToyPool) -> list[dict[str, list[float]]]:
    """Return the loss inputs of the last pass that a worker has run, datum by datum."""
    items = [item for batch in pool.engines["w0"][-1].batches for item in batch.items if isinstance(item, PassItem)]
    return [{name: array.tolist() for name, array in datum.loss_inputs.items()} for datum in items[-1].data]


def num_records(path: Path) -> list[int]:
    return [query(path, f"SELECT COUNT(*) FROM {table}")[0][0] for table in ("sample_records", "sequence_records")]


async def test_a_pass_gets_log_probabilities_and_temperature_of_the_samples_that_it_names(pool: ToyPool) -> None:
    sampler, adapter = await sampler_and_adapter(pool)
    sample = await recorded_sample(pool, sampler, 1)
    [passed] = await pool.wait(await submit_pass(pool, adapter, 1, recorded_data(sample)))
    assert passed.state == SUCCEEDED
    for inputs, tokens in zip(inputs_at_the_worker(pool), tokens_of(sample), strict=True):
        num_before = len(PROMPT) - 1
        assert inputs["target_tokens"] == [*PROMPT[1:], *tokens]
        assert inputs["logprobs"] == [0.0] * num_before + [-2.0] * len(tokens)  # the toy's -1 at temperature 0.5
        assert inputs["temperatures"] == [0.0] * num_before + [0.5] * len(tokens)


async def test_the_weights_that_drew_a_sample_are_in_the_payload_of_its_pass(pool: ToyPool) -> None:
    adapter = await pool.adapter()
    await pool.forward_backward(adapter, 1, 5)
    await pool.optim_step(adapter, 2)
    sampler = (await pool.publish(adapter, 3)).save_weights_for_sampler.sampler_id
    sample = await recorded_sample(pool, sampler, 1)
    data = recorded_data(sample)
    data[0].target_spans[0].sampler_version = "a client's word"
    await submit_pass(pool, adapter, 4, data)
    logged = training_pb2.ForwardBackwardRequest.FromString(pool.store.operations.payload(adapter, 4))
    spans = [each for datum in logged.data for each in (*datum.token_spans, *datum.target_spans)]
    assert {each.sampler_version for each in spans} == {f"{adapter}:3"}


async def test_a_greedy_sample_is_recorded_at_temperature_one(pool: ToyPool) -> None:
    sampler, adapter = await sampler_and_adapter(pool)
    sample = await recorded_sample(pool, sampler, 1, temperature=0.0)
    await pool.wait(await submit_pass(pool, adapter, 1, recorded_data(sample)))
    assert inputs_at_the_worker(pool)[0]["temperatures"][-1] == 1.0
    assert inputs_at_the_worker(pool)[0]["logprobs"][-1] == -1.0


async def test_a_record_is_there_after_a_crash_behind_the_commit_of_its_sample(tmp_path: Path) -> None:
    async with running_pool(tmp_path, is_crash=True) as pool:
        sampler, adapter = await sampler_and_adapter(pool)
        sample = await recorded_sample(pool, sampler, 1)
        pool.hold()
        await pool.sample(sampler, 2, record_stability_info=True, max_tokens=4)
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        [second] = await pool.wait(f"{sampler}:2")
        name = await submit_pass(pool, adapter, 1, [*recorded_data(sample), *recorded_data(second)])
        [passed] = await pool.wait(name)
    assert passed.state == SUCCEEDED


async def test_neither_a_repeat_nor_a_replay_needs_the_record_again(tmp_path: Path) -> None:
    async with running_pool(tmp_path, is_crash=True) as pool:
        sampler, adapter = await sampler_and_adapter(pool)
        sample = await recorded_sample(pool, sampler, 1)
        data = recorded_data(sample)
        name = await submit_pass(pool, adapter, 1, data)
        await pool.wait(name)
        given = inputs_at_the_worker(pool)
        await pool.store.records.drop_session(sampler.partition(":")[0])
        assert await submit_pass(pool, adapter, 1, data) == name
        refused = await refusal(submit_pass(pool, adapter, 2, data))
        assert refused.reason == "NOT_RECORDED"
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        await pool.wait(await pool.optim_step(adapter, 3))  # a replay of the pass comes before it
        assert inputs_at_the_worker(pool) == given
        assert await submit_pass(pool, adapter, 1, data) == name


async def test_a_repeat_with_other_spans_is_another_request(pool: ToyPool) -> None:
    sampler, adapter = await sampler_and_adapter(pool)
    samples = [await recorded_sample(pool, sampler, seq, seed=7) for seq in (1, 2)]
    assert tokens_of(samples[0]) == tokens_of(samples[1])
    await submit_pass(pool, adapter, 1, recorded_data(samples[0]))
    refused = await refusal(submit_pass(pool, adapter, 1, recorded_data(samples[1])))
    assert refused.reason == "SEQ_TAKEN"


async def test_log_probabilities_that_a_client_sends_are_not_used_and_not_part_of_its_request(pool: ToyPool) -> None:
    sampler, adapter = await sampler_and_adapter(pool)
    data = recorded_data(await recorded_sample(pool, sampler, 1))
    name = await submit_pass(pool, adapter, 1, data)
    for datum in data:
        datum.loss_inputs["logprobs"].CopyFrom(datum.loss_inputs["advantages"])
    assert await submit_pass(pool, adapter, 1, data) == name
    await pool.wait(name)
    assert inputs_at_the_worker(pool)[0]["logprobs"][-1] == -2.0


async def test_unknown_unrecorded_and_foreign_sequences_are_refused_with_what_to_do(pool: ToyPool) -> None:
    sampler, adapter = await sampler_and_adapter(pool)
    their_sampler, _ = await sampler_and_adapter(pool, "bob")
    theirs = await recorded_sample(pool, their_sampler, 1, "bob")
    [plain] = await pool.wait(await pool.sample(sampler, 1, max_tokens=6))
    unknown = [recorded_datum(f"{sampler}:99:0", [4, 5])]
    for seq, data in enumerate((recorded_data(theirs), recorded_data(plain), unknown), 1):
        refused = await refusal(submit_pass(pool, adapter, seq, data))
        assert (refused.code, refused.reason) == (Code.FAILED_PRECONDITION, "NOT_RECORDED")
        assert "sample with record_stability_info=True" in refused.message
        assert refused.operation == f"{adapter}:{seq}", "a refused pass has consumed its number"


async def test_a_datum_that_is_not_its_sample_is_refused_and_told_where(pool: ToyPool) -> None:
    sampler, adapter = await sampler_and_adapter(pool)
    sample = await recorded_sample(pool, sampler, 1, num_samples=1)
    [tokens] = tokens_of(sample)
    name = f"{sampler}:1:0"
    other = recorded_datum(name, [*tokens[:3], (tokens[3] + 1) % 50, *tokens[4:]])
    longer = recorded_datum(name, [*tokens, 5])
    unshifted = recorded_datum(name, tokens)
    del unshifted.target_spans[:]
    unshifted.target_spans.extend(unshifted.token_spans)
    for seq, (datum, words) in enumerate(
        ((other, f"token 3 of {name} is "), (longer, "but the sequence has 6"), (unshifted, "shifted by one")), 1
    ):
        refused = await refusal(submit_pass(pool, adapter, seq, [datum]))
        assert refused.code is Code.INVALID_ARGUMENT
        assert words in refused.message


async def test_a_request_that_names_too_many_recorded_tokens_is_refused_and_consumes_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Patched: a request that reaches the limit has megabytes."""
    monkeypatch.setattr("coordinator.service.training.RECORDED_TOKENS_MAX", 11)
    async with running_pool(tmp_path) as pool:
        sampler, adapter = await sampler_and_adapter(pool)
        data = recorded_data(await recorded_sample(pool, sampler, 1))
        refused = await refusal(submit_pass(pool, adapter, 1, data))
        assert "send several requests" in refused.message
        await pool.discard_gradient(adapter, 2)
        [passed] = await pool.wait(await submit_pass(pool, adapter, 3, data[:1]))
    assert passed.state == SUCCEEDED


async def test_a_record_lives_a_day_and_each_use_begins_the_day_again(tmp_path: Path) -> None:
    assert CoordinatorConfig(data_dir=tmp_path).record_retention_s == 24 * 3600
    time = FakeTime()
    async with running_pool(tmp_path, time=time, record_retention_s=DAY_S, session_timeout_s=9 * DAY_S) as pool:
        sampler, adapter = await sampler_and_adapter(pool)
        used, unused = [await recorded_sample(pool, sampler, seq) for seq in (1, 2)]
        await time.advance(0.9 * DAY_S)
        await pool.wait(await submit_pass(pool, adapter, 1, recorded_data(used)))
        await time.advance(0.2 * DAY_S)
        await time.until(lambda: num_records(tmp_path) == [1, 2], DAY_S / 4)
        assert (await refusal(submit_pass(pool, adapter, 2, recorded_data(unused)))).reason == "NOT_RECORDED"
        await pool.discard_gradient(adapter, 3)
        [passed] = await pool.wait(await submit_pass(pool, adapter, 4, recorded_data(used)))
        assert passed.state == SUCCEEDED
        await time.advance(1.1 * DAY_S)
        await time.until(lambda: num_records(tmp_path) == [0, 0], DAY_S / 4)


async def test_records_end_with_the_session_of_their_sampler(tmp_path: Path, pool: ToyPool) -> None:
    adapter = await pool.adapter()
    session = await pool.session()
    sampler = await pool.sampler(session)
    sample = await recorded_sample(pool, sampler, 1)
    await pool.finish_session(session)
    assert num_records(tmp_path) == [0, 0]
    assert (await refusal(submit_pass(pool, adapter, 1, recorded_data(sample)))).reason == "NOT_RECORDED"


async def test_a_sample_that_ends_after_its_session_leaves_no_record(tmp_path: Path, pool: ToyPool) -> None:
    session = await pool.session()
    sampler = await pool.sampler(session)
    pool.hold()
    name = await pool.sample(sampler, 1, record_stability_info=True, max_tokens=4)
    await pool.store.sessions.end(session, 0.0)
    await pool.release()
    [finished] = await pool.wait(name)
    assert finished.state == SUCCEEDED
    assert num_records(tmp_path) == [0, 0]


async def test_records_count_as_stored_bytes_and_a_ceiling_refuses_a_sample_before_it_runs(pool: ToyPool) -> None:
    sampler, _ = await sampler_and_adapter(pool)
    tenant_id = (await pool.principal()).tenant_id
    pool.hold()
    before = pool.core.ceilings.stored_bytes.used(tenant_id)
    await pool.sample(sampler, 1, num_samples=2, max_tokens=50)
    without = pool.core.ceilings.stored_bytes.used(tenant_id)
    name = await pool.sample(sampler, 2, record_stability_info=True, num_samples=2, max_tokens=50)
    recorded = pool.core.ceilings.stored_bytes.used(tenant_id)
    assert 0 < (recorded - without) - (without - before) - record_bytes(2, 100) < 100, "beside its longer request"
    await set_stored_bytes_max(pool, recorded)
    refused = await refusal(pool.sample(sampler, 3, record_stability_info=True, max_tokens=1))
    assert (refused.code, refused.reason) == (Code.FAILED_PRECONDITION, "STORAGE_QUOTA")
    assert "finish sessions" in refused.message
    await pool.release()
    [finished] = await pool.wait(name)
    check_counts(pool.core)
    stored = pool.store.tenants.row_bytes(tenant_id)
    await pool.store.records.drop_session(sampler.partition(":")[0])
    freed = stored - pool.store.tenants.row_bytes(tenant_id)
    assert freed == record_bytes(2, sum(map(len, tokens_of(finished))))


async def set_stored_bytes_max(pool: ToyPool, num_bytes: int) -> None:
    key, _ = await pool.coordinator.authenticator.create_key("root", role=Role.ADMIN)
    request = limits_pb2.SetTenantLimitsRequest(tenant="alice", limits={"stored_bytes_max": str(num_bytes)})
    await pool.service.set_tenant_limits(pool.coordinator.authenticator.authenticate(key), request)


async def test_a_train_step_and_a_forward_use_records_too(pool: ToyPool) -> None:
    sampler, adapter = await sampler_and_adapter(pool)
    data = recorded_data(await recorded_sample(pool, sampler, 1))
    principal = await pool.principal()
    forward = training_pb2.ForwardRequest(
        adapter_id=adapter, seq=1, data=data, loss_function=types_pb2.LOSS_FUNCTION_STABLE_REINFORCE
    )
    step = training_pb2.TrainStepRequest(
        adapter_id=adapter, seq=2, data=data, loss_function=types_pb2.LOSS_FUNCTION_STABLE_REINFORCE
    )
    await pool.service.forward(principal, forward)
    await pool.service.train_step(principal, step)
    found = await pool.wait(*[f"{adapter}:{seq}" for seq in (1, 2, 3)])
    assert [each.state for each in found] == [SUCCEEDED] * 3
