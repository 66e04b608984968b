"""The attacker's process: runs one attack's program, told by lines on its input what to do.

    python -m scripts.attack.attacker NAME TARGET      # TARGET: JSON

Lines of input: `go`, `stop`. Lines of output: `ready` after the preparation, `finished` when the attack has sent
everything, and at the end the tally as JSON. The process ends itself above its limit of memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import queue
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from pathlib import Path

from scripts.attack.attack import Attack, Target

MEMORY_BYTES_MAX = 2 << 30
NICE = 10
"""The attacker leaves the processors to the pool, as one on another machine would."""
PREPARE_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 20.0
ROOT = Path(__file__).resolve().parents[2]
_PR_SET_PDEATHSIG = 1


class Attacker:
    """Handle on an attacker's process."""

    def __init__(self, attack: Attack, target: Target) -> None:
        facts = {name: getattr(target, name) for name in ("grpc", "http", "key", "model", "scale", "duration_s")}
        command = [sys.executable, "-m", "scripts.attack.attacker", attack.name, json.dumps(facts)]
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._seen: list[str] = []
        self._reader = threading.Thread(target=self._read, name="attacker's lines", daemon=True)
        self._reader.start()

    def wait_ready(self) -> bool:
        """Wait for the end of the preparation; return False if it failed or took too long."""
        return self._wait_for("ready", PREPARE_TIMEOUT_S)

    def go(self) -> None:
        """Begin the attack."""
        self._tell("go")

    def has_finished(self) -> bool:
        """Return whether the attack has sent everything, or its process has ended."""
        return self._wait_for("finished", 0) or self._process.poll() is not None

    def wait_finished(self, timeout_s: float) -> None:
        """Wait until the attack has sent everything, but not longer than this."""
        self._wait_for("finished", timeout_s)

    def stop(self) -> Counter[str]:
        """End the attack and its process; return the tally."""
        self._tell("stop")
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._wait_for("", 1.0)
        self._close()
        tallies = [line for line in self._seen if line.startswith("{")]
        return Counter(json.loads(tallies[-1])) if tallies else Counter({"no tally": 1})

    def kill(self) -> None:
        """`kill -9` the process."""
        self._process.kill()
        self._process.wait()
        self._close()

    def _close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # what is left to be written
            self._process.stdin.close()
        self._reader.join(STOP_TIMEOUT_S)

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # the process has ended, or was killed
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()

    def _wait_for(self, wanted: str, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while wanted not in self._seen:
            try:
                self._seen.append(self._lines.get(timeout=max(0.0, deadline - time.monotonic()) or 0.001))
            except queue.Empty:
                return False
            if self._seen[-1] == "" != wanted:
                return False
        return True

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line.strip())
        self._lines.put("")  # the process has ended


async def _run(attack: Attack, target: Target, commands: asyncio.Queue[str]) -> None:
    program = attack.program(target)
    try:
        await anext(program, None)
        _say("ready")
        if await commands.get() != "go":
            return
        target.begin()
        attacking = asyncio.ensure_future(_finish(program))
        stopping = asyncio.ensure_future(commands.get())
        await asyncio.wait((attacking, stopping), return_when=asyncio.FIRST_COMPLETED)
        if attacking.done():
            attacking.result()
            _say("finished")
            await stopping
        attacking.cancel()
        await asyncio.gather(attacking, return_exceptions=True)
    except Exception:  # noqa: BLE001  # the tally says so, and the text goes to the terminal
        traceback.print_exc()
        target.tally["the attack itself failed"] += 1
    finally:
        with contextlib.suppress(Exception):
            await program.aclose()
        _say(json.dumps(target.tally))


async def _finish(program: object) -> None:
    await anext(program, None)  # type: ignore[call-overload]


def _say(line: str) -> None:
    print(line, flush=True)


async def _main(name: str, facts: str) -> None:
    from scripts.attack.attacks import ATTACKS

    loop = asyncio.get_running_loop()
    commands: asyncio.Queue[str] = asyncio.Queue()

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(commands.put_nowait, line.strip())
        loop.call_soon_threadsafe(commands.put_nowait, "stop")

    threading.Thread(target=read, name="commands", daemon=True).start()
    await _run(ATTACKS[name], Target(**json.loads(facts)), commands)


def _watch_memory() -> None:
    while True:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        if pages * resource.getpagesize() > MEMORY_BYTES_MAX:
            _say(json.dumps({f"the attacker itself stopped at {MEMORY_BYTES_MAX >> 20} MiB": 1}))
            os._exit(1)
        time.sleep(0.05)


def main() -> None:
    """Run one attack, as the harness tells it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # never outlives the harness
    os.nice(NICE)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    threading.Thread(target=_watch_memory, name="memory", daemon=True).start()
    asyncio.run(_main(*sys.argv[1:3]))
    os._exit(0)  # without waiting for the thread that reads the input


if __name__ == "__main__":
    main()
