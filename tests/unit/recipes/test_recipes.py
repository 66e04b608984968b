"""Parts of the recipes that need no pool: options, folders, tables, losses and advantages."""

import dataclasses
import importlib
import json
import math
import re
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from tinkerpool.client.training.custom_loss import evaluate_numpy
from tinkerpool.data import shift
from tinkerpool.recipes import dpo, reinforcement, supervised
from tinkerpool.recipes.metrics import Pace
from tinkerpool.recipes.options import parse
from tinkerpool.recipes.progress import Progress
from tinkerpool.recipes.run import Run, find_base_model
from tinkerpool.types import ForwardBackwardOutput, SampledSequence, SupportedModel, TensorData

RECIPES = (supervised, dpo, reinforcement)


class Done:
    """A future that is done."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def result(self) -> Any:
        return self._value


@pytest.mark.parametrize("recipe", RECIPES)
def test_help_has_the_form_of_the_data_and_each_option(recipe: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(recipe.Settings, recipe.__doc__, recipe.__name__, ["--help"])
    shown = capsys.readouterr().out
    assert f"usage: python -m {recipe.__name__} --data FILE" in shown
    assert "Each line of --data is a JSON object" in shown
    for field in dataclasses.fields(recipe.Settings):
        assert f"--{field.name.replace('_', '-')}" in shown


def test_a_command_line_becomes_settings_of_their_types(capsys: pytest.CaptureFixture[str]) -> None:
    command = "--data a.jsonl --log-dir runs --learning-rate 3e-4 --schedule cosine --max-length 64 --base-model m"
    settings = parse(supervised.Settings, "", "m", command.split())
    expected = supervised.Settings(
        data=Path("a.jsonl"),
        log_dir=Path("runs"),
        learning_rate=3e-4,
        schedule="cosine",
        max_length=64,
        base_model="m",
    )
    assert settings == expected
    for wrong in ("--data a.jsonl", "--data a --log-dir b --schedule step", "--data a --log-dir b --rank x"):
        with pytest.raises(SystemExit):
            parse(supervised.Settings, "", "m", wrong.split())


def test_a_folder_continues_only_the_same_settings_and_data(tmp_path: Path) -> None:
    data = tmp_path / "a.jsonl"
    data.write_text("{}")
    settings = supervised.Settings(data=data, log_dir=tmp_path / "run")
    run = Run(settings)
    assert run.start_step == 0
    run.training_client(MagicMock())
    run.record(30, Done(TensorPath("tinker://a/weights/step-000030")))  # type: ignore[arg-type]
    run.record(35, None)
    assert Run(settings).start_step == 30
    with pytest.raises(ValueError, match=r"batch_size was 8, is 4.*another --log-dir"):
        Run(dataclasses.replace(settings, batch_size=4))
    data.write_text("{} ")
    with pytest.raises(ValueError, match="data_sha256 was"):
        Run(settings)


def test_a_folder_without_a_step_is_free_for_other_settings(tmp_path: Path) -> None:
    data = tmp_path / "a.jsonl"
    data.write_text("{}")
    settings = supervised.Settings(data=data, log_dir=tmp_path / "run")
    other = dataclasses.replace(settings, batch_size=4)
    Run(settings).training_client(MagicMock())
    with Progress(settings.log_dir, 0, 2, lambda *_: None):
        pass  # the first step failed
    Run(other).training_client(MagicMock())
    with Progress(settings.log_dir, 0, 2, lambda *_: None) as progress:
        progress.report(1, POOL_METRICS)
    Run(other)
    with pytest.raises(ValueError, match="batch_size was 4, is 8"):
        Run(settings)


def test_texts_are_taken_for_paths(tmp_path: Path) -> None:
    data = tmp_path / "a.jsonl"
    data.write_text("{}")
    settings: Any = {"data": str(data), "log_dir": str(tmp_path / "run")}
    run = Run(supervised.Settings(**settings))
    run.training_client(MagicMock())
    run.record(1, Done(TensorPath("tinker://a/weights/step-000001")))  # type: ignore[arg-type]
    data.write_text("other data")
    with pytest.raises(ValueError, match="data_sha256 was"):
        Run(supervised.Settings(**settings))


def test_a_folder_is_one_processs_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    settings = supervised.Settings(data=tmp_path / "a.jsonl", log_dir=tmp_path / "run")
    program = (
        "import sys; from pathlib import Path; from tinkerpool.recipes import run; "
        "run._take(Path(sys.argv[1])); print(flush=True); sys.stdin.read()"
    )
    settings.log_dir.mkdir()
    command = [sys.executable, "-c", program, str(settings.log_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(ValueError, match="another process is training in"):
            Run(settings).training_client(MagicMock())
        other.communicate()
    for _ in range(2):  # this process may begin again
        Run(settings).training_client(MagicMock())


@pytest.mark.parametrize(("max_length", "most"), [(None, 1024), (2000, 1024), (60, 60)])
def test_no_line_is_longer_than_the_model_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_length: int | None, most: int
) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    loaded = MagicMock(side_effect=KeyboardInterrupt)  # what is behind it needs a pool
    monkeypatch.setattr(supervised, "load", loaded)
    model = SupportedModel(
        model_name="m", max_context_length=1024, vocab_size=9, max_rank=8, num_params=9, num_workers=1
    )
    service = MagicMock()
    service.get_server_capabilities.return_value.supported_models = [model]
    settings = supervised.Settings(data=tmp_path / "a.jsonl", log_dir=tmp_path / "run", max_length=max_length)
    with pytest.raises(KeyboardInterrupt):
        supervised.train(settings, service)
    assert loaded.call_args.kwargs["max_length"] == most
    with pytest.raises(ValueError, match="max_length must be at least 1, got 0"):
        supervised.train(dataclasses.replace(settings, max_length=0), service)


def test_a_state_of_another_base_model_than_the_one_that_is_asked_for_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    service = MagicMock()
    service.create_rest_client().get_checkpoint("tinker://s/weights/x").result().base_model = "m"
    settings = supervised.Settings(
        data=tmp_path / "a.jsonl", log_dir=tmp_path / "run", base_model="other", start_from="tinker://s/weights/x"
    )
    with pytest.raises(ValueError, match="base_model is other, but tinker://s/weights/x is of m"):
        find_base_model(settings, service)


def test_a_run_starts_from_the_folder_of_another(tmp_path: Path) -> None:
    data, service = tmp_path / "a.jsonl", MagicMock()
    data.write_text("{}")
    first = supervised.Settings(data=data, log_dir=tmp_path / "first")
    second = dataclasses.replace(first, log_dir=tmp_path / "second", start_from=str(first.log_dir))
    with pytest.raises(ValueError, match="the folder of a run that has saved"):
        Run(second)
    run = Run(first)
    run.training_client(service)
    run.record(30, Done(TensorPath("tinker://a/weights/step-000030")))  # type: ignore[arg-type]
    Run(second).training_client(service)
    service.create_training_client_from_state.assert_called_once_with("tinker://a/weights/step-000030")


@dataclasses.dataclass
class TensorPath:
    path: str


POOL_METRICS = {"tokens": 64, "clock_cycle": 7}


def test_without_a_terminal_each_step_is_a_row_with_tokens_a_second_and_the_time_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress(tmp_path, 0, 20) as progress:
        progress.report(1, POOL_METRICS | {"loss": 2.0})
        progress.report(2, POOL_METRICS | {"loss": 1.0, "test_loss": 1.23456})
        progress.report(3, POOL_METRICS | {"loss": 0.5})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    columns = ["loss", "tokens_per_s", "time_left"]
    assert [lines[0], lines[2]] == [["step", *columns], ["step", *columns, "test_loss"]]
    rows = [lines[1], lines[3], lines[4]]
    assert [row[:2] for row in rows] == [["1/20", "2"], ["2/20", "1"], ["3/20", "0.5"]]
    assert rows[1][4:] == ["1.235"]
    assert [row[3] for row in rows] == ["0:00:00"] * 3, "the steps took no time"


def test_at_a_terminal_rows_are_printed_above_a_bar_that_has_tokens_a_second_and_the_time_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    importlib.import_module("tinkerpool.cli.show")  # its console takes the width of its first import
    monkeypatch.setenv("COLUMNS", "120")
    with Progress(tmp_path, 0, 2) as progress:
        progress.report(1, POOL_METRICS | {"loss": 2.0})
        progress.say("[saved]")
    shown = capsys.readouterr().out
    assert "training" in shown
    assert re.search(r"1/2 [\d,]+ tokens/s, 0:00:00 left", shown)
    assert "tokens_per_s" not in shown
    assert "[saved]" in shown


def test_metrics_go_to_a_callback_instead_of_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = []
    with Progress(tmp_path, 0, 2, lambda step, metrics: seen.append((step, dict(metrics)))) as progress:
        progress.report(1, POOL_METRICS | {"loss": 2.0})
    [(step, metrics)] = seen
    assert step == 1
    assert metrics.pop("tokens_per_s") > 0
    assert metrics == POOL_METRICS | {"loss": 2.0}
    assert not capsys.readouterr().out


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_step_is_in_the_file_of_metrics_as_soon_as_it_is_reported(tmp_path: Path) -> None:
    with Progress(tmp_path, 0, 2, lambda *_: None) as progress:
        progress.report(1, POOL_METRICS | {"reward": math.nan})
        [line] = lines_of(tmp_path)
    assert {"step": 1, "tokens": 64, "clock_cycle": 7, "reward": None}.items() <= line.items()
    assert abs(datetime.now(UTC) - datetime.fromisoformat(line["time"])) < timedelta(minutes=1)


def test_a_run_that_continues_writes_no_step_twice_and_drops_a_line_that_was_cut_off(tmp_path: Path) -> None:
    def run(start: int, end: int, loss: float) -> None:
        with Progress(tmp_path, start, 9, lambda *_: None) as progress:
            for step in range(start + 1, end + 1):
                progress.report(step, POOL_METRICS | {"loss": loss})

    run(0, 6, 1.0)  # interrupted behind the checkpoint of step 4
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    run(4, 9, 2.0)
    assert [(line["step"], line["loss"]) for line in lines_of(tmp_path)] == [
        *((step, 1.0) for step in range(1, 5)),
        *((step, 2.0) for step in range(5, 10)),
    ]
    run(0, 1, 3.0)  # a run that was interrupted before its first checkpoint
    assert [(line["step"], line["loss"]) for line in lines_of(tmp_path)] == [(1, 3.0)]


def test_the_pace_is_that_of_most_recent_steps_whatever_one_of_them_took() -> None:
    pace, now_s = Pace(100.0), 100.0
    pace.step(now_s := now_s + 8.0, 40)
    assert (pace.step_s(), pace.tokens_per_s()) == (8.0, 5.0)
    for step in range(100):
        pause_s = 600.0 if step == 90 else 0.0
        pace.step(now_s := now_s + (1.0 if step % 2 else 3.0) + pause_s, 40)
    assert (pace.step_s(), pace.tokens_per_s()) == (2.0, 20.0), "results arrive in twos; the pool was away once"


def test_the_gradient_of_dpo_is_that_of_torch(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    data = [shift(range(length), [0, 0] + [1] * (length - 2)) for length in (5, 4, 7, 6)]
    logprobs, reference = ([-rng.random(d.model_input.length).astype(np.float32) for d in data] for _ in range(2))
    settings = dpo.Settings(data=tmp_path, log_dir=tmp_path, beta=0.7, likelihood=0.3)
    outputs = [{"logprobs": TensorData(values)} for values in reference]
    output = ForwardBackwardOutput(loss_fn_output_type="", loss_fn_outputs=outputs, metrics={})
    result = evaluate_numpy(dpo.Dpo(settings, Done(output)), data, logprobs)

    leaves = [torch.tensor(values, dtype=torch.float64, requires_grad=True) for values in logprobs]
    weights = [torch.tensor(d.loss_fn_inputs["weights"].data, dtype=torch.float64) for d in data]
    new = torch.stack([(w * leaf).sum() for w, leaf in zip(weights, leaves, strict=True)])
    old = torch.stack([(w * torch.tensor(r)).sum() for w, r in zip(weights, reference, strict=True)])
    margins = 0.7 * ((new - old)[0::2] - (new - old)[1::2])
    lengths = torch.stack([w.sum() for w in weights[0::2]])
    loss = -torch.nn.functional.logsigmoid(margins).mean() - 0.3 * (new[0::2] / lengths).mean()
    loss.backward()
    assert result.value == pytest.approx(loss.item())
    assert result.metrics["margin:mean"] == pytest.approx(margins.mean().item())
    for gradient, leaf in zip(result.gradients, leaves, strict=True):
        assert leaf.grad is not None
        assert gradient.tolist() == pytest.approx(leaf.grad.tolist(), rel=1e-5, abs=1e-7)


def test_advantages_are_rewards_against_their_group_and_equal_rewards_teach_nothing() -> None:
    sequences = [SampledSequence(stop_reason="stop", tokens=[7, 8], logprobs=[-1.0, -2.0]) for _ in range(4)]
    data = reinforcement.learn_from([4, 5, 6], sequences, [1.0, 0.0, 0.0, 1.0])
    assert data[0].model_input.to_ints() == [4, 5, 6, 7]
    assert data[0].loss_fn_inputs["target_tokens"].tolist() == [5, 6, 7, 8]
    assert data[0].loss_fn_inputs["logprobs"].tolist() == [0, 0, -1, -2]
    advantages = [datum.loss_fn_inputs["advantages"].tolist() for datum in data]
    np.testing.assert_allclose(advantages, [[0, 0, sign, sign] for sign in (1, -1, -1, 1)], atol=1e-3)
    for reward, number in ((0.5, 4), (0.1, 6), (0.7, 7), (-0.1, 64)):  # of some the mean is rounded
        assert reinforcement.learn_from([4], (sequences * 16)[:number], [reward] * number) == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"group_size": 1}, "group_size must be at least 2, got 1"), ({"temperature": 0}, "temperature must be above 0")],
)
def test_groups_that_teach_nothing_are_refused(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    data = tmp_path / "a.jsonl"
    data.write_text('{"prompt": "And", "answer": "s"}')
    with pytest.raises(ValueError, match=said):
        reinforcement.train(reinforcement.Settings(data=data, log_dir=tmp_path / "run", **settings), MagicMock())


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (KeyError("answer"), "gave no number: KeyError: 'answer'"),
        (None, "gave no number: TypeError"),
        (math.nan, "gave nan; it must be finite"),
    ],
)
def test_a_wrong_reward_is_an_error_with_its_name_and_the_line(found: object, said: str) -> None:
    def my_reward(_: Mapping[str, Any], __: str) -> Any:
        if isinstance(found, Exception):
            raise found
        return found

    with pytest.raises(ValueError, match=rf"^a\.jsonl, line 3: the reward .*my_reward {said}") as caught:
        reinforcement.score_of(my_reward, ({"prompt": "And"}, [1], "a.jsonl, line 3"), "so")
    if isinstance(found, Exception):
        assert caught.value.__cause__ is found


def test_a_reply_is_shown_on_one_line_below_what_was_asked_without_control_characters() -> None:
    chat = [{"role": "system", "content": "Calculate."}, {"role": "user", "content": "What is 3 + 4?"}]
    shown = reinforcement.shown_reply(20, chat, "So\n\x1b[2J7\u4e03" + "." * 1000, 0.5).splitlines()
    assert [line.split(maxsplit=1)[0] for line in shown] == ["sampled", "prompt", "reply"]
    assert shown[0].endswith("in step 20, reward 0.5")
    assert shown[1].endswith("'What is 3 + 4?'")
    assert r"'So\n\x1b[2J7" + "\u4e03..." in shown[2]
    assert len(shown[2]) < 700


def test_how_often_replies_are_shown_may_change_when_a_run_continues(tmp_path: Path) -> None:
    data = tmp_path / "a.jsonl"
    data.write_text("{}")
    settings = reinforcement.Settings(data=data, log_dir=tmp_path / "run")
    run = Run(settings)
    run.training_client(MagicMock())
    run.record(1, Done(TensorPath("tinker://a/weights/step-000001")))  # type: ignore[arg-type]
    Run(dataclasses.replace(settings, show_every=1))


def test_wrong_rewards_are_refused_with_what_is_expected() -> None:
    for name in ("nowhere:score", "json:score", "has_answer"):
        with pytest.raises(ValueError, match="must be module:function"):
            reinforcement.named_reward(name)
    assert reinforcement.named_reward("tinkerpool.recipes.reinforcement:has_answer")({"answer": 7}, "It is 7.") == 1
