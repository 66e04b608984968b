"""A run's folder, and how a run that was interrupted continues.

The folder holds `settings.json` from the moment when the adapter exists. From then on `metrics.jsonl` has a line for
each step. Until it has one, the folder is free for other settings: there is nothing to continue. After the first save
there is `checkpoint.json`: the number of steps done, the path of the state in the pool and, of a finished run, the path
of the trained weights. Data, learning rates and seeds are functions of the settings and the step. So a run that
continues at a checkpoint takes the steps that it would have taken, with the same bits where the pool promises them.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from tinkerpool import AdamParams, APIFuture, ServiceClient, TrainingClient, types
from tinkerpool.data import Schedule
from tinkerpool.data.schedule import ScheduleKind
from tinkerpool.recipes.metrics import METRICS
from tinkerpool.recipes.options import option
from tinkerpool.recipes.progress import Progress

CHECKPOINT, SETTINGS, LOCK = "checkpoint.json", "settings.json", "lock"
KEPT_S = 30 * 24 * 3600
"""The pool deletes the checkpoints during a run after this time; the last one stays."""
FREE = frozenset({"log_dir", "show_every"})
"""Settings that may change when a run continues: they change nothing that it computes."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings of every recipe."""

    log_dir: Path = option("folder of the run; the same command with the same folder continues it")
    base_model: str | None = option("base model; needed if the pool has several", None)
    start_from: str | None = option(
        "saved state to start from, instead of a new adapter: a tinker:// path, or the folder of another run", None
    )
    rank: int = option("LoRA rank of a new adapter, a power of two; with --start-from it is that of the state", 32)
    learning_rate: float = option("highest learning rate", 1e-3)
    schedule: ScheduleKind = option("decay of the learning rate", "linear")
    warmup_steps: int = option("steps in which the learning rate rises", 0)
    seed: int = option("of the adapter, the order of data, and samples", 0)
    eval_every: int = option("steps between two evaluations on --test-data; 0: only after the last step", 20)
    save_every: int = option("steps between two checkpoints; 0: only after the last step", 50)

    def __post_init__(self) -> None:
        """Take a text for a path: what a folder or a file of data is, is decided by the type."""
        for name, hint in get_type_hints(type(self)).items():
            if Path in {hint, *get_args(hint)} and isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, Path(value))


class Run:
    """One run: its folder, its adapter, its schedule and its checkpoints."""

    def __init__(self, settings: RunSettings) -> None:
        """Read the folder, if there is one. Raises ValueError if it has steps with other settings or data."""
        self.settings = settings
        self.start_step = 0
        """Steps done before this process."""
        self._checkpoint: dict[str, Any] = {}
        """As `checkpoint.json` has it."""
        self._folder = settings.log_dir
        if self._folder.exists() and not self._folder.is_dir():
            raise ValueError(f"{self._folder} is no folder: choose another --log-dir")
        self._found = self._found_settings()
        self._check_settings()
        if (self._folder / CHECKPOINT).exists():
            self._checkpoint = _read_checkpoint(self._folder)
            self.start_step = self._checkpoint["step"]

    def finished(self) -> str | None:
        """Return the path of a finished run's trained weights, and say that nothing is left to do; else None."""
        trained_weights: str | None = self._checkpoint.get("trained_weights")
        if trained_weights is not None:
            print(
                f"{self._folder} has a run that finished with step {self.start_step}: nothing is left to do. "
                f"Another run needs another --log-dir.\ntrained weights: {trained_weights}"
            )
        return trained_weights

    def training_client(self, service: ServiceClient) -> TrainingClient:
        """Return the client of the run's adapter, of the last checkpoint or as `new_client`. Takes the folder.

        Raises ValueError if another process has the folder.
        """
        if self._checkpoint:
            client = service.create_training_client_from_state_with_optimizer(self._checkpoint["path"])
        else:
            client = self.new_client(service)
        self._folder.mkdir(parents=True, exist_ok=True)
        _take(self._folder)
        _write(self._folder / SETTINGS, self._found)
        return client

    def new_client(self, service: ServiceClient) -> TrainingClient:
        """Return the client of another adapter, with the weights that the run began with."""
        if (state := start_state(self.settings)) is not None:
            return service.create_training_client_from_state(state)
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
            self._write_checkpoint({"step": done, "path": saved.result().path})

    def finish(self, client: TrainingClient, progress: Progress) -> str:
        """Save the weights for sampling, record that the run is finished, and return and report their path."""
        path = str(client.save_weights_for_sampler("final").result().path)
        self._write_checkpoint(self._checkpoint | {"trained_weights": path})
        progress.say(f"trained weights: {path}")
        return path

    def _write_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._checkpoint = checkpoint
        _write(self._folder / CHECKPOINT, checkpoint)

    def _found_settings(self) -> dict[str, Any]:
        """Return the settings as `settings.json` has them, with the digests of the data files."""
        paths = {name: value for name, value in asdict(self.settings).items() if isinstance(value, Path)}
        files = {name: path for name, path in paths.items() if name != "log_dir"}
        found = {name: str(value) if name in paths else value for name, value in asdict(self.settings).items()}
        found |= {f"{name}_sha256": hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
        found = {name: value for name, value in found.items() if name not in FREE}
        return found | {"start_from": start_state(self.settings)}

    def _check_settings(self) -> None:
        path, found = self._folder / SETTINGS, self._found
        if not path.exists() or not self._has_steps():
            return
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

    def _has_steps(self) -> bool:
        """Return whether a step was done or saved: one line of metrics is enough, though it may be cut off."""
        metrics = self._folder / METRICS
        return (self._folder / CHECKPOINT).exists() or (metrics.exists() and metrics.stat().st_size > 0)


def is_due(done: int, every: int, num_steps: int) -> bool:
    """Return whether something happens after `done` of `num_steps` steps that happens every `every`, and at the end."""
    return done == num_steps or (every > 0 and done % every == 0)


def start_state(settings: RunSettings) -> str | None:
    """Return the path of the state that a run starts from; None: a new adapter. Raises ValueError if it has none."""
    start = settings.start_from
    if start is None or start.startswith("tinker://"):
        return start
    if not (Path(start) / CHECKPOINT).is_file():
        raise ValueError(f"start_from is {start!r}: expected a tinker:// path, or the folder of a run that has saved")
    return str(_read_checkpoint(Path(start))["path"])


def find_base_model(settings: RunSettings, service: ServiceClient) -> types.SupportedModel:
    """Return the base model of a run, before anything is made. Raises NotFound, and ValueError if it is not clear."""
    name = settings.base_model
    if (state := start_state(settings)) is not None:
        of_state = service.create_rest_client().get_checkpoint(state).result().base_model
        if name not in {None, of_state}:
            raise ValueError(f"base_model is {name}, but {state} is of {of_state}: leave base_model out")
        name = of_state
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


def _take(folder: Path) -> None:
    """Keep other processes out of a folder until this one ends. Raises ValueError if one has it.

    Does nothing on Windows, which has no such locks.
    """
    try:
        import fcntl
    except ModuleNotFoundError:
        return
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ValueError(f"another process is training in {folder}: wait for it, or choose another --log-dir") from None


def _read_checkpoint(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / CHECKPOINT).read_text(encoding="utf-8"))
    return found


def _write(path: Path, value: Any) -> None:
    """Write JSON so that a crash leaves the old file or the new one."""
    temporary = path.with_suffix(".new")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
