"""Signatures of what a door gives away and takes back: download URLs, cookies. Does not depend on what they name.

The secret is in memory alone, so a restart of the coordinator makes all signatures invalid. The standard library's
`hmac` makes them: itsdangerous would put the same HMAC around one opaque token, where people and logs of a relay see no
path and no expiry.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets


class Signer:
    """Signs texts with a secret of its own, and knows its signatures again."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def sign(self, *parts: str) -> str:
        """Return the signature of these texts in this order, as hexadecimal digits."""
        return hmac.new(self._secret, "\0".join(parts).encode(), hashlib.sha256).hexdigest()

    def has_signed(self, signature: str, *parts: str) -> bool:
        """Return whether this is the signature of these texts."""
        return hmac.compare_digest(self.sign(*parts).encode(), signature.encode())
