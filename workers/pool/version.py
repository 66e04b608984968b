"""The code that a process runs, as text: equal texts, equal code.

Covers tinkerpool's own sources and the libraries that compute. Knows nothing of workers or hardware.
"""

from __future__ import annotations

import functools
import hashlib
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("coordinator", "tinkerpool", "workers")
LIBRARIES = ("torch", "transformers", "ray")


@functools.cache
def running_version() -> str:
    """Return tinkerpool's version with a digest of its sources, and the libraries' versions.

    The first call in a process counts: call it before files may be replaced.
    """
    libraries = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    return f"tinkerpool {version('tinkerpool')} (sources {_digest()[:12]}), {libraries}"


def _digest() -> str:
    """Return the SHA-256 over paths and contents of the packages' Python files, as they are on disk."""
    sha = hashlib.sha256()
    for package in PACKAGES:
        spec = find_spec(package)
        for folder in map(Path, (spec.submodule_search_locations if spec is not None else None) or ()):
            for path in sorted(folder.rglob("*.py")):
                sha.update(f"{package}/{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
                sha.update(path.read_bytes())
    return sha.hexdigest()
