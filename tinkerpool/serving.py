"""What a pool on this machine tells other processes: its lock, the stages of its start, and the ready file.

The lock that a coordinator holds on its data directory shows whether a pool runs there. A process id does not show it,
because another process may have the same id by now. The ready file has address, process and base models of a pool that
is ready.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from tinkerpool.credentials import Certificate

READY_FILE = "serving.json"
"""In the data directory, while the pool serves."""
LOCK_FILE = "lock"
"""In the data directory: the running coordinator holds its lock, and its content is the coordinator's process id."""
STAGES = logging.getLogger("tinkerpool.start")
"""Logs each stage of a start; `tinkerpool up` shows these lines of the pool's log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """Address, process and base models of a pool that is ready."""

    url: str
    pid: int
    data_dir: str
    models: tuple[str, ...]
    http_url: str = ""
    """Address for the Tinker SDK and OpenAI's clients; empty if there is no HTTP door."""
    certificate: Certificate | None = None
    """What clients on this machine trust, if the address is `https://`."""

    def sdk_lines(self, api_key: str) -> list[str]:
        """Return the commands that point the Tinker SDK and OpenAI's clients at this pool, if it has an HTTP door."""
        if not self.http_url:
            return []
        return [
            f"The page for browsers, with the same key: {self.http_url}/ui/",
            f"For the Tinker SDK: export TINKER_BASE_URL={self.http_url} TINKER_API_KEY=tml-{api_key}",
            f"For OpenAI's clients: export OPENAI_BASE_URL={self.http_url}/v1 OPENAI_API_KEY=tml-{api_key}",
        ]

    def write(self, path: Path) -> None:
        """Write the file atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{self.pid}")
        temporary.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")
        temporary.rename(path)

    @classmethod
    def read(cls, path: Path) -> Serving | None:
        """Read the file; None if there is none, or if it has another format."""
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            certificate = Certificate.of(fields.get("certificate"))
            return cls(**{**fields, "models": tuple(fields["models"]), "certificate": certificate})
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None


def running_pid(data_dir: Path) -> int | None:
    """Return the process id of the coordinator on a data directory; None if there is none that this user can see."""
    try:
        with (data_dir / LOCK_FILE).open(encoding="utf-8") as lock:
            import fcntl  # not on Windows, where no pool runs

            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return int(lock.read().strip() or 0) or None
    except (OSError, ValueError):
        pass
    return None


def is_stopped(data_dir: Path) -> bool:
    """Return whether no coordinator runs on a data directory of this machine; False if this user cannot see that."""
    lock = data_dir / LOCK_FILE
    is_visible = os.access(data_dir, os.R_OK | os.X_OK) and (os.access(lock, os.R_OK) or not lock.exists())
    return is_visible and running_pid(data_dir) is None
