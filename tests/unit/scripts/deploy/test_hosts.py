"""The container file, and the files for hosts without Kubernetes: compose, systemd, Ray's cluster launcher."""

from __future__ import annotations

import configparser
import copy
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import ValidationError
from ray._private.ray_constants import RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S
from ray.autoscaler._private.util import prepare_config, validate_config

from coordinator.base.config import CoordinatorConfig
from coordinator.server import DOOR_GRACE_S
from tests.support.deploy import compose
from tests.support.deploy.commands import interpolated, ray_start_fault, serve_fault
from tests.support.deploy.files import DEPLOY, ROOT, documents
from tinkerpool.credentials import DEFAULT_PORT
from workers.contract.settings import PoolConfig, PoolModel

CONTAINERFILE = DEPLOY / "Containerfile"
HADOLINT = Path(sys.executable).with_name("hadolint")
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
SYSTEMD = shutil.which("systemd-analyze")
START_TIMEOUT_S = PoolConfig(models=(PoolModel(name="m", path="m"),)).start_timeout_s
LONGEST_STOP_S = CoordinatorConfig(data_dir=Path()).stop_s_max + DOOR_GRACE_S


def linted(path: Path) -> str:
    """Return what hadolint finds in a container file."""
    command: list[str | Path] = [HADOLINT, "--no-color", "--failure-threshold", "style", path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_the_container_file_has_no_fault_that_hadolint_knows() -> None:
    assert linted(CONTAINERFILE) == ""


@pytest.mark.parametrize(
    ("line", "broken"),
    [
        ("USER 10001:10001", "USER root"),
        ("FROM docker.io/library/python:3.11-slim-bookworm AS build", "FROM python AS build"),
        ("WORKDIR /build", "WORKDIR build"),
        ("EXPOSE 7600 7601", "EXPOSES 7600 7601"),
    ],
)
def test_a_fault_in_a_container_file_is_found(line: str, broken: str, tmp_path: Path) -> None:
    text = CONTAINERFILE.read_text(encoding="utf-8")
    assert line in text
    path = tmp_path / "Containerfile"
    path.write_text(text.replace(line, broken), encoding="utf-8")
    assert linted(path)


def test_the_image_is_made_of_files_that_are_there_and_sent_to_the_builder() -> None:
    text = CONTAINERFILE.read_text(encoding="utf-8")
    copied = [name for found in re.findall(r"^COPY (?!--)(.*) \S+$", text, re.MULTILINE) for name in found.split()]
    assert {"pyproject.toml", "constraints.txt", "constraints-cpu.txt", "constraints-uv.txt"} <= set(copied)
    sent = CONTAINERFILE.with_name("Containerfile.dockerignore").read_text(encoding="utf-8").split()
    for name in copied:
        assert (ROOT / name).exists()
        assert any(Path(name).match(pattern.removeprefix("!")) for pattern in sent if pattern.startswith("!"))
    assert set(re.findall(r"constraints[\w-]*\.txt", text)) <= set(copied) | {"constraints*.txt"}


def test_the_image_has_a_python_that_the_project_takes_and_what_a_pool_needs() -> None:
    text = CONTAINERFILE.read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [minimum] = re.findall(r">=(\d+)\.(\d+)", project["requires-python"])
    images = re.findall(r"^FROM \S+/python:(\d+)\.(\d+)-", text, re.MULTILINE)
    assert len(images) == 2
    assert {tuple(map(int, each)) for each in images} == {tuple(map(int, images[0]))}
    assert tuple(map(int, images[0])) >= tuple(map(int, minimum))
    [extra] = re.findall(r"--extra (\w+)", text)
    assert extra in project["optional-dependencies"]
    assert 'ENTRYPOINT ["tinkerpool", "serve"]' in text
    assert text.count("--require-hashes") == 3, "every download of a build has a hash"
    [library] = re.findall(r"sed -n '/\^(\w+)==/", text)
    assert re.search(rf"^{library}==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)


def test_an_image_for_gpus_has_a_compiler_where_the_pool_runs() -> None:
    """Without one Triton compiles nothing, and a worker runs without kernels of our own."""
    last = CONTAINERFILE.read_text(encoding="utf-8").rpartition("\nFROM ")[2]
    [installed] = re.findall(
        r'^RUN if \[ "\$\{VARIANT\}" = cuda \]; then(?:.*\\\n)* .*apt-get install (.*?) &&', last, re.MULTILINE
    )
    assert {"gcc", "libc6-dev"} <= set(installed.split())
    assert re.search(r"^ARG VARIANT=", last, re.MULTILINE), "the argument of a stage before is not this stage's"


def composed(text: str) -> Any:
    return yaml.safe_load(interpolated(text))


def test_the_compose_file_has_known_fields_and_a_command_that_exists() -> None:
    file = composed((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    assert compose.faults(file) == []
    [service] = file["services"].values()
    assert serve_fault(service["command"]) == ""
    assert (DEPLOY / service["build"]["context"]).resolve() == ROOT
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).exists()
    assert f"{service['build']['args']['VARIANT']})" in CONTAINERFILE.read_text(encoding="utf-8")
    ports = [f"{port}:{port}" for port in range(DEFAULT_PORT, DEFAULT_PORT + 3)]
    assert service["ports"] == [*ports[:2], f"127.0.0.1:{ports[2]}"], "metrics have no key"
    assert compose.seconds(service["stop_grace_period"]) >= 2 * LONGEST_STOP_S
    assert compose.seconds(service["healthcheck"]["start_period"]) >= START_TIMEOUT_S
    program = service["healthcheck"]["test"][-1]
    compile(program, "healthcheck", "exec")
    assert f":{DEFAULT_PORT + 1}/readyz" in program


@pytest.mark.parametrize(
    ("line", "broken"),
    [
        ("    init: true", "    inti: true"),
        ('      - "7600:7600"', "      - 7600"),
        ("    stop_grace_period: 2m", "    stop_grace_period: 120"),
        ("      - data:/var/lib/tinkerpool", "      - dta:/var/lib/tinkerpool"),
        ("              capabilities: [gpu]", "              capability: [gpu]"),
    ],
)
def test_a_fault_in_a_compose_file_is_found(line: str, broken: str) -> None:
    text = (DEPLOY / "compose.yaml").read_text(encoding="utf-8")
    assert line in text
    assert compose.faults(composed(text.replace(line, broken)))


def unit_faults(path: Path, folder: Path) -> str:
    """Return what systemd says of a unit, as an error or as a warning. Its programs need not be installed here."""
    text = path.read_text(encoding="utf-8").replace("/opt/tinkerpool/.venv/bin/", f"{folder}/bin/")
    (folder / "bin").mkdir(exist_ok=True)
    for name in ("tinkerpool", "ray"):
        (folder / "bin" / name).touch(mode=0o755)
    (folder / path.name).write_text(text, encoding="utf-8")
    assert SYSTEMD is not None
    command: list[str | Path] = [SYSTEMD, "verify", "--man=no", folder / path.name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr or ("" if done.returncode == 0 else f"exit code {done.returncode}")


@pytest.mark.skipif(SYSTEMD is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_has_no_fault_that_systemd_knows(path: Path, tmp_path: Path) -> None:
    assert unit_faults(path, tmp_path) == ""


@pytest.mark.skipif(SYSTEMD is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
@pytest.mark.parametrize(
    ("line", "broken"),
    [
        ("RestartSec=5", "RestartSecs=5"),
        ("[Service]", "[Services]"),
        ("LimitNOFILE=65536", "LimitNOFILE=many"),
        ("ExecStart=/opt/tinkerpool/", "ExecStart=/opt/elsewhere/"),
    ],
)
def test_a_fault_in_a_unit_is_found(path: Path, line: str, broken: str, tmp_path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert line in text
    spoilt = tmp_path / "spoilt.service"
    spoilt.write_text(text.replace(line, broken), encoding="utf-8")
    folder = tmp_path / "units"
    folder.mkdir()
    assert unit_faults(spoilt, folder)


def unit(name: str) -> configparser.SectionProxy:
    parsed = configparser.ConfigParser(interpolation=None)
    parsed.optionxform = str  # type: ignore[assignment,method-assign]  # systemd's keys have capitals
    parsed.read_string((DEPLOY / "systemd" / name).read_text(encoding="utf-8"))
    return parsed["Service"]


def test_the_pools_unit_starts_serve_and_waits_for_its_stop() -> None:
    service = unit("tinkerpool.service")
    program, command, *arguments = shlex.split(service["ExecStart"])
    assert (Path(program).name, command) == ("tinkerpool", "serve")
    assert serve_fault(arguments) == ""
    assert int(service["TimeoutStopSec"]) >= 2 * LONGEST_STOP_S
    assert service["KillMode"] == "mixed", "workers would get the signal, too, and lose the running cycle"
    home = f"/var/lib/{service['StateDirectory']}"
    assert f"TINKERPOOL_HOME={home}" in service["Environment"].split()
    assert arguments[arguments.index("--data-dir") + 1].startswith(f"{home}/")


def test_a_stop_of_rays_unit_lets_ray_tell_the_pool_and_wait_for_its_worker() -> None:
    service = unit("tinkerpool-ray.service")
    settings = dict(each.split("=", 1) for each in service["Environment"].split())
    drain_s = int(settings["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
    assert drain_s > RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, "Ray knows the variable; its default is short"
    assert service["KillMode"] == "mixed", "the raylet would get the signal, too, and end at once"
    assert int(service["TimeoutStopSec"]) >= drain_s + 10


def test_rays_unit_starts_a_host_with_each_of_the_options_that_it_shows() -> None:
    program, command, *arguments = shlex.split(unit("tinkerpool-ray.service")["ExecStart"])
    assert (Path(program).name, command, arguments) == ("ray", "start", ["--block", "$RAY_START_OPTIONS"])
    text = (DEPLOY / "systemd/tinkerpool-ray.service").read_text(encoding="utf-8")
    shown = re.findall(r"RAY_START_OPTIONS=(\S+(?: --\S+)*)", text)
    assert len(shown) == 2
    for options in shown:
        assert ray_start_fault(["--block", *options.split()]) == ""


LAUNCHER = documents(DEPLOY / "ray-cluster.yaml")[0]


def launched(config: dict[str, Any]) -> dict[str, Any]:
    """Return the file as Ray completes it. Raises ValidationError, or what else Ray raises for it."""
    prepared: dict[str, Any] = prepare_config(copy.deepcopy(config))
    validate_config(prepared)
    return prepared


def test_the_launchers_file_is_one_that_ray_takes() -> None:
    prepared = launched(LAUNCHER)
    [node] = prepared["available_node_types"].values()
    assert node["min_workers"] == node["max_workers"] == len(LAUNCHER["provider"]["worker_ips"])


def spoil_field(config: dict[str, Any]) -> None:
    config["worker_start_ray_command"] = []


def spoil_user(config: dict[str, Any]) -> None:
    config["auth"]["ssh_user"] = 5


def spoil_commands(config: dict[str, Any]) -> None:
    config["head_start_ray_commands"] = "ray start --head"


@pytest.mark.parametrize("spoil", [spoil_field, spoil_user, spoil_commands])
def test_a_fault_in_the_launchers_file_is_found(spoil: Callable[[dict[str, Any]], None]) -> None:
    config = copy.deepcopy(LAUNCHER)
    spoil(config)
    with pytest.raises(ValidationError):
        launched(config)


@pytest.mark.parametrize("field", ["head_start_ray_commands", "worker_start_ray_commands"])
def test_the_launcher_starts_ray_with_options_that_exist_and_a_token(field: str) -> None:
    stop, start = LAUNCHER[field]
    assert shlex.split(stop)[1:] == ["stop"]
    _, _, command = start.partition("; ")
    words = shlex.split(command)
    settings = dict(word.split("=", 1) for word in words[: words.index("~/venv/bin/ray")])
    assert settings["RAY_AUTH_MODE"] == "token"
    assert settings["RAY_gcs_rpc_server_reconnect_timeout_s"] == "600"
    assert words[len(settings) + 1] == "start"
    assert ray_start_fault(words[len(settings) + 2 :]) == ""
