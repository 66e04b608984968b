"""The entry point of the `tinkerpool` command. An error is one sentence on stderr and exit code 1, no traceback.

Importable without the libraries of the extra `cli`, so that it can report that they are missing.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from tinkerpool.errors import TinkerpoolError

TRACEBACK_VARIABLE = "TINKERPOOL_TRACEBACK"
"""If set in the environment, unexpected errors show a traceback."""


def main() -> None:
    """Run the command line of this process."""
    # Read when grpc is imported; without it, grpc logs a line for each process of Ray. No fork here is without exec.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    try:
        from tinkerpool.cli.app import command_line
        from tinkerpool.cli.show import CliError
    except ModuleNotFoundError as error:
        if error.name not in {"typer", "rich"}:
            raise
        _fail("the command line needs two more libraries; install them with: pip install 'tinkerpool[cli]'")
    try:
        command_line()(prog_name="tinkerpool")
    except (CliError, TinkerpoolError) as error:
        _fail(str(error))
    except BrokenPipeError:  # `tinkerpool ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        _fail(
            f"unexpected {type(error).__name__}: {error}\n"
            f"This is a fault in tinkerpool; {TRACEBACK_VARIABLE}=1 in the environment shows where."
        )


def _fail(message: str) -> NoReturn:
    print(f"Error: {message}", file=sys.stderr)
    sys.exit(1)
