"""Where the `tinkerpool` command begins and where its errors end: one sentence on stderr, exit code 1, no traceback.

Importable without the libraries of the extra `cli`, so that it can say that they are missing.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from tinkerpool.cli.errors import CliError
from tinkerpool.errors import TinkerpoolError

TRACEBACK_VARIABLE = "TINKERPOOL_TRACEBACK"
"""Set in the environment: an unexpected error shows where it came from."""


def main() -> None:
    """Run the command line of this process."""
    # Read when grpc is imported. We never fork without exec; else grpc would log a line for each process of Ray's.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    try:
        from tinkerpool.cli.app import build
    except ModuleNotFoundError as error:
        if error.name not in {"typer", "rich"}:
            raise
        _fail("the command line needs two more libraries; install them with: pip install 'tinkerpool[cli]'")
    try:
        build()(prog_name="tinkerpool")
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
            f"This is a fault of tinkerpool's; {TRACEBACK_VARIABLE}=1 in the environment shows where it is."
        )


def _fail(message: str) -> NoReturn:
    print(f"Error: {message}", file=sys.stderr)
    sys.exit(1)
