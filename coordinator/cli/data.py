"""`backup`, `restore` and `doctor`: commands on the data directory of a pool on this machine."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from tinkerpool.cli import show
from tinkerpool.cli.finding import DataDirOption, find_place
from tinkerpool.cli.show import CliError
from tinkerpool.credentials import start_command
from tinkerpool.serving import running_pid

if TYPE_CHECKING:
    from coordinator.runtime.backup import Progress

BACKUP_HELP = (
    "Back a pool up, while it runs or when it is stopped.\n\n"
    "Copies the database and every checkpoint and snapshot as they are at one moment, and compares their checksums. "
    "The pool goes on meanwhile. 'tinkerpool restore' makes a data directory of the backup. API keys are in it only "
    "as hashes: keep ~/.tinkerpool/credentials.json, too."
)
RESTORE_HELP = (
    "Make a new data directory of a backup.\n\n"
    "Takes what the backup's database names, verifies it, and gives it to a new pool with the same tenants, API keys, "
    "adapters and checkpoints. All sessions have ended: clients of before are refused (POOL_RESTORED), because the "
    "backup may lack operations that were acknowledged to them, and continue from a checkpoint.\n\n"
    "The source stays as it is. It may also be the data directory of a stopped pool whose database is an older copy."
)
DOCTOR_HELP = (
    "Examine a pool's data, while it runs or when it is stopped, or a backup; change nothing.\n\n"
    "Shows which pool it is, damage of the database, states whose folders are missing, folders in quarantine, rights "
    "of other users, the file system, and what a start would do. The exit code is 1 if a start would be refused or "
    "something is damaged."
)


def backup(
    target: Annotated[Path, typer.Argument(metavar="DEST", help="A new or empty folder, best on another disk.")],
    data_dir: DataDirOption = None,
) -> None:
    """Back a pool up, while it runs or when it is stopped. Raises CliError."""
    from coordinator.runtime.backup import back_up

    source = find_place(data_dir).folder()
    with _reported() as on_progress:
        made = back_up(source, target.expanduser().absolute(), on_progress)
    show.say(
        f"Backed up pool {made.identity.name} (epoch {made.identity.epoch}): {made.num_states} states, "
        f"{show.size(made.num_bytes)}, in {target}."
    )
    show.say(f"Make a data directory of it: tinkerpool restore {shlex.quote(str(target))} NEW_DATA_DIR")
    for state in made.damaged:
        show.say(f"lost in the pool: {state}")
    if made.damaged:
        raise CliError(
            f"the backup is complete, but the pool itself has lost {len(made.damaged)} of its states, as listed; an "
            "older backup may have them"
        )


def restore(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A backup, or the data directory of a stopped pool.")
    ],
    new_data_dir: Annotated[
        Path, typer.Argument(metavar="NEW_DATA_DIR", help="A new or empty folder on a disk of this machine.")
    ],
    skip_damaged: Annotated[
        bool, typer.Option("--skip-damaged", help="Leave out states that are missing or damaged, and list them.")
    ] = False,
) -> None:
    """Make a new data directory of a backup. Raises CliError."""
    from coordinator.runtime.restore import restore as make

    target = new_data_dir.expanduser().absolute()
    with _reported() as on_progress:
        made = make(source.expanduser().absolute(), target, skip_damaged=skip_damaged, on_progress=on_progress)
    show.say(
        f"Restored pool {made.source.name} (epoch {made.source.epoch}) as pool {made.identity.name}: "
        f"{made.num_states} states, {show.size(made.num_bytes)}, in {target}."
    )
    for state in made.lost:
        show.say(f"lost: {state}")
    show.say(f"Start it: {start_command(target)}")


def doctor(
    data_dir: DataDirOption = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read every state and compare its checksum.")] = False,
) -> None:
    """Examine a pool's data, or a backup; exit with 1 if there is a problem. Raises CliError."""
    from coordinator.runtime.doctor import examine

    path = find_place(data_dir).folder()
    with _reported() as on_progress:
        report = examine(path, running_pid(path), is_verified=verify, on_progress=on_progress)
    for name, fact in report.facts:
        show.say(f"{name + ':':<16}{fact}")
    for note in report.notes:
        show.say(f"note: {note}")
    for problem in report.problems:
        show.say(f"PROBLEM: {problem}")
    if report.problems:
        raise typer.Exit(1)
    show.say("No problem was found.")


@contextmanager
def _reported() -> Iterator[Progress]:
    """Yield a function that shows progress on a terminal. Raises CliError for what goes wrong in the block."""
    from coordinator.storage.identity import DataDirError

    with Console(stderr=True, highlight=False).status("Reading ...") as spinner:

        def on_progress(step: str, done: int, num_bytes: int) -> None:
            share = f" {min(100, 100 * done // num_bytes)} % of {show.size(num_bytes)}" if num_bytes else ""
            spinner.update(f"{step} ...{share}")

        try:
            yield on_progress
        except DataDirError as error:
            raise CliError(str(error)) from None
        except OSError as error:
            raise CliError(f"{error.strerror}: {error.filename}") from None
