"""Send generated messages to every RPC and HTTP route of a pool, and show what they break: `make fuzz`.

    python -m scripts.reliability.fuzz
    python -m scripts.reliability.fuzz ForwardBackward /asample --messages 1000 --seed 7

The pool is `tinkerpool serve` in a process of its own, with the shipped model; a neighbour trains beside the
messages. Some messages are valid, some have one odd part, some are arbitrary, some are damaged; most come with a key
of a tenant. A fault is: INTERNAL or a status of 500 and more, no answer, a path or a stack in a message, an ended
process,
results of the neighbour that differ in a bit, memory above the idle size + 600 MB, an exception in the log.
Returns 1 if there was one.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from scripts.reliability.fuzz.run import Found, fuzz

LOCAL = ("--pool", "local")
TOY = ("--engine", "tests.support.toy_engine:toy_factory")


def main() -> int:
    """Read the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="NAME", help="parts of names of RPCs and routes (default: all)")
    parser.add_argument("--messages", type=int, default=10_000, metavar="N", help="for each (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(default %(default)s)")
    parser.add_argument("--toy", action="store_true", help="engines without a model: faster")
    args = parser.parse_args()
    serve_arguments = LOCAL + TOY if args.toy else LOCAL
    report = asyncio.run(fuzz(args.targets, args.messages, args.seed, serve_arguments, _show))
    num_messages = sum(sum(each.answers.values()) + each.num_faults for each in report.found)
    print(
        f"{num_messages} messages to {len(report.found)} RPCs and routes; the pool had {report.idle_bytes >> 20} MiB "
        f"before and at most {report.most_bytes >> 20} MiB; the neighbour's training was repeated "
        f"{report.num_runs_of_neighbour} times"
    )
    for fault in report.general:
        print(f"FAULT: {fault}")
    print("no fault" if report.is_clean else f"faults: {sum(each.num_faults for each in report.found)}")
    return 0 if report.is_clean else 1


def _show(found: Found) -> None:
    answers = ", ".join(f"{number} {answer}" for answer, number in found.answers.most_common())
    print(f"{found.target}: {answers} ({found.seconds:.0f} s)", flush=True)
    for fault in found.faults:
        print(f"  FAULT {fault}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
