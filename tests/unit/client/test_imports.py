"""An import over a fake pool: what is sent, repeated and begun again, and which directories are refused at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.adapters import AdapterFiles, adapter_files
from tests.support.doors.fake_transport import SESSION_ID, UNREACHABLE, FakePool
from tests.support.exports import pool_of
from tests.support.toy_engine import toy_model_info
from tinkerpool import ServiceClient
from tinkerpool.errors import Code, NotFound, NotImportable, api_error
from tinkerpool.v1 import checkpoints_pb2, imports_pb2

FILES = adapter_files(toy_model_info().modules[:2])
PATH = f"tinker://{SESSION_ID}:train:0/weights/mine"
GONE = api_error(Code.NOT_FOUND, "no upload 'adapter'", reason="NOT_FOUND")


class Receiver:
    """Receives one upload, in parts of 30 bytes."""

    def __init__(self, pool: FakePool, files: AdapterFiles = FILES) -> None:
        self.data = b""
        self._files = files
        pool.handlers |= {"CreateUpload": self._create, "UploadPart": self._part, "ImportCheckpoint": self._import}

    def _create(self, request: imports_pb2.CreateUploadRequest) -> imports_pb2.CreateUploadResponse:
        assert (json.loads(request.adapter_config), request.weights_header) == (self._files.config, self._files.header)
        upload = imports_pb2.Upload(
            base_model="toy", rank=4, alpha=8, size_bytes=len(FILES.data), part_bytes_max=30, notes=["a note"]
        )
        upload.num_bytes = len(self.data)
        return imports_pb2.CreateUploadResponse(upload=upload)

    def _part(self, request: imports_pb2.UploadPartRequest) -> imports_pb2.UploadPartResponse:
        assert request.offset <= len(self.data)
        self.data = self.data[: request.offset] + request.data
        return imports_pb2.UploadPartResponse(num_bytes=len(self.data))

    def _import(self, request: imports_pb2.ImportCheckpointRequest) -> imports_pb2.ImportCheckpointResponse:
        assert self.data == self._files.data
        checkpoint = checkpoints_pb2.Checkpoint(path=PATH, adapter_id=f"{SESSION_ID}:train:0")
        return imports_pb2.ImportCheckpointResponse(checkpoint=checkpoint)


def test_an_import_sends_the_file_in_parts_and_reports_its_progress(
    pool: FakePool, service: ServiceClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    receiver, sent = Receiver(pool), list[tuple[int, int]]()
    imported = service.create_rest_client().import_checkpoint(
        FILES.write(tmp_path), "mine", seed=3, ttl_seconds=9, on_progress=lambda *each: sent.append(each)
    )
    assert imported.result(60).path == PATH
    assert (imported.result().lora_rank, imported.result().lora_alpha, imported.result().notes) == (4, 8.0, ("a note",))
    size = len(receiver.data)
    assert sent == [(done, size) for done in (0, 30, 60, size)]
    [request] = pool.requests("ImportCheckpoint")
    assert (request.index, request.name, request.seed, request.ttl_seconds) == (0, "mine", 3, 9)
    assert pool.calls[-1][0] == "FinishSession"
    assert "a note" in caplog.text


@pytest.mark.parametrize(("exported", "served", "is_noted"), [("a", "b", True), ("a", "a", False), ("a", "", False)])
def test_an_adapter_of_other_weights_than_the_base_model_has_is_noted(
    pool: FakePool, service: ServiceClient, tmp_path: Path, exported: str, served: str, is_noted: bool
) -> None:
    Receiver(pool)
    pool.handlers["GetCapabilities"] = lambda _: pool_of("toy", weights_id=served)
    (FILES.write(tmp_path) / "tinkerpool.json").write_text(json.dumps({"base_weights_id": exported}))
    notes = service.create_rest_client().import_checkpoint(tmp_path, "mine").result(60).notes
    assert any("other weights (a) than toy has in this pool (b)" in note for note in notes) == is_noted


@pytest.mark.parametrize("text", ["", "[]", "{}", "\udce4"])
def test_other_facts_beside_an_adapter_are_left_aside(
    pool: FakePool, service: ServiceClient, tmp_path: Path, text: str
) -> None:
    Receiver(pool)
    (FILES.write(tmp_path) / "tinkerpool.json").write_bytes(text.encode(errors="surrogateescape"))
    assert service.create_rest_client().import_checkpoint(tmp_path, "mine").result(60).notes == ("a note",)


async def test_an_import_is_awaited_too(pool: FakePool, service: ServiceClient, tmp_path: Path) -> None:
    Receiver(pool)
    imported = await service.create_rest_client().import_checkpoint_async(FILES.write(tmp_path), "mine")
    assert imported.model_id == f"{SESSION_ID}:train:0"


def test_lost_replies_and_a_restart_of_the_pool_are_survived(
    pool: FakePool, service: ServiceClient, tmp_path: Path
) -> None:
    receiver = Receiver(pool)
    pool.lost_replies = {"CreateUpload": 1, "UploadPart": 1, "ImportCheckpoint": 1}
    pool.faults["UploadPart"] = [UNREACHABLE, GONE]
    assert service.create_rest_client().import_checkpoint(FILES.write(tmp_path), "mine").result(60).path == PATH
    assert receiver.data == FILES.data
    pool.faults["ImportCheckpoint"] = [GONE]
    service.create_rest_client().import_checkpoint(tmp_path, "mine").result(60)


def test_a_pool_that_always_loses_the_upload_is_given_up_and_the_session_ends(
    pool: FakePool, service: ServiceClient, tmp_path: Path
) -> None:
    Receiver(pool)
    pool.faults["UploadPart"] = [GONE] * 99
    with pytest.raises(NotFound):
        service.create_rest_client().import_checkpoint(FILES.write(tmp_path), "mine").result(60)
    assert len(pool.requests("CreateUpload")) == 5
    assert pool.calls[-1][0] == "FinishSession"


def without(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def pickled(directory: Path) -> None:
    (directory / "adapter_model.safetensors").rename(directory / "adapter_model.bin")


def cut(num_bytes: int) -> Callable[[Path], object]:
    return lambda directory: (directory / "adapter_model.safetensors").write_bytes(FILES.weights[:num_bytes])


def merged(directory: Path) -> None:
    without("adapter_config.json")(directory)
    (directory / "tinkerpool.json").write_text("{}")


def huge_header(directory: Path) -> None:
    (directory / "adapter_model.safetensors").write_bytes(b"\xff" * 8 + FILES.weights[8:])


def long_header(directory: Path) -> None:
    header = FILES.header.encode() + b" " * (2 << 20)
    (directory / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + FILES.data)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (without("adapter_config.json"), "no adapter_config.json"),
        (merged, "a merged model has no adapter"),
        (without("adapter_model.safetensors"), "no adapter_model.safetensors"),
        (pickled, "adapter_model.bin is a pickle"),
        (cut(0), "not a safetensors file"),
        (cut(100), "not a safetensors file"),
        (huge_header, "not a safetensors file"),
        (long_header, "which no LoRA adapter needs"),
        (lambda directory: (directory / "adapter_config.json").write_bytes(b"\xff"), "cannot be read"),
    ],
)
def test_a_directory_without_an_adapter_is_refused_before_a_call(
    pool: FakePool, service: ServiceClient, tmp_path: Path, damage: Callable[[Path], object], says: str
) -> None:
    damage(FILES.write(tmp_path))
    with pytest.raises(NotImportable, match=says):
        service.create_rest_client().import_checkpoint(tmp_path)
    assert pool.calls == []


def test_a_file_is_refused_as_a_directory_and_a_name_as_a_path(service: ServiceClient, tmp_path: Path) -> None:
    rest = service.create_rest_client()
    with pytest.raises(NotImportable, match="not a directory"):
        rest.import_checkpoint(tmp_path / "absent")
    with pytest.raises(ValueError, match="not allowed"):
        rest.import_checkpoint(FILES.write(tmp_path), "a/b")


def test_a_file_that_is_not_complete_is_refused_before_its_data_is_sent(
    pool: FakePool, service: ServiceClient, tmp_path: Path
) -> None:
    Receiver(pool)
    cut(len(FILES.weights) - 1)(FILES.write(tmp_path))
    with pytest.raises(NotImportable, match="not complete"):
        service.create_rest_client().import_checkpoint(tmp_path).result(60)
    assert not pool.requests("UploadPart")
