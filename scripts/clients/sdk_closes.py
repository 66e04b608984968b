"""Count the clients of the official Tinker SDK whose `close` never ends, with each of its two HTTP transports.

    .venv/bin/python -m scripts.clients.sdk_closes

Three processes at a time make client after client on a pool: each draws 60 samples and closes. A close that has not
ended after 15 s counts as hung, and ends its process. The pool tells the SDK to use httpx; here that is overruled.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import os
import time
from typing import Any

import tinker
from tinker.lib.internal_client_holder import InternalClientHolder

from scripts.clients.cookbook import serving
from scripts.clients.recipe_inputs import MODEL

PROCESSES = 3
SAMPLES = 60
HUNG_S = 15.0


def use_transport(name: str) -> None:
    """Let the SDK in this process use httpx or pyqwest, whatever a pool tells it."""
    holder_type: Any = InternalClientHolder
    fetch = holder_type._fetch_client_config  # private: the SDK has no option

    async def overruled(holder: InternalClientHolder, *args: Any) -> Any:
        config = await fetch(holder, *args)
        return config.model_copy(update={"use_pyqwest_transport": name == "pyqwest"})

    holder_type._fetch_client_config = overruled


def close_clients(transport: str, url: str, key: str, seconds: float, counts: Any) -> None:
    """Put the numbers of clients and of hung ones into a queue after `seconds`, or at the first hung one."""
    use_transport(transport)
    num_clients, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        service = tinker.ServiceClient(base_url=url, api_key=f"tml-{key}")
        sampler: Any = service.create_sampling_client(base_model=MODEL)
        sampler = sampler.result() if hasattr(sampler, "result") else sampler
        prompt, params = tinker.ModelInput.from_ints([1, 2, 3]), tinker.SamplingParams(max_tokens=3, seed=1)
        for future in [sampler.sample(prompt, 1, params) for _ in range(SAMPLES)]:
            future.result()
        num_clients += 1
        try:
            service.close("success").result(HUNG_S)
        except (TimeoutError, concurrent.futures.TimeoutError):
            counts.put((num_clients, 1))
            break
    else:
        counts.put((num_clients, 0))
    counts.close()
    counts.join_thread()
    os._exit(0)  # a hung client would keep the process


def main() -> int:
    """Read the command line, count and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=120.0, help="for each transport (default %(default)s)")
    seconds = parser.parse_args().seconds
    context = multiprocessing.get_context("spawn")
    with serving() as pool:
        for transport in ("httpx", "pyqwest"):
            counts = context.Queue()
            arguments = (transport, pool.http_url, pool.admin_key, seconds, counts)
            processes = [context.Process(target=close_clients, args=arguments) for _ in range(PROCESSES)]
            for process in processes:
                process.start()
            found = [counts.get() for _ in processes]
            for process in processes:
                process.join()
            num_clients, num_hung = (sum(each) for each in zip(*found, strict=True))
            print(f"{transport}: {num_hung} of {num_clients} clients hung", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
