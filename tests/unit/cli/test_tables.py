"""Lists in narrow terminals: ids and paths are never cut or wrapped, other columns make room for them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.command_line import Run
from tests.support.doors.fake_service import KEY, FakeService
from tests.support.doors.open_doors import open_door
from tinkerpool.cli import show
from tinkerpool.credentials import Credentials, write_credentials
from tinkerpool.v1.adapters_pb2 import Adapter, ListAdaptersResponse
from tinkerpool.v1.admin_pb2 import ApiKey, ListApiKeysResponse
from tinkerpool.v1.checkpoints_pb2 import Checkpoint, ListCheckpointsResponse

SESSION = "bebc5362-e9f1-4c9e-bef5-0fd693b591f8"
ADAPTERS = [
    Adapter(
        adapter_id=f"{SESSION}:train:{number}",
        name=name,
        base_model="organisation/a-model-with-a-long-name",
        rank=32,
        train_attn=True,
        train_mlp=True,
        train_unembed=True,
        next_seq=1,
    )
    for number, name in enumerate(("", "poet", "a long name for a run, with spaces " * 2, "x" * 100))
]
PATHS = [
    f"tinker://{SESSION}:train:1/{kind}/{name}" for kind in ("weights", "sampler_weights") for name in ("a", "n" * 60)
]
WIDTHS = (20, 40, 60, 80, 100, 132, 200)


@pytest.fixture
def service() -> Iterator[FakeService]:
    """A service with a list of each kind."""
    checkpoints = [Checkpoint(path=path, adapter_name="a run with a name", size_bytes=1_500_000) for path in PATHS]
    fake = FakeService(
        list_adapters=ListAdaptersResponse(adapters=ADAPTERS),
        list_checkpoints=ListCheckpointsResponse(checkpoints=checkpoints),
        list_api_keys=ListApiKeysResponse(api_keys=[ApiKey(key_id="a1b2c3d4e5f6", tenant="a-tenant-with-a-long-name")]),
    )
    with open_door(fake) as url:
        write_credentials(Credentials(url=url, api_key=KEY))
        yield fake


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("command", "whole", "kept"),
    [
        (("adapter", "list"), [adapter.adapter_id for adapter in ADAPTERS], ["adapter", "name"]),
        (("checkpoint", "list"), PATHS, ["path"]),
        (("key", "list"), ["a1b2c3d4e5f6"], ["key", "id", "tenant", "role", "state"]),
    ],
)
def test_ids_and_paths_are_whole_and_at_the_begin_of_a_line(
    run: Run,
    service: FakeService,
    monkeypatch: pytest.MonkeyPatch,
    width: int,
    command: tuple[str, ...],
    whole: list[str],
    kept: list[str],
) -> None:
    monkeypatch.setattr(show.console, "width", width)
    done = run(*command)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert [line.split()[0] for line in lines[2:] if not line.startswith(" ")] == whole
    assert [word for word in lines[1].split() if word in kept] == kept
    longest = max(map(len, whole))
    # What makes a line longer than the console is one more text of a few letters, not a column that could go.
    assert max(len(line.rstrip()) for line in lines) <= max(width, longest + 2 * (2 + show.TEXT_WIDTH_MIN) + 6)


def test_columns_are_left_out_before_an_id_or_a_name_suffers_and_a_note_names_them(
    run: Run, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "Not shown" not in run("adapter", "list").err
    monkeypatch.setattr(show.console, "width", 80)
    done = run("adapter", "list")
    header = done.out.splitlines()[1].split()
    assert header[:2] == ["adapter", "name"]
    assert "trains" not in header
    assert "Not shown in 80 columns: trains, rank, created, base model" in done.err
    assert "poet" in done.out
    assert all(len(line) <= 80 for line in done.out.splitlines())


@pytest.mark.parametrize(("columns", "width"), [("70", 70), ("", 200)])
def test_the_width_is_that_of_the_environment_if_it_names_one(columns: str, width: int) -> None:
    program = "from tinkerpool.cli import show; print(show.console.width)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"COLUMNS": columns},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{width}\n"
