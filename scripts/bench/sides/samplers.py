"""Sampling in one process: the engine's sampler, and transformers with a PEFT adapter.

Depends on the engine, PEFT and transformers' generation. Import `scripts.bench.models` first: it configures threads.

Dimensions: S sequences, P tokens of a prompt, N tokens drawn for each.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig

from scripts.bench.models import Case, Model
from scripts.bench.sides.training import Fused, SequentialPeft
from workers.contract.messages import SampleRequest, SampleResult, SamplerVersion, SamplingParams

RANK = 8
LOGPROB_TOLERANCE = 1e-3
"""Largest difference of a drawn token's log-probability between two sides with equal weights."""
RESULT_TIMEOUT_S = 60.0
"""Continuous batching has failed after this long without a result."""
PAGE_TOKENS = 256
"""Of continuous batching's cache; its own default."""


class Prompts:
    """Random prompts, never repeated, so that caches help only where the benchmark repeats a prompt."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(0)

    def draw(self, num_tokens: int) -> NDArray[np.int32]:
        """Draw one prompt (P,)."""
        return self._rng.integers(0, self._vocab_size, num_tokens).astype(np.int32)

    def draw_many(self, num_prompts: int, num_tokens: int) -> list[NDArray[np.int32]]:
        """Draw prompts of equal length."""
        return [self.draw(num_tokens) for _ in range(num_prompts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request of a tenant."""

    prompt: NDArray[np.int32]
    """(P,)."""
    num_tokens: int
    """N; no stop condition ends a sequence earlier."""
    num_samples: int = 1
    tenant: int | None = 0
    """None: the base model without an adapter."""


class EngineSampler:
    """The engine's sampler, driven as in a worker: start the requests, then decode until all have ended."""

    def __init__(self, model: Model, num_tenants: int, num_threads: int) -> None:
        """Create tenants with one adapter of rank `RANK` each, take a step, and publish."""
        slots = max(16, 2 * num_tenants)
        self.fused = Fused(model, [RANK] * num_tenants, num_threads, num_slots=slots)
        self.fused.give(Case(num_tenants=num_tenants, num_seqs=1, num_tokens=64).data(model.vocab_size))
        self.fused.step()
        for tenant in range(num_tenants):
            self.fused.publish(tenant, _version(tenant))
        self.num_rows = 0
        """Rows of passes since it was last set to 0: prompt tokens, and drawn tokens but the last."""
        self._numbers = itertools.count()
        self._count_rows()

    def sample(self, asks: Sequence[Ask]) -> list[SampleResult]:
        """Run all requests at once to their end. Raises RuntimeError if one failed or ended early."""
        names = self.start(asks)
        results: dict[str, SampleResult] = {}
        engine = self.fused.engine
        while engine.can_decode():
            results |= {event.op_id: event for event in engine.decode_step() if isinstance(event, SampleResult)}
        for name, ask in zip(names, asks, strict=True):
            error = results[name].error
            if error is not None:
                raise RuntimeError(f"the engine failed: {error.message}")
            lengths = [len(sequence.tokens) for sequence in results[name].sequences]
            if lengths != [ask.num_tokens] * ask.num_samples:
                raise RuntimeError(f"sequences have {lengths} tokens; {ask.num_tokens} were requested")
        return [results[name] for name in names]

    def start(self, asks: Sequence[Ask]) -> list[str]:
        """Start requests without decoding; return their names."""
        names = []
        for ask in asks:
            number = next(self._numbers)
            request = SampleRequest(
                op_id=f"sample-{number}",
                version=SamplerVersion(key="" if ask.tenant is None else _version(ask.tenant)),
                prompt=ask.prompt,
                num_samples=ask.num_samples,
                params=SamplingParams(max_tokens=ask.num_tokens, seed=number),
            )
            self.fused.engine.start_sample(request)
            names.append(request.op_id)
        return names

    def _count_rows(self) -> None:
        base_model = self.fused.engine.base_model
        forward = base_model.forward

        def counting(tokens: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            self.num_rows += len(tokens)
            return forward(tokens, *args, **kwargs)

        base_model.forward = counting  # type: ignore[method-assign]


def _version(tenant: int) -> str:
    return f"version-{tenant}"


class Generate:
    """`generate` of transformers, well configured: one batch, evaluation, inference mode, a cache."""

    def __init__(self, model: Model, weights: bytes, num_tokens: int) -> None:
        """`weights`: the adapter from `Fused.weights`."""
        self.model: Any = SequentialPeft(model, [RANK], [weights]).model.eval().requires_grad_(requires_grad=False)
        self.model.generation_config = _generation_config(num_tokens, eos_token_id=None)
        self._num_tokens = num_tokens
        self._num_threads = 1

    def use_threads(self, num_threads: int) -> None:
        """Set the number of threads."""
        self._num_threads = num_threads

    def sample(self, prompts: Sequence[NDArray[np.int32]]) -> Tensor:
        """Sample from prompts (P,) of equal length: tokens (S, P + N). Raises RuntimeError if it ended early."""
        tokens = torch.from_numpy(np.stack(prompts).astype(np.int64))  # (S, P)
        with _threads(self._num_threads), torch.inference_mode():
            out: Tensor = self.model.generate(input_ids=tokens, attention_mask=torch.ones_like(tokens))
        if out.shape != (len(prompts), tokens.shape[1] + self._num_tokens):
            raise RuntimeError(f"generate returned tokens of shape {tuple(out.shape)}: it ended early")
        return out

    @torch.inference_mode()
    def logprobs(self, prompt: NDArray[np.int32], drawn: NDArray[np.int32]) -> Tensor:
        """Return the log-probabilities (N,) of tokens after a prompt."""
        tokens = torch.from_numpy(np.concatenate([prompt, drawn]).astype(np.int64))  # (P + N,)
        logprobs = self.model(input_ids=tokens[None, :-1], use_cache=False).logits[0].log_softmax(-1)  # (P + N - 1, V)
        taken: Tensor = logprobs[len(prompt) - 1 :].gather(1, tokens[len(prompt) :, None]).squeeze(1)
        return taken


class ContinuousBatching:
    """Continuous batching of transformers on the same model: requests to a manager that keeps running.

    Its cache and batches have the size of the job, not of the machine's memory.
    """

    def __init__(self, generate: Generate, num_prompts: int, prompt_tokens: int, num_tokens: int) -> None:
        self._model = generate.model.get_base_model()
        self._num_tokens = num_tokens
        self._generation_config = _generation_config(num_tokens, eos_token_id=-1)
        pages = -(-(prompt_tokens + num_tokens) // PAGE_TOKENS)
        self._config = ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=2 * num_prompts * pages,
            max_batch_tokens=max(256, num_prompts * prompt_tokens),
            auto_switch_to_flash=False,
        )
        self._manager: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def use_threads(self, num_threads: int) -> None:
        """Start or restart the manager with this many threads; its thread reads the number at its first computation."""
        self._stop()
        with _threads(num_threads):
            self._manager = self._model.init_continuous_batching(self._generation_config, self._config)
            self._manager.start()
            self.sample([np.zeros(8, np.int32)])

    def sample(self, prompts: Sequence[NDArray[np.int32]]) -> list[list[int]]:
        """Return the tokens drawn after each of the prompts (P,), in any order. Raises RuntimeError if one fails."""
        self._manager.add_requests([prompt.tolist() for prompt in prompts], max_new_tokens=self._num_tokens)
        drawn: list[list[int]] = []
        while len(drawn) < len(prompts):
            result = self._manager.get_result(timeout=RESULT_TIMEOUT_S)
            if result is None or result.error is not None:
                why = self._manager.background_thread_status.fatal_error if result is None else result.error
                raise RuntimeError(f"continuous batching failed: {why or 'it returned no result'}")
            drawn.append(result.generated_tokens)
        if {len(tokens) for tokens in drawn} != {self._num_tokens}:
            raise RuntimeError("continuous batching ended a sequence early")
        return drawn

    def _stop(self) -> None:
        if self._manager is not None:
            self._manager.stop(block=True, timeout=RESULT_TIMEOUT_S, hard_stop=True)
            self._manager.destroy()
            self._manager = None


def check_logprobs(result: SampleResult, prompt: NDArray[np.int32], generate: Generate) -> float:
    """Return the largest difference of log-probabilities from PEFT's. Raises RuntimeError if the weights differ."""
    [sequence] = result.sequences
    difference = float((torch.from_numpy(sequence.logprobs) - generate.logprobs(prompt, sequence.tokens)).abs().max())
    if not difference <= LOGPROB_TOLERANCE:
        raise RuntimeError(f"log-probabilities differ by {difference:.1e}: two sides do not sample from the same model")
    return difference


def _generation_config(num_tokens: int, *, eos_token_id: int | None) -> GenerationConfig:
    """Configure plain sampling of exactly `num_tokens` tokens; `eos_token_id` must be an id that never occurs."""
    return GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=num_tokens, eos_token_id=eos_token_id
    )


@contextlib.contextmanager
def _threads(num_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
