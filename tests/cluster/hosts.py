"""Hosts of a cluster on one machine: network namespaces on a bridge, each with processes and folders of its own.

A host has its own network, pids, host name, /dev/shm and /tmp/ray; all other folders are the machine's, the checkout
under test among them. Killing its first process ends all of them at once, and the network stays: like a machine whose
kernel goes on, it refuses connections. Cutting its link makes it silent. Needs root.

Main invariant: signals go only to processes inside these hosts. A host ends when its keeper, the test's process, ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

BOOT_TIMEOUT_S = 10.0
POLL_S = 0.05
FIRST_PROCESS = """
set -e
hostname "$1"
mount -t tmpfs tmpfs /dev/shm
mkdir -p /tmp/ray "$2/ray"
mount --bind "$2/ray" /tmp/ray
mount --bind "$2/hosts" /etc/hosts
touch "$2/up"
read -r _ || true
"""
"""The first process of a host, with its name and its folder. It ends with its standard input."""


def problem() -> str:
    """Return why no hosts can be made on this machine; empty if they can."""
    if os.geteuid() != 0:
        return "hosts out of network namespaces need root"
    made = subprocess.run(
        ["unshare", "--net", "--pid", "--fork", "--mount-proc", "true"], capture_output=True, text=True, check=False
    )
    return f"no namespaces can be made: {made.stderr.strip()}" if made.returncode else ""


def has_netem() -> bool:
    """Return whether this kernel can delay and drop packets."""
    command = ["unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@contextlib.contextmanager
def made_folder() -> Iterator[Path]:
    """Make a folder on the machine's disk: each host has a /dev/shm of its own, and its sockets need short paths."""
    folder = Path(tempfile.mkdtemp(prefix="tp-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Started:
    """A process that was started inside a host."""

    def __init__(self, entering: subprocess.Popen[bytes]) -> None:
        self._entering = entering
        """`nsenter`, the parent of the process; it ends with the process, with the same exit code."""
        self._pid: int | None = None

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while the process runs."""
        return self._entering.poll()

    def kill(self) -> None:
        """Kill the process, and wait for its end."""
        self.send(signal.SIGKILL)
        self._entering.wait(30)

    def send(self, signum: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(_child_of(self._entering.pid), signum)

    def finish(self, timeout_s: float) -> None:
        """Close the standard input, and wait for the end."""
        assert self._entering.stdin is not None
        self._entering.stdin.close()
        self._entering.wait(timeout_s)


class Host:
    """One host. It runs from `boot` to `kill`; its network stays from `connect` to `remove`."""

    def __init__(self, name: str, address: str, folder: Path) -> None:
        """`name` is also that of its network namespace, and of its end of the link, on this machine."""
        self.name = name
        self.address = address
        self.folder = folder
        self._init: subprocess.Popen[bytes] | None = None
        self._init_pid = 0
        self._entered: list[Started] = []

    def connect(self, bridge: str) -> None:
        """Make the network of the host, with a link to a bridge."""
        name = self.name
        self.folder.mkdir()
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{self.address} {name}\n", encoding="utf-8")
        _ip("netns", "add", name)
        _ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", name, "master", bridge)
        _ip("-n", name, "addr", "add", f"{self.address}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "link", "set", "eth0", "up")
        self.set_link(is_up=True)

    def set_link(self, *, is_up: bool) -> None:
        """Connect or cut the host's link. A cut one is silent: nothing is refused."""
        _ip("link", "set", self.name, "up" if is_up else "down")

    def slow_down(self, delay_ms: int, loss_percent: int) -> None:
        """Delay the packets on the host's link, and drop some of them, both ways. Needs `has_netem`."""
        netem = ["root", "netem", "delay", f"{delay_ms}ms", "loss", f"{loss_percent}%"]
        for command in (["tc"], ["tc", "-n", self.name]):
            device = self.name if len(command) == 1 else "eth0"
            subprocess.run([*command, "qdisc", "replace", "dev", device, *netem], check=True)

    def boot(self) -> None:
        """Start the first process."""
        assert self._init is None, f"{self.name} is up"
        up = self.folder / "up"
        up.unlink(missing_ok=True)
        namespaces = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts", "--ipc"]
        first = ["bash", "-c", FIRST_PROCESS, "init", self.name, str(self.folder)]
        self._init = subprocess.Popen(
            ["ip", "netns", "exec", self.name, *namespaces, *first], stdin=subprocess.PIPE, start_new_session=True
        )
        wait_until(up.exists, BOOT_TIMEOUT_S, f"{self.name} does not boot")
        self._init_pid = _child_of(self._init.pid)

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], cwd: Path, *, log: Path | None = None
    ) -> Started:
        """Start a process on the host, with its output behind that in `log`; its standard input is a pipe."""
        assert self._init is not None, f"{self.name} is down"
        spaces = ["--mount", "--uts", "--ipc", "--net", "--pid"]
        with (log or self.folder / "log").open("ab") as output:
            entering = subprocess.Popen(
                ["nsenter", "-t", str(self._init_pid), *spaces, f"--wdns={cwd}", "--", *arguments],
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        started = Started(entering)
        self._entered.append(started)
        return started

    def run(self, arguments: Sequence[str], environment: Mapping[str, str], cwd: Path, *, timeout_s: float = 60) -> str:
        """Run a process on the host; return its output. Raises AssertionError if it fails."""
        log = self.folder / f"run-{time.monotonic_ns()}.log"
        started = self.start(arguments, environment, cwd, log=log)
        started.finish(timeout_s)
        text = log.read_text(encoding="utf-8", errors="replace")
        assert started.exit_code == 0, f"{' '.join(arguments)} on {self.name} ended with {started.exit_code}:\n{text}"
        log.unlink()
        return text

    def signal_processes(self, signum: signal.Signals, name: str = "", argument: str = "") -> int:
        """Send a signal to the host's processes with this name or this argument; return their number."""
        mine = Path(f"/proc/{self._init_pid}/ns/pid").readlink()
        number = 0
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (folder / "ns/pid").readlink() != mine:
                    continue
                arguments = (folder / "cmdline").read_text(errors="replace").split("\0")
                if argument in arguments if argument else (folder / "comm").read_text().strip() == name:
                    os.kill(int(folder.name), signum)
                    number += 1
        return number

    def kill(self) -> None:
        """Kill all processes at once. Idempotent."""
        if self._init is None:
            return
        self._init.kill()  # the kernel kills its child, the first process of the host, with it
        self._init.wait()
        assert self._init.stdin is not None
        self._init.stdin.close()
        wait_until(lambda: not Path(f"/proc/{self._init_pid}").exists(), 30, f"{self.name} does not end")
        for started in self._entered:
            with contextlib.suppress(OSError):
                started.finish(30)
        self._entered.clear()
        self._init = None

    def remove(self) -> None:
        """Kill the host, and remove what there is of its network."""
        self.kill()
        for network in (["link", "delete", self.name], ["netns", "delete", self.name]):
            subprocess.run(["ip", *network], capture_output=True, check=False)


@contextlib.contextmanager
def made_hosts(num_hosts: int, folder: Path) -> Iterator[list[Host]]:
    """Make hosts on one bridge, running, and remove them at the end."""
    prefix = f"tp{os.getpid()}"
    bridge, hosts = f"{prefix}b", list[Host]()
    _ip("link", "add", bridge, "type", "bridge")
    try:
        _ip("link", "set", bridge, "up")
        for number in range(1, num_hosts + 1):
            hosts.append(host := Host(f"{prefix}h{number}", f"10.77.0.{number}", folder / f"host{number}"))
            host.connect(bridge)
            host.boot()
        yield hosts
    finally:
        for host in hosts:
            host.remove()
        _ip("link", "delete", bridge)


def wait_until(condition: Callable[[], object], timeout_s: float, message: str) -> None:
    """Wait until a function returns something true. Raises AssertionError after the time-out."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{message} (waited {timeout_s:g} s)"
        time.sleep(POLL_S)


def _child_of(pid: int) -> int:
    """Return the only child of a process. Raises ProcessLookupError if there is none."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    if not children:
        raise ProcessLookupError(f"{pid} has no child")
    return int(children[0])


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr.strip()}"
