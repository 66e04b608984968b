"""A sample request that is not finished: its operation, its sampler, its worker, and its streamed tokens. In memory.

Does not depend on queues or placement. Main invariant: a token is streamed at most once, also if it is drawn again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from coordinator.fleet.fleet import Flight, Incarnation
from coordinator.operations.operation import Operation, Usage
from coordinator.operations.outcomes import fill_sample, item_error
from coordinator.payloads.samples import DecodedSample
from coordinator.storage.rows import SamplerRow
from tinkerpool.v1 import operations_pb2 as ops_pb
from workers.contract.messages import SampleResult, TokenEvent


@dataclass(slots=True, eq=False)
class Sample:
    """One unfinished sample request."""

    operation: Operation
    sampler: SamplerRow
    decoded: DecodedSample
    num_slots: int
    """Sequence slots that it counts for on a worker."""
    worker: Incarnation | None = None
    """The incarnation that has it; None: it is queued."""
    is_cancelled: bool = False
    num_refused: int = 0
    """How often a worker did not hold its version."""
    _num_drawn: Counter[int] = field(default_factory=Counter)
    """Sequence to tokens drawn on its present worker."""
    _num_streamed: Counter[int] = field(default_factory=Counter)
    """Sequence to tokens that were streamed: tokens that are drawn again elsewhere are not sent again."""

    @property
    def name(self) -> str:
        """The operation's name."""
        return self.operation.name

    @property
    def base_model(self) -> str:
        """The base model that it samples from."""
        return self.sampler.base_model

    @property
    def flight(self) -> Flight:
        """Its record for the fleet."""
        operation = self.operation
        return Flight(self.name, operation.target_id, operation.seq, operation.tenant_id, self.sampler.version)

    def fail(self, error: ops_pb.OperationError) -> None:
        """Decide it as failed without a worker's result."""
        self.operation.fail(error)

    def decide(self, result: SampleResult) -> int:
        """Decide by a worker's result; return how many tokens the engine computed."""
        usage = Usage(result.num_prompt_tokens + result.num_sampled_tokens, result.engine_s)
        if result.error is not None:
            self.operation.fail(item_error(result.error), usage)
        else:
            fill_sample(self.operation, self.decoded, result, usage)
        return result.num_prompt_tokens - result.num_cached_tokens + result.num_sampled_tokens

    def start_on(self, worker: Incarnation) -> None:
        """Record the worker that it is sent to."""
        self.worker = worker

    def restart(self) -> None:
        """Queue it again: from its logged seed it draws the same tokens, on any worker."""
        self.worker = None
        self._num_drawn.clear()

    def refused(self) -> None:
        """Count a refusal: its worker did not hold the version."""
        self.num_refused += 1

    def cancel(self) -> None:
        """Mark it as cancelled by its owner."""
        self.is_cancelled = True

    def is_new(self, token: TokenEvent) -> bool:
        """Count a drawn token; return whether it was not streamed before."""
        index = token.sequence_index
        self._num_drawn[index] += 1
        if self._num_drawn[index] <= self._num_streamed[index]:
            return False
        self._num_streamed[index] += 1
        return True
