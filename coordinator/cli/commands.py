"""`serve` runs a pool in this process; `up`, `down` and `logs` are for a pool in the background."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Annotated

import typer
from rich.console import Console

from coordinator.cli import process
from coordinator.cli.options import Settings
from tinkerpool.cli import show
from tinkerpool.cli.finding import DataDirOption, find_place
from tinkerpool.cli.show import CliError
from tinkerpool.credentials import credentials_file, data_dir_option
from tinkerpool.pools import credentials_of, meant_pool
from tinkerpool.serving import STAGES
from workers.contract.logs import message_in

_log = logging.getLogger(__name__)
_said = logging.getLogger("tinkerpool.serve")
PRIVATE_UMASK = 0o077
"""A pool's files can be read by its operator only: they have the training data of all tenants."""

EXAMPLE = """\
import tinkerpool
client = tinkerpool.ServiceClient().create_lora_training_client("{model}", rank=8)
tokens = client.get_tokenizer().encode("The LORD is my shepherd; I shall not want.")
datum = tinkerpool.Datum(tokens[:-1], {{"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}})
adam = tinkerpool.AdamParams(learning_rate=1e-2)
steps = [client.train_step([datum], "cross_entropy", adam) for _ in range(10)]
print([round(step.result().forward_backward.metrics["loss:sum"], 3) for step in steps])
sampler = client.save_weights_and_get_sampling_client()
prompt, params = tinkerpool.ModelInput.from_ints(tokens[:3]), tinkerpool.SamplingParams(max_tokens=12, temperature=0.0)
print(client.get_tokenizer().decode(sampler.sample(prompt, 1, params).result().sequences[0].tokens))
"""
"""A first program, for the user to paste into Python."""


def serve(settings: Settings, _arguments: Sequence[str]) -> None:
    """Run the pool until a signal stops it. Raises CliError if it cannot start, or fails.

    With JSON, everything that it says is an event of the log, also the error.
    """
    settings.pool.log.apply()
    for logger in (STAGES, _said):
        logger.setLevel(logging.INFO)  # also where others log only errors
    if settings.pool.log.format == "text":
        _serve(settings, _say)
        return
    try:
        _serve(settings, _said.info)
    except CliError as error:
        _said.error("%s", error)
        raise typer.Exit(1) from None


def _say(text: str) -> None:
    """Print a line. A closed terminal or pipe is no error: the pool runs on, or stops in order."""
    try:
        show.say(text)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _serve(settings: Settings, say: Callable[[str], None]) -> None:
    from coordinator.cli.checks import check_start

    check_start(settings)
    os.umask(PRIVATE_UMASK)
    say(_starting(settings))
    STAGES.info("loading libraries")
    from coordinator.server import Server, StartError
    from workers.pool.factory import make_pool

    try:
        asyncio.run(Server(settings.server, make_pool(settings.pool), say).run())
    except StartError as error:
        _log.debug("the pool did not start", exc_info=error)
        raise CliError(str(error)) from None
    except Exception as error:  # noqa: BLE001  # every failure ends here: logged, and shown as one sentence
        _log.error("the pool failed", exc_info=error)
        raise CliError(f"the pool failed; acknowledged operations are kept: {type(error).__name__}: {error}") from None


def up(settings: Settings, arguments: Sequence[str]) -> None:
    """Start the pool in the background, and print how to use it. Raises CliError."""
    from coordinator.cli.checks import check_start

    began_s = time.monotonic()
    check_start(settings)
    os.umask(PRIVATE_UMASK)
    show.say(_starting(settings))
    with show.console.status("Starting ...") as spinner:

        def say_stage(text: str) -> None:
            show.say(f"{time.monotonic() - began_s:6.1f} s  {text}")
            spinner.update(f"{text} ...")

        def on_line(line: str) -> None:
            if (stage := message_in(line, STAGES.name)) is not None:
                say_stage(stage)

        serving = process.start(settings.data_dir, arguments, on_line, settings.pool.start_timeout_s + 60)
        say_stage("ready")
    this_pool = data_dir_option(settings.data_dir)
    known = credentials_of(settings.data_dir)
    key = known.api_key if known is not None and sys.stdout.isatty() else f"<the key in {credentials_file()}>"
    for line in (
        f"tinkerpool is ready at {serving.url} (process {serving.pid}), serving {', '.join(serving.models)}.",
        *serving.sdk_lines(key),
        f"Its log: tinkerpool logs -f{this_pool}. Stop it: tinkerpool down{this_pool}\n",
        "Try it in Python:\n",
        *(f"    {line}" for line in EXAMPLE.format(model=serving.models[0]).splitlines()),
    ):
        show.say(line)


def _starting(settings: Settings) -> str:
    return f"Starting a pool: {settings.pool.summary} ({settings.pool.kind}); data in {settings.data_dir}"


def down(
    data_dir: DataDirOption = None,
    timeout: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="How long to wait for it.")] = 120.0,
) -> None:
    """Stop the pool on this machine: it finishes its cycle and keeps everything for the next start."""
    place = find_place(data_dir)
    with Console(stderr=True, highlight=False).status("Stopping the pool ..."):
        pid = process.stop(place.folder(), timeout)
    if pid is None:
        raise place.no_pool()
    show.say(f"Stopped (process {pid}).")
    if (other := meant_pool(falls_back=True)).note and other.credentials is not None:
        show.note(
            f"Note: another pool runs at {other.credentials.url}, on {other.credentials.data_dir}. Commands and "
            "programs that name no pool mean it until the one in use is started again."
        )


def logs(
    data_dir: DataDirOption = None,
    num_lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Number of last lines.")] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines, until Ctrl-C.")] = False,
) -> None:
    """Show the log of the pool that `tinkerpool up` started."""
    try:
        for line in process.tail(find_place(data_dir).folder(), num_lines, follow=follow):
            print(line, end="", flush=follow)
    except KeyboardInterrupt:
        pass
