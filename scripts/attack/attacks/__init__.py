"""The attacks, a module for each group. `ATTACKS` has them all, by name."""

from __future__ import annotations

from collections.abc import Mapping

from scripts.attack.attack import Attack
from scripts.attack.attacks import bodies, connections, listings, openai, results, sampling, training, unknown, waits

ATTACKS: Mapping[str, Attack] = {
    attack.name: attack
    for module in (connections, unknown, bodies, results, training, sampling, waits, listings, openai)
    for attack in module.ATTACKS
}
