"""Where a pool on this machine leaves its address and a key, so that clients here need no arguments.

`~/.tinkerpool/credentials.json`, readable by its owner only; `TINKERPOOL_HOME` names another folder instead.
Knows neither the client nor the pool; both read and write through here.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

FILE_NAME = "credentials.json"
_KEPT_GLOB = "credentials.*.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """How to reach a pool."""

    url: str
    """`http://<host>:<port>`, or `https://` for TLS."""
    api_key: str
    """A key of that pool."""


def home() -> Path:
    """Folder of all that tinkerpool keeps for this user: `TINKERPOOL_HOME`, or else `~/.tinkerpool`."""
    return Path(os.environ.get("TINKERPOOL_HOME") or Path.home() / ".tinkerpool").expanduser()


def credentials_file() -> Path:
    """Where the credentials are, if there are any."""
    return home() / FILE_NAME


def read_credentials() -> Credentials | None:
    """What a pool on this machine left, None if none did. Raises ValueError for a file that is not of ours."""
    return _read(credentials_file())


def kept_credentials() -> Iterator[Credentials]:
    """What `read_credentials` returns, then what other pools left before; files that are not ours are passed over."""
    for path in (credentials_file(), *sorted(home().glob(_KEPT_GLOB))):
        with contextlib.suppress(ValueError):
            if (credentials := _read(path)) is not None:
                yield credentials


def _read(path: Path) -> Credentials | None:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return Credentials(url=str(fields["url"]), api_key=str(fields["api_key"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"cannot read {path}: expected a JSON object with 'url' and 'api_key'; mend or delete it"
        ) from error


def write_credentials(credentials: Credentials) -> Path:
    """Write them for this user alone; returns the file. Another key that was there is kept in a file beside it."""
    path = credentials_file()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.suppress(ValueError):
        previous = read_credentials()
        if previous is not None and previous.api_key != credentials.api_key:
            path.rename(_free_name(path))
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".credentials-")  # mode 0600
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(asdict(credentials), file, indent=2)
        file.write("\n")
    Path(temporary).rename(path)
    for kept in path.parent.glob(_KEPT_GLOB):
        with contextlib.suppress(ValueError):
            if (other := _read(kept)) is not None and other.api_key == credentials.api_key:
                kept.unlink()
    return path


def _free_name(path: Path) -> Path:
    number = 1
    while (kept := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return kept
