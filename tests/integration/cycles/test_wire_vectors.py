"""tests/data/wire/vectors.tsv: its README describes it, and a running pool keeps the payloads that it has."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import json_format
from google.protobuf.message import Message

from coordinator.base.config import Limits
from coordinator.payloads.canonical import serialize
from coordinator.payloads.passes import canonical_pass
from scripts import generate_wire_vectors
from tests.support.adapters import adapter_files
from tests.support.database import query
from tests.support.toy_engine import toy_model_info
from tests.support.toy_pool import ToyPool, refusal
from tinkerpool.convert import from_tensor, to_tensor
from tinkerpool.v1 import (
    adapters_pb2,
    checkpoints_pb2,
    imports_pb2,
    operations_pb2,
    sampling_pb2,
    training_pb2,
    types_pb2,
)

MODULES = (adapters_pb2, checkpoints_pb2, imports_pb2, operations_pb2, sampling_pb2, training_pb2, types_pb2)
TYPES: dict[str, type[Message]] = {
    descriptor.full_name: getattr(module, name)
    for module in MODULES
    for name, descriptor in module.DESCRIPTOR.message_types_by_name.items()
}
DTYPES = {types_pb2.DATA_TYPE_FLOAT32: "<u4", types_pb2.DATA_TYPE_INT32: "<i4", types_pb2.DATA_TYPE_INT64: "<i8"}


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the file."""

    name: str
    message: str
    bytes: str
    values: str
    encoding: str
    elements: str
    payloads: str
    kind: str
    hash: str

    def decoded(self) -> Any:
        return TYPES[self.message].FromString(bytes.fromhex(self.bytes))

    def with_session(self, session_id: str) -> Any:
        """Return the message with another session's id in place of the example's."""
        values = self.values.replace(generate_wire_vectors.SESSION, session_id)
        return json_format.Parse(values, TYPES[self.message]())


def read() -> Iterator[Row]:
    with generate_wire_vectors.FILE.open(encoding="utf-8", newline="") as lines:
        rows = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
        next(rows)
        yield from (Row(*cells) for cells in rows)


ROWS = {row.name: row for row in read()}


def test_the_encoding_and_the_payloads_are_those_of_the_committed_file() -> None:
    assert generate_wire_vectors.text() == generate_wire_vectors.FILE.read_text(encoding="utf-8"), (
        "a message is encoded in another way than before, or is new: see tests/data/wire/README.md"
    )


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_bytes_values_elements_and_hash_of_a_row_agree(row: Row) -> None:
    message = row.decoded()
    assert serialize(json_format.Parse(row.values, TYPES[row.message]())) == serialize(message)
    assert json_format.MessageToDict(message) == json.loads(row.values)
    assert message.SerializeToString(deterministic=row.encoding == "sorted").hex() == row.bytes
    if isinstance(message, types_pb2.Tensor):
        is_float = message.dtype == types_pb2.DATA_TYPE_FLOAT32
        found = np.frombuffer(message.data, DTYPES[message.dtype])
        assert ",".join(f"{each:08x}" if is_float else str(each) for each in found) == row.elements
        assert to_tensor(from_tensor(message)) == message
    if row.kind != "-":
        assert hashlib.sha256(row.kind.encode() + b"\0" + bytes.fromhex(row.bytes)).hexdigest() == row.hash


def test_every_message_that_carries_a_tensor_has_a_row() -> None:
    wanted = {descriptor.full_name for descriptor in generate_wire_vectors.messages_with_tensors()}
    assert "tinkerpool.v1.TrainStepResponse" in wanted
    assert wanted <= {row.message for row in ROWS.values()}


CALLS = {
    "forward": "forward",
    "forward_backward_abandoned": "forward_backward",
    "forward_backward": "forward_backward",
    "train_step": "train_step",
    "optim_step": "optim_step",
    "save_state": "save_state",
    "save_weights_for_sampler": "save_weights_for_sampler",
    "load_state": "load_state",
    "discard_gradient": "discard_gradient",
    "sample": "sample",
}
"""The rows that are operations, in the order of their seqs, and the use cases that take them."""
REST = {"create_adapter", "create_sampler", "import_checkpoint", "recorded_pass"}


async def test_a_pool_keeps_the_payloads_and_hashes_of_the_file(pool: ToyPool, tmp_path: Path) -> None:
    principal, session = await pool.principal(), await pool.session()
    await pool.service.create_adapter(principal, ROWS["create_adapter"].with_session(session))
    await pool.service.create_sampler(principal, ROWS["create_sampler"].with_session(session))
    for table in ("adapter", "sampler"):
        [kept] = query(tmp_path, f"SELECT payload FROM {table}s")
        assert kept["payload"] == serialize(ROWS[f"create_{table}_payload"].with_session(session))

    pool.hold()  # a payload goes when its operation is finished and saved
    for name, method in CALLS.items():
        request, call = ROWS[name].with_session(session), getattr(pool.service, method)
        if name == "forward_backward_abandoned":
            assert (await refusal(call(principal, request))).reason == "ABANDONED"
            continue
        if name == "load_state":
            await pool.release()
            await pool.wait(f"{session}:train:0:7", f"{session}:train:0:8")  # the checkpoint is there
            pool.hold()
        response = await call(principal, request)
        operations = [value for _, value in response.ListFields()]
        payloads = ROWS[name].payloads.split(",")
        for operation, payload in zip(operations, payloads, strict=True):
            [kept] = query(
                tmp_path,
                "SELECT kind, payload_hash, payload FROM operations JOIN payloads USING (target_id, seq)"
                " WHERE target_id = ? AND seq = ?",
                operation.target_id,
                operation.seq,
            )
            wanted = serialize(ROWS[payload].with_session(session))
            assert (kept["kind"], kept["payload"]) == (ROWS[payload].kind, wanted)
            assert kept["payload_hash"] == hashlib.sha256(f"{ROWS[payload].kind}\0".encode() + wanted).digest()
    assert CALLS.keys() | REST >= {row.name for row in ROWS.values() if row.payloads != "-"}


async def test_a_pool_keeps_the_payload_of_an_import(pool: ToyPool, tmp_path: Path) -> None:
    principal, session = await pool.principal(), await pool.session()
    request = ROWS["import_checkpoint"].with_session(session)
    files = adapter_files(toy_model_info().modules[:2], rank=4)
    fields: dict[str, Any] = {"session_id": session, "upload_id": "up"}
    upload = imports_pb2.CreateUploadRequest(
        adapter_config=json.dumps(files.config), weights_header=files.header, **fields
    )
    await pool.service.create_upload(principal, upload)
    await pool.service.upload_part(principal, imports_pb2.UploadPartRequest(data=files.data, **fields))
    await pool.service.import_checkpoint(principal, request)
    [kept] = query(tmp_path, "SELECT payload FROM adapters")
    assert kept["payload"] == serialize(ROWS["import_checkpoint_payload"].with_session(session))


def test_the_hash_of_a_pass_with_recorded_inputs_covers_what_the_client_sent() -> None:
    payload, _ = canonical_pass(ROWS["recorded_pass"].decoded(), toy_model_info(), Limits())
    assert payload.hex() == ROWS["recorded_pass_payload"].bytes
