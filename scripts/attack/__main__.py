"""Attack a pool and report what its neighbour and its coordinator suffer: `make attack`.

    python -m scripts.attack --list
    python -m scripts.attack saves loads --json figures.json
    python -m scripts.attack --scale 0.1

Each attack gets a pool of its own: `tinkerpool serve` with one worker in Ray, and both doors. A neighbour works alone
first, then beside the attack. Everything is on the loopback; an attack stops when the coordinator has 4 GiB.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from scripts.attack.attacks import ATTACKS
from scripts.attack.report import Figures, comparison, details, table
from scripts.attack.run import Plan, run_attacks
from scripts.terminal import interrupt_at_sigterm


def main() -> int:
    """Read the command line, attack and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help="default: all of them")
    parser.add_argument("--list", action="store_true", help="print the attacks and exit")
    parser.add_argument("--scale", type=float, default=1.0, help="size of the attacks and their times (default 1)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file, after each attack")
    parser.add_argument(
        "--compare",
        type=Path,
        nargs=2,
        metavar=("BEFORE", "AFTER"),
        help="print a table of the figures in two files, and exit",
    )
    args = parser.parse_args()
    if args.compare:
        print("\n".join(comparison(*(_read(file) for file in args.compare))))
        return 0
    if args.list:
        for attack in ATTACKS.values():
            print(f"{attack.name:18} {attack.by:11} {attack.text}")
        return 0
    if unknown := [name for name in args.attacks if name not in ATTACKS]:
        parser.error(f"{', '.join(unknown)}: not an attack; --list prints all of them")
    if not 0 < args.scale <= 1:
        parser.error("--scale must be above 0 and at most 1")
    interrupt_at_sigterm()
    seconds = max(10.0 * args.scale, 2.0)
    plan = Plan(scale=args.scale, solo_s=seconds, attack_s=seconds)
    done: list[Figures] = []
    for name in args.attacks or ATTACKS:
        print(f"{name}: {ATTACKS[name].text}", flush=True)
        done += run_attacks([ATTACKS[name]], plan)
        print("\n".join([*table(done[-1:]), *details(done[-1])]), flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps([asdict(each) for each in done], indent=1) + "\n", encoding="utf-8")
    print("\n" + "\n".join(table(done)))
    return 0


def _read(file: Path) -> dict[str, Figures]:
    """Return the figures in a file, by the name of the attack."""
    found = (Figures(**each) for each in json.loads(file.read_text(encoding="utf-8")))
    return {figures.attack: figures for figures in found}


if __name__ == "__main__":
    sys.exit(main())
