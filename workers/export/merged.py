"""Writes a base model with an adapter merged into it, and checks it before anybody may load it.

Files are copied, and each adapted weight is changed in the copy, block by block: memory is bounded by one weight and
its factors. A trained unembedding that is tied to the embedding gets a file of its own, and the model is untied. The
check loads whole models, one after the other.

Main invariant: the merged directory has the log-probabilities of base model and adapter, to the rounding of its dtype.

Dimensions: N tokens, V vocabulary.
"""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from tinkerpool.errors import ExportError
from tinkerpool.model_weights import INDEX, SINGLE
from workers.bank.state_files import PEFT_PREFIX
from workers.export.adapter import LEAVES, PARAMETERS, WEIGHTS, ExportedAdapter, weight_of_expert
from workers.export.base_files import StoredTensor, mapped, read_config, read_tensors
from workers.model.files import TOKENIZER_FILES
from workers.model.pretrained import (
    UnsupportedModelError,
    experts_of,
    load_pretrained,
    load_without_weights,
    logprob_difference,
    num_roundings,
)

CHECK_TOKENS = 48
"""Tokens of the fixed prompt."""
_COPIED = (*TOKENIZER_FILES, "generation_config.json", "*processor_config.json", "LICENSE*", "NOTICE*")
"""Patterns of a base model's other files than its weights and `config.json`."""


def write_merged(adapter_directory: Path, base: Path, out: Path) -> dict[str, Any]:
    """Write the merged model into `out`, a new directory; return what the check measured.

    Raises ExportError if the adapter is of another model, the base model's files are damaged or the result computes
    something else, UnsupportedModelError for a base model that no pool serves, OSError.
    """
    plan = _MergePlan(adapter_directory, base)
    out.mkdir()
    plan.write(out)
    return _check(plan.adapter, base, out, plan.dtype)


def write_whole_unembedding(adapter_directory: Path, base: Path) -> None:
    """Replace the LoRA matrices of an adapter's unembedding by the whole weight, as PEFT's `modules_to_save`.

    Raises ExportError if the adapter is of another model or the base model's files are damaged, UnsupportedModelError,
    OSError.
    """
    plan = _MergePlan(adapter_directory, base)
    tensors = safetensors.torch.load_file(adapter_directory / WEIGHTS)
    prefix = f"{PEFT_PREFIX}{plan.unembedding}"
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{prefix}.lora_")}
    whole = {f"{prefix}.weight": plan.merged_unembedding()}
    _save(kept | whole, adapter_directory / WEIGHTS)


@contextmanager
def _loading(base: Path) -> Iterator[None]:
    """Raise ExportError for what libraries raise of damaged files."""
    try:
        yield
    except (ExportError, UnsupportedModelError):
        raise
    except Exception as error:
        raise ExportError(
            f"the base model in {base} cannot be loaded ({type(error).__name__}: {error}): its files are damaged or "
            "incomplete, or its config.json is that of another model; download or save it again"
        ) from error


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a weight (F, D) is in the base model's files."""

    stored: StoredTensor
    part: Callable[[Tensor], Tensor]
    """Returns the weight, as a view of the stored tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.part(torch.empty(self.stored.shape, device="meta")).shape)


class _MergePlan:
    """Where each change of a merge belongs."""

    def __init__(self, adapter_directory: Path, base: Path) -> None:
        """Raises ExportError, OSError."""
        self._base = base
        with _loading(base):
            self._config = read_config(base)
            self._tensors = read_tensors(base)
            self._model = load_without_weights(base, torch.float32)
        self.adapter = adapter = ExportedAdapter(adapter_directory, self._model)
        self.unembedding, self._embedding, is_tied = _embeddings(self._model)
        self._unties = is_tied and self.unembedding in adapter.modules
        self._has_own_file = self._unties and f"{self.unembedding}.weight" not in self._tensors
        self._weights: dict[str, _Place] = {}
        """Where each adapted module's weight is, or that which it is a copy of."""
        for module in adapter.modules:
            place = self._place_of(module)
            if place is None or place.shape != adapter.shape(module):
                found = "no such tensor" if place is None else f"shape {place.shape}"
                raise ExportError(
                    f"the adapter is of another base model than {base}: it needs {module}.weight of shape "
                    f"{adapter.shape(module)}, and the files have {found}"
                )
            self._weights[module] = place
        dtypes = {place.stored.torch_dtype for place in self._weights.values()}
        if len(dtypes) > 1:
            raise ExportError(f"the base model's weights are of several dtypes, {', '.join(sorted(map(str, dtypes)))}")
        (self.dtype,) = dtypes

    def _place_of(self, module: str) -> _Place | None:
        """Return where the weight of a module is; None: nowhere."""
        name = self._embedding if self._has_own_file and module == self.unembedding else module
        if (stored := self._stored(f"{name}.weight")) is not None:
            return _Place(stored, lambda whole: whole)
        experts, number, leaf = module.rsplit(".", 2)
        if leaf not in LEAVES or not number.isdecimal():
            return None
        stored = self._stored(f"{experts}.{PARAMETERS[LEAVES.index(leaf)]}")
        if stored is None or int(number) >= stored.shape[0]:
            return None
        form = self._model.get_submodule(experts)
        return _Place(stored, lambda whole: weight_of_expert(whole, int(number), leaf, form))

    def _stored(self, name: str) -> StoredTensor | None:
        return next((self._tensors[each] for each in _stored_names(name) if each in self._tensors), None)

    def write(self, out: Path) -> None:
        """Write the model's files."""
        for pattern in _COPIED:
            for found in self._base.glob(pattern):
                shutil.copyfile(found, out / found.name)
        config = _untied(self._config) if self._unties else self._config
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        names = _new_names(sorted({stored.file for stored in self._tensors.values()}), has_own_file=self._has_own_file)
        for file, name in names.items():
            if file:
                shutil.copyfile(self._base / file, out / name)
        for module, place in self._weights.items():
            if not (self._has_own_file and module == self.unembedding):
                with mapped(out / names[place.stored.file], place.stored, is_writable=True) as tensor:
                    self.adapter.add_to(module, place.part(tensor))
        if self._has_own_file:
            whole = {f"{self.unembedding}.weight": self.merged_unembedding()}
            _save(whole, out / names[""])
        if len(names) > 1:
            self._write_index(out, names)

    def merged_unembedding(self) -> Tensor:
        """Return the weight (V, D) of the unembedding with the adapter, in memory."""
        stored = self._weights[self.unembedding].stored
        with mapped(self._base / stored.file, stored, is_writable=False) as weight:
            merged = weight.clone()
        self.adapter.add_to(self.unembedding, merged)
        return merged

    def _write_index(self, out: Path, names: dict[str, str]) -> None:
        files = {name: names[stored.file] for name, stored in self._tensors.items()}
        if self._has_own_file:
            files[f"{self.unembedding}.weight"] = names[""]
        total = sum((out / name).stat().st_size for name in names.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
        (out / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


_MIXTRAL = {"mlp.experts": "block_sparse_moe.experts", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""What Mixtral's files call the experts of a layer."""


def _stored_names(name: str) -> tuple[str, ...]:
    """Return the names that a tensor may have: its own, that in a checkpoint that can see, too, and Mixtral's."""
    beside_vision = f"model.language_model.{name.removeprefix('model.')}" if name.startswith("model.") else name
    if ".mlp.experts." not in name:
        return name, beside_vision
    of_mixtral = name
    for ours, theirs in _MIXTRAL.items():
        of_mixtral = of_mixtral.replace(f".{ours}.", f".{theirs}.")
    return name, beside_vision, of_mixtral


def _untied(config: dict[str, Any]) -> dict[str, Any]:
    """Return a `config.json` without ties; in that of a checkpoint that can see is another one, of its text model."""
    text = {"text_config": _untied(config["text_config"])} if "text_config" in config else {}
    return config | text | {"tie_word_embeddings": False}


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a file of tensors with the mode of any other file: safetensors' own is 0600, whatever the umask."""
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    safetensors.torch.save_file(tensors, path, {"format": "pt"})
    path.chmod(mode)


def _new_names(files: list[str], *, has_own_file: bool) -> dict[str, str]:
    """Return the names of merged files by those of the base model's; "" is the file of an untied unembedding."""
    every = [*files, ""] if has_own_file else files
    if len(every) == 1:
        return {files[0]: SINGLE}
    return {file: f"model-{number:05}-of-{len(every):05}.safetensors" for number, file in enumerate(every, 1)}


def _embeddings(model: Any) -> tuple[str, str, bool]:
    """Return the names of unembedding and embedding, and whether they are tied, of a model."""
    names = {module: name for name, module in model.named_modules()}
    output, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return names[output], names[embedding], bool(model.config.tie_word_embeddings)


@torch.no_grad()
def _check(adapter: ExportedAdapter, base: Path, merged: Path, dtype: torch.dtype) -> dict[str, Any]:
    """Compare the log-probabilities of a fixed prompt. Raises ExportError if they differ by more than rounding.

    In bf16 and fp16 rounding would send some tokens to other experts, and all their values would differ. There the
    merged model takes the routes of the other; routers are not adapted, so that both have the same.
    """
    with _loading(base):
        model = load_pretrained(base, "cpu", dtype)
    roundings = num_roundings(model.config)
    num_tokens = min(CHECK_TOKENS, int(model.config.max_position_embeddings))
    tokens = (torch.arange(num_tokens) * 7919 + 13) % model.get_input_embeddings().num_embeddings
    plain = _logprobs(model, tokens)
    detach = adapter.attach(model)
    routes: list[tuple[Tensor, Tensor]] = []
    for experts in experts_of(model):
        experts.register_forward_pre_hook(lambda _, args: routes.append(args[1:]))
    expected = _logprobs(model, tokens)
    detach()
    del model  # before the next one is loaded
    model = load_pretrained(merged, "cpu", dtype)
    if dtype != torch.float32:
        for experts in experts_of(model):
            experts.register_forward_pre_hook(lambda _, args: (args[0], *routes.pop(0)))
    actual = _logprobs(model, tokens)
    difference, tolerance = logprob_difference(actual, expected, dtype, roundings)
    effect, _ = logprob_difference(plain, expected, dtype, roundings)
    measure = "largest difference" if dtype == torch.float32 else "root mean square, relative to the spread"
    if not difference <= tolerance:
        raise ExportError(
            f"the merged model computes something else than base model and adapter: their log-probabilities of "
            f"{num_tokens} tokens differ by {difference:.2g} ({measure}), and rounding to {dtype} explains "
            f"{tolerance:.2g}; the adapter itself changes them by {effect:.2g}. Nothing was written: keep the adapter "
            "separate (--format peft), and please report this with the name of the base model"
        )
    return {
        "adapter_effect": effect,
        "difference": difference,
        "dtype": str(dtype).removeprefix("torch."),
        "measure": f"{measure} of log-probabilities of {num_tokens} tokens",
        "tolerance": tolerance,
    }


def _logprobs(model: Any, tokens: Tensor) -> Tensor:
    """Return the log-probabilities (N, V), fp32."""
    logits: Tensor = model(input_ids=tokens.unsqueeze(0), use_cache=False).logits[0]
    return logits.float().log_softmax(-1)
