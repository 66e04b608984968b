"""Adapters that an engine has trained, as a pool sends them."""

from __future__ import annotations

import io
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from coordinator.storage.disk import RealDisk
from coordinator.storage.folders import StateFiles
from coordinator.storage.identity import Identity
from tests.support.exports import Files
from tests.support.numerics.harness import Driver, make_data, make_spec
from workers.contract.messages import AdamParams, AdapterSpec

DATA = make_data("cross_entropy", [23, 8, 40])


def train(model: Path, **spec: Any) -> tuple[Driver, AdapterSpec]:
    """Return an engine with an adapter of two large steps."""
    made = make_spec("a", 4, **spec)
    driver = Driver(model)
    driver.install(made)
    for _ in range(2):
        driver.train(driver.backward("a", DATA))
        driver.train(driver.step("a", AdamParams(learning_rate=3e-2)))
    return driver, made


def checkpoint_files(driver: Driver, spec: AdapterSpec, *, for_tinker: bool = False) -> Files:
    """Return the files that a pool sends of an adapter: to its own client, or to Tinker's."""
    with tempfile.TemporaryDirectory() as directory:
        states = StateFiles(Path(directory) / "checkpoints", "checkpoint", RealDisk())
        states.begin_epoch(Identity(pool_id=1, epoch=1))
        saved = states.write(spec, driver.engine.info, driver.state(spec.adapter_id))
        pieces = [piece.data for piece in states.archive(saved.folder, saved.sha256, for_tinker=for_tinker).pieces()]
    with tarfile.open(fileobj=io.BytesIO(b"".join(pieces))) as archive:
        return {name: archive.extractfile(name).read() for name in archive.getnames()}  # type: ignore[union-attr]
