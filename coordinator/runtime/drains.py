"""Which workers stay drained over a restart: those that an administrator has drained, as far as the settings permit.

Does not depend on how a worker is drained. Main invariant: every base model has a worker that is started.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from coordinator.storage.workers import DrainedWorkers

logger = logging.getLogger(__name__)


async def keep_drained(drained: DrainedWorkers, base_models: Mapping[str, str]) -> list[str]:
    """Return the workers that a start leaves out, and forget the other drained ones.

    `base_models`: of each worker of this start. A worker that has another base model now is another worker.
    """
    rows = drained.all()
    kept = [row.worker_id for row in rows if base_models.get(row.worker_id) == row.base_model]
    for base_model in dict.fromkeys(base_models.values()):
        workers = [worker_id for worker_id, each in base_models.items() if each == base_model]
        if all(worker_id in kept for worker_id in workers):
            logger.warning(
                "worker %s is started: it is drained, but no other worker has %s now", workers[0], base_model
            )
            kept.remove(workers[0])
    await drained.forget([row.worker_id for row in rows if row.worker_id not in kept])
    return kept
