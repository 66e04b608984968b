"""A tenant whose passes kill their workers again and again, between passes that do not.

`Poisoner` outlives coordinators, as a client does. `Kills` watches the workers: from the poisoner's first kill on, no
pass of another tenant may be lost with one, and between two of them must be a multiple of the time that the first one
cost. Raises ContractViolation otherwise, or if a pass does not end as it must.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container
from dataclasses import dataclass

import numpy as np

from coordinator.coordinator import Coordinator
from coordinator.scheduling.probation import COST_FACTOR
from tests.simulation.client import FINAL, Behaviour, Client
from tests.simulation.standing import ContractViolation, Standings
from tests.simulation.world import World
from tests.support.toy_engine import KILL_TOKEN
from tinkerpool.convert import to_tensor
from tinkerpool.v1 import operations_pb2 as ops_pb
from tinkerpool.v1 import training_pb2, types_pb2
from workers.contract.messages import Batch

PASSES_MAX = 5
POLL_S, POLL_S_MAX = 0.2, 5.0
"""Longest pauses between two questions for a result: of the first, and of each after many. A back-off takes long."""
NOTICED_S = 4.0
"""Seconds after which a coordinator has noticed a silence: it pings every 2 s, and a reply is late after 1 s."""


class Poisoner:
    """The poisoner of a history; without passes there is none."""

    def __init__(self, world: World, standings: Standings) -> None:
        self._world = world
        self._random = random = world.random("poisoner")
        behaviour = Behaviour(window=1, drop=0.2, repeat=0.0, other=0.0, think_s=0.01)
        self.client = Client(world, "mallory", [], behaviour, standings)
        num_passes = random.randrange(1, PASSES_MAX + 1) if random.random() < 0.3 else 0
        self._kills = [random.random() < 0.7 for _ in range(num_passes)]
        """Whether each pass kills its worker. Each is followed by a step."""
        self._num_done = 0

    @property
    def is_there(self) -> bool:
        """Whether the history has a poisoner."""
        return bool(self._kills)

    @property
    def is_done(self) -> bool:
        """Whether every pass has ended."""
        return self._num_done == len(self._kills)

    async def run(self, coordinator: Coordinator, *, is_last: bool) -> None:
        """Continue with the next pass."""
        if not self.is_there:
            return
        await self.client.run(coordinator, is_last=is_last)
        while not self.is_done:
            does_kill, seq = self._kills[self._num_done], 2 * self._num_done + 1
            step = training_pb2.OptimStepRequest(
                adapter_id=self.client.adapter_id, seq=seq + 1, adam=types_pb2.AdamParams(learning_rate=1e-3)
            )
            await self.client.call("forward_backward", _pass(self.client.adapter_id, seq, does_kill=does_kill))
            await self.client.call("optim_step", step)
            found = [await self._ended(f"{self.client.adapter_id}:{each}") for each in (seq, seq + 1)]
            reasons = [each.error.reason for each in found]
            if reasons != (["WORKER_DIED", "GRADIENT_WINDOW_CLOSED"] if does_kill else ["", ""]):
                raise ContractViolation(f"the poisoner's pass {seq} ended with {reasons}")
            self._world.work["passes of a poisoner"] += 1
            self._num_done += 1

    async def _ended(self, name: str) -> ops_pb.Operation:
        pause_s = POLL_S
        while True:
            found: ops_pb.Operation = (
                await self.client.call("get_operation", ops_pb.GetOperationRequest(name=name))
            ).operation
            if found.state in FINAL:
                return found
            await asyncio.sleep(self._random.uniform(0, pause_s))
            pause_s = min(POLL_S_MAX, 1.2 * pause_s)


@dataclass(slots=True)
class _Kill:
    """A kill while the poisoner was on probation."""

    sent_s: float
    """When its batch was sent."""
    incarnation: str
    replaced_s: float | None = None
    """When its worker was replaced, or the first attempt at that failed; None: neither so far."""


class Kills:
    """What the poisoner's kills cost in one epoch."""

    def __init__(self, world: World, poisoner: Poisoner) -> None:
        self._world = world
        self._poisoner = poisoner
        self._last: dict[str, _Kill] = {}
        """By worker."""
        self._missing: set[str] = set()
        """The workers that poisons took, and whose replacement has neither started nor failed."""
        self._taken: set[str] = set()
        """Those that they took since the last time that none was missing."""
        self._notices: Container[str] = ()
        self._coordinator: Coordinator | None = None

    def watch(self, notices: Container[str]) -> None:
        """Judge kills by these incarnations, whose hosts leave."""
        self._notices = notices

    def begin_epoch(self, coordinator: Coordinator) -> None:
        """Watch the kills of another coordinator."""
        self._coordinator = coordinator
        self._last.clear()
        self._missing.clear()
        self._taken.clear()

    def killed(self, worker_id: str, incarnation: str, sent_s: float, batch: Batch, samples: frozenset[str]) -> None:
        """Record that a batch killed an incarnation of a worker, which had these samples."""
        assert self._coordinator is not None
        if worker_id in self._coordinator.core.fleet.leaving and not self._coordinator.core.fleet.is_live(worker_id):
            return  # its host leaves: the coordinator has given it up
        self._check_taken(worker_id)
        tenant_id = self._poisoner.client.principal.tenant_id
        if not self._coordinator.core.probation.has(tenant_id):
            return
        self._world.work["kills on probation"] += 1
        beside = {item.adapter_id for item in batch.items} - {self._poisoner.client.adapter_id}
        if beside or samples:
            raise ContractViolation(f"a poisoner on probation killed {sorted(beside | samples)}")
        fleet = self._coordinator.core.fleet
        for missing_id, last in self._last.items():
            if missing_id not in fleet.worker_ids() or fleet.worker(missing_id).is_ending:
                continue  # it is removed, or is to be: nobody waits for it
            if last.replaced_s is None:
                raise ContractViolation("a poisoner on probation ran while a worker was missing")
            cost_s, pause_s = last.replaced_s - last.sent_s, self._world.time() - last.replaced_s
            if last.incarnation in self._notices and cost_s < NOTICED_S:
                continue  # the coordinator ended the worker before it could notice that it was silent
            if pause_s < COST_FACTOR * cost_s:
                raise ContractViolation(f"{pause_s:.3f} s after a kill that cost {cost_s:.3f} s came another one")
        self._last = {worker_id: _Kill(sent_s, incarnation)}

    def _check_taken(self, worker_id: str) -> None:
        """Raise ContractViolation if a poison has taken the last of three workers, or one of two twice.

        One that is drained and ends counts for neither: it is not replaced, so nobody waits for it.
        """
        assert self._coordinator is not None
        fleet = self._coordinator.core.fleet
        others = {each for each in fleet.worker_ids() if each != worker_id and not fleet.worker(each).is_ending}
        self._missing &= others | {worker_id}
        if not self._missing:
            self._taken.clear()
        if self._missing and worker_id in self._taken and others <= self._missing:
            raise ContractViolation(f"a poison took {worker_id} twice while {sorted(self._missing)} were missing")
        if len(others) >= 2 and others <= self._missing:
            raise ContractViolation(f"a poison took {worker_id}, the last worker of {len(others) + 1}")
        self._missing.add(worker_id)
        self._taken.add(worker_id)

    def replaced(self, worker_id: str) -> None:
        """Record that a worker is replaced, or that the attempt has failed: then the wait for it might never end."""
        self._missing.discard(worker_id)
        if not self._missing:
            self._taken.clear()
        if (last := self._last.get(worker_id)) is not None and last.replaced_s is None:
            last.replaced_s = self._world.time()  # after a failed attempt the next turn may begin before another one


def _pass(adapter_id: str, seq: int, *, does_kill: bool) -> training_pb2.ForwardBackwardRequest:
    tokens = to_tensor(np.array([KILL_TOKEN if does_kill else 1, 2, 3], np.int32))
    weights = to_tensor(np.ones(3, np.float32))
    return training_pb2.ForwardBackwardRequest(
        adapter_id=adapter_id,
        seq=seq,
        data=[types_pb2.Datum(tokens=tokens, loss_inputs={"target_tokens": tokens, "weights": weights})],
        loss_function=types_pb2.LOSS_FUNCTION_CROSS_ENTROPY,
    )
