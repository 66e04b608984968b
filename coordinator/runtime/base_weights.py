"""Which weights the name of a base model stands for: an adapter that was trained on these is worth nothing on others.

The first worker of a base model says it, for as long as there are adapters or checkpoints of that base model, also over
restarts. Depends on what workers report, not on how it is found. Main invariant: no worker with other weights takes
work.
"""

from __future__ import annotations

from coordinator.storage.rows import BaseModelRow
from coordinator.storage.workers import BaseModels
from workers.contract.messages import WorkerInfo


class BaseWeights:
    """The weights of every base model."""

    def __init__(self, rows: BaseModels) -> None:
        self._rows = rows
        self._known = {row.name: row.weights_id for row in rows.in_use()}

    def problem(self, worker: WorkerInfo) -> str:
        """Return why a worker must not take work; empty: it may. Weights that are not known are no reason."""
        name, found = worker.model.name, worker.model.weights_id
        known = self._known.get(name)
        if known is None and found:
            self._known[name] = found
            self._rows.put(BaseModelRow(name=name, weights_id=found))
        if not found or known in {None, found}:
            return ""
        return (
            f"on {worker.node} the files of {name} have other weights ({found}) than {name} has had in this pool "
            f"({known}), and adapters are worth nothing on others: put the former files back, or serve these under "
            "another name (--model NAME=DIRECTORY)"
        )
