"""The commands that run a pool, `serve`, `up`, `down`, `logs`, and those on its data, `backup`, `restore`, `doctor`.

`models` tells what a pool would make of a base model.

Public interface: `register`, which the `tinkerpool` command finds through an entry point. The pool's libraries are
imported only when a command needs them, so that `tinkerpool --help` is quick and works without them. `checks` refuses
a start that cannot succeed; `process` starts and stops a pool in the background.
"""

from __future__ import annotations

import typer

from coordinator.cli import commands, data, models
from coordinator.cli.options import KeepsArguments, with_options
from tinkerpool.cli.app import DATA_PANEL, RUN_PANEL

_SERVE_HELP = (
    "Run a pool in this terminal, until Ctrl-C or SIGTERM, or until the terminal closes.\n\n"
    "The first start on a data directory creates an administrator's key and writes it, with the address, to "
    "~/.tinkerpool/credentials.json, where programs on this machine find it. The pool is ready after the line "
    "'tinkerpool is ready at URL'; scripts use --ready-file."
)
_UP_HELP = (
    "Start a pool in the background, and wait until it is ready.\n\n"
    "Takes the options of 'tinkerpool serve'. Its log is serve.log in the data directory: see 'tinkerpool logs'."
)


def register(app: typer.Typer) -> None:
    """Add the commands to the `tinkerpool` command."""
    for name, run, text in (("up", commands.up, _UP_HELP), ("serve", commands.serve, _SERVE_HELP)):
        app.command(name, help=text, cls=KeepsArguments, rich_help_panel=RUN_PANEL)(with_options(run))
    app.command("down", rich_help_panel=RUN_PANEL)(commands.down)
    app.command("logs", rich_help_panel=RUN_PANEL)(commands.logs)
    app.command(help=models.MODELS_HELP, rich_help_panel=RUN_PANEL)(models.models)
    app.command(help=data.BACKUP_HELP, rich_help_panel=DATA_PANEL)(data.backup)
    app.command(help=data.RESTORE_HELP, rich_help_panel=DATA_PANEL)(data.restore)
    app.command(help=data.DOCTOR_HELP, rich_help_panel=DATA_PANEL)(data.doctor)
