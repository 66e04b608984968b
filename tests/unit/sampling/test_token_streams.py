"""Tokens of streams that nobody reads: bounded, and the finished operation always arrives."""

import pytest

from coordinator.sampling import sample
from coordinator.sampling.sample import Event, Listener, TokenStreams
from tinkerpool.v1 import operations_pb2, sampling_pb2

TOKENS = [sampling_pb2.SampledToken(sequence_index=0, token=token) for token in range(6)]


@pytest.fixture(autouse=True)
def _small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in (("UNREAD_ALWAYS", 1), ("UNREAD_OF_TENANT_MAX", 5), ("UNREAD_MAX", 7)):
        monkeypatch.setattr(sample, name, number)


def sent(streams: TokenStreams, *tenants: str) -> list[Listener]:
    """Send tokens and an operation to a new listener of each tenant; return the listeners."""
    listeners = [streams.listener(tenant) for tenant in tenants]
    for number, listener in enumerate(listeners):
        streams.listen(str(number), listener)
        for token in TOKENS:
            listener.put(token)
    for number in range(len(tenants)):
        streams.finish(str(number), operations_pb2.Operation(name=str(number)))
    return listeners


async def read(listener: Listener) -> list[int]:
    """Return the tokens before the operation."""
    tokens, event = list[int](), await listener.get()
    while isinstance(event, sampling_pb2.SampledToken):
        tokens.append(event.token)
        event = await listener.get()
    assert isinstance(event, operations_pb2.Operation)
    return tokens


async def test_unread_tokens_are_bounded_by_tenant_and_in_all_and_each_listener_has_some() -> None:
    listeners = sent(TokenStreams(), "a", "a", "b", "c")
    assert [await read(listener) for listener in listeners] == [[0, 1, 2, 3, 4], [0], [0], [0]]


async def test_no_token_is_sent_behind_one_that_was_left_out() -> None:
    streams = TokenStreams()
    listener, events = streams.listener("a"), list[Event | None]()
    streams.listen("0", listener)
    for token in TOKENS:
        listener.put(token)
    events += [await listener.get() for _ in range(3)]
    listener.put(TOKENS[0])
    streams.finish("0", operations_pb2.Operation(name="0"))
    assert await read(listener) == [3, 4]


@pytest.mark.parametrize("is_closed", [True, False])
async def test_what_was_read_or_belongs_to_a_reader_that_has_gone_makes_room(is_closed: bool) -> None:
    streams = TokenStreams()
    [first] = sent(streams, "a")
    if is_closed:
        first.close()
    else:
        await read(first)
    [second] = sent(streams, "a")
    assert await read(second) == [0, 1, 2, 3, 4]


async def test_a_reader_of_the_outcome_gets_no_token_and_its_worker_sends_none() -> None:
    streams = TokenStreams()
    listener = streams.listener("a", takes_tokens=False)
    streams.listen("0", listener)
    assert not streams.has_listener("0")
    for token in TOKENS:
        listener.put(token)
    streams.finish("0", operations_pb2.Operation(name="0"))
    assert await read(listener) == []
