"""A run's folder, and how a run that was interrupted continues.

The folder holds `settings.json` and, after the first save, `checkpoint.json`: the number of steps done and the path of
the state in the pool. Data, learning rates and seeds are functions of the settings and the step. So a run that
continues at a checkpoint takes the steps that it would have taken, with the same bits where the pool promises them.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tinkerpool import AdamParams, APIFuture, ServiceClient, TrainingClient, types
from tinkerpool.data import Schedule
from tinkerpool.data.schedule import ScheduleKind
from tinkerpool.recipes.options import option

KEPT_S = 30 * 24 * 3600
"""The pool deletes the checkpoints during a run after this time; the last one stays."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings of every recipe."""

    log_dir: Path = option("folder of the run; the same command with the same folder continues it")
    base_model: str | None = option("base model; needed if the pool has several", None)
    start_from: str | None = option("tinker:// path of a saved state to start from, instead of a new adapter", None)
    rank: int = option("LoRA rank of a new adapter, a power of two", 32)
    learning_rate: float = option("highest learning rate", 1e-3)
    schedule: ScheduleKind = option("decay of the learning rate", "linear")
    warmup_steps: int = option("steps in which the learning rate rises", 0)
    seed: int = option("of the adapter, the order of data, and samples", 0)
    eval_every: int = option("steps between two evaluations on --test-data; 0: only after the last step", 20)
    save_every: int = option("steps between two checkpoints; 0: only after the last step", 50)


class Run:
    """One run: its folder, its adapter, its schedule and its checkpoints."""

    def __init__(self, settings: RunSettings) -> None:
        """Open the folder, or create it. Raises ValueError if it has a run with other settings or data."""
        self.settings = settings
        self.start_step = 0
        """Steps done before this process."""
        self._path = settings.start_from
        self._folder = settings.log_dir
        self._folder.mkdir(parents=True, exist_ok=True)
        self._check_settings()
        saved = self._folder / "checkpoint.json"
        if saved.exists():
            checkpoint = json.loads(saved.read_text(encoding="utf-8"))
            self.start_step, self._path = checkpoint["step"], checkpoint["path"]

    def training_client(self, service: ServiceClient) -> TrainingClient:
        """Return the client of the run's adapter: of the last checkpoint, of `start_from`, or new."""
        if self.start_step and self._path:
            return service.create_training_client_from_state_with_optimizer(self._path)
        return self.new_client(service)

    def new_client(self, service: ServiceClient) -> TrainingClient:
        """Return the client of another adapter, with the weights that the run began with."""
        if self.settings.start_from:
            return service.create_training_client_from_state(self.settings.start_from)
        return service.create_lora_training_client(
            self.settings.base_model, rank=self.settings.rank, seed=self.settings.seed
        )

    def adam(self, step: int, num_steps: int) -> AdamParams:
        """Return the parameters of step `step`, counted from 0."""
        schedule = Schedule(
            learning_rate=self.settings.learning_rate,
            num_steps=num_steps,
            kind=self.settings.schedule,
            warmup_steps=min(self.settings.warmup_steps, num_steps),
        )
        return AdamParams(learning_rate=schedule.at(step))

    def save(self, client: TrainingClient, done: int, num_steps: int) -> APIFuture[types.SaveWeightsResponse] | None:
        """Submit a save after `done` steps if one is due; give its future to `record`."""
        if not is_due(done, self.settings.save_every, num_steps):
            return None
        ttl_s = None if done == num_steps else KEPT_S
        return client.save_state(f"step-{done:06d}", ttl_seconds=ttl_s)

    def record(self, done: int, saved: APIFuture[types.SaveWeightsResponse] | None) -> None:
        """Wait for a save, and continue there if the run is interrupted from now on."""
        if saved is not None:
            _write(self._folder / "checkpoint.json", {"step": done, "path": saved.result().path})

    def _check_settings(self) -> None:
        paths = {name: value for name, value in asdict(self.settings).items() if isinstance(value, Path)}
        files = {name: path for name, path in paths.items() if name != "log_dir"}
        found = {name: str(value) if name in paths else value for name, value in asdict(self.settings).items()}
        found |= {f"{name}_sha256": hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
        del found["log_dir"]
        path = self._folder / "settings.json"
        if not path.exists():
            _write(path, found)
        before = json.loads(path.read_text(encoding="utf-8"))
        changed = [
            f"{name} was {before.get(name)!r}, is {found.get(name)!r}"
            for name in sorted(before.keys() | found.keys())
            if before.get(name) != found.get(name)
        ]
        if changed:
            raise ValueError(
                f"{self._folder} has a run with other settings ({'; '.join(changed)}): continue it with its own, or "
                "choose another --log-dir"
            )


def is_due(done: int, every: int, num_steps: int) -> bool:
    """Return whether something happens after `done` of `num_steps` steps that happens every `every`, and at the end."""
    return done == num_steps or (every > 0 and done % every == 0)


def find_base_model(settings: RunSettings, service: ServiceClient) -> types.SupportedModel:
    """Return the base model of a run, before anything is made. Raises NotFound, and ValueError if it is not clear."""
    name = settings.base_model
    if settings.start_from:
        name = service.create_rest_client().get_checkpoint(settings.start_from).result().base_model
    models = service.get_server_capabilities().supported_models
    found = [model for model in models if name in {None, model.model_name}]
    if len(found) != 1:
        served = ", ".join(model.model_name for model in models)
        raise ValueError(f"base_model is {name or 'left out'}: this pool serves {served or 'none'}")
    return found[0]


def check_length(num_tokens: int, base_model: types.SupportedModel) -> None:
    """Raise ValueError for a line that is longer than the base model's longest sequence."""
    if num_tokens > base_model.max_context_length:
        raise ValueError(f"{num_tokens} tokens, but {base_model.model_name} takes {base_model.max_context_length}")


def _write(path: Path, value: Any) -> None:
    """Write JSON so that a crash leaves the old file or the new one."""
    temporary = path.with_suffix(".new")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
