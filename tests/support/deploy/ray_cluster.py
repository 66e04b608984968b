"""What a RayCluster may have: the fields that our manifests use, written from KubeRay's documentation (1.7).

KubeRay's own schema is not in the repository. A field that is not listed here is a fault: so a misspelt one is found,
and a new one is looked up in the documentation before it is added. Pod templates are checked as pods, elsewhere.
"""

from __future__ import annotations

import re
from typing import Any

import jsonschema

_NUMBER = {"type": "integer", "minimum": 0}
_START_PARAMETERS = {"type": "object", "additionalProperties": {"type": "string"}}
"""Options of `ray start`: KubeRay takes text only."""
_SECRET_VALUE = {
    "type": "object",
    "properties": {
        "valueFrom": {
            "type": "object",
            "properties": {
                "secretKeyRef": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}, "key": {"type": "string"}},
                    "required": ["name", "key"],
                    "additionalProperties": False,
                }
            },
            "required": ["secretKeyRef"],
            "additionalProperties": False,
        }
    },
    "required": ["valueFrom"],
    "additionalProperties": False,
}
_ON_REDIS = {
    "type": "object",
    "properties": {
        "backend": {"const": "redis"},
        "redisAddress": {"type": "string", "pattern": r"^(rediss?://)?[\w.-]+:\d+$"},
        "redisUsername": _SECRET_VALUE,
        "redisPassword": _SECRET_VALUE,
        "externalStorageNamespace": {"type": "string"},
    },
    "required": ["redisAddress"],
    "additionalProperties": False,
}
_ON_ROCKSDB = {
    "type": "object",
    "properties": {
        "backend": {"const": "rocksdb"},
        "storage": {
            "type": "object",
            "properties": {
                "size": {"type": "string", "pattern": r"^\d+(Mi|Gi|Ti)$"},
                "storageClassName": {"type": "string"},
                "deletionPolicy": {"enum": ["DeleteWithCluster", "Retain"]},
            },
            "additionalProperties": False,
        },
    },
    "required": ["backend"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayCluster"},
        "metadata": {
            "type": "object",
            "properties": {"name": {"type": "string", "pattern": "^[a-z]([a-z0-9-]*[a-z0-9])?$", "maxLength": 53}},
            "required": ["name"],
        },
        "spec": {
            "type": "object",
            "properties": {
                "rayVersion": {"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
                "authOptions": {
                    "type": "object",
                    "properties": {"mode": {"enum": ["token", "disabled"]}, "secretName": {"type": "string"}},
                    "required": ["mode"],
                    "additionalProperties": False,
                },
                "gcsFaultToleranceOptions": {"oneOf": [_ON_ROCKSDB, _ON_REDIS]},
                "enableInTreeAutoscaling": {"type": "boolean"},
                "autoscalerOptions": {
                    "type": "object",
                    "properties": {
                        "version": {"enum": ["v1", "v2"]},
                        "idleTimeoutSeconds": _NUMBER,
                        "upscalingMode": {"enum": ["Default", "Aggressive", "Conservative"]},
                        "resources": {"type": "object"},
                        "securityContext": {"type": "object"},
                    },
                    "additionalProperties": False,
                },
                "headGroupSpec": {
                    "type": "object",
                    "properties": {
                        "rayStartParams": _START_PARAMETERS,
                        "serviceType": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
                        "template": {"type": "object"},
                    },
                    "required": ["rayStartParams", "template"],
                    "additionalProperties": False,
                },
                "workerGroupSpecs": {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "properties": {
                            "groupName": {"type": "string", "pattern": "^[a-z0-9]([a-z0-9-]*[a-z0-9])?$"},
                            "replicas": _NUMBER,
                            "minReplicas": _NUMBER,
                            "maxReplicas": _NUMBER,
                            "idleTimeoutSeconds": _NUMBER,
                            "rayStartParams": _START_PARAMETERS,
                            "template": {"type": "object"},
                        },
                        "required": ["groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"],
                        "additionalProperties": False,
                    },
                },
            },
            "required": ["rayVersion", "headGroupSpec", "workerGroupSpecs"],
            "additionalProperties": False,
        },
    },
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "additionalProperties": False,
}
_MANAGED = {"RAY_gcs_storage", "RAY_gcs_storage_path", "RAY_REDIS_ADDRESS", "REDIS_PASSWORD"}
"""Variables of the head that KubeRay sets itself, and refuses from others."""
_MANAGED_MOUNT = "/data/gcs"
_FIRST_WITH_TOKENS = (2, 52, 0)
_FIRST_WITH_ROCKSDB = (2, 57, 0)


def faults(cluster: dict[str, Any]) -> list[str]:
    """Return what is wrong with a RayCluster: fields, and the rules by which KubeRay's operator refuses one."""
    validator = jsonschema.Draft202012Validator(SCHEMA)
    found = [f"{error.json_path}: {error.message}" for error in validator.iter_errors(cluster)]
    return found or _refusals(cluster["spec"])


def _refusals(spec: dict[str, Any]) -> list[str]:
    """Return the rules of the operator that a specification of the right form breaks."""
    found = []
    version = tuple(map(int, re.findall(r"\d+", spec["rayVersion"])))
    if spec.get("authOptions", {}).get("mode") == "token" and version < _FIRST_WITH_TOKENS:
        found.append("tokens need Ray 2.52")
    if spec.get("gcsFaultToleranceOptions", {}).get("backend") == "rocksdb" and version < _FIRST_WITH_ROCKSDB:
        found.append("rocksdb needs Ray 2.57")
    groups = spec["workerGroupSpecs"]
    if len({group["groupName"] for group in groups}) < len(groups):
        found.append("two groups of one name")
    found += [
        f"{group['groupName']}: replicas are outside of minReplicas and maxReplicas"
        for group in groups
        if not group["minReplicas"] <= group.get("replicas", group["minReplicas"]) <= group["maxReplicas"]
    ]
    head = spec["headGroupSpec"]["template"]["spec"]
    for container in head["containers"]:
        found += [f"the head sets {each['name']}" for each in container.get("env", ()) if each["name"] in _MANAGED]
        mounts = (mount["mountPath"] for mount in container.get("volumeMounts", ()))
        found += [f"the head mounts {path}" for path in mounts if path == _MANAGED_MOUNT]
    if spec.get("autoscalerOptions", {}).get("version") == "v2":
        pods = [head, *(group["template"]["spec"] for group in groups)]
        found += ["a restartPolicy with autoscaler v2" for pod in pods if pod.get("restartPolicy", "Never") != "Never"]
    return found
