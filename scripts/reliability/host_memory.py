"""Train more adapters than a worker's memory holds, and compare their bits with those of pools without a limit.

    make host-memory                            # 1,000 adapters of rank 128 in 200 MB: half an hour, 26 GB of disk
    make host-memory ARGS="--adapters 100"

Every adapter takes two steps, in two rounds over all, so that each is installed again from its snapshot. Pools without
a limit train the same adapters, a hundred in each. Prints by how much each worker grew, and exits with 1 if a loss or a
gradient norm differs, or if the worker of the first pool grew by more than `--host-memory` and `SLACK`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.embedded_pool import EmbeddedPool, embedded_pool
from tinkerpool import AdamParams, Datum, ServiceClient

RANK = 128
AT_ONCE = 16
"""Adapters that train at a time."""
PART = 100
"""Adapters of one pool without a limit."""
SLACK = 500_000_000
"""Bytes that a worker may grow beyond its adapters: buffers of passes, of states on their way, of the allocator."""
ADAM = AdamParams(learning_rate=1e-3)


def main() -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapters", type=int, default=1000, help="default: %(default)s")
    parser.add_argument("--host-memory", type=int, default=200_000_000, help="bytes; default: %(default)s")
    args = parser.parse_args()
    numbers = range(args.adapters)
    print(f"{args.adapters} adapters of rank {RANK} in {args.host_memory / 1e6:.0f} MB:", flush=True)
    bounded, grown = train(numbers, args.host_memory)
    differing = 0
    for first in range(0, args.adapters, PART):
        part = numbers[first : first + PART]
        print(f"adapters {part.start} to {part.stop - 1} without a limit:", flush=True)
        unbounded, _ = train(part, 1 << 40)
        differing += sum(bounded[number] != unbounded[number] for number in part)
    print(f"{differing} of {args.adapters} adapters have other losses or gradient norms than without a limit")
    sys.exit(bool(differing) or grown > args.host_memory + SLACK)


def train(numbers: Sequence[int], host_bytes_max: int) -> tuple[dict[int, list[float]], int]:
    """Take two steps with each adapter on a pool of its own; return metrics by adapter, and the worker's growth."""
    found: dict[int, list[float]] = {number: [] for number in numbers}
    arguments = ["--workers", "1", "--host-memory", str(host_bytes_max), "--tenant-limit", "stored_bytes_max=1TiB"]
    with embedded_pool([*arguments, "--tenant-limit", "adapters_max=100000"]) as pool:
        before, most, began = resident_bytes(pool), 0, time.monotonic()
        with ServiceClient(pool.url, pool.create_key("alice")) as service:
            clients = {n: service.create_lora_training_client("kjv-2m", rank=RANK, seed=n) for n in numbers}
            for round_index in range(2):
                for first in range(0, len(numbers), AT_ONCE):
                    futures = []
                    for number in numbers[first : first + AT_ONCE]:
                        tokens = [(7 * number + 3 * each + round_index) % 900 + 1 for each in range(17)]
                        data = [Datum(tokens[:-1], {"target_tokens": tokens[1:]})]
                        client = clients[number]
                        futures.append(
                            (number, client.forward_backward(data, "cross_entropy"), client.optim_step(ADAM))
                        )
                    for number, forward, step in futures:
                        found[number] += [forward.result().metrics["loss:sum"], step.result().metrics["grad_norm:last"]]
                    most = max(most, resident_bytes(pool))
        grown = most - before
        seconds = time.monotonic() - began
        print(f"  {seconds:.0f} s; the worker grew from {before / 1e6:.0f} MB by {grown / 1e6:.0f} MB", flush=True)
    return found, grown


def resident_bytes(pool: EmbeddedPool) -> int:
    """Return the resident size of the pool's worker."""
    lines = Path(f"/proc/{pool.status().workers[0].pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


if __name__ == "__main__":
    main()
