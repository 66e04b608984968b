"""A self-signed certificate, made by the openssl command."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from scripts.attack import pool


def make_certificate(folder: Path, names: str = "DNS:localhost,IP:127.0.0.1") -> tuple[Path, Path]:
    """Return certificate and key for `names`, in PEM. Skips the test where there is no openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    return pool.make_certificate(folder, names)
