"""The ready file: address, process and base models of a pool that is ready, for scripts and for `tinkerpool up`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tinkerpool.credentials import Certificate

READY_FILE = "serving.json"
"""In the data directory, while the pool serves."""


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
