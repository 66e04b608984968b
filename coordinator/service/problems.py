"""What is wrong with the pool at the moment, in words, each with the command that mends it.

Derived from a status that was made for its caller, so that it tells nobody more than that. The terminal and the page
read the same list. Does not depend on where the status comes from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from tinkerpool.v1 import pool_pb2 as pb

OLD_S = 60.0
"""Seconds for which an operation has waited when that is said."""
WHY, LOGS = "tinkerpool why OPERATION", "tinkerpool logs"
_SERVING = (pb.WORKER_STATE_READY, pb.WORKER_STATE_LATE)


def problems(status: pb.GetPoolStatusResponse, *, is_admin: bool) -> list[pb.Problem]:
    """Return the problems that a status shows, the severe ones first. `is_admin`: whether its reader may mend them."""
    found = [*_of_pool(status), *_of_workers(status), *_of_tenants(status)]
    for each in found:
        if not is_admin and each.command != WHY:
            each.command = ""  # an administrator's
    return sorted(found, key=lambda each: not each.is_severe)


def _of_pool(status: pb.GetPoolStatusResponse) -> Iterator[pb.Problem]:
    if status.problem:
        yield pb.Problem(text=f"{_sentence(status.problem)}.", is_severe=True)
    models = {worker.base_model for worker in status.workers}
    serving = {worker.base_model for worker in status.workers if worker.state in _SERVING}
    for model in sorted(models - serving):
        yield pb.Problem(
            text=f"No worker of {model} takes work: its operations wait.",
            command=_undrain(status, model),
            is_severe=True,
        )


def _undrain(status: pb.GetPoolStatusResponse, model: str) -> str:
    """Return the command that lets a drained worker of a base model work again; empty without one."""
    drained = (each for each in status.workers if each.base_model == model and each.state == pb.WORKER_STATE_DRAINED)
    return next((f"tinkerpool worker undrain {each.worker_id}" for each in drained), "")


def _of_workers(status: pb.GetPoolStatusResponse) -> Iterator[pb.Problem]:
    for worker in status.workers:
        name = f"Worker {worker.worker_id}"
        if worker.start_problem:
            yield pb.Problem(text=f"{name} does not start: {worker.start_problem}", command=LOGS)
        elif worker.state == pb.WORKER_STATE_LOST:
            reason = f": {worker.last_loss_reason}" if worker.last_loss_reason else ""
            yield pb.Problem(text=f"{name} was lost and starts again{reason}", command=LOGS)
        elif worker.state == pb.WORKER_STATE_LATE:
            yield pb.Problem(text=f"{name} does not reply: its adapters wait for it.", command=LOGS)
        if worker.slow_because:
            yield pb.Problem(text=f"{name} is slower than it could be: {worker.slow_because}.", command=LOGS)
        if worker.HasField("host_leaves_in_seconds"):
            left_s = worker.host_leaves_in_seconds
            when = "" if math.isinf(left_s) else f" in {left_s:.0f} s"
            yield pb.Problem(text=f"The host of worker {worker.worker_id} leaves{when}: its adapters move.")


def _of_tenants(status: pb.GetPoolStatusResponse) -> Iterator[pb.Problem]:
    for each in status.probations:
        yield pb.Problem(
            text=f"Tenant {each.tenant} is on probation: {each.operation} ended its worker, so all its operations run "
            f"alone, for {math.ceil(each.remaining_seconds / 60)} more minutes of service.",
            command=f"tinkerpool tenant release {each.tenant}",
        )
    for tenant in status.tenants:
        if tenant.tenant and tenant.oldest_seconds > OLD_S and tenant.num_queued:
            yield pb.Problem(
                text=f"An operation of {tenant.tenant} has waited for {tenant.oldest_seconds:.0f} s.",
                command=WHY,
            )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
