"""The recipes and the pages about them, with the shipped model on one pool."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from tests.support.pages import run_page
from tests.support.served_pool import ServedPool
from tinkerpool import ServiceClient
from tinkerpool.errors import InvalidArgument
from tinkerpool.recipes import dpo, reinforcement, supervised
from tinkerpool.recipes.metrics import OF_THE_POOL

pytestmark = pytest.mark.slow

PAIRS = Path(__file__).parents[3] / "scripts" / "demo" / "data" / "plain_english.train.jsonl"
Seen = dict[int, dict[str, float]]


@pytest.fixture
def pairs(tmp_path: Path) -> list[dict[str, str]]:
    """Clauses in old English (prompt) and in plain English (completion)."""
    with PAIRS.open(encoding="utf-8") as file:
        return [json.loads(line) for line in itertools.islice(file, 48)]


def file_of(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def mean(seen: Seen, name: str, steps: slice) -> float:
    return float(np.mean([metrics[name] for metrics in seen.values()][steps]))


Train = Callable[[ServiceClient, Callable[[int, Mapping[str, float]], None]], object]
"""Runs a recipe with this client and `on_metrics`."""


def repeatable(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that do not depend on who else uses the pool."""
    return {name: value for name, value in metrics.items() if name not in OF_THE_POOL}


def lines_of(folder: Path) -> Seen:
    """Return the metrics that a run has written, by step; each step has one line."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line.pop("step") for line in lines] == list(range(1, len(lines) + 1))
    assert all(datetime.fromisoformat(line.pop("time")).tzinfo is not None for line in lines)
    assert all(line["tokens_per_s"] > 0 for line in lines)
    return {step: repeatable(line) for step, line in enumerate(lines, start=1)}


def interrupted(pool: ServedPool, tenant: str, train: Train, stop_at: int) -> Seen:
    """Run a recipe, interrupt it at a step, run it again to its end; return the metrics of both runs together."""
    before: Seen = {}
    after: Seen = {}

    def on_metrics(step: int, metrics: Mapping[str, float]) -> None:
        if step == stop_at:
            raise KeyboardInterrupt
        before[step] = repeatable(metrics)

    with pytest.raises(KeyboardInterrupt), pool.client(tenant) as service:
        train(service, on_metrics)
    with pool.client(tenant) as service:
        train(service, lambda step, metrics: after.update({step: repeatable(metrics)}))
    assert min(after) > 1, "the second run began at a checkpoint"
    return before | after


def test_supervised_learns_and_a_run_that_was_interrupted_takes_the_same_steps(
    pool: ServedPool, pairs: list[dict[str, str]], tmp_path: Path
) -> None:
    data, test_data = file_of(tmp_path / "train.jsonl", pairs[:40]), file_of(tmp_path / "test.jsonl", pairs[40:])

    def settings(folder: str) -> supervised.Settings:
        return supervised.Settings(
            data=data,
            test_data=test_data,
            log_dir=tmp_path / folder,
            rank=8,
            learning_rate=1e-2,
            batch_size=8,
            epochs=2,
            eval_every=5,
            save_every=4,
        )

    whole: Seen = {}
    with pool.client("scribe") as service:
        path = supervised.train(settings("whole"), service, lambda step, m: whole.update({step: repeatable(m)}))
    assert list(whole) == list(range(1, 11))
    assert mean(whole, "loss", slice(-3, None)) < 0.8 * mean(whole, "loss", slice(3))
    assert whole[10]["test_loss"] < whole[5]["test_loss"]
    rerun = interrupted(pool, "scribe", lambda *given: supervised.train(settings("interrupted"), *given), stop_at=7)
    assert rerun == whole
    assert lines_of(tmp_path / "whole") == lines_of(tmp_path / "interrupted") == whole
    with pool.client("scribe") as service:
        assert service.create_sampling_client(path).get_base_model() == "kjv-2m"


@pytest.mark.long
def test_dpo_learns_to_prefer(pool: ServedPool, pairs: list[dict[str, str]], tmp_path: Path) -> None:
    preferences = [
        {"prompt": words[0], "chosen": " " + " ".join(pair["completion"].split(" ")[1:]), "rejected": " " + words[1]}
        for pair in pairs
        if (words := pair["prompt"].split(" ", 1))[0] == pair["completion"].split(" ")[0]
    ]
    settings = dpo.Settings(
        data=file_of(tmp_path / "train.jsonl", preferences[:32]),
        test_data=file_of(tmp_path / "test.jsonl", preferences[32:]),
        log_dir=tmp_path / "run",
        rank=8,
        learning_rate=2e-3,
        batch_size=8,
        epochs=2,
        eval_every=4,
    )
    seen: Seen = {}
    with pool.client("judge") as service:
        dpo.train(settings, service, lambda step, metrics: seen.update({step: repeatable(metrics)}))
    again = replace(settings, log_dir=tmp_path / "interrupted", save_every=3)
    assert interrupted(pool, "judge", lambda *given: dpo.train(again, *given), stop_at=5) == seen
    assert lines_of(settings.log_dir) == lines_of(again.log_dir) == seen
    assert seen[1]["margin"] == 0  # the reference has the same bits as the new adapter
    assert seen[1]["loss"] == pytest.approx(np.log(2))
    assert mean(seen, "margin", slice(-2, None)) > 0.1
    assert mean(seen, "accuracy", slice(-2, None)) > 0.8
    assert seen[8]["test_margin"] > 0


def test_reinforcement_compares_sampler_and_trainer_at_the_temperature_of_the_samples(
    pool: ServedPool, tmp_path: Path
) -> None:
    records = [{"prompt": prompt, "answer": "s"} for prompt in ("And", "The")]
    settings = reinforcement.Settings(
        data=file_of(tmp_path / "train.jsonl", records),
        log_dir=tmp_path / "run",
        num_steps=2,
        batch_size=2,
        group_size=6,
        max_tokens=6,
        temperature=0.6,
    )
    seen: Seen = {}
    with pool.client("poet") as service:
        reinforcement.train(settings, service, lambda step, m: seen.update({step: dict(m)}))
    differences = [abs(metrics["kl"]) for metrics in seen.values() if "kl" in metrics]
    assert differences
    assert max(differences) < 1e-5


@pytest.mark.long  # in each run the demo's poet learns by rewards
def test_reinforcement_raises_the_reward(pool: ServedPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def words_with_s(record: Mapping[str, Any], reply: str) -> float:
        words = re.findall(r"[a-z]+", reply.lower())
        return float(sum(word.startswith(record["letter"]) for word in set(words)) / max(len(words), 6))

    records = [{"prompt": prompt, "letter": "s"} for prompt in ("And", "The", "Then", "He")]
    settings = reinforcement.Settings(
        data=file_of(tmp_path / "train.jsonl", records),
        test_data=file_of(tmp_path / "test.jsonl", records[:2]),
        log_dir=tmp_path / "run",
        rank=8,
        learning_rate=4e-3,
        num_steps=8,
        batch_size=4,
        group_size=8,
        max_tokens=12,
        stop="\n",
        eval_every=0,
        show_every=4,
    )
    seen: Seen = {}
    with pool.client("poet") as service:
        reinforcement.train(settings, service, lambda step, m: seen.update({step: repeatable(m)}), reward=words_with_s)
    shown = re.findall(
        r"sampled in step (\d+), reward [\d.]+\n +prompt '(\w+)'\n +reply ['\"]", capsys.readouterr().out
    )
    assert [int(step) for step, _ in shown] == [4, 8]
    assert {prompt for _, prompt in shown} <= {record["prompt"] for record in records}
    again = replace(settings, log_dir=tmp_path / "interrupted", num_steps=4, save_every=2)
    rerun = interrupted(
        pool,
        "poet",
        lambda service, on_metrics: reinforcement.train(again, service, on_metrics, words_with_s),
        stop_at=3,
    )
    assert lines_of(settings.log_dir) == seen
    assert lines_of(again.log_dir) == rerun
    assert "test_reward" in rerun[4], "of its last step"
    rerun[4] = {name: value for name, value in rerun[4].items() if name != "test_reward"}
    assert rerun == {step: seen[step] for step in (1, 2, 3, 4)}
    assert mean(seen, "reward", slice(-2, None)) > 1.5 * mean(seen, "reward", slice(2))
    assert max(abs(metrics["kl"]) for metrics in seen.values()) < 1e-5
    assert "test_reward" in seen[8]


@pytest.mark.parametrize(
    ("recipe", "line", "message"),
    [
        (supervised, {"prompt": "And"}, "line 1: expected"),
        (supervised, {"text": "And " * 2000}, "line 1: "),
        (dpo, {"prompt": "And"}, "line 1: expected"),
        (dpo, {"prompt": "And " * 2000, "chosen": "so", "rejected": "not"}, "line 1: .* kjv-2m takes"),
        (dpo, {"prompt": "And", "chosen": "so", "rejected": "so"}, r"wrong\.jsonl, line 1: chosen and rejected"),
        (reinforcement, {"answer": "And"}, "line 1: expected"),
        (reinforcement, {"prompt": "And", "anwser": "2"}, r"line 1: expected .*got the keys \['anwser', 'prompt'\]"),
        (reinforcement, {"prompt": "And " * 2000, "answer": "And"}, "line 1: .* kjv-2m takes"),
    ],
)
def test_a_wrong_file_is_refused_before_anything_is_made(
    pool: ServedPool, tmp_path: Path, recipe: Any, line: dict[str, str], message: str
) -> None:
    settings = recipe.Settings(data=file_of(tmp_path / "wrong.jsonl", [line]), log_dir=tmp_path / "run")
    with pool.client("careless") as service:
        with pytest.raises(ValueError, match=message):
            recipe.train(settings, service)
        assert service.create_rest_client().list_training_runs().result().training_runs == []
    assert not (tmp_path / "run").exists(), "the corrected file can use the same folder"


def test_a_run_that_the_pool_refused_leaves_its_folder_for_other_settings(pool: ServedPool, tmp_path: Path) -> None:
    data = file_of(tmp_path / "train.jsonl", [{"text": "In the beginning"}])
    refused = supervised.Settings(data=data, log_dir=tmp_path / "run", rank=100)
    with pool.client("guesses-a-rank") as service:
        with pytest.raises(InvalidArgument, match="rank"):
            supervised.train(refused, service)
        supervised.train(replace(refused, rank=8), service)


def test_a_reward_that_fails_names_its_line_and_leaves_the_folder_for_other_data(
    pool: ServedPool, tmp_path: Path
) -> None:
    def has_word(record: Mapping[str, Any], reply: str) -> float:
        return float(record["word"] in reply)

    data = file_of(tmp_path / "train.jsonl", [{"prompt": "And", "wrod": "s"}])
    settings = reinforcement.Settings(data=data, log_dir=tmp_path / "run", num_steps=1, group_size=2, max_tokens=2)
    with pool.client("misspells") as service:
        with pytest.raises(ValueError, match=r"train\.jsonl, line 1: the reward .*has_word gave no number: KeyError"):
            reinforcement.train(settings, service, reward=has_word)
        file_of(data, [{"prompt": "And", "word": "s"}])
        assert reinforcement.train(settings, service, reward=has_word)


def test_a_finished_run_that_is_started_again_says_so_and_changes_nothing(
    pool: ServedPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = file_of(tmp_path / "train.jsonl", [{"text": "In the beginning"}])
    settings = supervised.Settings(data=data, log_dir=tmp_path / "run", rank=8)

    def state(service: ServiceClient) -> tuple[object, ...]:
        rest = service.create_rest_client()
        while not all(each.sha256 for each in rest.list_user_checkpoints().result().checkpoints):
            time.sleep(0.05)  # the last one can be sampled, and has no file yet
        runs, checkpoints = rest.list_training_runs().result(), rest.list_user_checkpoints().result()
        return runs, checkpoints, [path.read_bytes() for path in sorted((tmp_path / "run").iterdir())]

    with pool.client("starts-again") as service:
        path = supervised.train(settings, service)
        before = state(service)
        capsys.readouterr()
        assert supervised.train(settings, service) == path
        assert state(service) == before
    shown = capsys.readouterr().out
    assert "a run that finished with step 1" in shown
    assert path in shown


@pytest.fixture
def reader(
    pool: ServedPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> pytest.CaptureFixture[str]:
    """A reader's terminal in an empty folder, who has the pool's address and a key."""
    monkeypatch.setenv("TINKERPOOL_BASE_URL", pool.url)
    monkeypatch.setenv("TINKERPOOL_API_KEY", pool.key("reader"))
    monkeypatch.chdir(tmp_path)
    return capsys


def test_the_code_of_the_page_about_data_runs(reader: pytest.CaptureFixture[str]) -> None:
    run_page("docs/data.md")
    shown = reader.readouterr().out
    assert "loss per token" in shown
    assert "wrong.jsonl, line 1: expected" in shown


def test_the_code_of_the_page_about_recipes_runs(
    reader: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = run_page("docs/recipes.md")
    shown = reader.readouterr().out
    assert "trained weights: tinker://" in shown
    for step, metrics in lines_of(Path("runs/psalms")).items():
        assert f"\n{step} {metrics['loss']} " in shown
    # Stand-ins: tests install neither library.
    wandb, tensorboard = MagicMock(), MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    names["to_wandb"]("project", names["settings"])(3, {"loss": 2.0})
    to_tensorboard = names["to_tensorboard"]("runs")
    for step in (3, 4):
        to_tensorboard(step, {"loss": 2.0})
    wandb.init.assert_called_once_with(project="project", id="psalms", resume="allow", config=vars(names["settings"]))
    wandb.init().log.assert_called_once_with({"loss": 2.0}, step=3)
    tensorboard.SummaryWriter.assert_called_once_with("runs", purge_step=3)
    assert [call.args for call in tensorboard.SummaryWriter().add_scalar.mock_calls] == [
        ("loss", 2.0, 3),
        ("loss", 2.0, 4),
    ]


def test_a_recipe_runs_at_the_command_line_and_reports_a_mistake_in_one_line(
    reader: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def run(data: Path) -> subprocess.CompletedProcess[str]:
        options = ["--data", str(data), "--log-dir", "run", "--rank", "8", "--epochs", "2", "--batch-size", "1"]
        command = [sys.executable, "-m", "tinkerpool.recipes.supervised", *options]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = run(file_of(tmp_path / "train.jsonl", [{"text": "In the beginning"}]))
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["step", "1/2", "2/2", "trained"]
    wrong = run(file_of(tmp_path / "wrong.jsonl", [{"text": "In the beginning"}] * 2))
    assert wrong.returncode == 1
    assert wrong.stderr.startswith("error: run has a run with other settings")
    assert len(wrong.stderr.splitlines()) == 1


def test_the_package_lists_its_recipes() -> None:
    listed = subprocess.run([sys.executable, "-m", "tinkerpool.recipes"], capture_output=True, text=True, check=True)
    found = re.findall(r"python -m (tinkerpool\.recipes\.\w+) --help", listed.stdout)
    assert found == [f"tinkerpool.recipes.{name}" for name in ("supervised", "dpo", "reinforcement", "arithmetic")]
    for module in found:
        subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, check=True)
