"""Replacements of a client's key by itself, in some histories.

`KeyRotations` outlives coordinators, as its client does, which calls with the key that it received last. If a response
is lost, the operator makes another key. Raises ContractViolation if a replaced key is admitted after its time.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from coordinator.base.errors import ServiceError
from coordinator.coordinator import Coordinator
from coordinator.tenants.principals import Role
from tests.simulation.client import KEY_ENDED, LOCAL, Client
from tests.simulation.standing import ContractViolation
from tests.simulation.world import World

ROTATIONS_MAX = 3


@dataclass(frozen=True, slots=True)
class _Rotation:
    after_s: float
    grace_seconds: int
    is_response_lost: bool


class KeyRotations:
    """The replacements of one client's key."""

    def __init__(self, world: World, client: Client) -> None:
        self._world = world
        self._client = client
        self._random = random = world.random(f"keys of {client.name}")
        num_rotations = random.randrange(1, ROTATIONS_MAX + 1) if random.random() < 0.2 else 0
        self._rotations = [
            _Rotation(
                random.choice((0.02, 0.2)) * random.expovariate(1), random.choice((0, 0, 1, 60)), random.random() < 0.3
            )
            for _ in range(num_rotations)
        ]
        self._num_done = 0
        self._ended: list[str] = []
        """Keys that were replaced without grace."""

    @property
    def is_done(self) -> bool:
        """Whether no key is left to be replaced."""
        return self._num_done == len(self._rotations)

    async def run(self, coordinator: Coordinator, *, is_last: bool) -> None:
        """Continue with the next replacement. In the last epoch, check the replaced keys once more."""
        await self._client.until_known()
        for rotation in self._rotations[self._num_done :]:
            await asyncio.sleep(rotation.after_s)
            await self._replace(rotation)
            self._num_done += 1
            self._world.work["keys replaced"] += 1
            self._check_ended(coordinator)
        if is_last:
            self._check_ended(coordinator)

    async def _replace(self, rotation: _Rotation) -> None:
        """Replace the key; have the operator make another one if a crash or the network lost the response."""
        client, old = self._client, self._client.key
        was_in_doubt, client.is_key_in_doubt = client.is_key_in_doubt, True
        while not was_in_doubt:
            try:
                new = await client.replaced_key(rotation.grace_seconds)
            except ServiceError as error:
                if error.retry_delay_s is None:
                    raise
                await asyncio.sleep(self._random.uniform(0, error.retry_delay_s))
                continue
            if not rotation.grace_seconds:
                self._ended.append(old)
            if rotation.is_response_lost:
                break
            client.key, client.is_key_in_doubt = new, False
            return
        self._world.faults["new key lost"] += 1
        await client.renew_key()
        client.is_key_in_doubt = False

    def _check_ended(self, coordinator: Coordinator) -> None:
        for key in self._ended:
            try:
                coordinator.authenticator.admit(key, LOCAL, Role.READ_ONLY)
            except ServiceError as error:
                if error.reason in KEY_ENDED:
                    continue
                raise
            raise ContractViolation("a key that was replaced without grace was admitted")
