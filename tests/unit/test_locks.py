"""The locks of dependencies: what pyproject.toml asks for is in them, with hashes, and `make` installs nothing else."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LOCKS = {"dev": "constraints.txt"} | {group: f"constraints-{group}.txt" for group in PROJECT["dependency-groups"]}
PIN = re.compile(r"([a-z0-9-]+)==([\w.+]+)(?: ; [^\\]+)? \\")
HASH = re.compile(r"    --hash=sha256:[0-9a-f]{64}( \\)?")


def asked_for(name: str) -> Iterator[Requirement]:
    """Return what an extra, with those that it includes, or a group of dependencies asks for."""
    extras = PROJECT["project"]["optional-dependencies"]
    for text in extras.get(name) or PROJECT["dependency-groups"][name]:
        requirement = Requirement(text)
        if requirement.name == PROJECT["project"]["name"]:
            for extra in requirement.extras:
                yield from asked_for(extra)
        else:
            yield requirement
    if name == "dev":
        yield from map(Requirement, PROJECT["project"]["dependencies"])


def locked(file: str) -> dict[str, set[str]]:
    """Return the versions of a lock by name, after a check that it has pins with hashes and nothing else."""
    lines = [line for line in (ROOT / file).read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    pins: dict[str, set[str]] = {}
    goes_on = False
    for line in lines:
        is_hash = HASH.fullmatch(line)
        pin = PIN.fullmatch(line)
        assert is_hash if goes_on else pin, f"{file}: {line}"
        if pin is not None:
            pins.setdefault(pin[1], set()).add(pin[2])
        goes_on = line.endswith("\\")
    assert not goes_on
    return pins


@pytest.mark.parametrize(("name", "file"), LOCKS.items())
def test_a_lock_has_every_dependency_in_a_version_of_its_range_and_a_hash_for_each(name: str, file: str) -> None:
    pins = locked(file)
    for requirement in asked_for(name):
        versions = pins.get(requirement.name.lower(), set())
        assert versions, f"{requirement.name} is not in {file}: run `make lock`"
        for version in versions:
            assert requirement.specifier.contains(Version(version)), f"{requirement} is {version} in {file}"


def test_the_cpu_build_of_torch_is_locked_in_the_version_of_the_other_builds() -> None:
    assert locked("constraints-cpu.txt") == {"torch": {f"{each}+cpu" for each in locked("constraints.txt")["torch"]}}


def test_make_installs_nothing_but_the_project_itself_without_hashes() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    installs = [line for line in text.splitlines() if re.search(r"(\bpip|\$\(call UV,\S*\)) install\b", line)]
    assert len(installs) == 3
    [alone] = [line for line in installs if "--require-hashes" not in line]
    assert "--no-deps --no-build-isolation --editable ." in alone
