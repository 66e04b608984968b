"""The options of `serve` and `up`: the setting that each one sets, and its form on the command line.

Types, defaults and help texts come from the settings, in `coordinator.base.config` and `workers.contract.settings`; an
entry here has only the differences.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
import typer.core

from coordinator.base.config import (
    CoordinatorConfig,
    DoorConfig,
    GrpcConfig,
    HttpConfig,
    MetricsConfig,
    ServerConfig,
    is_loopback,
)
from coordinator.base.errors import ServiceError
from coordinator.base.tenant_limits import TenantLimits, limits_with, parse_whole
from coordinator.base_models import DEFAULT_MODEL, resolve_model
from tinkerpool.cli.show import CliError
from tinkerpool.credentials import default_data_dir
from workers.contract.logs import LogConfig
from workers.contract.settings import PoolConfig, PoolModel

RAY_FILE = "ray.json"
"""In the data directory, while a private Ray runs: its processes and files on this machine."""
_ARGUMENTS = "tinkerpool.arguments"
_LIBRARIES = (
    "grpc_health",
    "grpc_reflection",
    "perfetto",
    "prometheus_client",
    "pydantic",
    "safetensors",
    "starlette",
    "tokenizers",
    "torch",
    "transformers",
    "uvicorn",
    "zstandard",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a pool from the command line."""

    server: ServerConfig
    pool: PoolConfig

    @property
    def data_dir(self) -> Path:
        """Folder of everything durable."""
        return self.server.coordinator.data_dir


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    """One option. `type`, `default` and `help` are those of the setting unless they are given."""

    flag: str
    setting: tuple[type[Any], str] | None = None
    """The class of settings and the field that the option sets; None: the command itself uses the value."""
    type: Any = None
    default: Any = ...
    help: str = ""
    form: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of `typer.Option`: limits, metavar."""

    @property
    def name(self) -> str:
        """The name of the parameter that holds the value."""
        return self.flag.partition("/")[0].removeprefix("--").replace("-", "_")

    def parameter(self) -> inspect.Parameter:
        """Return the option as a parameter of a typer command."""
        kind, default, text = self.type, self.default, self.help
        if self.setting is not None:
            config, name = self.setting
            kind = kind or _types_of(config)[name]  # type: ignore[arg-type]  # a class is hashable
            default = _default_of(config, name) if default is ... else default
            text = text or help_of(config, name).replace("None:", "Default:")
        annotation: Any = Annotated[kind, typer.Option(self.flag, help=text, **self.form)]
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


@functools.cache
def _types_of(config: Any) -> dict[str, Any]:
    """Return the types of a class's settings."""
    return get_type_hints(config)


def help_of(config: type[Any], name: str) -> str:
    """Return the attribute docstring of a setting, which is also its help text."""
    return attribute_docstrings(inspect.getmodule(config))[config.__name__, name]


@functools.cache
def attribute_docstrings(module: Any) -> dict[tuple[str, str], str]:
    """Return the attribute docstrings of a module's classes, each as one line, by class and attribute."""
    texts = {}
    for found in ast.parse(inspect.getsource(module)).body:
        if not isinstance(found, ast.ClassDef):
            continue
        for line, following in itertools.pairwise(found.body):
            match line, following:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    texts[found.name, name] = " ".join(text.split())
    return texts


def _default_of(config: type[Any], name: str) -> Any:
    return next(setting.default for setting in dataclasses.fields(config) if setting.name == name)


def _cycle_tokens(text: str) -> int | None:
    """Parse the value of --cycle-tokens. Raises CliError."""
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise CliError(f"--cycle-tokens takes a whole number from 1 up, or auto; got {text!r}")
    return int(text)


def _bytes_of(flag: str) -> Callable[[str], int]:
    """Return a parser of the values of an option. It raises CliError."""

    def parse(text: str) -> int:
        try:
            return parse_whole(text)
        except ValueError as error:
            raise CliError(f"{flag}: {error}; got {text!r}") from None

    return parse


def _tenant_limits(texts: Sequence[str]) -> TenantLimits:
    """Parse the values of --tenant-limit. Raises CliError."""
    try:
        return limits_with(TenantLimits(), dict(text.partition("=")[::2] for text in texts))
    except ServiceError as error:
        raise CliError(f"--tenant-limit: {error.message}") from None


DATA_DIR_HELP = f"{help_of(CoordinatorConfig, 'data_dir')} Default: pool in ~/.tinkerpool (or in TINKERPOOL_HOME)."
_PORT = {"min": 0, "max": 65535}
_OPTIONS = (
    _Option(
        flag="--model",
        type=list[str] | None,
        default=None,
        help="Base model: a Hugging Face directory, organisation/model from the local hub cache, or a name that comes "
        "with tinkerpool. Repeat the option for several. Default: the small model that comes with tinkerpool.",
        form={"metavar": "[NAME=]PATH_OR_NAME"},
    ),
    _Option(
        flag="--data-dir",
        setting=(CoordinatorConfig, "data_dir"),
        type=Path | None,
        default=None,
        help=DATA_DIR_HELP,
    ),
    _Option(flag="--port", setting=(GrpcConfig, "port"), form=_PORT),
    _Option(
        flag="--http-port",
        setting=(HttpConfig, "port"),
        type=int | None,
        default=None,
        help=f"{help_of(HttpConfig, 'port')} Default: the port after --port.",
        form=_PORT,
    ),
    _Option(flag="--http/--no-http", type=bool, default=True, help="Whether there is an HTTP door."),
    _Option(
        flag="--metrics-port",
        setting=(MetricsConfig, "port"),
        type=int | None,
        default=None,
        help=f"{help_of(MetricsConfig, 'port')} Default: the second port after --port.",
        form=_PORT,
    ),
    _Option(flag="--metrics-host", setting=(MetricsConfig, "host")),
    _Option(flag="--metrics-tenants", setting=(MetricsConfig, "num_tenants"), form={"min": 0}),
    _Option(flag="--metrics/--no-metrics", type=bool, default=True, help="Whether metrics are served."),
    _Option(flag="--host", setting=(DoorConfig, "host")),
    _Option(flag="--public-url", setting=(HttpConfig, "public_url"), form={"metavar": "URL"}),
    _Option(flag="--pool", setting=(PoolConfig, "kind")),
    _Option(flag="--workers", setting=(PoolModel, "num_workers"), form={"min": 1}),
    _Option(flag="--slots", setting=(PoolConfig, "num_slots"), form={"min": 0}),
    _Option(flag="--threads", setting=(PoolConfig, "num_threads"), form={"min": 0}),
    _Option(flag="--cpus", setting=(PoolConfig, "num_cpus"), form={"min": 0}),
    _Option(flag="--gpus", setting=(PoolConfig, "num_gpus"), form={"min": 0}),
    _Option(
        flag="--host-memory",
        setting=(PoolConfig, "host_bytes_max"),
        default="0",
        form={"parser": _bytes_of("--host-memory"), "metavar": "BYTES"},
    ),
    _Option(flag="--cache-share", setting=(PoolConfig, "cache_share"), form={"min": 0}),
    _Option(
        flag="--device",
        setting=(PoolConfig, "device"),
        default="",
        help=f"{help_of(PoolConfig, 'device')} Default: cuda with --gpus, else cpu.",
        form={"show_default": False},
    ),
    _Option(flag="--recompute", setting=(PoolConfig, "recompute")),
    _Option(flag="--dtype", setting=(PoolConfig, "dtype")),
    _Option(flag="--exact", setting=(PoolConfig, "exact")),
    _Option(flag="--linear-attention", setting=(PoolConfig, "linear_attention")),
    _Option(flag="--ray-address", setting=(PoolConfig, "ray_address")),
    _Option(flag="--keep-workers", setting=(PoolConfig, "keep_workers")),
    _Option(
        flag="--cycle-tokens",
        setting=(CoordinatorConfig, "cycle_tokens_max"),
        default="auto",
        help=help_of(CoordinatorConfig, "cycle_tokens_max").replace("None:", "auto:"),
        form={"parser": _cycle_tokens, "metavar": "NUMBER|auto"},
    ),
    _Option(flag="--cycle-seconds", setting=(CoordinatorConfig, "cycle_s_max"), form={"min": 0.01}),
    _Option(flag="--ping-interval", setting=(CoordinatorConfig, "ping_interval_s"), form={"min": 0.1}),
    _Option(flag="--ping-timeout", setting=(CoordinatorConfig, "ping_timeout_s"), form={"min": 0.1}),
    _Option(flag="--class-wait", setting=(CoordinatorConfig, "class_wait_s"), form={"min": 0, "metavar": "SECONDS"}),
    _Option(flag="--history-rows", setting=(CoordinatorConfig, "history_rows"), form={"min": 0}),
    _Option(flag="--history-days", setting=(CoordinatorConfig, "history_days"), form={"min": 0}),
    _Option(
        flag="--otlp-endpoint",
        setting=(CoordinatorConfig, "otlp_endpoint"),
        form={"metavar": "URL", "envvar": "OTEL_EXPORTER_OTLP_ENDPOINT"},
    ),
    _Option(
        flag="--disk-free-min",
        setting=(CoordinatorConfig, "disk_free_bytes_min"),
        default="256MiB",
        form={"parser": _bytes_of("--disk-free-min"), "metavar": "BYTES"},
    ),
    _Option(
        flag="--tenant-limit",
        setting=(CoordinatorConfig, "tenant_limits"),
        type=list[str] | None,
        default=None,
        help="A limit of every tenant for which an administrator set no other: adapters_max=50. Repeat the option for "
        "several.",
        form={"metavar": "NAME=VALUE"},
    ),
    _Option(flag="--tls-cert", setting=(DoorConfig, "tls_cert")),
    _Option(flag="--tls-key", setting=(DoorConfig, "tls_key")),
    _Option(flag="--tls-client-ca", setting=(DoorConfig, "tls_client_ca")),
    _Option(flag="--allow-plaintext", setting=(DoorConfig, "allow_plaintext")),
    _Option(flag="--new-key", setting=(ServerConfig, "is_new_key_wanted")),
    _Option(flag="--ready-file", setting=(ServerConfig, "ready_file")),
    _Option(flag="--engine", setting=(PoolConfig, "engine"), form={"hidden": True}),
    _Option(flag="--log-level", setting=(LogConfig, "level")),
    _Option(flag="--log-format", setting=(LogConfig, "format")),
)


class KeepsArguments(typer.core.TyperCommand):
    """Keeps the arguments as typed, so that `up` can pass them to `serve`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, and keep them in the context."""
        ctx.meta[_ARGUMENTS] = list(args)
        return super().parse_args(ctx, args)


def with_options(run: Callable[[Settings, Sequence[str]], None]) -> Callable[..., None]:
    """Return a typer command with all options, which calls `run` with the settings and the arguments as typed."""

    def command(ctx: typer.Context, **values: Any) -> None:
        try:
            settings = _settings(values)
        except ValueError as error:
            raise CliError(str(error)) from None
        check_libraries(*(["ray"] if settings.pool.kind == "ray" else []))
        run(settings, ctx.meta[_ARGUMENTS])

    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    signature = inspect.Signature([context, *(option.parameter() for option in _OPTIONS)])
    command.__signature__ = signature  # type: ignore[attr-defined]  # typer reads it
    return command


def _settings(values: Mapping[str, Any]) -> Settings:
    """Return the settings for the values of the options, by name. Raises ValueError."""

    def of(config: type[Any]) -> dict[str, Any]:
        """Return the values of the options that set a field of one class."""
        mine = ((option.setting, option.name) for option in _OPTIONS)
        return {setting[1]: values[name] for setting, name in mine if setting is not None and setting[0] is config}

    data_dir = data_dir_of(values["data_dir"])
    door, pool, log = of(DoorConfig), of(PoolConfig), LogConfig(**of(LogConfig))
    http_port = port_after(values["port"]) if values["http_port"] is None else values["http_port"]
    metrics_port = port_after(values["port"], 2) if values["metrics_port"] is None else values["metrics_port"]
    grpc = GrpcConfig(**door, **of(GrpcConfig))
    http_values = of(HttpConfig) | {"port": http_port, "is_remote": not is_loopback(grpc.host)}
    http = HttpConfig(**door, **http_values) if values["http"] else None
    return Settings(
        server=ServerConfig(
            coordinator=CoordinatorConfig(
                **of(CoordinatorConfig)
                | {"data_dir": data_dir, "tenant_limits": _tenant_limits(values["tenant_limit"] or ())}
            ),
            grpc=grpc,
            http=http,
            metrics=MetricsConfig(**of(MetricsConfig) | {"port": metrics_port}) if values["metrics"] else None,
            is_key_shown=sys.stdout.isatty() and log.format == "text",
            **of(ServerConfig),
        ),
        pool=PoolConfig(
            **pool | {"device": pool["device"] or ("cuda" if pool["num_gpus"] else "cpu")},
            models=tuple(resolve_model(text, values["workers"]) for text in values["model"] or [DEFAULT_MODEL]),
            owner_file=data_dir / RAY_FILE,
            spool_folder=data_dir,
            log=log,
        ),
    )


def data_dir_of(given: Path | None) -> Path:
    """Return the data directory of a pool that is started: the given one, or the default."""
    return (given or default_data_dir()).expanduser().absolute()


def port_after(grpc_port: int, distance: int = 1) -> int:
    """Return the port so far behind the gRPC door's; 0, any free one, if that is 0 or too near to the last one."""
    return grpc_port + distance if 0 < grpc_port <= 65535 - distance else 0


def check_libraries(*more: str) -> None:
    """Raise CliError if libraries are missing that a machine needs to serve a pool, or `more` that this one needs."""
    missing = [name for name in sorted({*_LIBRARIES, *more}) if find_spec(name) is None]
    if missing:
        raise CliError(
            f"running a pool needs more than the client ({', '.join(missing)} not found); install it with: "
            "pip install 'tinkerpool[pool]'"
        )
