"""State folders: complete or absent on disk, and never read when damaged."""

import errno
import io
import json
import os
import stat
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyrage
import pytest
import safetensors.numpy

from coordinator.base.errors import Code, ServiceError
from coordinator.storage.disk import RealDisk
from coordinator.storage.folders import QUARANTINE_S, QuarantinedFolders, StateFiles
from coordinator.storage.identity import Identity, identity_in
from tests.support.toy_engine import toy_model_info
from workers.contract.contents import LARGE_BYTES, PIECE_BYTES, FileContent, Spool, whole
from workers.contract.messages import AdapterSpec, AdapterState

MODEL = toy_model_info()
SPEC = AdapterSpec(
    adapter_id="s:train:0", rank=8, alpha=16.0, seed=3, train_attn=True, train_mlp=True, train_unembed=False
)
STATE = AdapterState(weights=b"w" * 3000, optimizer=b"m" * 50, num_steps=4, applied_seq=9, fingerprint="toy")
IN_A_WINDOW = replace(STATE, gradient=b"g" * 70, num_datums=3)


@pytest.fixture
def files(tmp_path: Path) -> StateFiles:
    files = StateFiles(tmp_path / "states", "checkpoint", RealDisk())
    files.begin_epoch(Identity(pool_id=1, epoch=2))
    return files


def test_a_written_state_is_read_back(files: StateFiles) -> None:
    for state in (STATE, replace(STATE, optimizer=None), IN_A_WINDOW, replace(IN_A_WINDOW, optimizer=None)):
        saved = files.write(SPEC, MODEL, state)
        assert files.read(saved.folder, saved.sha256) == state


def test_a_large_state_is_written_and_read_piece_by_piece_with_the_checksum_of_its_bytes(
    files: StateFiles, tmp_path: Path
) -> None:
    weights = os.urandom(LARGE_BYTES + 3 * PIECE_BYTES + 5)
    spool = Spool(tmp_path)
    for start in range(0, len(weights), 777_777):
        spool.append(weights[start : start + 777_777])
    assert list(tmp_path.glob("tmp*")) == [], "the file has no name"
    in_memory = files.write(SPEC, MODEL, replace(STATE, weights=weights))
    in_pieces = files.write(SPEC, MODEL, replace(STATE, weights=spool.content()))
    assert in_pieces.sha256 == in_memory.sha256
    found = files.read(in_pieces.folder, in_pieces.sha256)
    assert isinstance(found.weights, FileContent)
    files.remove(in_pieces.folder)
    assert whole(found.weights) == weights, "it stays readable without its name"


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
    assert calls == ["file"] * 5 + ["folder", "rename", "parent"]


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


@pytest.fixture
def checkpoints(tmp_path: Path) -> StateFiles:
    files = StateFiles(tmp_path / "checkpoints", "checkpoint", RealDisk())
    files.begin_epoch(Identity(pool_id=1, epoch=2))
    return files


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_only_orphans_of_a_crash_leave_their_place_and_none_is_deleted(checkpoints: StateFiles, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    kept, orphan = checkpoints.write(SPEC, MODEL, STATE), checkpoints.write(SPEC, MODEL, IN_A_WINDOW)
    for name in (".writing-abc", "an operator's notes"):
        (root / name).mkdir()
        (root / name / "part").write_bytes(b"half")
    content = {path.name: path.read_bytes() for path in (root / orphan.folder).iterdir()}
    quarantine = QuarantinedFolders(tmp_path / "quarantine", RealDisk())
    checkpoints.set_orphans_aside({kept.folder}, quarantine, 12.5)
    assert names(root) == sorted([kept.folder, "an operator's notes"])
    assert checkpoints.read(kept.folder, kept.sha256) == STATE
    [aside] = quarantine.root.iterdir()
    assert aside.name == f"12500-checkpoints-{orphan.folder}"
    assert {path.name: path.read_bytes() for path in aside.iterdir()} == content


def test_orphans_are_deleted_after_a_week_of_service_and_nothing_else_is(
    checkpoints: StateFiles, tmp_path: Path
) -> None:
    quarantine = QuarantinedFolders(tmp_path / "quarantine", RealDisk())
    older, newer = checkpoints.write(SPEC, MODEL, STATE), checkpoints.write(SPEC, MODEL, STATE)
    checkpoints.set_orphans_aside({newer.folder}, quarantine, 10.0)
    checkpoints.set_orphans_aside(set(), quarantine, 20.0)
    (quarantine.root / "0-checkpoints-mine").mkdir()
    quarantine.remove_expired(9.9 + QUARANTINE_S)
    assert len(names(quarantine.root)) == 3
    quarantine.remove_expired(10.0 + QUARANTINE_S)
    assert names(quarantine.root) == ["0-checkpoints-mine", f"20000-checkpoints-{newer.folder}"]
    assert older.folder != newer.folder


def test_an_orphan_stays_where_it_is_if_the_quarantine_is_on_another_disk(
    checkpoints: StateFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orphan = checkpoints.write(SPEC, MODEL, STATE)

    def other_disk(*_: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(RealDisk, "rename", other_disk)  # a test cannot mount a second disk
    checkpoints.set_orphans_aside(set(), QuarantinedFolders(tmp_path / "quarantine", RealDisk()), 0.0)
    assert names(tmp_path / "checkpoints") == [orphan.folder]


def test_a_folder_is_named_after_its_pool_and_epoch_and_its_checksum_is_not(files: StateFiles) -> None:
    saved = files.write(SPEC, MODEL, STATE)
    assert identity_in(saved.folder) == Identity(pool_id=1, epoch=2)
    files.begin_epoch(Identity(pool_id=3, epoch=4))
    again = files.write(SPEC, MODEL, STATE)
    assert identity_in(again.folder) == Identity(pool_id=3, epoch=4)
    assert again.sha256 == saved.sha256


def test_a_file_is_verified_in_pieces(files: StateFiles, tmp_path: Path) -> None:
    """So that other exports have turns between them. A snapshot has no digests of blocks, as earlier checkpoints."""
    snapshots = StateFiles(tmp_path / "snapshots", "snapshot", RealDisk())
    snapshots.begin_epoch(Identity(pool_id=1, epoch=2))
    for each in (files, snapshots):
        saved = each.write(SPEC, MODEL, IN_A_WINDOW)
        pieces = list(each.file(saved.folder, saved.sha256, "adapter_config.json", 100).pieces())
        assert max(len(piece.data) for piece in pieces) <= 100
        assert each is files or max(piece.num_read for piece in pieces) <= 100
        num_verified = sum(piece.num_read for piece in pieces if not piece.data)
        assert num_verified == (0 if each is files else saved.size_bytes)


def test_an_export_is_a_tar_of_a_peft_directory(files: StateFiles) -> None:
    saved = files.write(SPEC, MODEL, IN_A_WINDOW)
    pieces = [piece.data for piece in files.archive(saved.folder, saved.sha256, piece_bytes=1000).pieces()]
    assert all(len(piece) <= 1000 for piece in pieces)
    with tarfile.open(fileobj=io.BytesIO(b"".join(pieces))) as archive:
        contents = {name: archive.extractfile(name).read() for name in archive.getnames()}  # type: ignore[union-attr]
    config = json.loads(contents["adapter_config.json"])
    assert contents["adapter_model.safetensors"] == STATE.weights
    pieces = [piece.data for piece in files.file(saved.folder, saved.sha256, "adapter_model.safetensors", 3).pieces()]
    assert b"".join(pieces) == STATE.weights
    assert set(contents) == {"adapter_config.json", "adapter_model.safetensors"}
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 8, 16.0)
    assert config["target_modules"] == ["q_proj", "up_proj"]


NAMED = replace(
    STATE,
    weights=safetensors.numpy.save(
        {
            f"base_model.model.{module}.lora_{matrix}.weight": np.full((2, columns), columns, np.float32)
            for columns, module in enumerate(("model.layers.0.self_attn.q_proj", "lm_head"), 3)
            for matrix in "AB"
        },
        {"format": "pt"},
    ),
)
TINKERS_NAMES = {
    f"base_model.model.model.{module}.lora_{matrix}.weight"
    for module in ("layers.0.self_attn.q_proj", "unembed_tokens")
    for matrix in "AB"
}


@pytest.mark.parametrize("piece_bytes", [7, 100, 1 << 20])
def test_for_tinker_the_unembedding_has_the_services_name_and_all_tensors_their_values(
    files: StateFiles, piece_bytes: int
) -> None:
    saved = files.write(SPEC, MODEL, NAMED)
    arguments = saved.folder, saved.sha256
    archive = b"".join(piece.data for piece in files.archive(*arguments, piece_bytes, for_tinker=True).pieces())
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        in_tar = opened.extractfile("adapter_model.safetensors").read()  # type: ignore[union-attr]
    pieces = list(files.file(*arguments, "adapter_model.safetensors", piece_bytes, for_tinker=True).pieces())
    alone = b"".join(piece.data for piece in pieces)
    assert alone == in_tar
    tensors = safetensors.numpy.load(alone)
    assert set(tensors) == TINKERS_NAMES
    for name, tensor in tensors.items():
        assert np.array_equal(tensor, np.full((2, 4 if "unembed" in name else 3), 4 if "unembed" in name else 3))
    assert int.from_bytes(alone[:8], "little") % 8 == 0, "the data is not aligned"
    as_stored = files.file(*arguments, "adapter_model.safetensors").pieces()
    assert b"".join(piece.data for piece in as_stored) == NAMED.weights


def test_an_encrypted_state_is_exported_encrypted_and_read_by_its_recipients_alone(
    files: StateFiles, tmp_path: Path
) -> None:
    identity = pyrage.x25519.Identity.generate()
    saved = files.write(SPEC, MODEL, NAMED, [str(identity.to_public())])
    assert files.exported(saved.folder) == ["adapter_config.json.age", "adapter_model.safetensors.age"]
    for for_tinker in (False, True):
        with tarfile.open(
            fileobj=io.BytesIO(
                b"".join(p.data for p in files.archive(saved.folder, saved.sha256, for_tinker=for_tinker).pieces())
            )
        ) as archive:
            content = {name: archive.extractfile(name).read() for name in archive.getnames()}  # type: ignore[union-attr]
        assert set(content) == set(files.exported(saved.folder))
        decrypted = pyrage.decrypt(content["adapter_model.safetensors.age"], [identity])
        assert set(safetensors.numpy.load(decrypted)) == TINKERS_NAMES
    with pytest.raises(ServiceError, match="encrypted"):
        files.read(saved.folder, saved.sha256)
    for path in (tmp_path / "states" / saved.folder).iterdir():
        assert b"lora_A" not in path.read_bytes(), f"{path.name} has the weights in the clear"


def test_a_disk_that_is_full_while_it_encrypts_is_named_and_no_folder_stays(
    files: StateFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(RealDisk, "write_piece", full)  # no disk is full on demand
    with pytest.raises(OSError, match="full"):
        files.write(SPEC, MODEL, NAMED, [str(pyrage.x25519.Identity.generate().to_public())])
    assert list((tmp_path / "states").iterdir()) == []


def test_removing_a_folder_never_removes_the_root(files: StateFiles, tmp_path: Path) -> None:
    saved = files.write(SPEC, MODEL, STATE)
    with pytest.raises(AssertionError):
        files.remove("")
    files.remove(saved.folder)
    files.remove(saved.folder)
    assert list((tmp_path / "states").iterdir()) == []
