"""A real Prometheus server scrapes a working pool, and checks the alert rules. `make prometheus` unpacks it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from scripts import generate_dashboard
from tests.support.metrics import fetch, served
from tests.support.toy_pool import running_pool

ROOT = Path(__file__).resolve().parents[3]
ALERTS = ROOT / "docs" / "alerts.yml"
PATH = ROOT / "build" / "prometheus" / "usr" / "bin"
SERVER, TOOL = (shutil.which(name) or shutil.which(name, path=str(PATH)) for name in ("prometheus", "promtool"))
pytestmark = pytest.mark.skipif(
    SERVER is None or TOOL is None, reason="Prometheus is not installed; `make prometheus` unpacks Debian's package"
)


def run_tool(*arguments: str, text: str = "") -> str:
    assert TOOL is not None
    done = subprocess.run((TOOL, *arguments), input=text, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@asynccontextmanager
async def prometheus(folder: Path, target: str) -> AsyncIterator[str]:
    """Run a server that scrapes one target each half second; yield its address."""
    assert SERVER is not None
    shutil.copy(ALERTS, folder / "alerts.yml")
    config = folder / "prometheus.yml"
    config.write_text(
        json.dumps(
            {
                "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
                "rule_files": ["alerts.yml"],
                "scrape_configs": [{"job_name": "tinkerpool", "static_configs": [{"targets": [target]}]}],
            }
        )
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = await asyncio.create_subprocess_exec(
        SERVER,
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        await server.wait()


async def ask(url: str, path: str, **parameters: str) -> Any:
    """Return the data of an answer of Prometheus's API; None while it starts."""

    def read() -> Any:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            query = urllib.parse.urlencode(parameters)
            with urllib.request.urlopen(f"{url}/api/v1/{path}?{query}", timeout=10) as response:
                return json.load(response)["data"]

    return await asyncio.to_thread(read)


async def value(url: str, query: str) -> float | None:
    """Return the value of a query with one result; None if there is none."""
    data = await ask(url, "query", query=query)
    return float(data["result"][0]["value"][1]) if data and data["result"] else None


def test_the_alert_rules_are_valid() -> None:
    assert "SUCCESS" in run_tool("check", "rules", str(ALERTS))


def test_the_queries_of_the_dashboard_are_valid(tmp_path: Path) -> None:
    panels = generate_dashboard.dashboard()["panels"]
    queries = [each["expr"] for panel in panels for each in panel.get("targets", ())]
    rules = [
        {"record": f"query:{number}", "expr": query.replace("$__rate_interval", "1m")}
        for number, query in enumerate(queries)
    ]
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"SUCCESS: {len(queries)} rules found" in run_tool("check", "rules", str(file))


async def test_the_metrics_follow_the_conventions_of_prometheus(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool, served(pool, num_tenants=3) as url:
        await pool.wait(await pool.forward_backward(await pool.adapter(), 1, 5))
        _, text = await asyncio.to_thread(fetch, url, "text/plain")
        ours = [line for line in text.splitlines(keepends=True) if "tinkerpool_" in line]
        assert run_tool("check", "metrics", text="".join(ours)) == ""


async def test_a_server_of_prometheus_scrapes_a_pool_and_knows_when_it_is_down(tmp_path: Path) -> None:
    (tmp_path / "prometheus").mkdir()
    async with running_pool(tmp_path / "pool") as pool, contextlib.AsyncExitStack() as stack:
        await pool.wait(await pool.forward_backward(await pool.adapter(), 1, 5))
        url = await stack.enter_async_context(served(pool))
        async with prometheus(tmp_path / "prometheus", urllib.parse.urlsplit(url).netloc) as server:
            await reached(server, 'tinkerpool_tokens_total{kind="forward_backward"} > 0')
            await reached(server, 'tinkerpool_workers{state="ready"} == 1')
            await reached(server, "tinkerpool_healthy == 1")
            rules = (await ask(server, "rules"))["groups"][0]["rules"]
            assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
            await stack.aclose()
            await reached(server, 'ALERTS{alertname="TinkerpoolDown"}')


async def reached(server: str, query: str) -> None:
    """Return when a query has a result. Raises TimeoutError."""
    async with asyncio.timeout(60):
        while await value(server, query) is None:  # noqa: ASYNC110  # of another process
            await asyncio.sleep(0.2)
