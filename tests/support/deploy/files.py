"""The files of scripts/deploy as they are parsed, and the little of kustomize that they use."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "scripts" / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
BASE = KUBERNETES / "base"
OVERLAYS = sorted((KUBERNETES / "overlays").iterdir())
COMPONENTS = sorted((KUBERNETES / "components").iterdir())
LISTS = ("resources", "components")
"""Fields of a kustomization that name files or folders."""


def documents(path: Path) -> list[dict[str, Any]]:
    """Return the documents of a YAML file."""
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def kustomization(folder: Path) -> dict[str, Any]:
    """Return the kustomization of a folder."""
    [found] = documents(folder / "kustomization.yaml")
    return found


def resources(folder: Path) -> list[dict[str, Any]]:
    """Return the manifests that a kustomization names, without its patches. Raises OSError for a missing file."""
    found: list[dict[str, Any]] = []
    for name in kustomization(folder).get("resources", ()):
        path = folder / name
        found += resources(path) if path.is_dir() else documents(path)
    return found


def missing(folder: Path) -> list[str]:
    """Return the paths that a kustomization names and that do not exist."""
    named = [name for field in LISTS for name in kustomization(folder).get(field, ())]
    return [name for name in named if not (folder / name).exists()]


def only(kind: str, among: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the one manifest of a kind."""
    [found] = [each for each in among if each["kind"] == kind]
    return found


def patched_cluster(folder: Path) -> dict[str, Any]:
    """Return the RayCluster of an overlay: the base's, with the overlay's JSON patches."""
    cluster = only("RayCluster", resources(folder))
    for patch in kustomization(folder).get("patches", ()):
        if "target" in patch:
            cluster = patched(cluster, yaml.safe_load(patch["patch"]))
    return cluster


def unmatched(folder: Path, among: Sequence[dict[str, Any]]) -> list[str]:
    """Return what the patches of a kustomization change that is not among the manifests.

    A patch names an object by its target, or as a manifest by its kind and name; then also containers by their names.
    """
    faults = []
    for patch in kustomization(folder).get("patches", ()):
        body = yaml.safe_load(patch["patch"])
        kind, name = _named(patch.get("target") or {"kind": body["kind"], **body["metadata"]})
        targets = [each for each in among if (each["kind"], each["metadata"]["name"]) == (kind, name)]
        if not targets:
            faults.append(f"{kind} {name}")
        elif "target" in patch:
            try:
                patched(targets[0], body)
            except LookupError as error:
                faults.append(f"{kind} {name}: {error}")
        else:
            faults += [f"{kind} {name}: {each}" for each in _unknown_names(body, targets[0])]
    return faults


def patched(document: dict[str, Any], operations: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a copy of a document with the operations of a JSON patch (RFC 6902): add, copy, remove, replace.

    Raises LookupError for a path that is not there.
    """
    result = copy.deepcopy(document)
    for each in operations:
        value = copy.deepcopy(_at(result, _parts(each["from"]))) if each["op"] == "copy" else each.get("value")
        *way, last = _parts(each["path"])
        place = _at(result, way)
        key: Any = int(last) if isinstance(place, list) else last
        match each["op"]:
            case "add" | "copy" if isinstance(place, list):
                if key > len(place):
                    raise LookupError(f"{each['path']} is beyond the end")
                place.insert(key, value)
            case "add" | "copy":
                place[key] = value
            case "replace":
                _ = place[key]
                place[key] = value
            case "remove":
                del place[key]
            case other:
                raise LookupError(f"{other} is no operation of this function")
    return result


def pod_templates(manifest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the pod templates of a manifest, by what they are for."""
    match manifest["kind"]:
        case "StatefulSet" | "Job":
            return {manifest["kind"]: manifest["spec"]["template"]}
        case "Pod":
            return {manifest["kind"]: manifest}
        case "RayCluster":
            groups = manifest["spec"]["workerGroupSpecs"]
            workers = {f"workers {group['groupName']}": group["template"] for group in groups}
            return {"head": manifest["spec"]["headGroupSpec"]["template"]} | workers
    return {}


def containers(template: dict[str, Any]) -> list[dict[str, Any]]:
    """Return all containers of a pod template."""
    return [*template["spec"].get("initContainers", ()), *template["spec"]["containers"]]


def _named(target: dict[str, Any]) -> tuple[str, str]:
    return target["kind"], target["name"]


def _unknown_names(patch: Any, document: Any) -> list[str]:
    """Return the names of items in a patch's lists that the document's lists lack, and fields of another type."""
    if isinstance(patch, dict) and isinstance(document, dict):
        pairs = [(each, document[key]) for key, each in patch.items() if key in document]
    elif isinstance(patch, list) and isinstance(document, list):
        if not all(isinstance(each, dict) and "name" in each for each in [*patch, *document]):
            return []
        by_name = {each["name"]: each for each in document}
        if unknown := [f"no {each['name']}" for each in patch if each["name"] not in by_name]:
            return unknown
        pairs = [(each, by_name[each["name"]]) for each in patch]
    else:
        return [] if type(patch) is type(document) else [f"{patch!r} in place of {document!r}"]
    return [fault for each, counterpart in pairs for fault in _unknown_names(each, counterpart)]


def _parts(pointer: str) -> list[str]:
    return [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]


def _at(document: Any, way: Sequence[str]) -> Any:
    place = document
    for part in way:
        place = place[int(part) if isinstance(place, list) else part]
    return place
