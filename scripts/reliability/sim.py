"""Run the coordinator through seeded histories of crashes, power cuts, lost workers and unreliable networks.

Runs the real coordinator on an event loop in virtual time, with a disk that loses unsynced writes, and with toy engines
whose state is a hash of all operations applied, in order. Clients retry their operations and lose responses. At the end
of each history the hashes, results and checkpoints must equal those of an undisturbed run. A seed gives the same
history, event for event, in every process.

    python -m scripts.reliability.sim --seeds 20000          many histories on all cores, with a summary
    python -m scripts.reliability.sim --seed 1234            one history
    python -m scripts.reliability.sim --seed 1234 --verbose  the same, with every event
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time

from tests.simulation.runner import add_up, report, require_fixed_hashes, run_seed, run_seeds


def main() -> int:
    """Read the command line and run the histories. Return 1 if a seed failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2000, metavar="N", help="histories (default %(default)s)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the first seed (default %(default)s)")
    parser.add_argument("--seed", type=int, nargs="+", metavar="N", help="run only these seeds")
    parser.add_argument("--verbose", action="store_true", help="with --seed: print every event, and the service's log")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (default %(default)s)"
    )
    parser.add_argument(
        "--failures", type=int, default=10, metavar="N", help="stop after this many failures (default %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    require_fixed_hashes()
    if options.seed is None:
        return _many(options)
    if options.verbose:
        logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="    %(name)s: %(message)s")
    else:
        logging.disable(logging.CRITICAL)
    return max([_one(seed, verbose=options.verbose) for seed in options.seed])


def _one(seed: int, *, verbose: bool) -> int:
    result = run_seed(seed, print if verbose else None)
    print(f"seed {seed}: {result.virtual_s:.3f} s of virtual time, trace {result.digest}")
    for kind, count in sorted(result.faults.items()):
        print(f"  {count:>6,}  {kind}")
    print(f"{result.details}FAILED: {result.error}" if result.error else "no failure")
    return 1 if result.error else 0


def _many(options: argparse.Namespace) -> int:
    seeds, started = range(options.first, options.first + options.seeds), time.monotonic()
    figures = add_up(run_seeds(seeds, options.jobs, options.failures), len(seeds))
    seconds = time.monotonic() - started
    if options.json:
        failed = [{"seed": each.seed, "error": each.error} for each in figures.failed]
        print(json.dumps({"seconds": seconds, "faults": figures.faults, "work": figures.work, "failed": failed}))
    else:
        print(report(figures, seconds))
        print(f"{len(figures.failed)} FAILED" if figures.failed else "no failure")
    return 1 if figures.failed else 0


if __name__ == "__main__":
    sys.exit(main())
