"""Compare the speed of two versions of the project: the new one must reach 0.98 of the old one in every case.

    python -m scripts.bench.versions OLD_DIR NEW_DIR
    python -m scripts.bench.versions OLD_DIR NEW_DIR --only engine planner --rounds 10

engine   steps of 4m: 16 x 1 x 64, 8 x 4 x 64 and 1 x 1 x 64 (tenants x sequences x tokens)
hybrid   steps of a hybrid: 8 x 1 x 64 and 1 x 1 x 1024; only by --only, because both versions must know hybrids
decode   8 tenants with 4 sequences each, in one batch
planner  a cycle's planning for 1,000 tenants with 10,000 operations, in processor time
service  a step of one and of 16 tenants, and one whose request has 4 MiB, through gRPC and Ray

Each version prepares an item in a process of its own. In every round both measure it, one after the other; the order
alternates. Rounds are short, because the speed of a machine changes. There are several pairs of processes, because
equal processes differ by some percent. A service has background work even when it is idle, so services never run at the
same time: one measures all rounds of its pair and ends, then the other. A ratio is the median over rounds of that
round's ratio of speeds, new / old.
Prints a Markdown table; --results DIR writes DIR/versions.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TypeVar

from scripts.bench.common import Column, Results, Row, Timing, shown_ratio, shown_time
from scripts.bench.versions.measure import ITEMS
from workers.contract.settings import num_cores

T = TypeVar("T")
GOAL = 0.98
DEFAULT = [item for item in ITEMS if item != "hybrid"]
ALONE = ("service",)
"""Items whose versions do not run at the same time."""


class Version:
    """A process that measures an item of one version."""

    def __init__(self, folder: Path, item: str, args: argparse.Namespace) -> None:
        # By its path: as a module it would be the version's own, which may have other cases.
        command = [sys.executable, str(Path(__file__).with_name("measure.py")), item]
        self._process = subprocess.Popen(
            [*command, "--seconds", str(args.seconds), "--threads", str(args.threads), *["--quick"] * args.quick],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if Path(found := self._line()) != folder:
            raise RuntimeError(f"{found} was measured instead of {folder}")

    def measure(self) -> dict[str, float]:
        """Return median seconds by case. Raises RuntimeError if the process has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        seconds: dict[str, float] = json.loads(self._line())
        return seconds

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a measuring process has ended; its messages are above")
        return line.strip()


def commit_of(version: Path) -> str:
    """Return the commit of a version's folder, empty outside a repository."""
    command = ["git", "-C", str(version), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def in_turn(sides: list[T], number: int) -> list[T]:
    """Return the sides in the order of this round: every second one has the reverse order."""
    return sides if number % 2 == 0 else sides[::-1]


def compare(item: str, args: argparse.Namespace) -> list[Row]:
    """Measure an item of both versions, pair by pair and round by round; return a row for each of its cases."""
    rounds: dict[str, dict[str, list[float]]] = {}
    for pair in range(args.processes):
        folders = in_turn([("old", args.old), ("new", args.new)], pair)
        for group in [[each] for each in folders] if item in ALONE else [folders]:
            with contextlib.ExitStack() as stack:
                versions = {}
                for name, folder in group:
                    versions[name] = Version(folder, item, args)
                    stack.callback(versions[name].close)
                for number in range(args.rounds):
                    for name, version in in_turn(list(versions.items()), number):
                        for case, seconds in version.measure().items():
                            rounds.setdefault(case, {"old": [], "new": []})[name].append(seconds)
    rows = []
    for case, times in rounds.items():
        old, new = Timing(tuple(times["old"])), Timing(tuple(times["new"]))
        rows.append({"case": case, "old": old.summary(), "new": new.summary(), "ratio": old.ratio_to(new)})
    return rows


def main() -> int:
    """Read the command line, measure, print. Return 2 if the new version misses the goal in a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=_folder, metavar="OLD_DIR")
    parser.add_argument("new", type=_folder, metavar="NEW_DIR")
    parser.add_argument("--rounds", type=int, default=8, help="of each pair of processes (default %(default)s)")
    parser.add_argument("--processes", type=int, default=4, help="of each version and item (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each case and round (default %(default)s)")
    parser.add_argument("--only", nargs="+", choices=ITEMS, default=DEFAULT, help="some items")
    parser.add_argument("--threads", type=int, default=num_cores(), help="of the engine (default: the cores)")
    parser.add_argument("--quick", action="store_true", help="few tenants are planned: a smoke test")
    parser.add_argument("--results", type=Path, help="folder for versions.json (default: the table is only printed)")
    args = parser.parse_args()
    with Results("versions", args) as results:
        commits = {name: commit_of(folder) for name, folder in (("old", args.old), ("new", args.new))}
        table = results.table(
            "versions",
            (
                Column("case", lambda r: r["case"]),
                Column(f"old ({commits['old']})", lambda r: shown_time(r["old"])),
                Column(f"new ({commits['new']})", lambda r: shown_time(r["new"])),
                Column("speed of new / old", lambda r: shown_ratio(r["ratio"])),
            ),
        )
        for item in args.only:
            for row in compare(item, args):
                table.add(row)
        for row in table.rows:
            results.goal(f"{row['case']}: speed of new / old", row["ratio"]["median"], at_least=GOAL, unit=" x")
    return 0 if all(goal.is_met for goal in results.goals) else 2


def _folder(text: str) -> Path:
    folder = Path(text).resolve()
    if not (folder / "coordinator").is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a folder of this project: it has no coordinator/")
    return folder


if __name__ == "__main__":
    sys.exit(main())
