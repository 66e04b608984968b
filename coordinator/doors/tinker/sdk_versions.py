"""What the version of the SDK that sends a call knows and does. Every call of the SDK names its version in a header.

Main invariant: the order in which parts of a batch arrive is used only for versions that `make sdk-versions` has tried.
"""

from __future__ import annotations

import re

from coordinator.doors.http.calls import Call
from coordinator.service.checkpoints import KINDS, Kind
from coordinator.service.training import SequencedRequest
from tinkerpool.v1 import checkpoints_pb2, training_pb2

_VERSION = re.compile(r"(\d{1,9})\.(\d{1,9})\b")
_KINDS_SINCE = {checkpoints_pb2.CHECKPOINT_KIND_EXTERNAL: (0, 28)}
"""The first version that knows a kind of checkpoint: an older one fails at a list with such a checkpoint."""
_FIRST_PART_LAST = ((0, 20), (0, 38))
"""The first and last version known to send the first part of a batch after the pool has replied to all other parts, and
what follows the batch after the pool has replied to the first part. `make sdk-versions` tries that."""


def known_kinds(call: Call) -> list[Kind]:
    """Return the kinds of checkpoints that the client knows."""
    version = _version(call)
    return [kind for kind in KINDS if version is None or version >= _KINDS_SINCE.get(kind, (0, 0))]


def mark_batch(call: Call, request: SequencedRequest) -> None:
    """Mark a forward_backward as a batch of its own if it is one for certain. Call before the pool replies to it.

    When the first part of a batch arrives, all its other parts are in the log, and nothing behind the batch is. When
    another part arrives, the first one is missing. So a request is a whole batch exactly if every request before it has
    arrived and none behind it has. Raises ServiceError if there is no such adapter.
    """
    if not isinstance(request, training_pb2.ForwardBackwardRequest):
        return
    version = _version(call)
    first, last = _FIRST_PART_LAST
    if version is None or not first <= version <= last:
        return
    if call.service.is_next(call.principal, request.adapter_id, request.seq):
        request.batch.first_seq, request.batch.num_requests = request.seq, 1


def _version(call: Call) -> tuple[int, int] | None:
    """Return major and minor version of the SDK; None: unknown."""
    found = _VERSION.match(call.request.headers.get("x-stainless-package-version", ""))
    return (int(found[1]), int(found[2])) if found is not None else None
