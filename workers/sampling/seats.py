"""Who may run: seats for sequences, the memory behind them, and whose prompt is computed next.

Knows requests, blocks of key-value memory and turns; not passes, tokens drawn or events.

Main invariants: a seat has memory reserved for a sequence's last token, so whoever has one comes to its end; a request
that has begun keeps a seat until its last sequence has ended, so none stops half way. No line has more than its share
of seats and memory, unless by a single sequence. What a request held is free at once when it is removed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from workers.contract.capacity import BLOCK_TOKENS
from workers.sampling.block_pool import BlockPool, Prefix
from workers.sampling.running import Running, RunningSequence
from workers.sampling.turns import Turns

PATIENCE = 64
"""How many seats may be given past a request that does not fit; then nobody gets one before it does."""
LINE_SHARE = 3 / 4
"""The part of all seats, and of all memory, that one line has at most: who comes beside it need not wait for the end of
one of its sequences."""
DECODING_SHARE = 1 / 4
"""While sequences are decoding, the part of `prefill_tokens_max` that a step takes of prompts, so that their next token
does not wait long."""


class Seats:
    """The requests of one worker, those that wait and those that run."""

    def __init__(
        self,
        num_blocks: int,
        owner_of: Callable[[str], object | None],
        *,
        num_seats_max: int,
        prefill_tokens_max: int,
    ) -> None:
        """Of memory of `num_blocks`. `owner_of` tells to what the weights of a version's key belong now."""
        self.pool = BlockPool(num_blocks)
        self.running: list[Running] = []
        """Requests with a seat, in the order in which they got their first."""
        self.num_taken = 0
        """Seats that are given."""
        self._owner_of = owner_of
        self._num_seats_max = num_seats_max
        self._prefill_tokens_max = prefill_tokens_max
        self._turns: Turns[Running] = Turns(PATIENCE)
        """Requests of which not every sequence has got a seat."""
        self._prefilling: dict[str, deque[Running]] = {}
        """Those whose prompt is not yet computed, by line; lines, and requests in each, in the order of their turns."""

    def __bool__(self) -> bool:
        return bool(self._turns or self.running)

    def __iter__(self) -> Iterator[Running]:
        """Every request once."""
        return iter(dict.fromkeys((*self.running, *self._turns)))

    # ------------------------------------------------------------------ coming

    def add(self, request: Running) -> None:
        """Queue a request of which at least one sequence fits into the memory."""
        self._turns.add(request.line, request)

    def give(self) -> None:
        """Turn by turn a seat for one more sequence, as long as there are seats and memory."""
        while self._turns and self.num_taken < self._num_seats_max:
            request = self._turns.serve(self._try_seat, self._has_line_its_share)
            if request is None:
                return
            request.num_seats += 1
            self.num_taken += 1
            if not request.num_waiting:
                self._turns.remove(request.line, request)

    def _has_line_its_share(self, request: Running) -> bool:
        """Whether one more sequence would take its line beyond `LINE_SHARE`. Its only one may have all there is."""
        own = [other for other in self.running if other.line == request.line]
        if not own:
            return False
        if sum(other.num_seats for other in own) >= int(self._num_seats_max * LINE_SHARE):
            return True
        shared = {prefix.block for other in own for prefix in other.chain}
        num_blocks = len(shared) + request.num_own_blocks
        for other in own:
            num_blocks += other.num_prompt_blocks - len(other.chain) + other.num_seats * other.num_own_blocks
        if not request.num_seats:
            num_blocks += request.num_prompt_blocks
            num_blocks -= sum(prefix.block in shared for prefix in self._find_remembered(request))
        return num_blocks > int(self.pool.num_blocks * LINE_SHARE)

    def _try_seat(self, request: Running) -> bool:
        """Reserve the memory for one more sequence, and for the prompt if it is the first; whether there was enough."""
        if request.num_seats:
            return self.pool.reserve(request.num_own_blocks)
        remembered = self._hold_remembered(request)
        if not self.pool.reserve(request.num_prompt_blocks - len(remembered) + request.num_own_blocks):
            self.pool.release(remembered)
            return False
        request.use_remembered(remembered)
        self.running.append(request)
        self._prefilling.setdefault(request.line, deque()).append(request)
        return True

    # ------------------------------------------------------------------ prompts

    def plan_prefill(self, *, is_decoding: bool) -> dict[Running, int]:
        """Up to which of its prompt's tokens each request comes in this step; the memory for it is theirs from now on.

        Block by block, the lines in turn, and in each its requests. Of prompts whose next block is the same one
        computes it, and the others find it in the next step.
        """
        stops = self._where_prompts_are()
        budget = int(self._prefill_tokens_max * (DECODING_SHARE if is_decoding else 1))
        while budget > 0 and (request := self._whose_turn(stops)) is not None:
            num_tokens = min(BLOCK_TOKENS, request.prompt.length - stops[request])
            stops[request] += num_tokens
            budget -= num_tokens
        planned = {request: stop for request, stop in stops.items() if stop > request.position}
        for request, stop in planned.items():
            while len(request.prompt.blocks) * BLOCK_TOKENS < stop:
                request.prompt.blocks.append(self.pool.take("low"))
        return planned

    def _whose_turn(self, stops: Mapping[Running, int]) -> Running | None:
        """The next of the requests in `stops` whose prompt goes on behind that; its line and itself go to the end."""
        for line, requests in self._prefilling.items():
            for request in requests:
                if stops.get(request, request.prompt.length) < request.prompt.length:
                    requests.remove(request)
                    requests.append(request)
                    self._prefilling[line] = self._prefilling.pop(line)
                    return request
        return None

    def _where_prompts_are(self) -> dict[Running, int]:
        """How far each prompt is, with what is remembered by now; without those that wait for another's block."""
        stops: dict[Running, int] = {}
        under_way: set[tuple[Prefix, bytes]] = set()
        for request in [request for requests in self._prefilling.values() for request in requests]:
            remembered = self._hold_remembered(request)
            self.pool.unreserve(len(remembered))
            request.use_remembered(remembered)
            shareable = self._next_shareable(request)
            if shareable is None or shareable not in under_way:
                stops[request] = request.position
            if shareable is not None:
                under_way.add(shareable)
        return stops

    def note_prefilled(self, request: Running, stop: int) -> None:
        """A prompt is computed up to `stop`; its whole blocks are remembered."""
        request.position = stop
        for block in range(len(request.chain), stop // BLOCK_TOKENS):
            last = request.chain[-1] if request.chain else self._root(request)
            prefix = self.pool.remember(last, request.block_tokens(block), request.prompt.blocks[block])
            if prefix is None:
                break
            request.chain.append(prefix)
            request.prompt.blocks[block] = prefix.block
        if request.is_prefilled:
            self._leave_prefilling(request)

    def _leave_prefilling(self, request: Running) -> None:
        requests = self._prefilling.get(request.line, deque())
        if request in requests:
            requests.remove(request)
        if not requests:
            self._prefilling.pop(request.line, None)

    def _hold_remembered(self, request: Running) -> list[Prefix]:
        """Blocks of a prompt that come next and are remembered, held from now on."""
        found = self._find_remembered(request)
        for prefix in found:
            self.pool.hold(prefix)
        return found

    def _find_remembered(self, request: Running) -> list[Prefix]:
        """Blocks of a prompt that come next and are remembered."""
        found: list[Prefix] = []
        while (shareable := self._next_shareable(request, found)) is not None:
            prefix = self.pool.find(*shareable)
            if prefix is None:
                break
            found.append(prefix)
        return found

    def _next_shareable(self, request: Running, found: Sequence[Prefix] = ()) -> tuple[Prefix, bytes] | None:
        """The block that a prompt needs next, behind those that were just found, if it may be somebody else's."""
        block = len(request.chain)
        if request.position != block * BLOCK_TOKENS:
            return None  # its version was dropped, and what it has computed is its own
        block += len(found)
        if block >= request.num_shareable_blocks:
            return None
        chain = found or request.chain
        return chain[-1] if chain else self._root(request), request.block_tokens(block)

    def _root(self, request: Running) -> Prefix:
        """Where the chains of a request's version and scope begin. A key that was published again begins anew."""
        return self.pool.root((request.request.scope, request.key), self._owner_of(request.key))

    # ------------------------------------------------------------------ sequences

    def extend(self, sequence: RunningSequence) -> list[int]:
        """Give a sequence the block for its next token, if it needs one: what it was given."""
        if len(sequence.blocks) >= sequence.num_blocks_wanted:
            return []
        sequence.blocks.append(self.pool.take("high"))
        return sequence.blocks[-1:]

    def leave(self, request: Running, sequence: RunningSequence) -> None:
        """A sequence has ended. Its seat is anybody's, but the last one stays with a request that has more to run."""
        self.pool.give(sequence.blocks)
        if request.num_seats == 1 and request.num_begun < request.request.num_samples:
            is_reserved = self.pool.reserve(len(sequence.blocks))
            assert is_reserved, "blocks that were just given are free"
            if not request.num_waiting:
                self._turns.remove(request.line, request)
            return
        self.pool.unreserve(request.num_own_blocks - len(sequence.blocks))
        request.num_seats -= 1
        self.num_taken -= 1

    def remove(self, request: Running) -> None:
        """Take a request out, wherever it is, with all that it holds."""
        self._turns.remove(request.line, request)
        self._leave_prefilling(request)
        if request not in self.running:
            return
        self.running.remove(request)
        own = [block for sequence in request.sequences for block in sequence.blocks]
        self.pool.give(own)
        self.pool.give(request.prompt.blocks[len(request.chain) :])
        num_missing = request.num_prompt_blocks - len(request.prompt.blocks)
        self.pool.unreserve(request.num_seats * request.num_own_blocks - len(own) + num_missing)
        self.pool.release(request.chain)
        self.num_taken -= request.num_seats
