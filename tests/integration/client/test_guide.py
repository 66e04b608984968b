"""The pages of the guide, as a reader runs them, with the shipped model on one pool; and what their tables say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.pages import ROOT, run_page
from tests.support.served_pool import ServedPool
from tinkerpool import Datum
from workers.contract.loss_inputs import LOSS_RULES

PAGES = (
    "docs/index.md",
    "docs/concepts.md",
    "docs/losses.md",
    "docs/tuning.md",
    "docs/checkpoints.md",
    "docs/grpc.md",
    "docs/sampling.md",
    "docs/async.md",
)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_programs_of_a_page_run(
    pool: ServedPool, page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TINKERPOOL_BASE_URL", pool.url)
    monkeypatch.setenv("TINKERPOOL_API_KEY", pool.key(Path(page).stem))
    names = run_page(page)
    if "service" in names:
        names["service"].close()


def test_the_table_of_losses_has_every_loss_with_its_inputs_and_options() -> None:
    text = (ROOT / "docs" / "losses.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    table = {row[0].strip("`"): row[2:] for row in rows if row[0].strip("`") in LOSS_RULES and len(row) == 5}

    def names(cell: str) -> set[str]:
        return set(re.findall(r"`(\w+)`", cell))

    assert list(table) == list(LOSS_RULES)
    for name, (required, optional, options) in table.items():
        rule = LOSS_RULES[name]
        assert names(required) == rule.required
        assert names(optional) == rule.optional | rule.filled.keys()
        assert {option: float(value) for option, value in re.findall(r"`(\w+)` ([\d.]+)", options)} == rule.options


@pytest.mark.slow
def test_the_tables_of_metrics_have_every_metric_of_a_pass_and_of_a_step_and_no_other(pool: ServedPool) -> None:
    def table(page: str, heading: str) -> set[str]:
        _, _, section = (ROOT / page).read_text(encoding="utf-8").partition(f"\n## {heading}\n")
        return set(re.findall(r"^\| `(\w+:\w+)` \|", section.partition("\n## ")[0], flags=re.MULTILINE))

    inputs = {"target_tokens": [2, 3], "logprobs": [-1.0, -1.0], "advantages": [1.0, 1.0]}
    with pool.client("metrics") as service:
        client = service.create_lora_training_client(rank=8)
        result = client.train_step([Datum([1, 2], inputs)], "ppo").result()
    assert table("docs/tuning.md", "Metrics") == result.optim_step.metrics.keys()
    assert table("docs/losses.md", "What comes back") == result.forward_backward.metrics.keys()
