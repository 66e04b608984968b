"""Build the programs in other languages, run them at a real pool that restarts under them, and compare what they print.

    make clients
    make clients ARGS=--short      # Node and Go, as CI does
    make clients ARGS="java ruby"

Installs what is missing, as root, and says what. Each language checks the vectors of the wire format. Then all go
through the scenario, in plaintext at a pool that is killed, and with TLS at another that is stopped, at the same time.
Standard outputs are compared with that of the scenario in Python, line for line: losses, log-probabilities, gradient
norms and samples as bits, checkpoints by their hashes. The exit status is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import difflib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.table import Table

from scripts.clients.languages import runs
from scripts.clients.languages.runs import Run
from scripts.clients.languages.toolchains import (
    LANGUAGES,
    PYTHON,
    SHORT,
    Language,
    ToolchainError,
    build,
    check_vectors,
    install,
)
from scripts.pool_process import PoolEnded

MODES = {"plaintext, killed": (False, True), "TLS, stopped": (True, False)}
"""Names of the table's columns: whether the pool has TLS, and whether it is killed."""
DIFFERENT_LINES = 20


def main() -> int:
    """Read the command line, build, run, compare and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [language.name for language in LANGUAGES]
    parser.add_argument("languages", nargs="*", metavar="LANGUAGE", help=f"only these of {', '.join(names)}")
    parser.add_argument("--short", action="store_true", help=f"only {' and '.join(SHORT)}")
    options = parser.parse_args()
    chosen = set(options.languages or (SHORT if options.short else names))
    if unknown := chosen.difference(names):
        parser.error(f"no such language: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    languages = [language for language in LANGUAGES if language.name in chosen]
    try:
        seconds = prepared(languages)
        with tempfile.TemporaryDirectory(prefix="tinkerpool-") as folder:
            results = run_all([PYTHON, *languages], Path(folder))
    except (ToolchainError, PoolEnded, subprocess.TimeoutExpired) as error:
        print(error, file=sys.stderr)
        return 1
    return report([PYTHON, *languages], seconds, results)


def prepared(languages: Sequence[Language]) -> dict[str, float]:
    """Install, build and check vectors; return the seconds that each language took. Raises ToolchainError."""
    install(languages)
    seconds = {}
    for language in languages:
        begin = time.monotonic()
        build(language)
        check_vectors(language)
        seconds[language.name] = time.monotonic() - begin
        print(f"built {language.name}, and checked vectors with it, in {seconds[language.name]:.0f} s", flush=True)
    return seconds


def run_all(languages: Sequence[Language], folder: Path) -> dict[str, list[Run]]:
    """Return what the programs did in each mode. Modes run side by side: most of their time is delays of the pools."""
    with ThreadPoolExecutor() as threads:
        started = {
            mode: threads.submit(runs.run, languages, folder / f"run{number}", is_tls=is_tls, is_killed=is_killed)
            for number, (mode, (is_tls, is_killed)) in enumerate(MODES.items())
        }
        return {mode: ran.result() for mode, ran in started.items()}


def report(languages: Sequence[Language], seconds: dict[str, float], results: dict[str, list[Run]]) -> int:
    """Print a table and what went wrong; return the exit status."""
    wanted = results[next(iter(MODES))][0].output
    table = Table("language", "gRPC", "built in", *MODES)
    faults: list[str] = []
    for index, language in enumerate(languages):
        took = f"{seconds[language.name]:.0f} s" if language.name in seconds else "-"
        cells = []
        for mode, ran in results.items():
            found = ran[index]
            fault = found.fault or difference(wanted, found.output)
            num_repeats = sum(line.endswith(" s") and "; again in " in line for line in found.errors.splitlines())
            cells.append("FAILED" if fault else f"{len(found.output.splitlines())} lines, {num_repeats} repeats")
            if fault:
                faults.append(f"{language.name}, {mode}: {fault}\n{indented(found.errors[-2000:])}")
        table.add_row(language.name, language.library(language.folder), took, *cells)
    Console(width=120).print(table)
    print(*faults, sep="\n", end="\n" if faults else "")
    print(f"{len(languages) * len(MODES) - len(faults)} passed, {len(faults)} failed")
    return 1 if faults else 0


def difference(wanted: str, found: str) -> str:
    """Return how an output differs from Python's in plaintext; empty: not at all."""
    lines = list(difflib.unified_diff(wanted.splitlines(), found.splitlines(), "python", "found", lineterm="", n=0))
    if not lines:
        return ""
    return "\n".join(["it printed something else than Python:", *lines[:DIFFERENT_LINES]])


def indented(text: str) -> str:
    """Return text as lines that begin with spaces."""
    return "\n".join(f"    {line}" for line in text.splitlines())


if __name__ == "__main__":
    sys.exit(main())
