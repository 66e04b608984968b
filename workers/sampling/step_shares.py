"""Shares of a step: how much of each scope it computes, so that a scope with much to compute does not slow the others.

`slot_queue` shares slots and memory; this module shares the time of steps. It counts rows: next tokens, and tokens of
prompts. Does not depend on passes or drawn tokens.

Main invariants: the scopes that want the fewest rows are not bounded, and so is none that is alone. Each other one has
on average at most as many rows in a step as they want, and `num_more`: as many as take the fixed time of a step. So if
all rows took as long, steps would take at most k times as long beside k - 1 other scopes as without them, as if scopes
took turns; a row with a long context, or with an adapter of its own, takes longer. Sequences that wait for a later step
keep their slots and memory, and come before those of their scope that did not wait.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from workers.sampling.prefill import Prefill
from workers.sampling.sequences import ActiveRequest, ActiveSequence


class StepShares:
    """What the scopes of one worker have had of its steps. Used by one thread only."""

    def __init__(self, num_more: float = math.inf) -> None:
        """A scope may have `num_more` rows in a step beyond those of the smallest one; infinity: any number."""
        self._num_more = num_more
        self._ahead: dict[str, float] = {}
        """Rows that a scope has had beyond its share, because a block of a prompt is computed at once."""

    def plan(
        self, running: Sequence[ActiveRequest], prefill: Prefill
    ) -> tuple[dict[ActiveRequest, list[ActiveSequence]], dict[ActiveRequest, int]]:
        """Return the sequences that decode in the next step, by request, and the result of `Prefill.plan`.

        Sequences and prompts that are taken go behind the others of their scope.
        """
        scopes: dict[str, list[ActiveRequest]] = {}
        for active in running:
            scopes.setdefault(active.scope, []).append(active)
        wanted = {scope: sum(map(_rows_wanted, own)) for scope, own in scopes.items()}
        share = min(wanted.values(), default=0) + self._num_more
        left = {
            scope: share - self._ahead.get(scope, 0.0)
            for scope, number in wanted.items()
            if number > min(wanted.values())
        }
        decoding: set[ActiveSequence] = set()
        for scope, own in scopes.items():
            sequences = [sequence for active in own for sequence in active.sequences]
            if len(sequences) > left.get(scope, math.inf):
                sequences = sorted(sequences, key=lambda sequence: sequence.turn)[: max(0, int(left[scope]))]
            decoding.update(sequences)
        stops = prefill.plan(is_decoding=bool(decoding), held={scope for scope, rows in left.items() if rows < 1})
        chosen = {active: [each for each in active.sequences if each in decoding] for active in running}
        for active, sequences in chosen.items():
            for sequence in sequences:
                sequence.end_turn()
            if active.scope in left:
                left[active.scope] -= (
                    len(sequences) + stops.get(active, active.prompt.num_computed) - active.prompt.num_computed
                )
        left = {scope: share - ahead for scope, ahead in self._ahead.items()} | left
        self._ahead = {scope: -rows for scope, rows in left.items() if rows < 0}
        return {active: sequences for active, sequences in chosen.items() if sequences}, stops


def _rows_wanted(active: ActiveRequest) -> int:
    """Return the rows that a request would have in a step without bounds: of its slots, and of its prompt."""
    return active.num_slots + active.prompt.length - active.prompt.num_computed
