"""Run recipes of the Tinker cookbook, unmodified, against a pool on this machine, and check their metrics.

    make cookbook

The recipes run in the cookbook's environment, the pool in this one, each recipe in a folder of its own. They have the
losses that they have by default. The pool serves its default base model under the name of its directory, because
recipes load the tokenizer by the model's name, and under one that the cookbook lists.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.clients.recipe_inputs import (
    LISTED_MODEL,
    MODEL,
    save_guesser,
    write_grader,
    write_rubrics,
    write_sums,
)
from scripts.embedded_pool import EmbeddedPool, embedded_pool

COMMON = (
    f"model_name={MODEL}",
    "renderer_name=role_colon",
    "eval_every=0",
    "behavior_if_log_dir_exists=delete",
)
RECIPE_S = 900
Metrics = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe, its arguments, and a check of the metrics that it writes."""

    name: str
    module: str
    arguments: tuple[str, ...]
    check: Callable[[Metrics], str]
    """Returns a line for the report. Raises AssertionError."""
    prepare: Callable[[EmbeddedPool, Path, Path], None] | None = None
    """Writes what the recipe reads; gets the folder that it runs in and that of its log."""


def loss_falls(metrics: Metrics) -> str:
    """Check that the loss at the end is below the loss at the beginning."""
    losses = [row["train_mean_nll"] for row in metrics if "train_mean_nll" in row]
    assert len(losses) >= 3, losses
    assert losses[-1] < losses[0], f"the loss did not fall: {losses}"
    return f"loss per token {losses[0]:.3f} -> {losses[-1]:.3f}"


def reward_is_computed(metrics: Metrics) -> str:
    """Check that every step has a reward, and that samples' log-probabilities agree with training's.

    The shipped model solves none of these tasks: where all samples of a group fail, the gradient is 0.
    """
    steps = [row for row in metrics if "progress/done_frac" in row]
    assert steps, "no step was taken"
    rewards, norms, divergences = (
        [row.get(name, math.nan) for row in steps]
        for name in ("env/all/reward/total", "grad_norm:last", "optim/kl_sample_train_v1")
    )
    assert all(map(math.isfinite, rewards)), f"a step has no reward: {rewards}"
    assert all(abs(divergence) < 1e-4 for divergence in divergences), f"sampler and trainer disagree: {divergences}"
    return (
        f"rewards {', '.join(f'{reward:.2f}' for reward in rewards)}; gradient norms "
        f"{', '.join(f'{norm:.2f}' for norm in norms)}; sampler and trainer differ by {max(map(abs, divergences)):.0e}"
    )


def learns_from_rewards(metrics: Metrics) -> str:
    """Check that a step was taken on rewards that differ, and that all numbers are finite."""
    rewards = [row["reward/total"] for row in metrics if "reward/total" in row]
    norms = [row["grad_norm:last"] for row in metrics if row.get("num_datums:sum")]
    assert norms, f"no step was taken: all rewards of every group are equal: {rewards}"
    assert all(map(math.isfinite, rewards + norms)), (rewards, norms)
    return (
        f"rewards {', '.join(f'{reward:.2f}' for reward in rewards)}; gradient norms of {len(norms)} steps "
        f"{', '.join(f'{norm:.0f}' for norm in norms)}"
    )


def _rubrics(pool: EmbeddedPool, folder: Path, logs: Path) -> None:
    del pool, logs
    write_rubrics(folder)


def _sums(pool: EmbeddedPool, folder: Path, logs: Path) -> None:
    write_sums(folder)
    save_guesser(pool, logs)


_ARITHMETIC = (
    *COMMON,
    "env=arithmetic",
    "group_size=4",
    "groups_per_batch=4",
    "max_steps=2",
    "save_every=0",
    "lora_rank=8",
)
RECIPES = (
    Recipe(
        "supervised fine-tuning on the bundled conversations",
        "tinker_cookbook.recipes.chat_sl.train",
        (
            *COMMON,
            "dataset={cookbook}/example_data/conversations.jsonl",
            "batch_size=16",
            "max_steps=6",
            "max_length=512",
            "lora_rank=8",
            "learning_rate=5e-3",
        ),
        loss_falls,
    ),
    Recipe(
        "reinforcement learning on arithmetic",
        "tinker_cookbook.recipes.math_rl.train",
        _ARITHMETIC,
        reward_is_computed,
    ),
    Recipe(
        "the same, asynchronously",
        "tinker_cookbook.recipes.math_rl.train",
        (*_ARITHMETIC, "max_steps_off_policy=2"),
        reward_is_computed,
    ),
    Recipe(
        "the same at temperature 0.7, where log-probabilities of sampler and trainer must be scaled alike",
        "tinker_cookbook.recipes.math_rl.train",
        (*_ARITHMETIC, "temperature=0.7"),
        reward_is_computed,
    ),
    Recipe(
        "the loop in one file, on sums",
        "tinker_cookbook.recipes.rl_loop",
        ("batch_size=4", "group_size=16", "max_steps=3", "max_tokens=24", "lora_rank=8", "save_every=0"),
        learns_from_rewards,
        _sums,
    ),
    Recipe(
        "reinforcement learning with a grader and rubrics",
        "tinker_cookbook.recipes.rubric.train",
        (
            *COMMON,
            "grader_llm_name={grader}",
            "grader_renderer_name=role_colon",
            "train_jsonl_path=rubrics.jsonl",
            "test_jsonl_path=rubrics.jsonl",
            "groups_per_batch=2",
            "train_group_size=2",
            "max_tokens=8",
            "max_steps=2",
            "save_every=0",
            "lora_rank=8",
        ),
        reward_is_computed,
        _rubrics,
    ),
    Recipe(
        "reinforcement learning on a guessing game",
        "tinker_cookbook.recipes.multiplayer_rl.guess_number.train",
        (*COMMON, "group_size=2", "batch_size=1", "max_tokens=4", "max_steps=1", "save_every=0"),
        reward_is_computed,
    ),
)


def main() -> int:
    """Read the command line and run the recipes. Return 1 if a recipe or a check failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("python", type=Path, help="the Python interpreter of the cookbook's environment")
    parser.add_argument("--only", default="", metavar="TEXT", help="run only recipes with this in their module's name")
    options = parser.parse_args()
    chosen = [recipe for recipe in RECIPES if options.only in recipe.module]
    with tempfile.TemporaryDirectory(prefix="tinkerpool-cookbook-") as scratch:
        environment = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TINKER_TELEMETRY": "0"}
        print("starting a pool ...", flush=True)
        grader = write_grader(Path(scratch))
        with serving({LISTED_MODEL: MODEL, str(grader): str(grader)}) as pool:
            environment |= {"TINKER_BASE_URL": pool.http_url, "TINKER_API_KEY": f"tml-{pool.admin_key}"}
            runner = Runner(pool, options.python, Path(scratch), environment, grader)
            failed = [recipe.name for recipe in chosen if not runner.run(recipe)]
    if failed:
        print(f"failed: {'; '.join(failed)}")
    return 1 if failed else 0


@contextlib.contextmanager
def serving(more: Mapping[str, str] | None = None) -> Iterator[EmbeddedPool]:
    """Run a pool with a local worker for the shipped model, and for each of `more` models: names to directories."""
    models = {MODEL: MODEL} | dict(more or {})
    with embedded_pool(["--pool", "local", *(f"--model={name}={path}" for name, path in models.items())]) as pool:
        yield pool


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs recipes against one pool."""

    pool: EmbeddedPool
    python: Path
    scratch: Path
    environment: dict[str, str]
    grader: Path

    def run(self, recipe: Recipe) -> bool:
        """Run a recipe and print its result; return whether it passed."""
        print(f"{recipe.name} ...", flush=True)
        begin = time.monotonic()
        try:
            seen = recipe.check(self._metrics(recipe))
        except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
            print(f"  failed: {error}", flush=True)
            return False
        print(f"  {seen} ({time.monotonic() - begin:.0f} s)", flush=True)
        return True

    def _metrics(self, recipe: Recipe) -> Metrics:
        """Run a recipe; return the metrics that it wrote. Raises AssertionError if it fails."""
        find = "import pathlib, tinker_cookbook; print(pathlib.Path(tinker_cookbook.__file__).parent)"
        found = subprocess.run([self.python, "-c", find], capture_output=True, text=True, check=True).stdout.strip()
        folder = self.scratch / recipe.name.replace(" ", "-").replace(",", "")
        folder.mkdir()
        logs = folder / "log"
        if recipe.prepare is not None:
            recipe.prepare(self.pool, folder, logs)
        arguments = [argument.format(cookbook=found, grader=self.grader) for argument in recipe.arguments]
        done = subprocess.run(
            [self.python.absolute(), "-m", recipe.module, f"log_path={logs}", *arguments],
            cwd=folder,
            env=os.environ | self.environment | {"HF_DATASETS_CACHE": str(folder / "cache")},
            capture_output=True,
            text=True,
            timeout=RECIPE_S,
            check=False,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        return [json.loads(line) for line in (logs / "metrics.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    sys.exit(main())
