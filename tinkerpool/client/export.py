"""Makes a directory that other programs load of a downloaded checkpoint: for PEFT, merged, or for vLLM.

Reads the names and shapes of tensors, never their values. What needs the base model's weights, and so torch, is found
by the entry points of `ENTRY_POINTS`: the client does not depend on the pool's libraries.

Main invariant: a directory that would compute something else than the pool did is refused, or says so in its
`tinkerpool.json` and in `notes`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from tinkerpool.client.archive import ArchiveFile
from tinkerpool.errors import ExportError
from tinkerpool.model_weights import weights_id
from tinkerpool.tensor_files import read_header
from tinkerpool.v1.sessions_pb2 import BaseModel, GetCapabilitiesResponse

ENTRY_POINTS = "tinkerpool.exports"
"""`base_models`: returns the directory of a name on this machine, or None. `merged`: `(adapter, base, new directory)`
-> facts for `tinkerpool.json`. `whole_unembedding`: `(adapter, base)`, changes the adapter in its place."""

CONFIG, WEIGHTS, FACTS = "adapter_config.json", "adapter_model.safetensors", "tinkerpool.json"
BASE_WEIGHTS = "base_weights_id"
"""Of the facts: on which weights the adapter was trained, as `BaseModel.weights_id`; empty: not known."""
UNEMBEDDING = "lm_head"
_PREFIX = "base_model.model."
_MATRIX = re.compile(rf"{re.escape(_PREFIX)}(?P<module>.+)\.lora_[AB]\.weight")
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")

VLLM_MODULES = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
"""Leaf names of modules that vLLM adapts in every dense family that the pool serves."""
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's `--max-lora-rank`, which an adapter's rank may not exceed."""
_VLLM_KEYS = ("base_model_name_or_path", "bias", "lora_alpha", "peft_type", "r", "target_modules", "task_type")
"""What vLLM reads of a configuration, and what PEFT needs in it."""

_TIED = (
    "The base model {ties} its unembedding (lm_head) to its embedding. This adapter changes the unembedding, and "
    "leaves the embedding as it is. PeftModel and AutoPeftModelForCausalLM compute what the pool computed; "
    "{merging}merge_and_unload() does not, because it changes the embedding, too. To merge, export with --format "
    "merged or --whole-unembedding (format='merged' or whole_unembedding=True in Python)."
)
_DENSE_QWEN3_NEXT = (
    "PEFT (0.21) leaves the MLP's matrices of a Qwen3-Next without experts out, because it takes their names for those "
    "of experts: the model that it loads is not what the pool trained. Export with --format merged (format='merged' in "
    "Python)."
)


class ExportFormat(StrEnum):
    """What an exported directory is for."""

    PEFT = "peft"
    MERGED = "merged"
    VLLM = "vllm"


@dataclass(slots=True, kw_only=True)
class _Adapter:
    """An unpacked checkpoint."""

    directory: Path
    config: dict[str, Any]

    @classmethod
    def read(cls, directory: Path) -> _Adapter:
        """Raises ExportError for a configuration that the pool does not write, and for an encrypted one."""
        if (directory / f"{CONFIG}.age").exists():
            raise ExportError(
                "the checkpoint is encrypted: download its files as the Tinker SDK does, and decrypt them with "
                "`age -d -i KEYFILE`; or export a checkpoint without age_recipients"
            )
        try:
            config = json.loads((directory / CONFIG).read_text())
            if not isinstance(config["r"], int) or not isinstance(config["target_modules"], list):
                raise ValueError("rank or modules are of a wrong type")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ExportError(f"the pool sent a checkpoint that cannot be read: {error}") from error
        return cls(directory=directory, config=config)

    @property
    def trains_unembedding(self) -> bool:
        return UNEMBEDDING in self.config["target_modules"]

    def modules(self) -> set[str]:
        """Return the full names of the modules that it adapts. Raises ExportError for weights that are no adapter's."""
        try:
            found = [_MATRIX.fullmatch(name) for name in read_header(self.directory / WEIGHTS)[0]]
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ExportError(f"the pool sent a checkpoint that cannot be read: {error}") from error
        if None in found or not found:
            raise ExportError("the pool sent a checkpoint with other tensors than LoRA's")
        return {match["module"] for match in found if match}

    def write_config(self) -> None:
        text = json.dumps(self.config, indent=2, sort_keys=True) + "\n"
        (self.directory / CONFIG).write_text(text, encoding="utf-8")


@dataclass(slots=True, kw_only=True)
class _BaseModel:
    """The base model as an export names it."""

    reference: str
    """For `base_model_name_or_path`."""
    directory: Path | None
    """Where its files are on this machine; None: they are not."""
    resolves: bool
    """Whether transformers finds the model by the reference."""


@dataclass(slots=True)
class Exporter:
    """Makes one directory of one checkpoint."""

    checkpoint: str
    """Its path, `tinker://...`."""
    format: str = ExportFormat.PEFT
    """An `ExportFormat`."""
    base_model: str = ""
    """A directory, or a name in the hub; empty: the pool's name for the base model."""
    whole_unembedding: bool = False
    """Only for PEFT: write the trained unembedding whole, so that `merge_and_unload` is right on a tied base model."""
    notes: list[str] = field(default_factory=list)
    """After `finish`: sentences for the person who loads the directory."""

    def __post_init__(self) -> None:
        """Raises ExportError for arguments that cannot work, and without the libraries that they need."""
        if self.format not in set(ExportFormat):
            raise ExportError(f"no format {self.format!r}: it is one of {', '.join(ExportFormat)}")
        if self.whole_unembedding and self.format != ExportFormat.PEFT:
            raise ExportError(f"a whole unembedding is for the format peft, not {self.format}: leave it out")
        if self.base_model:
            base = _resolve(self.base_model)
            if not base.resolves:
                raise ExportError(
                    f"no base model {self.base_model!r}: give a directory that exists, organisation/model, or a model "
                    "that comes with tinkerpool"
                )
            if base.directory is not None and not (base.directory / "config.json").is_file():
                raise ExportError(f"{base.directory} is no model directory: there is no config.json in it")
        if self.format == ExportFormat.MERGED:
            _load("merged")
        if self.whole_unembedding:
            _load("whole_unembedding")

    def finish(self, archive: ArchiveFile, pool: GetCapabilitiesResponse) -> Path:
        """Return the directory, to be published, of a complete archive from this pool.

        Raises ExportError and ValueError if there can be no such directory, and OSError.
        """
        adapter = _Adapter.read(archive.unpack())
        name = str(adapter.config.get("base_model_name_or_path", ""))
        base = _resolve(self.base_model) if self.base_model else _resolve(name, is_path=False)
        served = served_model(pool, name)
        self._check_weights(base, name, served.weights_id if served else "")
        facts: dict[str, Any] = {
            "base_model": name,
            BASE_WEIGHTS: served.weights_id if served else "",
            "checkpoint": self.checkpoint,
            "format": str(self.format),
            "lora_alpha": adapter.config.get("lora_alpha"),
            "rank": adapter.config["r"],
            "trains_unembedding": adapter.trains_unembedding,
        }
        directory = adapter.directory
        if self.format == ExportFormat.MERGED:
            adapter.modules()  # checks the names before they are used
            directory = archive.work / "merged"
            facts["check"] = dict(_load("merged")(adapter.directory, _need_files(base, name, "merging"), directory))
        else:
            adapter.config["base_model_name_or_path"] = base.reference
            if not base.resolves:
                self.notes.append(
                    f"base_model_name_or_path is {base.reference!r}, the pool's name, which transformers cannot find: "
                    "export with --base-model DIRECTORY or ORGANISATION/MODEL for AutoPeftModelForCausalLM, or load "
                    "the base model yourself and call PeftModel.from_pretrained(base, directory)"
                )
            if self.format == ExportFormat.VLLM:
                facts["max_lora_rank"] = _restrict_to_vllm(adapter)
                self.notes.append(
                    f"Serve it with: vllm serve BASE --enable-lora --max-lora-rank {facts['max_lora_rank']} "
                    "--lora-modules NAME=DIRECTORY. The adapter is within vLLM's published rules; it was not loaded "
                    "in vLLM."
                )
            else:
                self._finish_peft(adapter, base, name, served)
            adapter.write_config()
        facts["notes"] = self.notes
        (directory / FACTS).write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        return directory

    def _check_weights(self, base: _BaseModel, name: str, trained: str) -> None:
        """Raise ExportError if the files of the base model have other weights than the one that was trained.

        If nothing of them is needed here, and nobody said that they are the ones, that is a note. `trained` is empty
        if the pool does not say it.
        """
        is_needed = self.format == ExportFormat.MERGED or self.whole_unembedding
        if base.directory is None:
            return
        if not trained:
            if is_needed:
                self.notes.append(
                    f"whether {base.directory} has the weights of {name} that were trained is not known: the pool "
                    "does not say which these are"
                )
            return
        try:
            found = weights_id(base.directory)
            problem = f"{base.directory} has other weights ({found}) than {name} in the pool ({trained})"
        except (OSError, ValueError) as error:
            found, problem = "", f"the weights in {base.directory} cannot be read ({error})"
        if found == trained:
            return
        if is_needed or self.base_model:
            raise ExportError(f"{problem}: give the files that were trained with --base-model")
        self.notes.append(f"{problem}: on this machine the adapter would be loaded on these")

    def _finish_peft(self, adapter: _Adapter, base: _BaseModel, name: str, served: BaseModel | None) -> None:
        if {"in_proj_qkvz", "gate_proj"} <= set(adapter.config["target_modules"]):  # those of experts are parameters
            self.notes.append(_DENSE_QWEN3_NEXT)
        if self.whole_unembedding:
            if not adapter.trains_unembedding:
                raise ExportError("this adapter does not train the unembedding: leave out --whole-unembedding")
            if adapter.modules() == {UNEMBEDDING}:
                raise ExportError("PEFT needs another adapted module than the unembedding: export with --format merged")
            _load("whole_unembedding")(adapter.directory, _need_files(base, name, "a whole unembedding"))
            adapter.config["target_modules"] = sorted(set(adapter.config["target_modules"]) - {UNEMBEDDING})
            adapter.config["modules_to_save"] = [UNEMBEDDING]
        elif adapter.trains_unembedding:
            if served is None or not served.HasField("has_tied_unembedding"):
                self.notes.append(_TIED.format(ties="may tie", merging="if it does, "))
            elif served.has_tied_unembedding:
                self.notes.append(_TIED.format(ties="ties", merging=""))


def served_model(pool: GetCapabilitiesResponse, name: str) -> BaseModel | None:
    """Return what the pool says of a base model; None: it does not serve that any more."""
    return next((model for model in pool.base_models if model.name == name), None)


def _resolve(text: str, *, is_path: bool = True) -> _BaseModel:
    """Return the base model of a name, or of a user's path; a pool's name is never taken for a path."""
    given = Path(text).expanduser()
    if is_path and given.is_dir():
        return _BaseModel(reference=str(given.resolve()), directory=given.resolve(), resolves=True)
    directory, is_hub_name = _find_directory(text), _HUB_NAME.fullmatch(text) is not None
    if directory is not None and not is_hub_name:
        return _BaseModel(reference=str(directory), directory=directory, resolves=True)
    return _BaseModel(reference=text, directory=directory, resolves=is_hub_name)


def _restrict_to_vllm(adapter: _Adapter) -> int:
    """Restrict a configuration to what vLLM reads; return the least `--max-lora-rank`. Raises ExportError."""
    others = {module.removesuffix(".base_layer").rpartition(".")[2] for module in adapter.modules()} - VLLM_MODULES
    if UNEMBEDDING in others:
        raise ExportError(
            "this adapter trains the unembedding (lm_head), which vLLM does not take in adapters of every model family "
            "and version: export with --format merged and serve the directory as a model, or create adapters with "
            "train_unembed=False"
        )
    if others:
        raise ExportError(
            f"this adapter adapts {', '.join(sorted(others))}, which vLLM may not take in an adapter: "
            "export with --format merged"
        )
    rank: int = adapter.config["r"]
    if rank > VLLM_RANKS[-1]:
        raise ExportError(f"the rank is {rank}, vLLM takes at most {VLLM_RANKS[-1]}: export with --format merged")
    adapter.config = {key: adapter.config[key] for key in _VLLM_KEYS}
    return next(allowed for allowed in VLLM_RANKS if rank <= allowed)


def _need_files(base: _BaseModel, name: str, what: str) -> Path:
    if base.directory is None:
        raise ExportError(
            f"{what} needs the files of the base model {name!r}, which are not on this machine under that name: give "
            "--base-model DIRECTORY, or the name of a model in the local hub cache"
        )
    return base.directory


def _find_directory(name: str) -> Path | None:
    """Return the directory of a model that comes with tinkerpool, or of one in the local hub cache."""
    for entry_point in entry_points(group=ENTRY_POINTS, name="base_models"):
        found: Path | None = entry_point.load()(name)
        return found
    return None


def _load(name: str) -> Callable[..., Any]:
    """Return the function of an entry point. Raises ExportError if the pool's libraries are not installed."""
    for entry_point in entry_points(group=ENTRY_POINTS, name=name):
        try:
            function: Callable[..., Any] = entry_point.load()
        except ModuleNotFoundError as error:
            raise ExportError(
                f"this export computes with the base model's weights, and {error.name} is not installed: "
                "pip install 'tinkerpool[pool]'"
            ) from None
        return function
    raise ExportError(f"this installation of tinkerpool is older than its code (no {ENTRY_POINTS}): install it again")
