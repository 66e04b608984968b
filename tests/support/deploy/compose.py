"""What a compose file may have: the fields that ours uses, written from the Compose Specification.

A field that is not listed is a fault, so that a misspelt one is found.
"""

from __future__ import annotations

from typing import Any

import jsonschema

_TEXTS = {"type": "array", "items": {"type": "string"}}
_DURATION = {"type": "string", "pattern": r"^(\d+h)?(\d+m)?(\d+s)?$", "minLength": 2}
_SERVICE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "image": {"type": "string"},
        "build": {
            "type": "object",
            "properties": {
                "context": {"type": "string"},
                "dockerfile": {"type": "string"},
                "args": {"type": "object", "additionalProperties": {"type": "string"}},
            },
            "required": ["context"],
            "additionalProperties": False,
        },
        "command": _TEXTS,
        "init": {"type": "boolean"},
        "restart": {"enum": ["no", "always", "on-failure", "unless-stopped"]},
        "stop_grace_period": _DURATION,
        "shm_size": {"type": "string", "pattern": r"^\d+(b|k|m|g|kb|mb|gb)$"},
        "ulimits": {"type": "object", "additionalProperties": {"type": "integer"}},
        "cap_drop": _TEXTS,
        "security_opt": _TEXTS,
        "ports": {"type": "array", "items": {"type": "string", "pattern": r"^(127\.0\.0\.1:)?\d+:\d+$"}},
        "volumes": {"type": "array", "items": {"type": "string", "pattern": r"^[^:]+:/[^:]+(:ro)?$"}},
        "deploy": {
            "type": "object",
            "properties": {
                "resources": {
                    "type": "object",
                    "properties": {
                        "reservations": {
                            "type": "object",
                            "properties": {
                                "devices": {
                                    "type": "array",
                                    "items": {
                                        "type": "object",
                                        "properties": {
                                            "driver": {"type": "string"},
                                            "count": {"type": "integer", "minimum": 1},
                                            "capabilities": _TEXTS,
                                        },
                                        "required": ["capabilities"],
                                        "additionalProperties": False,
                                    },
                                }
                            },
                            "additionalProperties": False,
                        }
                    },
                    "additionalProperties": False,
                }
            },
            "additionalProperties": False,
        },
        "healthcheck": {
            "type": "object",
            "properties": {
                "test": {"type": "array", "items": {"type": "string"}, "minItems": 2},
                "interval": _DURATION,
                "timeout": _DURATION,
                "start_period": _DURATION,
            },
            "required": ["test"],
            "additionalProperties": False,
        },
    },
    "required": ["image"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "services": {"type": "object", "additionalProperties": _SERVICE},
        "volumes": {"type": "object"},
    },
    "required": ["services"],
    "additionalProperties": False,
}


def faults(text: dict[str, Any]) -> list[str]:
    """Return what is wrong with a compose file whose variables have their defaults: its fields, and its volumes."""
    validator = jsonschema.Draft202012Validator(SCHEMA)
    found = [f"{error.json_path}: {error.message}" for error in validator.iter_errors(text)]
    if found:
        return found
    mounts = [mount for service in text["services"].values() for mount in service.get("volumes", ())]
    named = {mount.partition(":")[0] for mount in mounts if not mount.startswith((".", "/", "~"))}
    return [f"{name} is not among the volumes" for name in sorted(named ^ set(text.get("volumes", ())))]


def seconds(duration: str) -> int:
    """Return a duration of a compose file in seconds: 1h2m3s."""
    total, number = 0, ""
    for character in duration:
        if character.isdecimal():
            number += character
        else:
            total, number = total + int(number) * {"h": 3600, "m": 60, "s": 1}[character], ""
    return total
