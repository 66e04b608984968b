"""The picture of docs/tutorial.md, from the run's figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

INK, FIRST, SECOND, PALE = "#333333", "#2f6fb0", "#d1802b", "#c9c9c9"
SMOOTHED = 10
"""Steps in the running mean of the reward."""


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw both curves and the cost of sharing."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": INK})
    figure, axes = plt.subplots(
        1, 3, figsize=(12.5, 3.7), layout="constrained", gridspec_kw={"width_ratios": [2.6, 5.2, 2.6]}
    )
    _draw_supervised(axes[0], results["supervised"])
    _draw_reinforcement(axes[1], results["reinforcement"], results["accuracy"])
    _draw_sharing(axes[2], results["sharing"]["median_s"])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _points(steps: Sequence[Mapping[str, float]], name: str) -> tuple[list[float], list[float]]:
    found = [step for step in steps if name in step]
    return [step["step"] for step in found], [step[name] for step in found]


def _draw_supervised(axes: Any, run: Mapping[str, Any]) -> None:
    axes.plot(*_points(run["steps"], "loss"), color=PALE, lw=1.2, label="batch")
    axes.plot(*_points(run["steps"], "test_loss"), color=FIRST, marker="o", ms=3.5, label="unseen problems")
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("loss per token")
    axes.legend(frameon=False)
    axes.set_title(f"Supervised fine-tuning, {run['seconds']:.0f} s", loc="left", fontsize=9.5)


def _draw_reinforcement(axes: Any, run: Mapping[str, Any], accuracy: Mapping[str, float]) -> None:
    steps, rewards = _points(run["steps"], "reward")
    means = [sum(rewards[max(0, n - SMOOTHED) : n]) / min(n, SMOOTHED) for n in range(1, len(rewards) + 1)]
    axes.plot(steps, rewards, color=PALE, lw=0.8, label="mean reward of a step's 128 samples")
    axes.plot(steps, means, color=SECOND, lw=1.6, label=f"its mean over {SMOOTHED} steps")
    tested_at, tested = _points(run["steps"], "test_reward")
    tested_at, tested = [0, *tested_at], [accuracy["supervised"], *tested]
    axes.plot(tested_at, tested, color=FIRST, marker="o", ms=3.5, label="right of 200 unseen problems")
    for name, label in (("base", "the model as it comes: "), ("reinforcement", "at the end: ")):
        axes.axhline(accuracy[name], color=INK, lw=0.8, ls=":")
        axes.text(0, accuracy[name] + 0.012, f"{label}{accuracy[name]:.1%}", fontsize=8, color=INK)
    axes.text(0, accuracy["supervised"] + 0.025, f"{accuracy['supervised']:.1%}", fontsize=8, color=FIRST)
    axes.set_ylim(0, 1)
    axes.set_xlabel("step")
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 0.09))
    axes.set_title(f"Reinforcement from answers alone, {run['seconds'] / 60:.0f} minutes", loc="left", fontsize=9.5)


def _draw_sharing(axes: Any, medians: Mapping[str, float]) -> None:
    for row, (tenant, color) in enumerate((("ada", FIRST), ("ben", SECOND))):
        for offset, kind in ((-0.2, "alone"), (0.2, "together")):
            seconds = medians[f"{tenant}_{kind}"]
            axes.barh(row + offset, seconds, 0.36, color=color, alpha=0.55 if kind == "alone" else 1.0)
            axes.text(seconds, row + offset, f" {kind} {seconds:.0f} s", va="center", fontsize=8.5, color=INK)
    axes.set_yticks([0, 1], ["ada:\nsupervised", "ben:\nreinforcement"])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.45 * max(medians.values()))
    axes.set_xlabel("seconds")
    axes.tick_params(left=False)
    axes.set_title("Two tenants at once", loc="left", fontsize=9.5)
