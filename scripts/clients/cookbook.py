"""Run recipes of the Tinker cookbook, unmodified, against a pool on this machine, and check their metrics.

    make cookbook

The recipes run in the cookbook's environment, the pool in this one. The pool serves its default base model under
the name of its directory, because recipes load the tokenizer by the model's name.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.base_models import DEFAULT_MODEL
from scripts.embedded_pool import EmbeddedPool, embedded_pool
from workers.contract.settings import SHIPPED_MODELS_DIR

MODEL = str(SHIPPED_MODELS_DIR / DEFAULT_MODEL)
COMMON = ("renderer_name=role_colon", "eval_every=0", "behavior_if_log_dir_exists=delete")
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


_ARITHMETIC = ("env=arithmetic", "group_size=4", "groups_per_batch=4", "max_steps=2", "save_every=0", "lora_rank=8")
RECIPES = (
    Recipe(
        "supervised fine-tuning on the bundled conversations",
        "tinker_cookbook.recipes.chat_sl.train",
        (
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
        (*_ARITHMETIC, "loss_fn=importance_sampling"),
        reward_is_computed,
    ),
    Recipe(
        "the same, asynchronously",
        "tinker_cookbook.recipes.math_rl.train",
        (*_ARITHMETIC, "loss_fn=ppo", "max_steps_off_policy=2"),
        reward_is_computed,
    ),
    Recipe(
        "reinforcement learning on a guessing game",
        "tinker_cookbook.recipes.multiplayer_rl.guess_number.train",
        ("group_size=2", "batch_size=1", "max_tokens=4", "max_steps=1", "save_every=0"),
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
        with serving() as pool:
            environment |= {"TINKER_BASE_URL": pool.http_url, "TINKER_API_KEY": f"tml-{pool.api_key}"}
            failed = [r.name for r in chosen if not run(r, options.python, Path(scratch), environment)]
    if failed:
        print(f"failed: {'; '.join(failed)}")
    return 1 if failed else 0


@contextlib.contextmanager
def serving() -> Iterator[EmbeddedPool]:
    """Run a pool with one local worker, whose base model has the name of its directory."""
    with embedded_pool(["--pool", "local", "--model", f"{MODEL}={MODEL}"]) as pool:
        yield pool


def run(recipe: Recipe, python: Path, scratch: Path, environment: dict[str, str]) -> bool:
    """Run a recipe and print its result; return whether it passed."""
    find = "import pathlib, tinker_cookbook; print(pathlib.Path(tinker_cookbook.__file__).parent)"
    cookbook = subprocess.run([python, "-c", find], capture_output=True, text=True, check=True).stdout.strip()
    logs = scratch / recipe.name.replace(" ", "-").replace(",", "")
    arguments = [argument.format(cookbook=cookbook) for argument in recipe.arguments]
    print(f"{recipe.name} ...", flush=True)
    begin = time.monotonic()
    try:
        done = subprocess.run(
            [python, "-m", recipe.module, f"model_name={MODEL}", f"log_path={logs}", *COMMON, *arguments],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=RECIPE_S,
            check=False,
        )
        took = f"{time.monotonic() - begin:.0f} s"
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        lines = (logs / "metrics.jsonl").read_text().splitlines()
        seen = recipe.check([json.loads(line) for line in lines])
    except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
        print(f"  failed: {error}", flush=True)
        return False
    print(f"  {seen} ({took})", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
