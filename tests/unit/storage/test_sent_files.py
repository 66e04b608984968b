"""What leaves a state folder: every range has the bytes of the whole, and no damaged byte is sent."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from coordinator.base.errors import ServiceError
from coordinator.storage import exported_folder
from coordinator.storage.disk import RealDisk
from coordinator.storage.folders import Saved, StateFiles
from coordinator.storage.identity import Identity
from coordinator.storage.sent_files import BLOCK_BYTES
from tests.support.joined_modules import hybrid_modules
from tests.support.toy_engine import toy_model_info
from workers.contract.messages import AdapterSpec, AdapterState

MODEL = toy_model_info()
SPEC = AdapterSpec(
    adapter_id="s:train:0", rank=8, alpha=16.0, seed=3, train_attn=True, train_mlp=True, train_unembed=True
)
WEIGHTS = safetensors.numpy.save({"base_model.model.lm_head.a": np.arange(BLOCK_BYTES, dtype=np.float32)[:, None]})
"""Some more than four blocks."""
STATE = AdapterState(weights=WEIGHTS, optimizer=bytes(3 * len(WEIGHTS)), num_steps=4, applied_seq=9, fingerprint="toy")
NAME = "adapter_model.safetensors"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "states"


@pytest.fixture
def files(root: Path) -> StateFiles:
    files = StateFiles(root, "checkpoint", RealDisk())
    files.begin_epoch(Identity(pool_id=1, epoch=2))
    return files


@pytest.fixture(params=[False, True], ids=["new", "old"])
def is_old(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def saved(files: StateFiles, root: Path, is_old: bool) -> Saved:
    """A folder of this version, and one as it was before exports were verified block by block."""
    saved = files.write(SPEC, MODEL, STATE)
    if not is_old:
        return saved
    (root / saved.folder / "blocks.json").unlink()
    content = {path.name: path.read_bytes() for path in (root / saved.folder).iterdir()}
    digest = hashlib.sha256()
    for name in sorted(content):
        digest.update(f"{name}\0{len(content[name])}\0".encode() + content[name])
    return replace(saved, sha256=digest.hexdigest(), size_bytes=sum(map(len, content.values())))


@pytest.mark.parametrize("for_tinker", [False, True])
def test_no_byte_of_a_damaged_block_is_sent_and_the_blocks_before_it_are(
    files: StateFiles, root: Path, saved: Saved, is_old: bool, for_tinker: bool
) -> None:
    path = root / saved.folder / NAME

    def sent(start: int = 0) -> bytes:
        """Return what is sent before damage is found."""
        found = b""
        with suppress(ServiceError):
            for piece in files.file(saved.folder, saved.sha256, NAME, for_tinker=for_tinker).pieces(start):
                found += piece.data
        return found

    whole = sent()
    assert len(whole) > 4 * BLOCK_BYTES
    for block in range(5):
        damaged = bytearray(WEIGHTS)
        damaged[block * BLOCK_BYTES + 5] ^= 1
        path.write_bytes(damaged)
        found = sent()
        assert whole.startswith(found)
        num_expected = 0 if is_old else block * BLOCK_BYTES
        assert abs(len(found) - num_expected) < 100, "the header for Tinker has another size"
        is_sound = not is_old and block not in ({0, 4} if for_tinker else {4})
        assert sent(len(whole) - 5) == (whole[-5:] if is_sound else b"")
    for other in (WEIGHTS[:-1], WEIGHTS[: 4 * BLOCK_BYTES], WEIGHTS + b"x", WEIGHTS + bytes(BLOCK_BYTES), b""):
        path.write_bytes(other)
        assert whole.startswith(sent())
        with pytest.raises(ServiceError, match="does not match its checksum"):
            list(files.file(saved.folder, saved.sha256, NAME, for_tinker=for_tinker).pieces())


@pytest.mark.parametrize("for_tinker", [False, True])
def test_damage_of_what_describes_a_folder_is_found_and_is_no_fault_of_the_pool(
    files: StateFiles, root: Path, saved: Saved, is_old: bool, for_tinker: bool
) -> None:
    path = root / saved.folder / ("state.json" if is_old else "blocks.json")
    sound = path.read_bytes()
    others = [sound[:position] + bytes([sound[position] ^ 1]) + sound[position + 1 :] for position in range(0, 140, 7)]
    for damaged in (*others, b"", b"null", b'{"adapter_config.json": 1, "state.json": {}}'):
        path.write_bytes(damaged)
        with pytest.raises(ServiceError, match="does not match its checksum"):
            list(files.archive(saved.folder, saved.sha256, for_tinker=for_tinker).pieces())


def test_what_is_sent_of_an_export_is_all_that_is_read_and_an_old_folder_is_verified_whole(
    files: StateFiles, saved: Saved, is_old: bool
) -> None:
    config = list(files.file(saved.folder, saved.sha256, "adapter_config.json", for_tinker=True).pieces())
    archive = files.archive(saved.folder, saved.sha256, for_tinker=True)
    part = list(archive.pieces(BLOCK_BYTES, BLOCK_BYTES + 10))
    num_read = [sum(piece.num_read for piece in pieces) for pieces in (config, part)]
    if is_old:
        assert min(num_read) >= saved.size_bytes
    else:
        assert num_read[0] == sum(len(piece.data) for piece in config)
        assert num_read[1] == BLOCK_BYTES, "ten bytes take as long as their block"


def test_a_header_of_any_length_is_refused_before_it_is_read(
    files: StateFiles, root: Path, saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder of an earlier version nothing is verified before."""
    monkeypatch.setattr(exported_folder, "HEAD_BYTES_MAX", 1000)
    (root / saved.folder / NAME).write_bytes((1001).to_bytes(8, "little") + WEIGHTS[8:])
    read, sizes = RealDisk.read_piece, list[int]()

    def noted(self: RealDisk, path: Path, start: int, num_bytes: int) -> bytes:
        sizes.append(num_bytes)
        return read(self, path, start, num_bytes)

    monkeypatch.setattr(RealDisk, "read_piece", noted)
    with pytest.raises(ServiceError, match="does not match its checksum"):
        files.file(saved.folder, saved.sha256, NAME, for_tinker=True)
    assert max(sizes) <= BLOCK_BYTES
    assert len(sizes) == 1


def test_damage_of_a_file_that_is_not_sent_does_not_keep_the_others_from_their_owner(
    files: StateFiles, root: Path
) -> None:
    saved = files.write(SPEC, MODEL, STATE)
    (root / saved.folder / "optimizer.safetensors").write_bytes(b"damaged")
    sent = files.file(saved.folder, saved.sha256, NAME).pieces()
    assert b"".join(piece.data for piece in sent) == WEIGHTS
    with pytest.raises(ServiceError, match="does not match its checksum"):
        files.read(saved.folder, saved.sha256)


def test_joined_matrices_are_sent_after_all_files_were_verified(files: StateFiles, root: Path) -> None:
    model = replace(MODEL, modules=hybrid_modules("in_proj_qkv"))
    saved = files.write(SPEC, model, STATE)
    path = root / saved.folder / NAME
    path.write_bytes(WEIGHTS[:-1] + b"x")
    pieces = (piece for piece in files.file(saved.folder, saved.sha256, NAME).pieces() if piece.data)
    with pytest.raises(ServiceError, match="does not match its checksum"):
        next(pieces)


@pytest.mark.parametrize("piece_bytes", [700, 1 << 20])
@pytest.mark.parametrize("for_tinker", [False, True])
@pytest.mark.parametrize("is_joined", [False, True])
def test_every_range_of_a_file_and_of_an_archive_has_the_bytes_of_the_whole(
    files: StateFiles, piece_bytes: int, for_tinker: bool, is_joined: bool
) -> None:
    model = replace(MODEL, modules=hybrid_modules("in_proj_qkv")) if is_joined else MODEL
    weights = safetensors.numpy.save({"base_model.model.lm_head.a": np.arange(1000, dtype=np.float32)[:, None]})
    saved = files.write(SPEC, model, replace(STATE, weights=weights, optimizer=None))
    of = saved.folder, saved.sha256
    for sent in (
        files.archive(*of, piece_bytes, for_tinker=for_tinker),
        files.file(*of, "adapter_config.json", piece_bytes, for_tinker=for_tinker),
        files.file(*of, NAME, piece_bytes, for_tinker=for_tinker),
    ):
        whole = b"".join(piece.data for piece in sent.pieces())
        assert len(whole) == sent.num_bytes
        places = [0, 1, 8, sent.num_bytes // 3, sent.num_bytes // 2 + 1, sent.num_bytes - 1, sent.num_bytes]
        for start in places:
            for stop in places:
                pieces = [piece.data for piece in sent.pieces(start, stop)]
                assert b"".join(pieces) == whole[start:stop], (start, stop)
                assert all(len(piece) <= piece_bytes for piece in pieces)
