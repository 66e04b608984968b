"""A pool on a cluster of hosts, its client, and the same training elsewhere, undisturbed."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import tinkerpool
from scripts.pool_process import PoolProcess
from tests.cluster.client import Training
from tests.cluster.hosts import Host, Started, wait_until
from tinkerpool.serving import READY_FILE, Serving

ROOT = Path(os.environ.get("CLUSTER_CHECKOUT") or Path(__file__).resolve().parents[2])
"""The checkout under test."""
CLIENT = Path(__file__).with_name("client.py")
PORT = 6379
RAY_CLI = (sys.executable, "-m", "ray.scripts.scripts")
RAY = (*RAY_CLI, "start", "--object-store-memory", "80000000")
SUPERVISED = 'while true; do "$@" --block; sleep 1; done'
"""Runs `ray start` again and again, as a service manager does: a raylet that was declared dead exits."""
START_TIMEOUT_S = 120.0
ENDED_S = 30.0
"""Seconds for the steps under way to end, once all are served again."""
LINE = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) \w+ \S+: (.*)$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A step that a client has seen to its end."""

    loss: str
    begin_s: float
    end_s: float


class Clients:
    """The program `client.py` on a host, and what it has printed so far."""

    def __init__(self, process: Started, log: Path, tenants: Sequence[str]) -> None:
        self.tenants = tenants
        self._process = process
        self._log = log

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of JSON: the client also prints notes, that it still waits for the pool.

        Raises AssertionError for an error that a client saw.
        """
        lines = []
        for line in self._log.read_text(encoding="utf-8").splitlines(keepends=True):
            assert "Traceback" not in line, self._log.read_text(encoding="utf-8")[-4000:]
            if line.startswith("{") and line.endswith("\n"):
                lines.append(json.loads(line))
        errors = [line for line in lines if "error" in line]
        assert not errors, f"clients saw errors: {errors}"
        return lines

    def model_ids(self) -> dict[str, str]:
        """Return the tenants whose adapters exist, by model id."""
        return {line["model_id"]: line["adapter"] for line in self.lines() if "model_id" in line}

    def steps(self) -> dict[str, list[Step]]:
        """Return the steps of each tenant's adapter, in order."""
        steps: dict[str, list[Step]] = {tenant: [] for tenant in self.tenants}
        for line in self.lines():
            if "step" in line:
                mine = steps[line["adapter"]]
                assert line["step"] == len(mine)
                mine.append(Step(loss=line["loss"], begin_s=line["begin_s"], end_s=line["end_s"]))
        return steps

    def wait_for_steps(self, number: int, since_s: float, timeout_s: float) -> None:
        """Wait until each adapter has finished `number` steps that began after a time."""
        wait_until(
            lambda: all(sum(step.begin_s > since_s for step in mine) >= number for mine in self.steps().values()),
            timeout_s,
            f"not every adapter has taken {number} more steps",
        )

    def finish(self) -> dict[str, list[Step]]:
        """End the loops; return all steps."""
        self._process.finish(ENDED_S)
        return self.steps()


class ClusterPool:
    """Ray on hosts, and `tinkerpool serve` on one of them. The first host is Ray's head, without a worker."""

    def __init__(
        self,
        hosts: Sequence[Host],
        folder: Path,
        *,
        coordinator: int = 0,
        on_disk: bool = False,
        keep_workers: bool = False,
    ) -> None:
        """`coordinator`: the number of its host. `on_disk`: the head's GCS is in RocksDB, and outlives the head."""
        self.hosts = hosts
        self.head = hosts[0]
        self.place = hosts[coordinator]
        """The host of the coordinator, and of the clients."""
        self.address = f"{self.head.address}:{PORT}"
        """Ray's."""
        self.home = folder / "home"
        self.log = folder / "serve.log"
        self.serving: Serving | None = None
        self.server: Started | None = None
        self._folder = folder
        self._keep_workers = ["--keep-workers"] if keep_workers else []
        self._num_clients = 0
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TINKERPOOL_", "RAY_"))}
        self.environment = inherited | {
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "TINKERPOOL_HOME": str(self.home),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": os.environ["RAY_AUTH_TOKEN"],
        }
        self._head_environment = dict(self.environment)
        if on_disk:
            self.environment["RAY_gcs_rpc_server_reconnect_timeout_s"] = "600"
            on_disk_too = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(folder / "gcs")}
            self._head_environment = self.environment | on_disk_too
        self.home.mkdir()

    def start_head(self) -> None:
        """Start Ray's head. Returns when it takes connections."""
        network = ["--head", "--port", str(PORT), "--node-ip-address", self.head.address]
        self.head.run([*RAY, *network, "--num-cpus", "0", "--include-dashboard=false"], self._head_environment, ROOT)

    def wait_for_node(self, host: Host) -> None:
        """Wait until Ray runs on a host that was started with `start_node`."""
        log = host.folder / "log"
        wait_until(lambda: "Ray runtime started" in log.read_text(encoding="utf-8"), 60, f"no Ray on {host.name}")

    def start_node(self, host: Host, *, num_cpus: int = 1) -> None:
        """Let a host join Ray's cluster, again and again."""
        network = ["--address", self.address, "--node-ip-address", host.address]
        command = [*RAY, *network, "--num-cpus", str(num_cpus)]
        host.start(["bash", "-c", SUPERVISED, "supervisor", *command], self.environment, ROOT)

    def begin(self, num_workers: int) -> None:
        """Start the coordinator, without waiting for it."""
        (self.home / "pool" / READY_FILE).unlink(missing_ok=True)
        options = ["--ray-address", self.address, "--workers", str(num_workers), "--threads", "1"]
        command = [sys.executable, "-m", "tinkerpool.cli", "serve", *options, *self._keep_workers]
        self.server = self.place.start(command, self.environment, ROOT, log=self.log)

    def wait_ready(self) -> None:
        """Wait until the coordinator serves."""

        def is_ready() -> bool:
            assert self.server is not None
            assert self.server.exit_code is None, self.log.read_text(encoding="utf-8")
            self.serving = Serving.read(self.home / "pool" / READY_FILE)
            return self.serving is not None

        wait_until(is_ready, START_TIMEOUT_S, "the pool is not ready")

    def command(self, *arguments: str) -> str:
        """Run a `tinkerpool` command beside the coordinator; return its output."""
        return self.place.run([sys.executable, "-m", "tinkerpool.cli", *arguments], self.environment, ROOT)

    def train(self, tenants: Sequence[str]) -> Clients:
        """Let tenants train beside the coordinator."""
        assert self.serving is not None
        keys = [self.command("key", "create", tenant).split()[0] for tenant in tenants]
        self._num_clients += 1
        log = self._folder / f"clients-{self._num_clients}.jsonl"
        pairs = [f"{tenant}={key}" for tenant, key in zip(tenants, keys, strict=True)]
        command = [sys.executable, str(CLIENT), self.serving.url, *pairs]
        return Clients(self.place.start(command, self.environment, ROOT, log=log), log, tenants)

    def workers(self, clients: Clients) -> dict[str, list[str]]:
        """Return the tenants whose adapters' last cycles ran on each worker, by the address of the worker's host."""
        status = json.loads(self.command("status", "--json"))
        host_of = {worker["worker_id"]: self._address(worker["node"]) for worker in status["workers"]}
        ids, on = clients.model_ids(), dict[str, str]()
        for cycle in status["cycles"]:
            on |= {ids[entry["adapter_id"]]: entry["worker_id"] for entry in cycle["entries"]}
        return {
            address: [tenant for tenant, worker_id in on.items() if worker_id == mine]
            for mine, address in host_of.items()
        }

    def said(self, pattern: str, since: datetime) -> list[tuple[float, str]]:
        """Return the lines in the coordinator's log that match, each with the seconds since a time."""
        found = []
        for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines():
            if (match := LINE.match(line)) and re.search(pattern, match[2]):
                at_s = (datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S,%f") - since).total_seconds()
                if at_s >= 0:
                    found.append((at_s, match[2]))
        return found

    def node_id(self, host: Host) -> str:
        """Return Ray's id of a host."""
        return next(node_id for node_id, address in self._nodes().items() if address == host.address)

    def announce_end(self, node_id: str, seconds: int) -> None:
        """Let Ray announce that a host leaves, as for a preemption."""
        reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "preempted"]
        when = ["--deadline-remaining-seconds", str(seconds)]
        command = [*RAY_CLI, "drain-node", "--address", self.address, "--node-id", node_id, *reason, *when]
        self.place.run(command, self.environment, ROOT)

    def _address(self, node: str) -> str:
        """Return a node's address, of an address or, in older commits, of an id."""
        return node if "." in node else self._nodes()[node]

    def _nodes(self) -> dict[str, str]:
        """Return the addresses of Ray's nodes, by their ids."""
        script = (
            f"import ray; ray.init('{self.address}', logging_level='ERROR', log_to_driver=False); "
            "print('NODES', *(f'{node[\"NodeID\"]}={node[\"NodeManagerAddress\"]}' for node in ray.nodes()))"
        )
        said = self.place.run([sys.executable, "-c", script], self.environment, ROOT)
        [line] = [line for line in said.splitlines() if line.startswith("NODES")]
        return dict(pair.split("=") for pair in line.split()[1:])


class Reference:
    """The same training, undisturbed: on one worker of a local pool, in the test's machine."""

    def __init__(self, folder: Path) -> None:
        self._pool = PoolProcess(folder)
        self._services: dict[str, tinkerpool.ServiceClient] = {}
        self._trainings: dict[str, Training] = {}
        self._losses: dict[str, list[str]] = {}

    def losses(self, tenant: str, number: int) -> list[str]:
        """Return the losses of a tenant's first steps."""
        if tenant not in self._trainings:
            service = tinkerpool.ServiceClient(base_url=self._pool.url, api_key=self._pool.create_key(tenant))
            self._services[tenant] = service
            self._trainings[tenant], self._losses[tenant] = Training(service, tenant), []
        losses = self._losses[tenant]
        while len(losses) < number:
            losses.append(self._trainings[tenant].step(len(losses)))
        return losses[:number]

    @classmethod
    @contextlib.contextmanager
    def started(cls, folder: Path) -> Iterator[Reference]:
        """Run the pool until the block ends."""
        reference = cls(folder)
        reference._pool.begin("--pool", "local", "--threads", "1", "--port", "0", "--no-http")
        try:
            reference._pool.wait_ready()
            yield reference
        finally:
            for service in reference._services.values():
                service.close()
            reference._pool.stop(60)


def longest_pause_s(steps: Sequence[Step], since_s: float) -> float:
    """Return the longest time between the ends of two steps, the later of them after `since_s`."""
    ends_s = [step.end_s for step in steps]
    return max(later - earlier for earlier, later in itertools.pairwise(ends_s) if later > since_s)


def now() -> tuple[float, datetime]:
    """Return the time, by the clock of steps and by that of logs."""
    return time.monotonic(), datetime.now()
