"""The official Tinker SDK as a client of a pool in a test, and calls of its protocol by hand."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

os.environ["TINKER_TELEMETRY"] = "0"  # it would keep the connections of a client for minutes

import httpx
import pytest
import tinker

from tinkerpool.compat import tinker_pb2 as wire

API = "/api/v1"


LEAKS = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
"""Mark of tests with the SDK: the garbage collector warns of a connection that the SDK does not close."""


@contextmanager
def sdk(url: str, key: str, **options: Any) -> Iterator[tinker.ServiceClient]:
    """Yield a ServiceClient; its session ends with the block."""
    service = tinker.ServiceClient(base_url=url, api_key=f"tml-{key}", **options)
    try:
        with service:
            yield service
    finally:
        collect_leaks()


def collect_leaks() -> None:
    """Collect the connections that the SDK does not close, without the warnings, which are errors in tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def datum(*tokens: int, targets: list[int] | None = None) -> tinker.Datum:
    """Return a sequence whose targets are its own tokens by default."""
    inputs: dict[str, Any] = {"target_tokens": targets or list(tokens), "weights": [1.0] * len(tokens)}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(list(tokens)), loss_fn_inputs=inputs)


class Wire:
    """Makes the SDK's calls one by one."""

    def __init__(self, url: str, key: str) -> None:
        self._http = httpx.Client(base_url=url + API, headers={"x-api-key": f"tml-{key}"}, timeout=60, verify=False)

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """POST JSON; return the response."""
        return self._http.post(path, json=body, headers=headers)

    def ok(self, path: str, body: Mapping[str, Any]) -> Any:
        """POST JSON, which must succeed; return the JSON of the response."""
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    def get(self, path: str, **headers: str) -> httpx.Response:
        """GET."""
        return self._http.get(path, headers=headers)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Make any request."""
        return self._http.request(method, path, **options)

    def binary(self, request: wire.ForwardBackwardRequest, body: bytes | None = None, **headers: str) -> httpx.Response:
        """POST /forward_backward; `body` replaces the request's bytes."""
        content = request.SerializeToString() if body is None else body
        headers = {"content-type": "application/x-protobuf", **headers}
        return self._http.post("/forward_backward", content=content, headers=headers)

    def session(self) -> str:
        """Create a session; return its id."""
        return str(self.ok("/create_session", {"tags": [], "sdk_version": "0.38.0"})["session_id"])

    def model(self, session: str, index: int = 0, rank: int = 8) -> str:
        """Create a model; return its id."""
        body = {"session_id": session, "model_seq_id": index, "base_model": "toy", "lora_config": {"rank": rank}}
        return str(self.result(self.ok("/create_model", body)["request_id"])["model_id"])

    def result(self, request_id: str) -> Any:
        """Return the JSON of a promise's result."""
        while True:
            response = self.post("/retrieve_future", {"request_id": request_id, "allow_metadata_only": True})
            if response.status_code != 408:
                assert response.status_code == 200, response.text
                return response.json()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()


def pass_of(model_id: str, seq: int, *sequences: list[int], **values: Any) -> wire.ForwardBackwardRequest:
    """Return a forward_backward with cross entropy; each sequence's targets are its own tokens."""
    request = wire.ForwardBackwardRequest(model_id=model_id, seq_id=seq, loss_fn="cross_entropy", **values)
    for tokens in sequences:
        size = len(tokens)
        added = request.data.add()
        added.model_input.add().encoded_text.tokens = b"".join(t.to_bytes(4, "little", signed=True) for t in tokens)
        targets = added.loss_fn_inputs["target_tokens"]
        targets.dtype, targets.dense = wire.DATA_TYPE_INT32, added.model_input[0].encoded_text.tokens
        targets.shape.append(size)
        weights = added.loss_fn_inputs["weights"]
        weights.dtype, weights.dense = wire.DATA_TYPE_FLOAT32, b"\x00\x00\x80\x3f" * size
        weights.shape.append(size)
    return request
