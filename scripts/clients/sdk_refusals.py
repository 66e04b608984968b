"""Try what the official Tinker SDK does when a call of it is refused, with each status that a pool may choose.

    .venv/bin/python -m scripts.clients.sdk_refusals
    .venv/bin/python -m scripts.clients.sdk_refusals --status 403 429 --call forward_backward

A proxy stands between the SDK and a real pool, and refuses one path. Each case is tried twice: refused for 3 seconds,
then served; and refused for as long as the case is watched. Prints a Markdown table: whether the call succeeded once
it was served, and what the program saw, or how often the SDK had tried, while it was not.
"""

from __future__ import annotations

import argparse
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

os.environ["TINKER_TELEMETRY"] = "0"

import httpx
import tinker
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from scripts.clients.cookbook import serving
from scripts.clients.recipe_inputs import MODEL
from scripts.clients.steps import TOKENS, WEIGHTS

STATUSES = (402, 403, 409, 429, 503)
WITH_DELAY = (429, 503)
"""Statuses that are sent with the delay that a pool asks for."""
BRIEF_S = 3.0
START_S = 20.0
AT_ONCE = 15
HOP_BY_HOP = {"host", "content-length", "connection", "transfer-encoding", "content-encoding"}


@dataclass
class Case:
    """One call of the SDK, refused with one status."""

    name: str
    status: int
    refused_s: float
    """How long the path is refused, from its first request on."""
    begin: float | None = None
    is_on: bool = False
    times: list[float] = field(default_factory=list)
    """Of the refused requests, from the first one on."""

    def is_refused(self, path: str) -> bool:
        """Return whether to refuse a request to this path now, and count it."""
        if not self.is_on or not path.endswith(PATHS[self.name]):
            return False
        now = time.monotonic()
        self.begin = self.begin or now
        if now - self.begin > self.refused_s:
            return False
        self.times.append(now - self.begin)
        return True


def _datum() -> tinker.Datum:
    inputs = {"target_tokens": TOKENS[1:], "weights": WEIGHTS}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=inputs)  # type: ignore[arg-type]


def _prepared(service: tinker.ServiceClient, case: Case) -> Callable[[float], object]:
    """Prepare what a call needs; return the call."""
    if case.name == "create_session":
        return lambda wait_s: service.create_lora_training_client(MODEL, rank=8).result(wait_s)
    client = service.create_lora_training_client(MODEL, rank=8).result(START_S)
    saved = client.save_state("saved").result(START_S).path

    def sample(sampler: tinker.SamplingClient, wait_s: float) -> object:
        prompt, params = tinker.ModelInput.from_ints(TOKENS), tinker.SamplingParams(max_tokens=2, seed=1)
        return sampler.sample(prompt, 1, params).result(wait_s)

    sampler = service.create_sampling_client(base_model=MODEL)
    sample(sampler, START_S)
    calls: dict[str, Callable[[float], object]] = {
        "create_model": lambda wait_s: service.create_lora_training_client(MODEL, rank=8).result(wait_s),
        "forward_backward": lambda wait_s: client.forward_backward([_datum()], "cross_entropy").result(wait_s),
        "optim_step": lambda wait_s: client.optim_step(tinker.AdamParams()).result(wait_s),
        "save_weights": lambda wait_s: client.save_state("more").result(wait_s),
        "load_weights": lambda wait_s: client.load_state(saved).result(wait_s),
        "retrieve_future": lambda wait_s: client.optim_step(tinker.AdamParams()).result(wait_s),
        "asample": lambda wait_s: sample(sampler, wait_s),
        "create_sampling_session": lambda wait_s: sample(service.create_sampling_client(base_model=MODEL), wait_s),
        "checkpoints": lambda wait_s: service.create_rest_client().list_user_checkpoints().result(wait_s),
    }
    return calls[case.name]


PATHS = {
    name: f"/{name}"
    for name in (
        "create_session",
        "create_model",
        "forward_backward",
        "optim_step",
        "save_weights",
        "load_weights",
        "retrieve_future",
        "asample",
        "create_sampling_session",
        "checkpoints",
    )
}
"""The end of the path that each case refuses."""


@contextmanager
def proxy(cases: Sequence[Case], upstream: str) -> Iterator[str]:
    """Serve every case below `/<its number>`; yield the URL."""
    http = httpx.AsyncClient(base_url=upstream, timeout=120)

    async def forward(request: Request) -> Response:
        case, path = cases[int(request.path_params["case"])], f"/{request.path_params['path']}"
        body = await request.body()
        if case.is_refused(path):
            headers = {"retry-after": "1", "retry-after-ms": "1000"} if case.status in WITH_DELAY else {}
            return JSONResponse({"detail": "refused in a trial", "reason": "TRIAL"}, case.status, headers)
        headers = {name: value for name, value in request.headers.items() if name not in HOP_BY_HOP}
        if "content-encoding" in request.headers:
            headers["content-encoding"] = request.headers["content-encoding"]
        reply = await http.request(request.method, path, params=request.query_params, content=body, headers=headers)
        kept = {name: value for name, value in reply.headers.items() if name not in HOP_BY_HOP}
        return Response(reply.content, reply.status_code, kept)

    app = Starlette(routes=[Route("/{case:int}/{path:path}", forward, methods=["GET", "POST", "PUT", "DELETE"])])
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + START_S
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        server.force_exit = True
        thread.join(START_S)


def try_case(case: Case, url: str, key: str, watch_s: float) -> str:
    """Return what the call did."""
    service = tinker.ServiceClient(base_url=url, api_key=f"tml-{key}")
    call = _prepared(service, case)
    outcome: list[str] = []

    def run() -> None:
        begin = time.monotonic()
        try:
            call(10 * watch_s)
            outcome.append("served")
        except BaseException as error:  # noqa: BLE001  # what a program sees is the result
            outcome.append(f"{type(error).__name__} after {time.monotonic() - begin:.0f} s")

    case.is_on = True
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(watch_s)
    tries = len(case.times)
    if outcome:
        return f"{outcome[0]}, {tries} refused"
    pause = max((after - before for before, after in itertools.pairwise(case.times)), default=0.0)
    return f"still trying: {tries} refused, pauses up to {pause:.0f} s"


def main() -> int:
    """Read the command line, try and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--status", type=int, nargs="+", default=STATUSES, choices=STATUSES)
    parser.add_argument("--call", nargs="+", default=tuple(PATHS), choices=tuple(PATHS), metavar="CALL")
    parser.add_argument("--seconds", type=float, default=45.0, metavar="S", help="watched (default %(default)s)")
    args = parser.parse_args()
    pairs = list(itertools.product(args.call, args.status))
    cases = [Case(name, status, refused_s) for name, status in pairs for refused_s in (BRIEF_S, args.seconds * 20)]
    with serving() as pool, proxy(cases, pool.http_url) as url, ThreadPoolExecutor(AT_ONCE) as threads:
        trials = [
            threads.submit(try_case, case, f"{url}/{number}", pool.admin_key, args.seconds)
            for number, case in enumerate(cases)
        ]
        results = [
            trial.result() if not trial.exception() else f"trial failed: {trial.exception()!r}" for trial in trials
        ]
    print("| call | status | refused for 3 s | refused for good |\n|---|---|---|---|")
    for index, (name, status) in enumerate(pairs):
        print(f"| `{name}` | {status} | {results[2 * index]} | {results[2 * index + 1]} |")
    os._exit(0)  # without waiting for calls that the SDK repeats for ever


if __name__ == "__main__":
    raise SystemExit(main())
