"""Reads the `adapter_config.json` of a PEFT adapter, and refuses every setting under which the pool would compute
something else than PEFT.

Does not depend on the base model or on tensors. Main invariant: a setting that is not known here is refused unless it
is empty or false, so that a new feature of PEFT is never ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coordinator.base.errors import ServiceError, invalid
from workers.contract.messages import ALPHA_MAX

CONFIG_BYTES_MAX = 256 << 10
"""Most bytes of a configuration. One that lists every module of a hundred layers by its full name has 50 KiB."""
_SHOWN = 80
"""Characters of a value in a message."""
_IGNORED = frozenset(
    {
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "eva_config",
        "inference_mode",
        "layers_pattern",
        "loftq_config",
        "lora_alpha",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "r",
        "revision",
        "rank_pattern",
        "target_modules",
        "target_parameters",
    }
)
"""Settings that are read below, or change nothing that a saved adapter computes while the others are as accepted."""
_SERVICES_TARGETS = {"unembed_tokens": "lm_head"}
"""Modules by the names that the Tinker service gives them, and by PEFT's."""
_MERGE = "merge the adapter into its base model (merge_and_unload) and serve that"


@dataclass(frozen=True, slots=True)
class _Rule:
    """The values of a setting that the pool can import, and what to do about others."""

    accepted: tuple[Any, ...]
    mend: str


_RULES: Mapping[str, _Rule] = {
    "peft_type": _Rule(("LORA",), "only LoRA adapters can be imported"),
    "task_type": _Rule((None, "CAUSAL_LM"), "only adapters of causal language models can be imported"),
    "bias": _Rule((None, "none"), "train with bias='none': the pool trains no bias"),
    "use_rslora": _Rule((None, False), ""),
    "use_dora": _Rule((None, False), f"train without DoRA, or {_MERGE}"),
    "use_qalora": _Rule((None, False), f"train without QALoRA, or {_MERGE}"),
    "lora_bias": _Rule((None, False), "train with lora_bias=False: the pool trains no bias"),
    "modules_to_save": _Rule(
        (None, []),
        "an import has LoRA matrices only: train without modules_to_save, or export without --whole-unembedding",
    ),
    "layers_to_transform": _Rule((None, []), f"adapt the modules in all layers, or {_MERGE}"),
    "exclude_modules": _Rule((None, []), f"adapt the modules in all layers, or {_MERGE}"),
    "layer_replication": _Rule((None, []), "it makes another base model: serve that one"),
    "trainable_token_indices": _Rule((None, [], {}), "train without new token embeddings"),
    "fan_in_fan_out": _Rule(
        (None, False), "set it to false if the base model's layers are linear, as in every model that a pool serves"
    ),
    "init_lora_weights": _Rule(
        (None, True, False, "gaussian", "eva", "orthogonal"),
        "this start changes the base model's weights, so the adapter belongs to the changed ones: convert it as PEFT's "
        "guide says (save_pretrained with path_initial_model_for_weight_conversion), which sets it to true",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftConfig:
    """What a configuration says of an adapter that the pool can import."""

    rank: int
    alpha: float
    """Scaling numerator: the pool scales by alpha / rank, as PEFT does."""
    targets: tuple[str, ...]
    """Names of modules, or the ends of names: `q_proj`; and of parameters of experts, `experts.down_proj`."""
    base_model: str
    """What it calls its base model: a hint. Empty: nothing."""
    dropout: float
    rank_pattern: Mapping[str, float]
    """Other ranks of modules, by names as in `targets`. Which of them can be imported depends on the base model."""
    alpha_pattern: Mapping[str, float]


def not_importable(message: str) -> ServiceError:
    """Return the refusal of an adapter."""
    return invalid(message, "NOT_IMPORTABLE")


def load_object(text: str, what: str) -> dict[str, Any]:
    """Return the object in a JSON text. Raises ServiceError for anything else, also for a name that is given twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name is given twice")
        return found

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise not_importable(f"{what} is no valid JSON: {str(error)[:_SHOWN]}") from None
    if not isinstance(value, dict):
        raise not_importable(f"{what} is no JSON object")
    return value


def read_config(text: str) -> PeftConfig:
    """Return the configuration of an adapter. Raises ServiceError, which names the first setting that is refused."""
    if len(text) > CONFIG_BYTES_MAX:
        raise not_importable(f"adapter_config.json has {len(text)} characters, at most {CONFIG_BYTES_MAX}")
    config = load_object(text, "adapter_config.json")
    rank, alpha = _rank(config), _alpha(config)
    for name, rule in _RULES.items():
        value = config.get(name, rule.accepted[0])
        if not any(value == accepted and type(value) is type(accepted) for accepted in rule.accepted):
            # alpha / sqrt(r) == (alpha * sqrt(r)) / r
            mend = (
                rule.mend or f"set use_rslora to false and lora_alpha to {alpha * math.sqrt(rank):.17g}, which is equal"
            )
            raise not_importable(f"adapter_config.json has {name} = {_shown(value)}: {mend}")
    for name, value in config.items():
        if name not in _IGNORED and name not in _RULES and value:
            raise not_importable(
                f"adapter_config.json has {_shown(name)} = {_shown(value)}, which this pool does not know: remove it "
                f"if it changes nothing that the adapter computes, or {_MERGE}"
            )
    hint, dropout = config.get("base_model_name_or_path"), config.get("lora_dropout")
    return PeftConfig(
        rank=rank,
        alpha=alpha,
        targets=_targets(config),
        base_model=hint if isinstance(hint, str) else "",
        dropout=float(dropout) if isinstance(dropout, int | float) and 0 < dropout <= 1 else 0.0,
        rank_pattern=_pattern(config, "rank_pattern"),
        alpha_pattern=_pattern(config, "alpha_pattern"),
    )


def _rank(config: Mapping[str, Any]) -> int:
    rank = config.get("r")
    if type(rank) is not int or rank < 1:
        raise not_importable(f"adapter_config.json has r = {_shown(rank)}: it must be the rank, a whole number above 0")
    return rank


def _alpha(config: Mapping[str, Any]) -> float:
    given = config.get("lora_alpha")
    try:
        alpha = float(given) if isinstance(given, int | float) and not isinstance(given, bool) else math.nan
    except OverflowError:
        alpha = math.inf
    if not 0 < alpha <= ALPHA_MAX:
        raise not_importable(
            f"adapter_config.json has lora_alpha = {_shown(given)}: it must be a number above 0, and at most "
            f"{ALPHA_MAX:g}"
        )
    return alpha


def _targets(config: Mapping[str, Any]) -> tuple[str, ...]:
    targets, parameters = config.get("target_modules"), config.get("target_parameters") or []
    if isinstance(targets, str):
        raise not_importable(
            f"adapter_config.json has target_modules = {_shown(targets)}, a pattern: write the list of the modules' "
            'names in its place, ["q_proj", "v_proj"] for example'
        )
    is_empty = not targets and not parameters  # an adapter of experts alone has parameters
    if not isinstance(targets, list) or is_empty or not all(isinstance(each, str) for each in targets):
        raise not_importable("adapter_config.json has no target_modules: it must be the list of the adapted modules")
    if not isinstance(parameters, list) or not all(isinstance(each, str) for each in parameters):
        raise not_importable(
            f"adapter_config.json has target_parameters = {_shown(parameters)}: it must be a list of names"
        )
    return (*(_SERVICES_TARGETS.get(each, each) for each in targets), *parameters)


def _pattern(config: Mapping[str, Any], name: str) -> Mapping[str, float]:
    pattern = config.get(name) or {}
    if not isinstance(pattern, dict) or not all(type(value) in (int, float) for value in pattern.values()):
        raise not_importable(
            f"adapter_config.json has {name} = {_shown(pattern)}: it must have a number for each name of a module"
        )
    return pattern


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."
