"""The expected results of a history, computed from the scripts and from the operations that succeeded.

Applies each adapter's operations in order to three hash chains, as an undisturbed engine does, and compares every
result, every checkpoint and the final state. An operation may fail only if the script makes it fail, if an earlier
failure closed its gradient window, or if the disk was full or failed while a state was saved.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from coordinator.payloads.passes import cut_chunks, decode_adam, decode_pass
from tests.simulation.client import Client, Sent
from tests.simulation.script import Step
from tests.support.toy_engine import digest, fresh_chain, item_digest, read_chain, toy_model_info, toy_token
from tinkerpool.convert import from_tensor
from tinkerpool.v1 import operations_pb2 as ops_pb
from tinkerpool.v1 import training_pb2
from workers.contract.contents import Content, whole
from workers.contract.messages import (
    AdapterSpec,
    AdapterState,
    OptimStepItem,
    PassItem,
    SampleRequest,
    SamplerVersion,
    SamplingParams,
)

MODEL = toy_model_info()


class Mismatch(AssertionError):
    """A result differs from the expected one."""


@dataclass(slots=True)
class Expected:
    """The expected state of an adapter."""

    chain: bytes
    gradient: bytes = b""
    moments: bytes = b""
    batches: set[tuple[int, int] | None] = field(default_factory=set)
    """The batches that tried to add to the gradient since the gradient window began; None for those without a mark."""
    is_window_open: bool = True
    num_corrected: int = 0
    """Windows that began behind a failed batch, without a step between."""
    saved: dict[str, tuple[int, bytes, bytes]] = field(default_factory=dict)
    """Path to the seq, weights and moments of its last save."""
    published: dict[int, bytes] = field(default_factory=dict)
    """Seq of a save for sampling to its weights."""
    unnamed: set[int] = field(default_factory=set)
    """The seqs of the published saves that have no path."""


def expect(client: Client, spec: AdapterSpec, *, may_lack_room: bool) -> Expected:
    """Apply all of a client's operations; return the expected state. Raises Mismatch."""
    adapter = Expected(fresh_chain(spec))
    for step in client.script:
        sent = client.sent[step.seq]
        for index in range(step.num_seqs):
            kind = step.kind
            if kind == "train_step":
                kind = ("forward_backward", "optim_step")[index]
            _apply(adapter, client, step, kind, step.seq + index, sent, index, may_lack_room)
    for (seq, number), sent in client.samples.items():
        _check_sample(sent, adapter.published[seq], number)
    return adapter


def _apply(
    adapter: Expected,
    client: Client,
    step: Step,
    kind: str,
    seq: int,
    sent: Sent,
    index: int,
    may_lack_room: bool,
) -> None:
    outcome = sent.outcome(index)
    name = f"{client.name} {outcome.name} ({kind})"
    reason = outcome.error.reason
    has_failed = outcome.state == ops_pb.OPERATION_STATE_FAILED
    if kind == "forward_backward":
        if not adapter.is_window_open and _is_behind(adapter.batches, seq):
            _begin_window(adapter)
            adapter.num_corrected += 1
        adapter.batches.add(step.batch)
    needs_window = kind in {"forward_backward", "optim_step"}
    is_closed = needs_window and not adapter.is_window_open
    is_refused = sent.is_bad and index == 0
    is_spoiled = step.is_poison and kind in {"forward", "forward_backward"}
    is_after_refused = sent.is_bad and index == 1
    must_fail = is_closed or is_refused or is_spoiled or is_after_refused
    if must_fail and not has_failed:
        raise Mismatch(f"{name} succeeded, but must fail")
    if has_failed:
        allowed = {
            "GRADIENT_WINDOW_CLOSED": is_closed or is_after_refused,
            "NON_FINITE": is_spoiled,
            "DISK": may_lack_room and kind.startswith(("save", "load")),
            "CHECKPOINT_EXISTS": False,
        }
        if not allowed.get(reason, is_refused):
            raise Mismatch(f"{name} failed with {reason}: {outcome.error.message} (must fail: {must_fail})")
    match kind:
        case "forward" | "forward_backward":
            _pass(adapter, sent, kind, seq, outcome, has_failed)
        case "optim_step":
            if not has_failed:
                _step(adapter, sent, seq)
            _begin_window(adapter)
        case "discard_gradient":
            if has_failed:
                raise Mismatch(f"{name} failed with {reason}: {outcome.error.message}")
            _begin_window(adapter)
        case "save_state":
            if not has_failed:
                adapter.saved[outcome.save_state.path] = (seq, adapter.chain, adapter.moments)
        case "save_weights_for_sampler":
            if not has_failed:
                adapter.published[seq] = adapter.chain
                if outcome.save_weights_for_sampler.sampler_id:
                    adapter.unnamed.add(seq)
        case "load_state":
            adapter.gradient = b""
            if has_failed:
                adapter.is_window_open = False
                adapter.batches.add(None)
            else:
                _begin_window(adapter)
                request = sent.request()
                _, adapter.chain, moments = adapter.saved[request.path]
                adapter.moments = moments if request.with_optimizer else b""


def _begin_window(adapter: Expected) -> None:
    adapter.gradient, adapter.is_window_open, adapter.batches = b"", True, set()


def _is_behind(batches: set[tuple[int, int] | None], seq: int) -> bool:
    """Return whether a closed window held one marked batch, and `seq` is behind it."""
    return len(batches) == 1 and all(batch is not None and seq > batch[1] for batch in batches)


def _pass(adapter: Expected, sent: Sent, kind: str, seq: int, outcome: ops_pb.Operation, has_failed: bool) -> None:
    if has_failed:
        if kind == "forward_backward":
            adapter.gradient, adapter.is_window_open = b"", False
        return
    request = sent.request()
    payload = training_pb2.ForwardBackwardRequest(data=request.data, loss_function=request.loss_function)
    decoded = decode_pass(payload.SerializeToString())
    chunks = cut_chunks(decoded.lengths, MODEL.chunk_tokens)
    if kind == "forward_backward":
        for index, chunk in enumerate(chunks):
            item = PassItem(
                op_id="",
                adapter_id="",
                prev_seq=0,
                seq=seq,
                chunk_index=index,
                num_chunks=len(chunks),
                data=decoded.data[chunk.start : chunk.stop],
                loss_fn=decoded.loss_fn,
                loss_config=decoded.loss_config,
                backward=True,
            )
            adapter.gradient = digest(adapter.gradient, item_digest(item))
    value = -int.from_bytes(adapter.chain[:2], "little") / 65536
    logprobs = [from_tensor(each).tolist() for each in outcome.forward_backward.logprobs]
    if logprobs != [[value] * len(datum.tokens) for datum in decoded.data]:
        raise Mismatch(f"{outcome.name} has log-probabilities of other weights")


def _step(adapter: Expected, sent: Sent, seq: int) -> None:
    adam = sent.request().adam
    params = decode_adam(_filled(adam))
    item = item_digest(OptimStepItem(op_id="", adapter_id="", prev_seq=0, seq=seq, params=params))
    adapter.chain = digest(adapter.chain, adapter.gradient, item)
    adapter.moments = digest(adapter.moments, adapter.gradient, item)


def _filled(adam: object) -> bytes:
    from coordinator.payloads.passes import canonical_adam

    return canonical_adam("", adam)  # type: ignore[arg-type]


def _check_sample(sent: Sent, chain: bytes, number: int) -> None:
    outcome, request = sent.outcome(), sent.request()
    if outcome.state == ops_pb.OPERATION_STATE_FAILED:
        raise Mismatch(f"{outcome.name} failed with {outcome.error.reason}: {outcome.error.message}")
    prompt = from_tensor(request.prompt)
    toy = SampleRequest(
        op_id="",
        version=SamplerVersion(key=""),
        prompt=prompt,
        num_samples=request.num_samples,
        params=SamplingParams(max_tokens=request.params.max_tokens, seed=request.params.seed),
    )
    for index, sequence in enumerate(outcome.sample.sequences):
        expected = [toy_token(chain, toy, index, position) for position in range(request.params.max_tokens)]
        if from_tensor(sequence.tokens).tolist() != expected:
            raise Mismatch(f"{outcome.name} (sample {number}) has tokens of other weights")
    if len(outcome.sample.sequences) != request.num_samples:
        raise Mismatch(f"{outcome.name} has {len(outcome.sample.sequences)} sequences")


def check_checkpoints(expected: Expected, stored: Mapping[str, tuple[int, AdapterState]]) -> None:
    """Check that exactly the saved checkpoints are listed, with the saved states. Raises Mismatch."""
    if set(stored) != set(expected.saved):
        raise Mismatch(f"listed: {sorted(stored)}, saved: {sorted(expected.saved)}")
    for path, (seq, chain, moments) in expected.saved.items():
        stored_seq, state = stored[path]
        found = (_chain(state.weights), _chain(state.optimizer))
        if (stored_seq, *found) != (seq, chain, moments):
            raise Mismatch(f"{path} does not have the state that operation {seq} saved")


def check_published(saves: Collection[int], stored: Mapping[int, AdapterState], expected: Expected) -> None:
    """Check that each of these saves has its file, with the weights that it published. Raises Mismatch."""
    if set(stored) != set(saves):
        raise Mismatch(f"saves with a file of weights: {sorted(stored)}, published: {sorted(saves)}")
    for seq, state in stored.items():
        if _chain(state.weights) != expected.published[seq]:
            raise Mismatch(f"the file of operation {seq} does not have the weights that it published")


def _chain(content: Content | None) -> bytes:
    assert content is not None
    return read_chain(whole(content))
