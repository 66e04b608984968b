"""Several clients of one sampling session: which of them has which numbers, and one question for all its promises.

The SDK's clients that were pickled or made from a handle send samples under numbers of their own. Each asks which of
its samples have finished, and fetches these one by one: so it holds one call and not one for each sample.
"""

from __future__ import annotations

from starlette.responses import JSONResponse, Response

from coordinator.doors.http.calls import Call
from coordinator.doors.tinker import shapes


async def join_sampling_session(call: Call) -> Response:
    """POST /join_sampling_session: the client's number in its sampling session. The first client's is 0."""
    asked = await call.json(shapes.OfSampler)
    number = await call.service.join_sampler(call.principal, asked.sampling_session_id)
    return JSONResponse({"type": "join_sampling_session", "client_counter": number})


async def retrieve_futures(call: Call) -> Response:
    """POST /retrieve_futures: which of a client's samples have finished since the cursor.

    Held while there are none, but no longer than the client wants.
    """
    asked = await call.json(shapes.RetrieveFutures)
    timeout_s = call.door.poll_s if asked.timeout is None else min(asked.timeout, call.door.poll_s)
    target = asked.target
    finished, cursor = await call.service.finished_samples(
        call.principal, target.sampling_session_id, target.cloned_sampler_id, asked.prev_cursor, timeout_s
    )
    completions = [
        {"state": "failed", "request_id": sample.name}
        if sample.is_failed
        else {
            "state": "finished",
            "request_id": sample.name,
            "response_payload_uncompressed_size": sample.num_bytes,
        }
        for sample in finished
    ]
    return JSONResponse({"completions": completions, "cursor": cursor})
