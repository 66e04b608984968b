"""Parts of the recipes that need no pool: options, folders, tables, losses and advantages."""

import dataclasses
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from tinkerpool.client.training.custom_loss import evaluate_numpy
from tinkerpool.data import shift
from tinkerpool.recipes import dpo, reinforcement, supervised
from tinkerpool.recipes.options import parse
from tinkerpool.recipes.progress import Progress
from tinkerpool.recipes.run import Run
from tinkerpool.types import ForwardBackwardOutput, SampledSequence, TensorData

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


def test_the_table_gets_a_header_whenever_there_is_a_new_metric(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(0, 20) as progress:
        progress.report(1, {"loss": 2.0})
        progress.report(2, {"loss": 1.0, "test_loss": 1.23456})
        progress.report(3, {"loss": 0.5})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["step", "loss"],
        ["1/20", "2"],
        ["step", "loss", "test_loss"],
        ["2/20", "1", "1.235"],
        ["3/20", "0.5"],
    ]


def test_at_a_terminal_rows_are_printed_above_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with Progress(0, 2) as progress:
        progress.report(1, {"loss": 2.0})
        progress.say("[saved]")
    shown = capsys.readouterr().out
    assert "training" in shown
    assert "1/2" in shown
    assert "[saved]" in shown


def test_metrics_go_to_a_callback_instead_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    seen = []
    with Progress(0, 2, lambda step, metrics: seen.append((step, dict(metrics)))) as progress:
        progress.report(1, {"loss": 2.0})
    assert seen == [(1, {"loss": 2.0})]
    assert not capsys.readouterr().out


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
    assert reinforcement.learn_from([4], sequences, [0.5] * 4) == []


def test_wrong_rewards_are_refused_with_what_is_expected() -> None:
    for name in ("nowhere:score", "json:score", "has_answer"):
        with pytest.raises(ValueError, match="must be module:function"):
            reinforcement.named_reward(name)
    assert reinforcement.named_reward("tinkerpool.recipes.reinforcement:has_answer")({"answer": 7}, "It is 7.") == 1
