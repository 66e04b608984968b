"""All commands in one application, grouped as `tinkerpool --help` shows them.

Commands that run a pool are added through the entry-point group `tinkerpool.commands`, so that this package does not
depend on theirs.
"""

from __future__ import annotations

import functools
from importlib.metadata import entry_points, version
from typing import Annotated

import typer
import typer.core
import typer.main

from tinkerpool.cli import (
    adapters,
    audit,
    checkpoints,
    history,
    keys,
    pool,
    pools,
    sessions,
    tenants,
    top,
    usage,
    workers,
)
from tinkerpool.cli.finding import OPTIONS_HELP

COMMAND_GROUP = "tinkerpool.commands"
"""Each entry point is a function that adds commands to the application."""

RUN_PANEL = "Run a pool on this machine"
POOLS_PANEL = "Choose a pool of this machine"
LOOK_PANEL = "Look into a pool"
THINGS_PANEL = "Adapters and checkpoints"
DATA_PANEL = "Back up, restore, check"
ADMIN_PANEL = "Administer"
PANELS = (RUN_PANEL, POOLS_PANEL, DATA_PANEL, LOOK_PANEL, THINGS_PANEL, ADMIN_PANEL)
"""The groups of commands, in the order of `--help`."""

HELP = "\n\n".join(
    (
        "Many users fine-tune language models on one shared pool.",
        "A pool keeps a base model warm. You train a LoRA adapter on it from an ordinary Python loop, on any machine; "
        "the pool runs the batches of all its users together, in clock cycles.",
        "[bold]Try it on this machine[/bold]",
        "  [cyan]tinkerpool up[/cyan]       start a pool in the background; it prints a first program\n"
        "  [cyan]tinkerpool watch[/cyan]    see its cycles while the program runs\n"
        "  [cyan]tinkerpool top[/cyan]      what each tenant and worker does now\n"
        "  [cyan]tinkerpool usage[/cyan]    tokens and engine time of each tenant\n"
        "  [cyan]tinkerpool down[/cyan]     stop it; everything is kept for the next [cyan]up[/cyan]",
        "[bold]Use a pool on another machine[/bold]",
        "  [cyan]export TINKERPOOL_BASE_URL=http://HOST:7600 TINKERPOOL_API_KEY=tp_...[/cyan]",
    )
)
_WIDTH = max(map(len, OPTIONS_HELP))
EPILOG = "\n\n".join(
    (
        "[bold]Which pool[/bold]",
        "Every command that calls a pool takes these options. Without them it means the pool in use: the one that was "
        "started last on this machine, or that `tinkerpool use` chose.",
        "\n".join(f"  [cyan]{option:<{_WIDTH}}[/cyan]  {text}" for option, text in OPTIONS_HELP.items()),
        "Or in the environment: TINKERPOOL_BASE_URL, TINKERPOOL_API_KEY, TINKERPOOL_CLIENT_CERTIFICATE and "
        "TINKERPOOL_CLIENT_KEY.",
    )
)


class _Grouped(typer.core.TyperGroup):
    """Lists the commands by panel."""

    def list_commands(self, ctx: object) -> list[str]:
        panels = {name: getattr(command, "rich_help_panel", None) for name, command in self.commands.items()}
        return sorted(panels, key=lambda name: PANELS.index(panels[name]) if panels[name] in PANELS else len(PANELS))


@functools.cache
def command_line() -> typer.core.TyperGroup:
    """Return the command `tinkerpool`, with the commands of the entry points."""
    app = typer.Typer(
        name="tinkerpool",
        help=HELP,
        epilog=EPILOG,
        cls=_Grouped,
        rich_markup_mode="rich",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for entry_point in sorted(entry_points(group=COMMAND_GROUP), key=lambda found: found.name):
        entry_point.load()(app)
    for command in (pools.pools, pools.use):
        app.command(rich_help_panel=POOLS_PANEL)(command)
    for command in (pool.status, top.top, pool.watch, history.why, history.history, usage.usage):
        app.command(rich_help_panel=LOOK_PANEL)(command)
    app.add_typer(
        sessions.app,
        name="session",
        help="Sessions of clients: the timeline of one.",
        rich_help_panel=LOOK_PANEL,
    )
    app.add_typer(
        adapters.app,
        name="adapter",
        help="Your adapters: list, rename, delete, prune, move.",
        rich_help_panel=THINGS_PANEL,
    )
    app.add_typer(
        checkpoints.app,
        name="checkpoint",
        help="Your checkpoints: list, save, export, import, delete.",
        rich_help_panel=THINGS_PANEL,
    )
    app.add_typer(keys.app, name="key", help="API keys: create, list, rotate, revoke.", rich_help_panel=ADMIN_PANEL)
    app.add_typer(
        tenants.app, name="tenant", help="Tenants: create, list, limit, suspend, delete.", rich_help_panel=ADMIN_PANEL
    )
    app.add_typer(workers.app, name="worker", help="Workers: list, drain, undrain.", rich_help_panel=ADMIN_PANEL)
    app.command(rich_help_panel=ADMIN_PANEL)(audit.audit)
    app.command("version", rich_help_panel=ADMIN_PANEL)(_print_version)
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    return group


def _version_and_exit(is_wanted: bool) -> None:
    if is_wanted:
        _print_version()
        raise typer.Exit


def _root(
    _is_version_wanted: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version_and_exit, is_eager=True)
    ] = False,
) -> None:
    """Take the options before any command."""


def _print_version() -> None:
    """Print the version of this installation."""
    print(f"tinkerpool {version('tinkerpool')}")
