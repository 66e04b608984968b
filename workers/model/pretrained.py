"""Loads a causal language model by transformers, and refuses architectures that the fused pass does not support.

Known features are refused by the model's config. All others are found by a probe of the loaded model: the packed
forward must give the log-probabilities of the model's own code.

Does not depend on adapters.

Main invariants: a model is read from a local directory or the local hub cache, never fetched, and its code never runs.
A model with a feature that the packed forward lacks is refused, even if the feature is not known here.

Dimensions: N rows, V vocabulary.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Mxfp4Config
from transformers.activations import ACT2FN

from workers.model.families import REFUSED, alternatives

MAX_RANK = 128
PROBE_LENGTHS, HYBRID_LENGTHS = (24, 11), (150, 70)
"""Tokens of the probe's two sequences, unless the model takes fewer: those of hybrids have several chunks each."""
TOLERANCE = 1e-4
"""Largest difference of the probe's log-probabilities in fp32."""
ROUNDINGS_PER_LAYER = 16
"""How often a layer rounds to 8 bits in bf16 from input to output: seven linears, two to four norms, rotary embedding,
attention, activation and residual sums. Two forwards may round each differently, and the errors add up as those of
independent values do."""
ROUNDINGS_PER_HYBRID_LAYER = 64
"""The same of a layer with linear attention. It rounds 24 times, and the rounding of a decay's argument counts more: it
is multiplied by exp(A_log), 9 on average, and goes into the states of all later tokens."""
_LOADING = threading.Lock()
"""transformers changes global state of torch while it loads. If two threads load at once, one of them may get a model
whose weights were never filled."""
READS_TEXT_ALONE: Mapping[str, str] = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
"""Model types whose checkpoints have a vision tower, and that of the text model, which transformers loads alone."""
MXFP4 = "mxfp4"
"""The quantization whose weights are dequantized when a model is loaded. gpt-oss is published in no other form."""


class UnsupportedModelError(ValueError):
    """The model has a feature that the fused pass would compute wrongly."""


def load_pretrained(directory: Path, device: str, dtype: torch.dtype) -> Any:
    """Return transformers' model, frozen, in this dtype on this device. Raises UnsupportedModelError, OSError."""
    config = _load_config(directory)
    with _LOADING:
        model, found = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            output_loading_info=True,
            dtype=dtype,
            trust_remote_code=False,
            local_files_only=True,
            attn_implementation="eager",
            experts_implementation="eager",
            quantization_config=Mxfp4Config(dequantize=True) if quantization_of(config) == MXFP4 else None,
        )
    if missing := sorted(found["missing_keys"]):
        raise UnsupportedModelError(f"the model's files lack {missing[0]}, which its config.json needs")
    if quantization_of(config) == MXFP4:  # transformers 5.17 dequantizes to bf16, which changes no value
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    _keep_frequencies(model)
    return model.to(device).eval().requires_grad_(requires_grad=False)


def _keep_frequencies(model: Any) -> None:
    """Let "dynamic" rotary frequencies stay those of sequences of at most `max_seq_len`, which they begin with.

    transformers compares the length of each pass with it, which waits for a GPU and ends the capture of a graph.
    """
    for module in model.modules():
        if getattr(module, "rope_type", None) == "dynamic":
            module.rope_type = "default"


def load_without_weights(directory: Path, dtype: torch.dtype) -> Any:
    """Return transformers' model on the meta device in this dtype: shapes alone. Raises UnsupportedModelError."""
    config = _load_config(directory)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except ValueError as error:
        raise UnsupportedModelError(
            f"transformers has no causal language model for the family {config.model_type} ({_first_line(error)}); "
            f"{alternatives()}"
        ) from None


def _load_config(directory: Path) -> Any:
    """Return transformers' config of a model that is not refused by it. Raises UnsupportedModelError, OSError."""
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except ValueError as error:
        raise UnsupportedModelError(
            f"transformers has no code for the model, and a pool runs none of the model's own ({_first_line(error)}); "
            f"{alternatives()}"
        ) from None
    _check_config(config.get_text_config() if config.model_type in READS_TEXT_ALONE else config)
    return config


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def quantization_of(config: Any) -> str:
    """Return how the weights of a model's files are quantized; empty: they are not."""
    quantization = getattr(config, "quantization_config", None)
    return str(quantization.get("quant_method", "unknown")) if quantization else ""


def experts_of(model: Any) -> list[Any]:
    """Return transformers' modules of experts, in the order of the forward.

    They are called with hidden states (N, D), chosen experts (N, k) and their weights (N, k).
    """
    return [module for module in model.modules() if isinstance(getattr(module, "down_proj", None), Tensor)]


def has_tied_unembedding(model: Any) -> bool:
    """Return whether one matrix is embedding and unembedding."""
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def max_rank(config: Any) -> int:
    """Return the largest rank of adapters, a power of two."""
    return min(MAX_RANK, 1 << (int(config.hidden_size).bit_length() - 1))


def activation_of(config: Any) -> Callable[[Tensor], Tensor]:
    """Return the activation of the model's MLPs."""
    activation: Callable[[Tensor], Tensor] = ACT2FN[getattr(config, "hidden_activation", None) or config.hidden_act]
    return activation


def logit_scale(config: Any) -> float:
    """Return the number by which the model's own code multiplies its logits: 1 but for Granite and Cohere."""
    return (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)


def max_seq_len(config: Any) -> int:
    """Return the most tokens of a sequence.

    "longrope" has two sets of rotary frequencies, and transformers takes the one for long sequences as soon as one row
    of the pass is behind the original length: a tenant's long sequence would change the others' short ones. So no
    sequence is longer than that.
    """
    most = int(config.max_position_embeddings)
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *rope.values()):  # or one for each type of layer
        if isinstance(parameters, Mapping) and parameters.get("rope_type") == "longrope":
            most = min(most, int(parameters["original_max_position_embeddings"]))
    return most


def eos_token_ids(model: Any) -> tuple[int, ...]:
    """Return the tokens that end a text, by the generation config, or else by the model's."""
    generation = getattr(model, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    if ids is None:
        ids = getattr(model.config, "eos_token_id", None)
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)


def _check_config(config: Any) -> None:
    """Raise UnsupportedModelError for features known to be unsupported; the message is better than the probe's."""
    if reason := REFUSED.get(config.model_type):
        raise UnsupportedModelError(reason)
    if quantization_of(config) not in {"", MXFP4}:
        raise UnsupportedModelError(
            "the model is quantized (quantization_config in config.json); take its unquantized original"
        )
    refused = {
        "attn_logit_softcapping": "attention logit soft-capping",
        "final_logit_softcapping": "soft-capping of the output logits",
        "clip_qkv": "clamped queries, keys and values",
        "use_bidirectional_attention": "bidirectional attention",
        "keep_window_size": "attention that hides tokens by their values",
        "vision_config": "a vision tower",
        "audio_config": "an audio tower",
    }
    for key, feature in refused.items():
        if getattr(config, key, None):
            raise UnsupportedModelError(
                f"models with {feature} ({key} in config.json) are not supported; {alternatives()}"
            )
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError("encoder-decoder models are not supported; take a causal language model")


@dataclass(frozen=True, slots=True)
class Probe:
    """Two sequences, with the log-probabilities of the model's own code."""

    tokens: Tensor
    """(N,) both sequences, one after the other."""
    lengths: list[int]
    num_roundings: int
    logprobs: list[Tensor]
    """(length, V) of each sequence, fp32."""
    choices: list[Tensor]
    """(N, k) of each layer of experts, the experts that each token chose; none of experts that are not told."""

    @classmethod
    @torch.no_grad()
    def of(cls, model: Any, max_seq_len: int) -> Probe:
        """Run the model's own forward, before any layer is replaced."""
        is_hybrid = bool(_num_hybrid_layers(model.config))
        lengths = [min(length, max_seq_len) for length in (HYBRID_LENGTHS if is_hybrid else PROBE_LENGTHS)]
        num_tokens = min(int(model.get_input_embeddings().num_embeddings), model.get_output_embeddings().out_features)
        tokens = (torch.arange(sum(lengths), device=model.device) * 7919 + 13) % num_tokens
        experts = experts_of(model)
        chosen: list[list[Tensor]] = [[] for _ in experts]
        hooks = [
            module.register_forward_pre_hook(lambda _, args, own=own: own.extend(args[1:2]))
            for module, own in zip(experts, chosen, strict=True)
        ]
        logprobs = [
            model(input_ids=part.unsqueeze(0), use_cache=False).logits[0].float().log_softmax(-1)
            for part in tokens.split(lengths)
        ]
        for hook in hooks:
            hook.remove()
        return cls(tokens, lengths, num_roundings(model.config), logprobs, [torch.cat(own) for own in chosen if own])

    def check(self, logits_of: Callable[[Tensor, Tensor, list[int]], Tensor], dtype: torch.dtype) -> None:
        """Compare the packed forward: tokens and positions (N,), int64, and lengths -> logits (N, V).

        Raises UnsupportedModelError if they differ by more than rounding in the model's `dtype` explains.
        """
        positions = torch.cat([torch.arange(length, device=self.tokens.device) for length in self.lengths])
        actual = logits_of(self.tokens, positions, self.lengths).float().log_softmax(-1)
        for logprobs, own in zip(actual.split(self.lengths), self.logprobs, strict=True):
            difference, tolerance = logprob_difference(logprobs, own, dtype, self.num_roundings)
            if not difference <= tolerance:
                raise UnsupportedModelError(
                    f"the fused pass gives other log-probabilities than the model's own code (by {difference:.2g}, "
                    f"allowed are {tolerance:.2g}); this architecture has a feature that is not supported"
                )


def num_roundings(config: Any) -> int:
    """Return how often a value is rounded on its way through a model with this config, for `logprob_difference`."""
    num_hybrid = _num_hybrid_layers(config)
    return ROUNDINGS_PER_LAYER * (int(config.num_hidden_layers) - num_hybrid) + ROUNDINGS_PER_HYBRID_LAYER * num_hybrid


def _num_hybrid_layers(config: Any) -> int:
    """Return the number of layers with linear attention."""
    return list(getattr(config, "layer_types", None) or ()).count("linear_attention")


def logprob_difference(actual: Tensor, expected: Tensor, dtype: torch.dtype, num_roundings: int) -> tuple[float, float]:
    """Return the difference of two forwards' log-probabilities (N, V), fp32, and how much rounding in `dtype` explains.

    In fp32 the largest difference. In bf16 and fp16, in which two roundings of one value may be 2^-8 and 2^-11 of it
    apart, the root mean square of the differences, as a fraction of that of the log-probabilities around their mean.
    """
    if dtype == torch.float32:
        return float((actual - expected).abs().max()), TOLERANCE
    spread = (expected - expected.mean(-1, keepdim=True)).square().mean().sqrt()
    difference = (actual - expected).square().mean().sqrt() / spread
    return float(difference), torch.finfo(dtype).eps / 2 * num_roundings**0.5
