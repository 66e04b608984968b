"""The REST client: listings, exports, watched cycles and single calls, over a fake pool."""

import io
import tarfile
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support.doors.fake_transport import UNREACHABLE, FakePool
from tests.support.exports import adapter_files, pieces_of, tar_of
from tests.support.waiting import wait_until
from tinkerpool import ServiceClient
from tinkerpool.client.archive import ArchiveFile
from tinkerpool.client.export import Exporter
from tinkerpool.v1 import adapters_pb2, checkpoints_pb2, operations_pb2, pool_pb2, sessions_pb2


def test_a_listing_is_assembled_from_its_pages(pool: FakePool, service: ServiceClient) -> None:
    adapters = [adapters_pb2.Adapter(adapter_id=f"s:train:{i}", base_model="toy", rank=8) for i in range(25)]

    def page(request: adapters_pb2.ListAdaptersRequest) -> adapters_pb2.ListAdaptersResponse:
        start = int(request.page_token or 0)
        end = start + min(request.page_size, 10)
        token = str(end) if end < len(adapters) else ""
        return adapters_pb2.ListAdaptersResponse(adapters=adapters[start:end], next_page_token=token)

    pool.handlers["ListAdapters"] = page
    rest = service.create_rest_client()
    runs = rest.list_training_runs(limit=12, offset=5).result(60).training_runs
    assert [run.training_run_id for run in runs] == [f"s:train:{i}" for i in range(5, 17)]
    assert len(rest.list_training_runs(limit=1000).result(60).training_runs) == 25
    assert rest.list_training_runs(offset=30).result(60).training_runs == []
    with pytest.raises(ValueError, match="limit"):
        rest.list_training_runs(limit=0).result(60)


def test_adapters_are_listed_by_name_and_labels_and_renamed(pool: FakePool, service: ServiceClient) -> None:
    used = datetime(2026, 11, 1, 12, tzinfo=UTC)
    adapter = adapters_pb2.Adapter(adapter_id="s:train:0", name="sft-3", user_metadata={"team": "nlp"})
    adapter.last_use_time.FromDatetime(used)
    pool.handlers["ListAdapters"] = lambda request: adapters_pb2.ListAdaptersResponse(adapters=[adapter])
    rest = service.create_rest_client()
    [run] = rest.list_training_runs(name_prefix="sft", labels={"team": "nlp"}).result(60).training_runs
    assert (run.name, run.user_metadata, run.last_request_time) == ("sft-3", {"team": "nlp"}, used)
    [request] = pool.requests("ListAdapters")
    assert (request.name_prefix, dict(request.labels)) == ("sft", {"team": "nlp"})
    renamed = adapters_pb2.Adapter(adapter_id="s:train:0", name="best")
    pool.handlers["RenameAdapter"] = lambda request: adapters_pb2.RenameAdapterResponse(adapter=renamed)
    assert rest.rename_training_run("s:train:0", "best").result(60).name == "best"
    assert pool.requests("RenameAdapter") == [adapters_pb2.RenameAdapterRequest(adapter_id="s:train:0", name="best")]


def test_a_broken_export_is_restarted_and_complete(pool: FakePool, service: ServiceClient, tmp_path: Path) -> None:
    files = adapter_files(["model.layers.0.mlp.up_proj"], base_model="organisation/model")
    pieces: list[Any] = pieces_of(files)
    attempts = [[*pieces[:2], UNREACHABLE], pieces]
    pool.handlers["ExportCheckpoint"] = lambda request: attempts.pop(0)
    target = tmp_path / "deep" / "adapter"
    rest = service.create_rest_client()
    assert rest.export_checkpoint("tinker://a:train:0/weights/x", target).result(60) == target
    assert {path.name for path in target.iterdir()} == {*files, "tinkerpool.json"}
    assert (target / "adapter_model.safetensors").read_bytes() == files["adapter_model.safetensors"]
    assert [path.name for path in target.parent.iterdir()] == ["adapter"]
    with pytest.raises(FileExistsError):
        rest.export_checkpoint("tinker://a:train:0/weights/x", target).result(60)


def test_a_cancelled_export_waits_for_its_thread_and_leaves_nothing(
    pool: FakePool, service: ServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.handlers["ExportCheckpoint"] = lambda request: pieces_of(adapter_files(["lm_head"], base_model="a/b"))
    has_begun, may_end = threading.Event(), threading.Event()
    finish = Exporter.finish

    def held(self: Exporter, archive: ArchiveFile, pool: Any) -> Path:
        has_begun.set()
        assert may_end.wait(60)
        return finish(self, archive, pool)

    monkeypatch.setattr(Exporter, "finish", held)  # a merge of a large model would take as long
    future = service.create_rest_client().export_checkpoint("tinker://a:train:0/weights/x", tmp_path / "new")
    assert has_begun.wait(60)
    assert future.cancel()
    service.get_server_capabilities()  # the loop has taken the cancellation
    assert [path.name[:5] for path in tmp_path.iterdir()] == [".new-"]
    may_end.set()
    wait_until(lambda: not list(tmp_path.iterdir()))


@pytest.mark.parametrize("kind", ["link to a new directory", "link to an empty directory", "mounted", "current"])
def test_a_directory_is_what_a_path_means_or_is_refused_before_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    folder, link = tmp_path / "folder", tmp_path / "link"
    if kind != "link to a new directory":
        folder.mkdir()
    link.symlink_to("folder")
    monkeypatch.chdir(folder if kind == "current" else tmp_path)
    monkeypatch.setattr(Path, "is_mount", lambda path: kind == "mounted")  # a mount needs root
    given = {"current": Path(), "mounted": folder}.get(kind, link)
    if kind in ("current", "mounted"):
        with pytest.raises(FileExistsError, match="mounted, or the current directory: choose a new one in it"):
            ArchiveFile(given)
        assert list(folder.iterdir()) == []
    else:
        with ArchiveFile(given) as archive:
            archive.write(tar_of({"file": b"x"}))
            archive.publish(archive.unpack())
        assert (folder / "file").read_bytes() == b"x"
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "link"}


def test_an_export_expands_the_home_directory(
    pool: FakePool, service: ServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    pool.handlers["ExportCheckpoint"] = lambda request: pieces_of(adapter_files(["lm_head"], base_model="a/b"))
    exported = service.create_rest_client().export_checkpoint("tinker://a:train:0/weights/x", "~/new").result(60)
    assert exported == tmp_path / "new"
    assert (exported / "tinkerpool.json").is_file()


@pytest.mark.parametrize("name", ["../outside", "/etc/outside", "a/../../outside"])
def test_an_archive_cannot_write_outside_its_directory(tmp_path: Path, name: str) -> None:
    with ArchiveFile(tmp_path / "new") as archive:
        archive.write(tar_of({name: b"x"}))
        with pytest.raises(ValueError, match="no plain file"):
            archive.unpack()
    assert list(tmp_path.iterdir()) == []


def test_an_archive_with_a_link_is_refused(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    with ArchiveFile(tmp_path / "new") as file:
        file.write(buffer.getvalue())
        with pytest.raises(ValueError, match="no plain file"):
            file.unpack()


def test_cycles_are_watched_across_broken_streams(pool: FakePool, service: ServiceClient) -> None:
    cycles = [pool_pb2.WatchCyclesResponse(cycle=pool_pb2.Cycle(cycle_id=i)) for i in range(4)]
    attempts: list[Any] = [[cycles[0], UNREACHABLE], [cycles[2], cycles[3]]]
    pool.handlers["WatchCycles"] = lambda request: attempts.pop(0)
    assert [cycle.cycle_id for cycle in service.create_rest_client().watch_cycles()] == [0, 2, 3]


def test_each_method_of_the_rest_client_makes_its_call_and_converts_the_response(
    pool: FakePool, service: ServiceClient
) -> None:
    path = "tinker://s:train:0/weights/x"
    checkpoint = checkpoints_pb2.Checkpoint(
        path=path, kind=checkpoints_pb2.CHECKPOINT_KIND_TRAINING, base_model="toy", rank=8, size_bytes=5
    )
    session = sessions_pb2.Session(session_id="s", adapter_ids=["s:train:0"], is_live=True)
    adapter = adapters_pb2.Adapter(adapter_id="s:train:0", rank=8, applied_seq=4)
    operation = operations_pb2.Operation(name="s:train:0:1")
    pool.handlers |= {
        "GetCheckpoint": lambda r: checkpoints_pb2.GetCheckpointResponse(checkpoint=checkpoint),
        "ListCheckpoints": lambda r: checkpoints_pb2.ListCheckpointsResponse(checkpoints=[checkpoint]),
        "DeleteCheckpoint": lambda r: checkpoints_pb2.DeleteCheckpointResponse(),
        "GetSession": lambda r: sessions_pb2.GetSessionResponse(session=session),
        "ListSessions": lambda r: sessions_pb2.ListSessionsResponse(sessions=[session]),
        "GetAdapter": lambda r: adapters_pb2.GetAdapterResponse(adapter=adapter),
        "DeleteAdapter": lambda r: adapters_pb2.DeleteAdapterResponse(),
        "GetOperation": lambda r: operations_pb2.GetOperationResponse(operation=operation),
        "CancelOperation": lambda r: operations_pb2.CancelOperationResponse(operation=operation),
        "GetPoolStatus": lambda r: pool_pb2.GetPoolStatusResponse(epoch=3),
        "GetUsage": lambda r: pool_pb2.GetUsageResponse(rows=[pool_pb2.UsageRow(tenant="alice")]),
    }
    rest = service.create_rest_client()
    found = rest.get_checkpoint(path).result(60)
    assert (found.checkpoint_id, found.checkpoint_type, found.size_bytes) == ("weights/x", "training", 5)
    assert rest.list_checkpoints("s:train:0").result(60).checkpoints == [found]
    assert rest.list_user_checkpoints().result(60).checkpoints == [found]
    rest.delete_checkpoint("s:train:0", "weights/x").result(60)
    assert pool.requests("DeleteCheckpoint")[0].path == path
    assert rest.get_session("s").result(60).training_run_ids == ["s:train:0"]
    assert rest.list_sessions().result(60).sessions == ["s"]
    assert rest.get_training_run_by_tinker_path(path).result(60).num_operations == 4
    rest.delete_training_run("s:train:0").result(60)
    assert rest.get_operation("s:train:0:1").result(60) == operation
    assert rest.cancel_operation("s:train:0:1").result(60) == operation
    assert rest.get_pool_status(num_cycles=3).result(60).epoch == 3
    assert rest.get_usage().result(60).rows[0].tenant == "alice"
    with pytest.raises(ValueError, match="checkpoint path"):
        rest.get_training_run_by_tinker_path("s:train:0")
