"""Run the same program with several versions of the official Tinker SDK against one pool, and print what worked.

    make sdk-versions

Each version is in a folder of its own, which a process imports before this environment's packages; the installed
version is the last one. All use one tenant, which has a checkpoint for export. The exit status is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

import tinkerpool
from scripts.clients.cookbook import serving
from scripts.clients.recipe_inputs import MODEL
from scripts.embedded_pool import EmbeddedPool

PROGRAM = Path(__file__).with_name("sdk_program.py")
CHECKS = ("train", "save_and_load", "sample", "list", "download", "correct", "large")
VERSION_S = 300
"""Seconds that the program may take with one version."""
STEPS, SHORT_STEPS = 10, 2
FAILED = "FAILED"
Found = dict[str, str]
"""What each check found; an error begins with `FAILED`. Also the version, and the seconds."""


def main() -> int:
    """Read the command line, run each version and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", nargs="*", type=Path, help="folders with a version of the SDK each")
    parser.add_argument("--short", action="store_true", help="take fewer steps")
    options = parser.parse_args()
    with serving() as pool:
        external = save_external(pool)
        num_steps = SHORT_STEPS if options.short else STEPS
        results = [run(pool, folder, external, num_steps) for folder in (*options.folders, None)]
    show(results)
    return 1 if any(text.startswith(FAILED) for found in results for text in found.values()) else 0


def save_external(pool: EmbeddedPool) -> str:
    """Save a checkpoint for export, through the pool's own client; return its path."""
    with tinkerpool.ServiceClient(base_url=pool.url, api_key=pool.admin_key) as service:
        client = service.create_lora_training_client(MODEL, rank=8, train_unembed=False)
        return client.save_weights_external("external").result().path


def run(pool: EmbeddedPool, folder: Path | None, external: str, num_steps: int) -> Found:
    """Return what the program found with the version in a folder; None: with the installed one."""
    arguments = [pool.http_url, f"tml-{pool.admin_key}", MODEL, external, str(num_steps), *CHECKS]
    begin = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", PROGRAM, *arguments],
            env=os.environ | {"PYTHONPATH": str(folder or ""), "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=VERSION_S,
            check=False,
        )
        output, error = done.stdout, done.stderr if done.returncode else ""
    except subprocess.TimeoutExpired as expired:
        output, error = str(expired.stdout or b"", "utf-8"), f"took longer than {VERSION_S} s"
    lines = [json.loads(line) for line in output.splitlines()]
    found = {line["check"]: line.get("found") or f"{FAILED}: {line['error']}" for line in lines}
    for check in CHECKS:
        found.setdefault(check, f"{FAILED}: not reached")
    found["seconds"] = f"{time.monotonic() - begin:.1f}" if not error else f"{FAILED}: {error[-2000:]}"
    return {"version": folder.name if folder is not None else "installed"} | found


def show(results: list[Found]) -> None:
    """Print a table with a column for each version, then what failed."""
    shown = Table()
    for index, heading in enumerate(["version", *(found["version"] for found in results)]):
        shown.add_column(heading, style="bold" if not index else None)
    for check in (*CHECKS, "seconds"):
        shown.add_row(check, *(FAILED if found[check].startswith(FAILED) else found[check] for found in results))
    Console(width=120).print(shown)
    for found in results:
        for check, text in found.items():
            if text.startswith(FAILED):
                print(f"{found['version']}, {check}: {text}")


if __name__ == "__main__":
    sys.exit(main())
