"""Names, labels and `adapter prune` as a person uses them: the client and the commands, with a pool."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from tests.support.command_line import Run
from tests.support.served_pool import ServedPool, restartable_pool
from tests.support.waiting import wait_until
from tinkerpool import AdamParams, ServiceClient, TrainingClient
from tinkerpool.cli import adapters
from tinkerpool.credentials import Credentials, write_credentials

DAY_S = 86_400


class Terminal(io.StringIO):
    """What a person types."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedPool]:
    """A pool that the commands find, with alice's key."""
    monkeypatch.setenv("TINKERPOOL_HOME", str(tmp_path / "home"))
    for name in ("TINKERPOOL_BASE_URL", "TINKERPOOL_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with restartable_pool(tmp_path / "data") as pool:
        write_credentials(Credentials(url=pool.url, api_key=pool.key("alice")))
        yield pool


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(monkeypatch, capsys)


@pytest.fixture
def alice(pool: ServedPool) -> Iterator[ServiceClient]:
    with pool.client("alice") as client:
        yield client


def last_used_days_ago(pool: ServedPool, client: TrainingClient, days: float) -> None:
    """Make an adapter's last use so long ago: a test cannot wait for days."""
    pool.pool.log_of(client.model_id).used_at -= days * DAY_S


def names_of(run: Run, *arguments: str) -> list[str]:
    return [each["name"] for each in json.loads(run("adapter", "list", "--json", *arguments).out)["adapters"]]


def test_a_person_names_finds_renames_and_saves_an_adapter_without_its_id(
    pool: ServedPool, alice: ServiceClient, run: Run
) -> None:
    client = alice.create_lora_training_client("toy", rank=8, name="sft 3", labels={"team": "nlp"})
    alice.create_lora_training_client("toy", rank=8, name="poet", user_metadata={"team": "rl"})
    assert client.get_info().name == "sft 3"
    assert (names_of(run, "--name", "sft"), names_of(run, "--label", "team=rl")) == (["sft 3"], ["poet"])
    assert run("adapter", "rename", "sft 3", "best").code == 0
    assert alice.get_training_client(client.model_id).get_info().name == "best"
    saved = run("checkpoint", "save", "best", "final")
    assert f"Saved tinker://{client.model_id}/weights/final: " in saved.err
    listed = run("checkpoint", "list", "--adapter", "best").out.splitlines()
    assert [line.split()[:2] for line in listed[2:]] == [[f"tinker://{client.model_id}/weights/final", "best"]]
    copy = alice.create_training_client_from_state_with_optimizer(listed[2].split()[0], name="copy")
    assert names_of(run) == ["copy", "poet", "best"]
    pool.stop()
    pool.start()
    assert names_of(run) == ["copy", "poet", "best"]
    assert run("adapter", "delete", f"{copy.model_id[:6]}:train:{copy.model_id.rpartition(':')[2]}", "-y").code == 0
    assert names_of(run) == ["poet", "best"]


def test_prune_shows_what_is_idle_asks_and_leaves_what_is_used(
    pool: ServedPool, alice: ServiceClient, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle, fresh, busy = (
        alice.create_lora_training_client("toy", rank=8, name=name, labels={"kind": "test"})
        for name in ("idle", "fresh", "busy")
    )
    labelled = alice.create_lora_training_client("toy", rank=8, name="kept", labels={"kind": "best"})
    path = idle.save_state("final").result(60).path
    for client, days in ((idle, 31), (fresh, 29), (busy, 31), (labelled, 31)):
        last_used_days_ago(pool, client, days)
    pool.pool.hold()
    step = busy.optim_step(AdamParams(learning_rate=1e-3))
    wait_until(lambda: pool.pool.log_of(busy.model_id).next_seq == 2)
    last_used_days_ago(pool, busy, 31)
    arguments = ("adapter", "prune", "--idle", "30d", "--label", "kind=test")

    refused = run(*arguments)
    assert (refused.code, "there is no terminal to ask: --yes deletes them" in refused.err) == (1, True)
    [row] = refused.out.splitlines()[2:]
    assert row.split() == [idle.model_id, "idle", "31", "days", "ago", "1"]
    assert f"Skipped {busy.model_id} (busy): it has unfinished operations." in refused.err

    pool.release()
    step.result(60)
    busy.optim_step(AdamParams(learning_rate=1e-3)).result(60)

    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    assert run(*arguments).code == 1
    assert names_of(run) == ["kept", "busy", "fresh", "idle"]

    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    done = run(*arguments)
    assert (done.code, done.err.endswith("Deleted 1 adapter.\n")) == (0, True)
    assert names_of(run) == ["kept", "busy", "fresh"]
    assert alice.create_rest_client().get_checkpoint(path).result(60).tinker_path == path
    assert "No adapter has been idle for 30d." in run(*arguments, "--yes").err


def test_prune_leaves_an_adapter_that_is_used_while_it_asks(pool: ServedPool, alice: ServiceClient, run: Run) -> None:
    first, second = (alice.create_lora_training_client("toy", rank=8, name=name) for name in ("first", "second"))
    for client in (first, second):
        last_used_days_ago(pool, client, 31)
    show_idle = adapters._show_idle  # patched: nothing else runs between the list and the deletions

    def use_first(*arguments: object) -> None:
        show_idle(*arguments)  # type: ignore[arg-type]
        first.optim_step(AdamParams(learning_rate=1e-3)).result(60)

    with mock.patch.object(adapters, "_show_idle", use_first):
        done = run("adapter", "prune", "--idle", "30d", "--yes")
    assert (done.code, done.err.endswith("Deleted 1 adapter.\n")) == (0, True)
    assert f"Skipped {first.model_id} (first): {first.model_id} has been used since" in done.err
    assert names_of(run) == ["first"]


def test_commands_show_and_touch_no_adapter_of_another_tenant(pool: ServedPool, alice: ServiceClient, run: Run) -> None:
    client = alice.create_lora_training_client("toy", rank=8, name="secret", labels={"team": "nlp"})
    last_used_days_ago(pool, client, 31)
    key = ("--url", pool.url, "--api-key", pool.key("eve"))
    assert names_of(run, *key) == names_of(run, *key, "--label", "team=nlp") == []
    for arguments in (
        ("delete", "secret", "-y"),
        ("delete", client.model_id, "-y"),
        ("rename", client.model_id, "mine"),
    ):
        assert run("adapter", *arguments, *key).code == 1
    assert "No adapter has been idle" in run("adapter", "prune", "--idle", "0s", "-y", *key).err
    assert names_of(run) == ["secret"]
