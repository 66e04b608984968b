"""Run docs/tutorial.md from its first command to its last: an hour or more on two cores.

    make tutorial
    make tutorial ARGS="--num-steps 20"     # a short curve
    make tutorial ARGS="--only sharing"     # the last part alone; the figures of the first stay

Starts a pool with SmolLM2-135M-Instruct and trains it on arithmetic: on worked problems, by supervised fine-tuning, and
then on problems with answers alone, by reinforcement. Then runs both at once for two tenants, and each alone, and
measures what sharing costs each. Writes the figures to tutorial.json after each part, and draws tutorial.png.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from scripts.bench.common import machine_line
from scripts.embedded_pool import EmbeddedPool, embedded_pool
from scripts.models.fetch_real_model import MODEL, cache_directory
from scripts.pool_process import PoolEnded
from scripts.terminal import shown_path
from scripts.tutorial.picture import draw
from tinkerpool import SamplingClient, ServiceClient
from tinkerpool.recipes import arithmetic, reinforcement, supervised
from tinkerpool.recipes.metrics import OF_THE_POOL
from workers.contract.settings import num_cores

OUTPUT = Path(__file__).resolve().parents[2] / "tutorial-output"
SHARED_EPOCHS, SHARED_STEPS = 0.5, 3
"""How long the two tenants train that share the pool: about a minute each."""
ROUNDS = 3


def supervised_settings(data: Path, runs: Path) -> supervised.Settings:
    """Return the settings of the page's first run."""
    return supervised.Settings(
        data=data / "shown.jsonl",
        test_data=data / "shown_test.jsonl",
        log_dir=runs / "shown",
        batch_size=8,
        epochs=2,
        learning_rate=1e-3,
        eval_every=10,
    )


def reinforcement_settings(data: Path, runs: Path) -> reinforcement.Settings:
    """Return the settings of the page's second run, which starts from the first one."""
    return reinforcement.Settings(
        data=data / "train.jsonl",
        test_data=data / "test.jsonl",
        reward="tinkerpool.recipes.arithmetic:is_right",
        log_dir=runs / "answers",
        start_from=str(runs / "shown"),
        batch_size=16,
        group_size=8,
        max_tokens=32,
        temperature=1.5,
        learning_rate=3e-4,
        schedule="linear",
        warmup_steps=5,
        eval_every=10,
        num_steps=100,
    )


@dataclass(slots=True)
class Curve:
    """Metrics of one run by step, and how long it took."""

    steps: list[dict[str, float]] = field(default_factory=list)
    seconds: float = 0.0

    def measure(self, train: Callable[[Callable[[int, Mapping[str, float]], None]], str], *, is_shown: bool) -> str:
        """Run a recipe; return the path of the trained weights."""
        started = time.perf_counter()

        def on_metrics(step: int, metrics: Mapping[str, float]) -> None:
            self.steps.append({"step": step, "seconds": round(time.perf_counter() - started, 2), **metrics})
            if is_shown:
                shown = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
                print(f"  {time.perf_counter() - started:6.0f} s  step {step}  {shown}", flush=True)

        path = train(on_metrics)
        self.seconds = time.perf_counter() - started
        return path

    def without_times(self) -> list[dict[str, float]]:
        """Return what must have the same bits alone and with other tenants."""
        other = OF_THE_POOL | {"seconds"}
        return [{name: value for name, value in step.items() if name not in other} for step in self.steps]


def run(args: argparse.Namespace) -> None:
    """Run the page. Raises PoolEnded."""
    path = args.results / "tutorial.json"
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    parts = {"learning": learn, "sharing": share}
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tinkerpool-tutorial-") as folder:
        data, runs = Path(folder) / "arithmetic", Path(folder) / "runs"
        arithmetic.write(data)
        say(f"Starting a pool with {args.model.name} ...")
        with embedded_pool(["--model", f"{args.model.name}={args.model}"]) as pool:
            for name in [args.only] if args.only else parts:
                machine = machine_line(num_cores())
                results |= {f"{name}_machine": machine, **parts[name](pool, data, runs, args)}
                path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
                say(shown_path(path))
    if results.keys() >= {"learning_machine", "sharing_machine"}:
        draw(results, args.images / "tutorial.png")
        say(shown_path(args.images / "tutorial.png"))


def learn(pool: EmbeddedPool, data: Path, runs: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Train as one tenant; return accuracies and curves."""
    with ServiceClient(pool.url, pool.create_key("learner")) as service:

        def accuracy(sampler: SamplingClient) -> float:
            found = arithmetic.accuracy(sampler, data / "test.jsonl")
            say(f"  {found:.1%} of {arithmetic.NUM_TEST} unseen problems are right")
            return found

        say(f"\n{args.model.name} as it comes:")
        before = accuracy(service.create_sampling_client(base_model=args.model.name))
        say(f"\nSupervised fine-tuning on {arithmetic.NUM_SHOWN} worked problems:")
        first, second = Curve(), Curve()
        shown = supervised_settings(data, runs)
        path = first.measure(lambda report: supervised.train(shown, service, report), is_shown=True)
        after_first = accuracy(service.create_sampling_client(path))
        answers = reinforcement_settings(data, runs)
        answers = replace(answers, num_steps=args.num_steps or answers.num_steps)
        say(f"\nReinforcement on answers alone, {answers.num_steps} steps:")
        path = second.measure(lambda report: reinforcement.train(answers, service, report), is_shown=True)
        after_second = accuracy(service.create_sampling_client(path))
    return {
        "accuracy": {"base": before, "supervised": after_first, "reinforcement": after_second},
        "supervised": {"seconds": round(first.seconds, 1), "steps": first.steps},
        "reinforcement": {"seconds": round(second.seconds, 1), "steps": second.steps},
    }


def share(pool: EmbeddedPool, data: Path, runs: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run a supervised tenant and a reinforcement tenant alone and at once, in turn; return the seconds of each."""
    del args
    keys = [pool.create_key(tenant) for tenant in ("ada", "ben")]
    numbers = iter(range(10_000))

    def train_first(curve: Curve, key: str = keys[0], folder: str = "", epochs: float = SHARED_EPOCHS) -> None:
        log_dir = runs / (folder or f"ada-{next(numbers)}")
        settings = replace(supervised_settings(data, runs), log_dir=log_dir, epochs=epochs)
        with ServiceClient(pool.url, key) as service:
            curve.measure(lambda report: supervised.train(settings, service, report), is_shown=False)

    def train_second(curve: Curve) -> None:
        settings = replace(
            reinforcement_settings(data, runs),
            log_dir=runs / f"ben-{next(numbers)}",
            start_from=str(runs / "ben-shown"),
            test_data=None,
            num_steps=SHARED_STEPS,
        )
        with ServiceClient(pool.url, keys[1]) as service:
            curve.measure(lambda report: reinforcement.train(settings, service, report), is_shown=False)

    rounds: list[dict[str, float]] = []
    say("\nTwo tenants: ada trains on worked problems, ben by reinforcement; each alone, and both at once:")
    train_first(Curve(), keys[1], "ben-shown", epochs=1)
    for _ in range(ROUNDS):
        alone, together = (Curve(), Curve()), (Curve(), Curve())
        train_first(alone[0])
        train_second(alone[1])
        threads = [
            threading.Thread(target=train, args=(curve,), daemon=True)
            for train, curve in zip((train_first, train_second), together, strict=True)
        ]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        both = time.perf_counter() - started
        is_equal = all(a.without_times() == b.without_times() for a, b in zip(alone, together, strict=True))
        if not is_equal:
            raise PoolEnded("a tenant's figures were not the same alone and together")
        rounds.append(
            {
                "ada_alone": alone[0].seconds,
                "ben_alone": alone[1].seconds,
                "ada_together": together[0].seconds,
                "ben_together": together[1].seconds,
                "both": both,
            }
        )
        say("  " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in rounds[-1].items()))
    medians = {name: round(statistics.median(row[name] for row in rounds), 1) for name in rounds[0]}
    say("\nMedians: " + ", ".join(f"{name} {seconds} s" for name, seconds in medians.items()))
    say("Every figure of both tenants has the same bits alone and together.")
    return {"sharing": {"rounds": rounds, "median_s": medians, "shared_steps": SHARED_STEPS}}


def say(text: str) -> None:
    """Print a line now."""
    print(text, flush=True)


def main() -> int:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=cache_directory() / MODEL, help="directory of a chat model")
    parser.add_argument("--num-steps", type=int, help="reinforcement steps (default: the page's)")
    parser.add_argument("--only", choices=("learning", "sharing"), help="run this part alone")
    parser.add_argument("--results", type=Path, default=OUTPUT, help="folder for tutorial.json")
    parser.add_argument("--images", type=Path, default=OUTPUT, help="folder for tutorial.png")
    args = parser.parse_args()
    try:
        run(args)
    except PoolEnded as error:
        print(f"Error: {error}")
        return 1
    except KeyboardInterrupt:
        print("Interrupted; the pool is stopped.")
        return 130
    return 0
