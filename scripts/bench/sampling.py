"""Measure the sampler: co-batched tenants, one adapter's batch against transformers, shared and repeated prompts.

    python -m scripts.bench.sampling --quick
    python -m scripts.bench.sampling                      # three models, some minutes
    python -m scripts.bench.sampling --models 4m --seconds 30

co-batched   8 tenants with one adapter and 4 sequences each, in one decode batch, against one tenant after another
batch        32 prompts of one adapter, against the base model without an adapter, and against transformers with the
             same adapter (PEFT): `generate` in one batch, and its continuous batching. Each with 1 thread or --threads,
             whichever is faster; the engine chooses its threads itself.
prompt       64 samples of one prompt of 512 tokens as one request, against 64 requests with that prompt, and against 64
             requests with different prompts: the time, and the prompt tokens that were computed
first token  a prompt of 480 tokens that is new, that is repeated, and that is continued

Sides alternate, on new prompts each time, so that the cache helps only where it is measured. Engine and PEFT sample
from the same weights: the script stops if log-probabilities differ. Prints Markdown tables.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scripts.bench.common import (
    Column,
    Effort,
    Results,
    Row,
    Table,
    measure_alternating,
    parser,
    shown_ratio,
    shown_time,
)
from scripts.bench.models import Model, add_model_options, chosen_models, open_models
from scripts.bench.sides.samplers import Ask, ContinuousBatching, EngineSampler, Generate, Prompts, check_logprobs
from workers.contract.messages import SampleResult

SLOW_PARAMS_MIN = 10_000_000
"""A larger model draws half as many tokens in a round, and the case of 64 different long prompts is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the requests."""

    num_tenants: int = 8
    num_seqs: int = 4
    """Of each tenant."""
    num_prompts: int = 32
    """In the batch of one adapter."""
    prompt_tokens: int = 32
    num_tokens: int = 64
    """Drawn for each sequence."""
    group: int = 64
    """Samples of one long prompt."""
    group_prompt_tokens: int = 512
    group_tokens: int = 16
    cached_tokens: int = 480
    """Of the repeated prompt."""
    added_tokens: int = 32
    """By which the continued prompt is longer."""


QUICK = Sizes(
    num_tenants=2,
    num_seqs=2,
    num_prompts=4,
    prompt_tokens=8,
    num_tokens=4,
    group=4,
    group_prompt_tokens=130,
    group_tokens=3,
    cached_tokens=130,
    added_tokens=10,
)


class Bench:
    """One model's engine, prompts and sizes."""

    def __init__(self, model: Model, sizes: Sizes, args: argparse.Namespace) -> None:
        self.model = model
        self.is_slow = model.num_matmul_params >= SLOW_PARAMS_MIN
        self.sizes = sizes
        self.num_tokens = sizes.num_tokens // 2 if self.is_slow else sizes.num_tokens
        self.effort: Effort = args.effort
        self.num_threads: int = args.threads
        self.prompts = Prompts(model.vocab_size)
        self.engine = EngineSampler(model, sizes.num_tenants, args.threads)

    def row(self, **cells: object) -> Row:
        """Return a row of this model."""
        return {"model": self.model.name, **cells}

    def co_batched(self, *, shares_prompt: bool) -> Row:
        """Compare co-batched tenants with one after another; a tenant's sequences share a prompt or not."""
        sizes = self.sizes
        num_prompts, num_samples = (1, sizes.num_seqs) if shares_prompt else (sizes.num_seqs, 1)

        def asks(tenant: int) -> list[Ask]:
            prompts = self.prompts.draw_many(num_prompts, sizes.prompt_tokens)
            return [
                Ask(prompt=prompt, num_tokens=self.num_tokens, num_samples=num_samples, tenant=tenant)
                for prompt in prompts
            ]

        def one_after_another() -> None:
            for tenant in range(sizes.num_tenants):
                self.engine.sample(asks(tenant))

        def all_at_once() -> None:
            self.engine.sample([ask for tenant in range(sizes.num_tenants) for ask in asks(tenant)])

        timings = measure_alternating({"co_batched": all_at_once, "in_turn": one_after_another}, self.effort)
        kind = f"{sizes.num_seqs} samples of a prompt" if shares_prompt else f"{sizes.num_seqs} prompts"
        return self.row(
            case=f"{sizes.num_tenants} x {kind}",
            tokens=sizes.num_tenants * sizes.num_seqs * self.num_tokens,
            ratio=timings["in_turn"].ratio_to(timings["co_batched"]),
            **{name: timing.summary() for name, timing in timings.items()},
        )

    def batch(self) -> Row:
        """Compare one adapter's batch on the engine, without the adapter, and with both methods of transformers."""
        sizes = self.sizes

        def prompts() -> list[NDArray[np.int32]]:
            return self.prompts.draw_many(sizes.num_prompts, sizes.prompt_tokens)

        def engine(tenant: int | None) -> Callable[[], object]:
            return lambda: self.engine.sample(
                [Ask(prompt=prompt, num_tokens=self.num_tokens, tenant=tenant) for prompt in prompts()]
            )

        generate = Generate(self.model, self.engine.fused.weights()[0], self.num_tokens)
        probe = self.prompts.draw(sizes.prompt_tokens)
        [sample] = self.engine.sample([Ask(prompt=probe, num_tokens=self.num_tokens)])
        difference = check_logprobs(sample, probe, generate)
        with ContinuousBatching(generate, sizes.num_prompts, sizes.prompt_tokens, self.num_tokens) as continuous:
            sides: dict[str, Callable[[], object]] = {
                "lora": engine(0),
                "base": engine(None),
                "generate": lambda: generate.sample(prompts()),
                "continuous": lambda: continuous.sample(prompts()),
            }
            threads = {
                "generate": self._better_threads(generate.use_threads, sides["generate"]),
                "continuous": self._better_threads(continuous.use_threads, sides["continuous"]),
            }
            timings = measure_alternating(sides, self.effort)
        return self.row(
            case=f"{sizes.num_prompts} x {sizes.prompt_tokens} + {self.num_tokens}",
            prompts=sizes.num_prompts,
            prompt_tokens=sizes.prompt_tokens,
            tokens=sizes.num_prompts * self.num_tokens,
            logprob_difference=difference,
            threads=threads,
            over_generate=timings["generate"].ratio_to(timings["lora"]),
            over_continuous=timings["continuous"].ratio_to(timings["lora"]),
            of_base=timings["base"].ratio_to(timings["lora"]),
            **{name: timing.summary() for name, timing in timings.items()},
        )

    def _better_threads(self, use: Callable[[int], None], side: Callable[[], object]) -> int:
        """Choose one thread for a side, or the common number, whichever is faster in two rounds."""
        best_s = {}
        for num_threads in sorted({1, self.num_threads}):
            use(num_threads)
            timing = measure_alternating({"side": side}, Effort(seconds=0, rounds_min=2, rounds_max=2))["side"]
            best_s[num_threads] = min(timing.seconds)
        chosen = min(best_s, key=lambda num_threads: best_s[num_threads])
        use(chosen)
        return chosen

    def prompt(self) -> Row:
        """Compare samples of one long prompt: one request, a request each, and a request and prompt each."""
        sizes = self.sizes

        def ask(num_samples: int, prompt: NDArray[np.int32]) -> Ask:
            return Ask(prompt=prompt, num_tokens=sizes.group_tokens, num_samples=num_samples)

        def one_request() -> list[Ask]:
            return [ask(sizes.group, self.prompts.draw(sizes.group_prompt_tokens))]

        def one_prompt() -> list[Ask]:
            return [ask(1, self.prompts.draw(sizes.group_prompt_tokens))] * sizes.group

        def own_prompts() -> list[Ask]:
            return [ask(1, prompt) for prompt in self.prompts.draw_many(sizes.group, sizes.group_prompt_tokens)]

        kinds = {"request": one_request, "requests": one_prompt} | ({} if self.is_slow else {"prompts": own_prompts})
        computed = dict.fromkeys(kinds, 0)
        cached = dict.fromkeys(kinds, 0)

        def side(kind: str) -> Callable[[], None]:
            def run() -> None:
                asks = kinds[kind]()
                self.engine.num_rows = 0
                results = self.engine.sample(asks)
                computed[kind] = self.engine.num_rows - num_decoded(results)
                cached[kind] = sum(result.num_cached_tokens for result in results)

            return run

        timings = measure_alternating({kind: side(kind) for kind in kinds}, self.effort)
        return self.row(
            case=f"{sizes.group} x {sizes.group_prompt_tokens} + {sizes.group_tokens}",
            samples=sizes.group,
            prompt_tokens=sizes.group_prompt_tokens,
            computed=computed,
            cached=cached,
            over={kind: timing.ratio_to(timings["request"]) for kind, timing in timings.items()},
            **{kind: timing.summary() for kind, timing in timings.items()},
        )

    def first_token(self) -> Row:
        """Measure the first token after a new prompt, a repeated one, and a continued one."""
        sizes = self.sizes
        prompt = self.prompts.draw(sizes.cached_tokens)
        computed = {}
        cached = {}

        def side(name: str, make: Callable[[], NDArray[np.int32]]) -> Callable[[], None]:
            def run() -> None:
                self.engine.num_rows = 0
                [result] = self.engine.sample([Ask(prompt=make(), num_tokens=1)])
                computed[name] = self.engine.num_rows
                cached[name] = result.num_cached_tokens

            return run

        def new() -> NDArray[np.int32]:
            nonlocal prompt
            prompt = self.prompts.draw(sizes.cached_tokens)
            return prompt

        def longer() -> NDArray[np.int32]:
            return np.concatenate([prompt, self.prompts.draw(sizes.added_tokens)])

        sides = {"cold": side("cold", new), "warm": side("warm", lambda: prompt), "longer": side("longer", longer)}
        timings = measure_alternating(sides, self.effort, in_order=True)
        return self.row(
            case=f"{sizes.cached_tokens} (+ {sizes.added_tokens})",
            computed=computed,
            cached=cached,
            speedup=timings["cold"].ratio_to(timings["warm"]),
            **{name: timing.summary() for name, timing in timings.items()},
        )


def num_decoded(results: Sequence[SampleResult]) -> int:
    """Return the number of decoded rows: each drawn token except the last passes through the model."""
    return sum(len(sequence.tokens) - 1 for result in results for sequence in result.sequences)


def _tokens_per_s(side: str) -> Callable[[Row], str]:
    return lambda row: f"{row['tokens'] / row[side]['median_s']:,.0f}"


def _with_threads(side: str) -> Callable[[Row], str]:
    return lambda row: f"{_tokens_per_s(side)(row)} ({row['threads'][side]})"


def _time_and_computed(kind: str) -> Callable[[Row], str]:
    return lambda row: f"{shown_time(row[kind])}: {row['computed'][kind]:,}" if kind in row else ""


def _ratio_of(kind: str) -> Callable[[Row], str]:
    return lambda row: shown_ratio(row["over"][kind]) if kind in row else ""


CO_BATCHED_COLUMNS = (
    Column("model", lambda r: r["model"]),
    Column("tenants x sequences of each", lambda r: r["case"]),
    Column("co-batched, median (quartiles)", lambda r: shown_time(r["co_batched"])),
    Column("co-batched, tokens/s", _tokens_per_s("co_batched")),
    Column("one tenant after another, tokens/s", _tokens_per_s("in_turn")),
    Column("co-batched / in turn", lambda r: shown_ratio(r["ratio"])),
)
BATCH_COLUMNS = (
    Column("model", lambda r: r["model"]),
    Column("prompts x tokens + drawn", lambda r: r["case"]),
    Column("one adapter, median (quartiles)", lambda r: shown_time(r["lora"])),
    Column("one adapter, tokens/s", _tokens_per_s("lora")),
    Column("base model, tokens/s", _tokens_per_s("base")),
    Column("`generate`, tokens/s (threads)", _with_threads("generate")),
    Column("continuous batching, tokens/s (threads)", _with_threads("continuous")),
    Column("adapter / base", lambda r: shown_ratio(r["of_base"])),
    Column("adapter / `generate`", lambda r: shown_ratio(r["over_generate"])),
    Column("adapter / continuous", lambda r: shown_ratio(r["over_continuous"])),
)
PROMPT_COLUMNS = (
    Column("model", lambda r: r["model"]),
    Column("samples x prompt + drawn", lambda r: r["case"]),
    Column("one request: prompt tokens computed", _time_and_computed("request")),
    Column("a request each, same prompt", _time_and_computed("requests")),
    Column("a request and prompt each", _time_and_computed("prompts")),
    Column("same prompt / one request", _ratio_of("requests")),
    Column("own prompts / one request", _ratio_of("prompts")),
)
FIRST_TOKEN_COLUMNS = (
    Column("model", lambda r: r["model"]),
    Column("prompt (+ more)", lambda r: r["case"]),
    Column("new", lambda r: shown_time(r["cold"])),
    Column("repeated", lambda r: shown_time(r["warm"])),
    Column("new / repeated", lambda r: shown_ratio(r["speedup"])),
    Column("continued", lambda r: shown_time(r["longer"])),
    Column("cached: repeated, continued", lambda r: f"{r['cached']['warm']:,}, {r['cached']['longer']:,}"),
)


def add_goals(results: Results, co_batched: Table, batch: Table, prompt: Table) -> None:
    """Compare the tables with the goals."""
    for row in co_batched.rows:
        what = f"{row['model']}: {row['case']}, co-batched against one tenant after another"
        results.goal(what, row["ratio"]["median"], at_least=3.5, unit=" x")
    for row in batch.rows:
        model = row["model"]
        what = f"{model}: sampling, a batch of one adapter against"
        results.goal(f"{what} `generate`", row["over_generate"]["median"], at_least=1.5, unit=" x")
        results.goal(f"{what} continuous batching", row["over_continuous"]["median"], at_least=1.0, unit=" x")
        results.goal(f"{what} the base model", row["of_base"]["median"], at_least=0.85, unit=" x")
    for row in prompt.rows:
        what = f"{row['model']}: prompt tokens computed for {row['samples']} samples of {row['prompt_tokens']} tokens"
        results.goal(what, row["computed"]["request"], at_most=row["prompt_tokens"])


def main() -> None:
    """Read the command line, measure, print."""
    command = parser(__doc__)
    add_model_options(command)
    command.add_argument("--seconds", type=float, default=3.0, help="for each row (at least 5 rounds)")
    args = command.parse_args()
    args.effort = Effort(seconds=0, rounds_min=2, rounds_max=2) if args.quick else Effort(seconds=args.seconds)
    sizes = QUICK if args.quick else Sizes()
    with contextlib.ExitStack() as stack:
        models = stack.enter_context(open_models(chosen_models(args)))
        results = stack.enter_context(Results("sampling", args))
        benches = [Bench(model, sizes, args) for model in models]
        co_batched = results.table("sampling-co-batched", CO_BATCHED_COLUMNS)
        for bench in benches:
            for shares_prompt in (False, True):
                co_batched.add(bench.co_batched(shares_prompt=shares_prompt))
        batch = results.table("sampling-batch", BATCH_COLUMNS)
        for bench in benches:
            batch.add(bench.batch())
        prompt = results.table("sampling-prompt", PROMPT_COLUMNS)
        for bench in benches:
            prompt.add(bench.prompt())
        first_token = results.table("sampling-first-token", FIRST_TOKEN_COLUMNS)
        for bench in benches:
            first_token.add(bench.first_token())
        add_goals(results, co_batched, batch, prompt)


if __name__ == "__main__":
    main()
