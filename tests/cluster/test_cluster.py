"""A pool on a cluster whose hosts are killed and cut off: no client sees an error, and no bit changes.

Each test prints the longest pauses: of an adapter whose worker was lost, and of another one.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

import pytest

from tests.cluster.hosts import Host, has_netem, made_folder, made_hosts, problem, wait_until
from tests.cluster.pools import Clients, ClusterPool, Reference, longest_pause_s, now

PROBLEM = problem()
pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM),
]
TENANTS = ("alice", "bob", "carol", "dave")
NUM_STEPS = 10
"""Steps of each adapter before a fault, and after all are served again."""
WORKER = "ray::EngineActo"
"""The name of a worker's process, cut as the kernel does."""
NOTICE_S = 45
"""Seconds between the announcement that a host leaves and its end. A start takes 7 to 12 s, on busy cores 25."""
LEFT_PAUSE_S_MAX = 4.0
"""Longest pause when a host leaves: 2 s, and a cycle (`cycle_s_max`)."""
ENDED_S = 30.0
"""Longest time for the end of `serve` after a signal; it finishes its cycle."""
REFUSED_S = 25.0
"""Longest life of `serve` without a head: 10 s of refused connections, 5 s for Ray's end; more on busy cores."""
SERVED_TIMEOUT_S = 240.0
"""Longest pause that is waited for, to be reported."""


@pytest.fixture(scope="module")
def reference() -> Iterator[Reference]:
    with made_folder() as folder, Reference.started(folder) as reference:
        yield reference


@contextlib.contextmanager
def training(
    num_nodes: int,
    num_workers: int,
    *,
    coordinator_beside_head: bool = True,
    on_disk: bool = False,
    keep_workers: bool = False,
) -> Iterator[tuple[ClusterPool, Clients]]:
    """Run a pool on a head and nodes, with clients that have trained a while; show its log if the block fails."""
    num_hosts = 1 + num_nodes + (not coordinator_beside_head)
    with made_folder() as folder, made_hosts(num_hosts, folder) as hosts:
        coordinator = 0 if coordinator_beside_head else num_hosts - 1
        pool = ClusterPool(hosts, folder, coordinator=coordinator, on_disk=on_disk, keep_workers=keep_workers)
        try:
            pool.start_head()
            for host in hosts[1:]:
                pool.start_node(host, num_cpus=1 if host is not pool.place else 0)
            if pool.place is not pool.head:
                pool.wait_for_node(pool.place)
            pool.begin(num_workers)
            pool.wait_ready()
            clients = pool.train(TENANTS)
            clients.wait_for_steps(NUM_STEPS, 0.0, SERVED_TIMEOUT_S)
            yield pool, clients
        except BaseException:
            for log in (pool.log, *(host.folder / "log" for host in hosts)):
                if log.exists():
                    print(f"---- {log}\n{log.read_text(encoding='utf-8', errors='replace')[-8000:]}")
            raise


@dataclass
class Scenario:
    """What is done to a pool while clients train, and what they saw of it."""

    title: str
    reference: Reference
    report: Callable[[str], None]

    def run(
        self, pool: ClusterPool, clients: Clients, fault: Callable[[], None], *, hit: Sequence[Host] = ()
    ) -> dict[str, float]:
        """Cause a fault that hits some hosts, and wait until all are served; compare and report.

        Returns each tenant's longest pause, from the beginning of the fault on.
        """
        workers = pool.workers(clients)
        begin_s, at = now()
        fault()
        clients.wait_for_steps(NUM_STEPS, now()[0], SERVED_TIMEOUT_S)
        steps = clients.finish()
        for tenant, mine in steps.items():
            assert [step.loss for step in mine] == self.reference.losses(tenant, len(mine)), tenant
        of_lost = [tenant for host in hit for tenant in workers.get(host.address, ())]
        pauses_s = {tenant: longest_pause_s(mine, begin_s) for tenant, mine in steps.items()}
        lost, other = (
            max((pauses_s[tenant] for tenant in tenants), default=None)
            for tenants in (of_lost, [tenant for tenant in steps if tenant not in of_lost])
        )
        noticed, back = (pool.said(pattern, at)[:1] for pattern in (r"^worker \S+ lost", r"^worker \S+ replaced by"))
        self.report(
            f"{self.title}: longest pause {_seconds(lost)} / {_seconds(other)} (adapters of lost workers / others), "
            f"noticed after {_seconds(noticed[0][0] if noticed else None)}, "
            f"a worker back after {_seconds(back[0][0] if back else None)}; "
            f"{sum(map(len, steps.values()))} steps with the bits of an undisturbed run"
        )
        return pauses_s


@pytest.fixture
def scenario(request: pytest.FixtureRequest, reference: Reference, capsys: pytest.CaptureFixture[str]) -> Scenario:
    def report(line: str) -> None:
        with capsys.disabled():
            print(f"\n{line}")

    return Scenario(request.node.name, reference, report)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def hit_hosts(pool: ClusterPool, clients: Clients, number: int = 1) -> list[Host]:
    """Return hosts with workers, those with adapters first."""
    workers = pool.workers(clients)
    hosts = [host for host in pool.hosts if host.address in workers]
    return sorted(hosts, key=lambda host: not workers[host.address])[:number]


def test_host_killed_and_back_after_20_s(scenario: Scenario) -> None:
    with training(num_nodes=2, num_workers=2) as (pool, clients):
        [host] = hit_hosts(pool, clients)

        def fault() -> None:
            host.kill()
            time.sleep(20)
            host.boot()
            pool.start_node(host)

        scenario.run(pool, clients, fault, hit=[host])


def test_host_killed_while_another_is_free(scenario: Scenario) -> None:
    with training(num_nodes=3, num_workers=2) as (pool, clients):
        [host] = hit_hosts(pool, clients)
        scenario.run(pool, clients, host.kill, hit=[host])


def test_two_of_three_hosts_killed_at_once_and_back_after_20_s(scenario: Scenario) -> None:
    with training(num_nodes=3, num_workers=3) as (pool, clients):
        hosts = hit_hosts(pool, clients, 2)

        def fault() -> None:
            for host in hosts:
                host.kill()
            time.sleep(20)
            for host in hosts:
                host.boot()
                pool.start_node(host)

        scenario.run(pool, clients, fault, hit=hosts)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_host_that_leaves_with_a_notice_while_another_is_free(scenario: Scenario, num_workers: int) -> None:
    with training(num_nodes=num_workers + 1, num_workers=num_workers) as (pool, clients):
        [host] = hit_hosts(pool, clients)
        node_id = pool.node_id(host)

        def fault() -> None:
            end_s = now()[0] + NOTICE_S
            pool.announce_end(node_id, NOTICE_S)
            wait_until(lambda: pool.said(r"^worker \S+ is ended", datetime.min), NOTICE_S, "no worker has left")
            time.sleep(max(0.0, end_s - now()[0]))
            assert host.signal_processes(signal.SIGKILL, WORKER) == 0
            host.kill()

        pauses_s = scenario.run(pool, clients, fault, hit=[host])
        assert not pool.said(r"^worker \S+ lost", datetime.min)
        assert max(pauses_s.values()) < LEFT_PAUSE_S_MAX


def test_host_whose_ray_is_told_to_stop_hands_its_adapters_over(scenario: Scenario) -> None:
    """As by the files to deploy a pool: `ray start --block` alone gets the signal, of systemd or of a pod's end."""
    with training(num_nodes=3, num_workers=2) as (pool, clients):
        [host] = hit_hosts(pool, clients)

        def fault() -> None:
            assert host.signal_processes(signal.SIGTERM, argument="--block") == 1
            wait_until(lambda: pool.said(r"^worker \S+ is ended", datetime.min), NOTICE_S, "no worker has left")

        pauses_s = scenario.run(pool, clients, fault, hit=[host])
        assert not pool.said(r"^worker \S+ lost", datetime.min)
        assert max(pauses_s.values()) < LEFT_PAUSE_S_MAX


@pytest.mark.parametrize("cut_s", [5, 20, 60])
def test_link_cut(scenario: Scenario, cut_s: int) -> None:
    with training(num_nodes=2, num_workers=2) as (pool, clients):
        [host] = hit_hosts(pool, clients)

        def fault() -> None:
            host.set_link(is_up=False)
            time.sleep(cut_s)
            host.set_link(is_up=True)

        scenario.run(pool, clients, fault, hit=[host])
        assert "(raylet" not in pool.log.read_text(encoding="utf-8"), "what raylets report is not for people"


def test_link_that_is_slow_and_drops_packets_for_20_s_loses_no_worker(scenario: Scenario) -> None:
    if not has_netem():
        pytest.skip("this kernel has no netem, which delays and drops packets")
    with training(num_nodes=2, num_workers=2) as (pool, clients):
        [host] = hit_hosts(pool, clients)

        def fault() -> None:
            host.slow_down(delay_ms=50, loss_percent=5)
            time.sleep(20)
            host.slow_down(delay_ms=0, loss_percent=0)

        scenario.run(pool, clients, fault)
        assert not pool.said(r"^worker \S+ lost", datetime.min)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_coordinator_ended_and_started_again_loads_no_model(scenario: Scenario, signum: signal.Signals) -> None:
    """It keeps its workers at SIGTERM; at SIGKILL it cannot end them."""
    with training(num_nodes=2, num_workers=2, keep_workers=signum == signal.SIGTERM) as (pool, clients):

        def fault() -> None:
            server = pool.server
            assert server is not None
            server.send(signum)
            wait_until(lambda: server.exit_code is not None, ENDED_S, "serve does not end")
            time.sleep(1)
            pool.begin(num_workers=2)
            pool.wait_ready()

        scenario.run(pool, clients, fault, hit=pool.hosts)
        adopted = pool.said(r"^worker \S+ was left by the last coordinator and goes on as ", datetime.min)
        assert len(adopted) == 2
        assert len(pool.said(r"^loading kjv-2m ", datetime.min)) == 1, "the second start loads a model"
        assert not pool.said(r"^worker \S+ (lost|joined)", datetime.min)


def test_head_host_killed_and_back_after_30_s_with_its_store_on_disk(scenario: Scenario) -> None:
    with training(num_nodes=2, num_workers=2, coordinator_beside_head=False, on_disk=True) as (pool, clients):

        def fault() -> None:
            pool.head.kill()
            time.sleep(30)
            pool.head.boot()
            pool.start_head()

        scenario.run(pool, clients, fault)


def test_worker_killed_after_the_head_came_back_is_replaced(scenario: Scenario) -> None:
    with training(num_nodes=2, num_workers=2, coordinator_beside_head=False, on_disk=True) as (pool, clients):
        pool.head.kill()
        time.sleep(15)
        pool.head.boot()
        pool.start_head()
        [host] = hit_hosts(pool, clients)

        def fault() -> None:
            assert host.signal_processes(signal.SIGKILL, WORKER) == 1

        scenario.run(pool, clients, fault, hit=[host])


def test_serve_ends_with_one_sentence_when_the_head_is_refused_and_its_store_was_in_memory(scenario: Scenario) -> None:
    with training(num_nodes=2, num_workers=2) as (pool, clients):
        begin_s, _ = now()
        assert pool.head.signal_processes(signal.SIGKILL, "gcs_server") == 1
        ended = _ended(pool)
        sentence = f"PoolFailed: the head of Ray's cluster, {pool.address}, has refused connections for 10 s"
        assert ended == f"Error: the pool failed; acknowledged operations are kept: {sentence}"
        clients.lines()
        scenario.report(f"{scenario.title}: ended after {now()[0] - begin_s:.1f} s: {ended}")


def test_host_without_a_raylet_is_told_so_within_seconds(scenario: Scenario) -> None:
    with made_folder() as folder, made_hosts(2, folder) as hosts:
        pool = ClusterPool(hosts, folder, coordinator=1)
        pool.start_head()
        begin_s, _ = now()
        pool.begin(num_workers=1)
        ended = _ended(pool)
        assert "no raylet runs on it" in ended
        assert f"`ray start --address={pool.address}" in ended
        scenario.report(f"{scenario.title}: ended after {now()[0] - begin_s:.1f} s: {ended}")


def _ended(pool: ClusterPool) -> str:
    """Wait until `serve` ends by itself, as a failure; return its last line."""
    server = pool.server
    assert server is not None
    wait_until(lambda: server.exit_code is not None, REFUSED_S, "serve goes on")
    assert server.exit_code == 1
    return pool.log.read_text(encoding="utf-8").splitlines()[-1]
