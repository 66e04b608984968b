"""Adapters that an engine has trained, as a pool sends them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from coordinator.storage.exports import peft_config
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


def checkpoint_files(driver: Driver, spec: AdapterSpec) -> Files:
    """Return the files that a pool sends of an adapter."""
    config = peft_config(spec, driver.engine.info)
    return {
        "adapter_config.json": json.dumps(config).encode(),
        "adapter_model.safetensors": driver.state(spec.adapter_id).weights,
    }
