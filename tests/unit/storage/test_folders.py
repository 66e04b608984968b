"""State folders: complete or absent on disk, and never read when damaged."""

import errno
import io
import json
import os
import stat
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.base.errors import Code, ServiceError
from coordinator.storage.disk import RealDisk
from coordinator.storage.folders import StateFiles
from tests.support.toy_engine import toy_model_info
from workers.contract.messages import AdapterSpec, AdapterState

MODEL = toy_model_info()
SPEC = AdapterSpec(
    adapter_id="s:train:0", rank=8, alpha=16.0, seed=3, train_attn=True, train_mlp=True, train_unembed=False
)
STATE = AdapterState(weights=b"w" * 3000, optimizer=b"m" * 50, num_steps=4, applied_seq=9, fingerprint="toy")
IN_A_WINDOW = replace(STATE, gradient=b"g" * 70, num_datums=3)


@pytest.fixture
def files(tmp_path: Path) -> StateFiles:
    return StateFiles(tmp_path / "states", "checkpoint", RealDisk())


def test_a_written_state_is_read_back(files: StateFiles) -> None:
    for state in (STATE, replace(STATE, optimizer=None), IN_A_WINDOW, replace(IN_A_WINDOW, optimizer=None)):
        saved = files.write(SPEC, MODEL, state)
        assert files.read(saved.folder, saved.sha256) == state


def test_a_flipped_byte_in_any_file_is_data_loss(files: StateFiles, tmp_path: Path) -> None:
    saved = files.write(SPEC, MODEL, IN_A_WINDOW)
    folder = tmp_path / "states" / saved.folder
    for path in sorted(folder.iterdir()):
        sound = path.read_bytes()
        for position in (0, len(sound) // 2, len(sound) - 1):
            damaged = bytearray(sound)
            damaged[position] ^= 1
            path.write_bytes(damaged)
            with pytest.raises(ServiceError) as raised:
                files.read(saved.folder, saved.sha256)
            assert raised.value.code is Code.DATA_LOSS
            assert str(tmp_path) not in raised.value.message
            with pytest.raises(ServiceError):
                next(files.tar(saved.folder, saved.sha256))
            with pytest.raises(ServiceError):
                next(files.piecewise(saved.folder, saved.sha256, "adapter_config.json"))
        path.write_bytes(sound)
    assert files.read(saved.folder, saved.sha256) == IN_A_WINDOW


def test_a_missing_an_extra_and_a_swapped_file_are_data_loss(files: StateFiles, tmp_path: Path) -> None:
    saved = files.write(SPEC, MODEL, IN_A_WINDOW)
    folder = tmp_path / "states" / saved.folder
    (folder / "extra").write_bytes(b"")
    with pytest.raises(ServiceError):
        files.read(saved.folder, saved.sha256)
    (folder / "extra").unlink()
    (folder / "optimizer.safetensors").rename(folder / "other.safetensors")
    with pytest.raises(ServiceError):
        files.read(saved.folder, saved.sha256)
    with pytest.raises(ServiceError) as absent:
        files.read("nowhere", saved.sha256)
    assert absent.value.code is Code.DATA_LOSS


@pytest.mark.parametrize("step", ["write", "rename", "sync"])
def test_a_write_that_fails_at_any_step_leaves_no_folder(
    files: StateFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RealDisk, step, full)  # no disk fails on demand
    with pytest.raises(OSError, match="No space"):
        files.write(SPEC, MODEL, STATE)
    assert list((tmp_path / "states").iterdir()) == []


def test_a_folder_has_its_name_only_when_every_file_and_itself_are_synced(
    files: StateFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records the system calls: a test cannot cut the power."""
    calls: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def note_sync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        is_root = status.st_ino == (tmp_path / "states").stat().st_ino
        calls.append("parent" if is_root else "folder" if stat.S_ISDIR(status.st_mode) else "file")
        fsync(descriptor)

    def note_rename(path: Path, target: Path) -> Path:
        assert not target.exists()
        calls.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "rename", note_rename)
    files.write(SPEC, MODEL, STATE)
    assert calls == ["file"] * 4 + ["folder", "rename", "parent"]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_transient_read_error_is_not_reported_as_damage(
    files: StateFiles, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    saved = files.write(SPEC, MODEL, STATE)

    def failing(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(RealDisk, "read", failing)  # no disk fails on demand
        with pytest.raises(ServiceError) as raised:
            files.read(saved.folder, saved.sha256)
    assert (raised.value.code, raised.value.retry_delay_s) == (Code.UNAVAILABLE, 1.0)
    assert files.read(saved.folder, saved.sha256) == STATE


def test_only_orphans_of_a_crash_are_removed(files: StateFiles, tmp_path: Path) -> None:
    kept, orphan = files.write(SPEC, MODEL, STATE), files.write(SPEC, MODEL, STATE)
    (tmp_path / "states" / ".writing-abc").mkdir()
    (tmp_path / "states" / ".writing-abc" / "part").write_bytes(b"half")
    files.remove_orphans({kept.folder})
    assert [path.name for path in (tmp_path / "states").iterdir()] == [kept.folder]
    assert orphan.folder != kept.folder
    assert files.read(kept.folder, kept.sha256) == STATE


def test_an_export_is_a_tar_of_a_peft_directory(files: StateFiles) -> None:
    saved = files.write(SPEC, MODEL, IN_A_WINDOW)
    pieces = list(files.tar(saved.folder, saved.sha256, piece_bytes=1000))
    assert all(len(piece) <= 1000 for piece in pieces)
    with tarfile.open(fileobj=io.BytesIO(b"".join(pieces))) as archive:
        contents = {name: archive.extractfile(name).read() for name in archive.getnames()}  # type: ignore[union-attr]
    config = json.loads(contents["adapter_config.json"])
    assert contents["adapter_model.safetensors"] == STATE.weights
    assert b"".join(files.piecewise(saved.folder, saved.sha256, "adapter_model.safetensors", 3)) == STATE.weights
    assert set(contents) == {"adapter_config.json", "adapter_model.safetensors"}
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 8, 16.0)
    assert config["target_modules"] == ["q_proj", "up_proj"]


def test_removing_a_folder_never_removes_the_root(files: StateFiles, tmp_path: Path) -> None:
    saved = files.write(SPEC, MODEL, STATE)
    with pytest.raises(AssertionError):
        files.remove("")
    files.remove(saved.folder)
    files.remove(saved.folder)
    assert list((tmp_path / "states").iterdir()) == []
