"""Arguments of the Tinker SDK that mean nothing in a pool of one's own: accepted at their defaults, else refused.

So a program for the SDK runs unchanged where it leaves them out, and learns what to do instead where it does not.
"""

from __future__ import annotations

from typing import Any

INSTEAD = {
    "access_scope": "a key sees what its own tenant has: leave it out, or pass 'owned'",
    "age_encryption_recipients": "encrypt the files that export_checkpoint writes",
    "destination_project_id": "a pool has tenants instead of projects: a copy belongs to the tenant of the key",
    "optimizer": "every adapter trains with AdamW: pass AdamParams to optim_step",
    "project_id": "a pool has tenants instead of projects: a listing has all that the tenant of the key has",
    "retry_config": "ServiceClient(retry_timeout_s=...) says for how long calls are tried again, samples among them",
    "weights_access_token": "publish the checkpoint, or use a key of its tenant",
}
"""What to do instead, by argument."""
_DEFAULTS = (None, False, "owned")


def refuse(**given: Any) -> None:
    """Raise ValueError for an argument that does not have its default."""
    for name, value in given.items():
        if value not in _DEFAULTS:
            raise ValueError(f"{name} is not supported here: {INSTEAD[name]}")
