"""Traces: what a collector receives of a real coordinator's operations and cycles."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.trace import TracerProvider

import tinkerpool
from coordinator.observe import traces
from tests.support.collector import attributes_of, collecting
from tests.support.doors.sdk import Wire, pass_of
from tests.support.served_pool import restartable_pool
from tests.support.toy_engine import POISON_TOKEN
from tests.support.toy_pool import fail_appends, refusal, running_pool, sample_request
from tests.support.waiting import until
from tinkerpool.v1 import operations_pb2 as ops_pb
from tinkerpool.v1 import sampling_pb2

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331"
DATUM = tinkerpool.Datum(tinkerpool.ModelInput.from_ints([1]), {"target_tokens": [2], "weights": [1.0]})


def seconds(span: Span) -> float:
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


def is_inside(inner: Span, outer: Span) -> bool:
    starts = outer.start_time_unix_nano <= inner.start_time_unix_nano
    return starts and inner.end_time_unix_nano <= outer.end_time_unix_nano


async def test_a_trace_shows_the_way_of_an_operation_and_links_it_to_its_cycle(tmp_path: Path) -> None:
    with collecting() as collector:
        async with running_pool(tmp_path, otlp_endpoint=collector.url) as pool:
            adapter = await pool.adapter()
            pool.hold()
            names = [await pool.forward_backward(adapter, 1, 5), await pool.optim_step(adapter, 2)]
            await until(lambda: pool.log_of(adapter).copy.is_running(pool.log_of(adapter).operations[1]))
            await asyncio.sleep(0.05)
            await pool.release()
            done = await pool.wait(*names)
            tenant_id = pool.tenant_id()
        assert collector.resource["service.name"] == "tinkerpool"
        [cycle] = collector.named("cycle")
        for name, operation, ran in zip(names, done, ("pass", "step"), strict=True):
            root = collector.operation(name)
            children = collector.children(root)
            assert list(children) == ["admission", "append", "queued", ran, "commit", "delivery"]
            assert not root.parent_span_id
            assert all(is_inside(span, root) for key, span in children.items() if key not in ("delivery", ran))
            assert children["delivery"].start_time_unix_nano == root.end_time_unix_nano
            assert [(each.trace_id, each.span_id) for each in children[ran].links] == [(cycle.trace_id, cycle.span_id)]
            found = attributes_of(root.attributes)
            assert found["tinkerpool.tokens"] == operation.num_tokens
            assert (found["tinkerpool.cycle"], found["tinkerpool.worker"]) == (operation.cycle_id, "w0")
            assert (found["tinkerpool.target"], found["tinkerpool.tenant"]) == (adapter, tenant_id)
        queued = collector.children(collector.operation(names[1]))["queued"]
        assert attributes_of(queued.attributes)["tinkerpool.wait.reason"] == "order"
        assert seconds(queued) >= 0.05
        assert attributes_of(cycle.attributes)["tinkerpool.cycle"] == done[0].cycle_id
        assert len({span.trace_id for span in collector.spans}) == 3, "two operations, and the cycle that they share"


async def test_a_pass_that_takes_several_cycles_links_to_each(tmp_path: Path) -> None:
    with collecting() as collector:
        async with running_pool(tmp_path, otlp_endpoint=collector.url, cycle_tokens_max=16) as pool:
            name = await pool.forward_backward(await pool.adapter(), 1, 16, 16, 16)
            await pool.wait(name)
        root, cycles = collector.operation(name), collector.named("cycle")
        passes = [span for span in collector.named("pass") if span.parent_span_id == root.span_id]
        assert [span.links[0].span_id for span in passes] == [span.span_id for span in cycles]
        assert len(cycles) == 3


async def test_a_sample_shows_its_prefill_and_its_decoding(tmp_path: Path) -> None:
    with collecting() as collector:
        async with running_pool(tmp_path, otlp_endpoint=collector.url) as pool:
            sampler = await pool.sampler(await pool.session())
            name = await pool.sample(sampler, 1)
            await pool.wait(name)
            streamed = sampling_pb2.StreamSampleRequest(request=sample_request(sampler, 2))
            async for _ in pool.service.stream_sample(await pool.principal(), streamed):
                pass
        for each in (name, f"{sampler}:2"):
            children = collector.children(collector.operation(each))
            assert list(children) == ["admission", "append", "queued", "prefill", "decode", "commit", "delivery"]
            assert children["prefill"].end_time_unix_nano == children["decode"].start_time_unix_nano
            assert seconds(children["decode"]) > 0


async def test_a_failure_is_marked_with_its_reason_and_without_contents(tmp_path: Path) -> None:
    with collecting() as collector:
        async with running_pool(tmp_path, otlp_endpoint=collector.url) as pool:
            adapter = await pool.adapter()
            names = [await pool.forward_backward(adapter, 1, 4, token=POISON_TOKEN), await pool.optim_step(adapter, 2)]
            failed, _ = await pool.wait(*names)
        root = collector.operation(names[0])
        assert (root.status.code, root.status.message) == (Status.STATUS_CODE_ERROR, failed.error.reason)
        assert attributes_of(root.attributes)["error.type"] == failed.error.reason
        assert not any(failed.error.message.encode() in each.SerializeToString() for each in collector.requests)
        assert not any(b"alice" in each.SerializeToString() for each in collector.requests), "the tenant's name"
        behind = collector.children(collector.operation(names[1]))
        assert "step" not in behind, "no worker ran it"


async def test_what_was_not_accepted_has_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting() as collector:
        async with running_pool(tmp_path, otlp_endpoint=collector.url) as pool:
            adapter = await pool.adapter()
            with monkeypatch.context() as patch:
                fail_appends(patch, pool.store, 1)
                await refusal(pool.optim_step(adapter, 1))
            await refusal(pool.forward_backward(adapter, 1))  # it has no data: its refusal is recorded at its seq
            name = await pool.optim_step(adapter, 2)
            await pool.wait(name)
            traces = pool.core.traces
            assert traces is not None
            assert not traces._open, "private: what is held shows nowhere"
        found = [attributes_of(each.attributes).get("tinkerpool.operation") for each in collector.spans]
        assert set(found) == {None, name}


async def test_an_operation_of_before_a_restart_has_a_trace_of_what_is_known(tmp_path: Path) -> None:
    with collecting() as collector:
        async with running_pool(tmp_path, is_crash=True) as pool:
            adapter = await pool.adapter()
            pool.hold()
            name = await pool.forward_backward(adapter, 1, 5)
        async with running_pool(tmp_path, otlp_endpoint=collector.url) as pool:
            await pool.take_over()
            await pool.wait(name)
        assert list(collector.children(collector.operation(name))) == ["pass", "commit", "delivery"]


async def test_what_is_held_for_unfinished_operations_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "HELD_MAX", 2)  # no setting: it only bounds memory
    with collecting() as collector:
        async with running_pool(tmp_path, otlp_endpoint=collector.url) as pool:
            adapter = await pool.adapter()
            pool.hold()
            names = [await pool.forward_backward(adapter, seq, 5) for seq in (1, 2, 3)]
            await pool.release()
            await pool.wait(*names)
        parts = [list(collector.children(collector.operation(name))) for name in names]
        assert [("append" in each, "pass" in each) for each in parts] == [(False, True), (True, True), (True, True)]


async def test_a_pool_serves_and_stops_while_its_collector_cannot_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "CLOSE_S", 0.2)  # no setting: a stop takes no longer than it must
    with collecting() as gone:
        pass
    async with running_pool(tmp_path, otlp_endpoint=gone.url) as pool:
        adapter = await pool.adapter()
        [done] = await pool.wait(await pool.forward_backward(adapter, 1, 5))
        assert done.state == ops_pb.OPERATION_STATE_SUCCEEDED
        began = time.monotonic()
    assert time.monotonic() - began < 3.0


def test_a_clients_span_is_the_parent_of_its_operations(tmp_path: Path) -> None:
    """A real client's, over gRPC, and that of any program over HTTP."""
    mine = TracerProvider().get_tracer("a program")
    with collecting() as collector:
        with restartable_pool(tmp_path / "data", otlp_endpoint=collector.url) as pool:
            with pool.client("alice") as service:
                client = service.create_lora_training_client("toy", rank=8)
                with mine.start_as_current_span("train") as span:
                    future = client.forward_backward([DATUM], "cross_entropy")
                future.result(60)
                client.optim_step(tinkerpool.AdamParams()).result(60)
            wire = Wire(pool.http_url, pool.key())
            model = wire.model(wire.session())
            for seq, flags in ((1, "01"), (2, "00")):
                sent = wire.binary(pass_of(model, seq, [1, 2]), traceparent=f"{TRACEPARENT}-{flags}")
                wire.result(sent.json()["request_id"])
            wire.close()
        context = span.get_span_context()
        [forward_backward, over_http], [optim_step] = map(collector.named, ("forward_backward", "optim_step"))
        assert int.from_bytes(forward_backward.trace_id) == context.trace_id
        assert int.from_bytes(forward_backward.parent_span_id) == context.span_id
        assert "delivery" in collector.children(forward_backward)
        assert not optim_step.parent_span_id, "its caller had no span"
        assert f"00-{over_http.trace_id.hex()}-{over_http.parent_span_id.hex()}" == TRACEPARENT, "the sampled one"
        assert "delivery" in collector.children(over_http)
