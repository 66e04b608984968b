"""Wheels of the project, and environments that have one of them, what it asks for, and nothing else.

No index is asked: an environment's other packages are links to those of this one. pip finds that the wheel has what it
asks for, or fails.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from email.parser import BytesParser
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
NAME = "tinkerpool"


def build(target: str, source: Path, folder: Path) -> Path:
    """Build a "wheel" or an "sdist" of a source tree, and return its file in the folder."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    [built] = folder.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return built


def build_from_sdist(folder: Path) -> Path:
    """Build the checkout's sdist, and return the wheel that is built of it alone."""
    with tarfile.open(build("sdist", ROOT, folder)) as archive:
        archive.extractall(folder / "source", filter="data")
    [source] = (folder / "source").iterdir()
    return build("wheel", source, folder / "of-sdist")


def environment(folder: Path, wheel: Path, extra: str = "") -> Path:
    """Make an environment with a wheel, and return its folder of commands. Raises CalledProcessError if pip refuses."""
    venv.create(folder, symlinks=True)
    _link(_wanted(wheel, extra), Path(sysconfig.get_path("purelib", vars={"base": str(folder)})))
    what = f"{wheel}[{extra}]" if extra else str(wheel)
    python = folder / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-qq", "--no-index", what]
    subprocess.run(command, check=True)
    return folder / "bin"


def variables(commands: Path, home: Path, **more: str) -> dict[str, str]:
    """Return the variables of a process that uses an environment, and has a home of its own."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("TINKERPOOL_", "PYTHON"))}
    return own | {"PATH": f"{commands}{os.pathsep}{os.environ['PATH']}", "HOME": str(home)} | more


def _wanted(wheel: Path, extra: str) -> Mapping[str, Distribution]:
    """Return the packages that a wheel asks for, and that these ask for, by name."""
    with zipfile.ZipFile(wheel) as archive:
        [metadata] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        own = BytesParser().parsebytes(archive.read(metadata)).get_all("Requires-Dist", [])
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()

    def add(texts: Iterable[str], extra: str) -> None:
        for requirement in map(Requirement, texts):
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
                continue
            name = canonicalize_name(requirement.name)
            for each in requirement.extras or {""}:
                if (name, each) in seen:
                    continue
                seen.add((name, each))
                if name == NAME:
                    add(own, each)
                else:
                    found[name] = distribution(name)
                    add(found[name].requires or (), each)

    add(own, extra)
    return found


def _link(wanted: Mapping[str, Distribution], packages: Path) -> None:
    """Link the files of packages into another environment: whole folders, except those that several packages share."""
    folders = Counter(first for each in distributions() for first in {path[0] for path in _paths(each)})
    for each in wanted.values():
        for parts in {path[: 1 if folders[path[0]] == 1 else 2] for path in _paths(each)}:
            link = packages.joinpath(*parts)
            link.parent.mkdir(exist_ok=True)
            if not link.exists():
                link.symlink_to(Path(str(each.locate_file(""))).joinpath(*parts))


def _paths(package: Distribution) -> Iterator[tuple[str, ...]]:
    """Yield the first parts, two of them, of the paths of a package's modules and metadata."""
    for name, *_ in csv.reader((package.read_text("RECORD") or "").splitlines()):
        if not name.startswith(("../", "__pycache__/")):
            yield tuple(name.split("/", 2)[:2])
