"""The options of `serve` and `up`: defaults and help texts come from the settings."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from coordinator.base.config import CoordinatorConfig, GrpcConfig, HttpConfig
from coordinator.base.tenant_limits import TenantLimits
from coordinator.cli.options import RAY_FILE, KeepsArguments, Settings, port_after, with_options
from workers.contract.logs import LogConfig
from workers.contract.settings import PoolConfig


def settings_of(monkeypatch: pytest.MonkeyPatch, home: Path, *arguments: str) -> Settings:
    """What a command gets that is called with these arguments."""
    monkeypatch.setenv("TINKERPOOL_HOME", str(home))
    found: list[Settings] = []

    def run(settings: Settings, given: Sequence[str]) -> None:
        assert given == list(arguments)
        found.append(settings)

    app = typer.Typer()
    app.command(cls=KeepsArguments)(with_options(run))
    done = CliRunner().invoke(app, arguments)
    assert done.exception is None, done.output or repr(done.exception)
    return found[0]


def test_without_options_every_setting_has_its_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = settings_of(monkeypatch, tmp_path)
    assert settings.server.coordinator == CoordinatorConfig(data_dir=tmp_path / "pool")
    assert settings.server.grpc == GrpcConfig()
    assert settings.server.http == HttpConfig()
    [model] = settings.pool.models
    assert (model.name, model.num_workers) == ("kjv-2m", 1)
    folder = tmp_path / "pool"
    assert settings.pool == PoolConfig(models=(model,), owner_file=folder / RAY_FILE, spool_folder=folder)


def test_only_a_pool_of_processes_needs_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find = importlib.util.find_spec
    # Ray is installed where tests run
    monkeypatch.setattr("coordinator.cli.options.find_spec", lambda name: find(name) if name != "ray" else None)
    assert settings_of(monkeypatch, tmp_path, "--pool", "local").pool.kind == "local"
    with pytest.raises(AssertionError, match="ray not found"):
        settings_of(monkeypatch, tmp_path)


def test_each_option_sets_its_own_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = settings_of(
        monkeypatch, tmp_path, "--host", "::1", "--port", "80", "--cycle-tokens", "512", "--cycle-seconds", "1.5",
        "--workers", "3", "--gpus", "0.5", "--exact", "--log-level", "debug", "--log-format", "json", "--new-key",
        "--tenant-limit", "adapters_max=5", "--tenant-limit", "queued_bytes_max=1GiB", "--disk-free-min", "1GiB",
        "--public-url", "https://pool.example", "--otlp-endpoint", "https://collector.example",
    )  # fmt: skip
    coordinator = settings.server.coordinator
    assert (coordinator.cycle_tokens_max, coordinator.cycle_s_max) == (512, 1.5)
    assert coordinator.disk_free_bytes_min == 1 << 30
    assert coordinator.otlp_endpoint == "https://collector.example"
    assert coordinator.tenant_limits == TenantLimits(adapters_max=5, queued_bytes_max=1 << 30)
    assert settings.server.grpc == GrpcConfig(host="::1", port=80)
    assert settings.server.http == HttpConfig(host="::1", port=81, public_url="https://pool.example")
    assert settings.server.is_new_key_wanted
    [model] = settings.pool.models
    assert dataclasses.replace(settings.pool, owner_file=None, spool_folder=None) == PoolConfig(
        models=(model,), num_gpus=0.5, device="cuda", exact=True, log=LogConfig(level="debug", format="json")
    )
    assert model.num_workers == 3


def test_the_variable_of_opentelemetry_names_the_collector(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318")
    assert settings_of(monkeypatch, tmp_path).server.coordinator.otlp_endpoint == "http://localhost:4318"


def test_without_an_http_door_there_are_no_settings_of_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert settings_of(monkeypatch, tmp_path, "--no-http").server.http is None


def test_the_default_http_port_is_the_one_after_the_grpc_port() -> None:
    assert [port_after(port) for port in (7600, 0, 65535)] == [7601, 0, 0]
    assert [port_after(port, 2) for port in (7600, 0, 65534)] == [7602, 0, 0]
