"""Write docs/configuration.md from the docstrings of the settings: every option with default, unit and advice."""

from dataclasses import MISSING, Field, fields
from pathlib import Path

from coordinator.base import config, tenant_limits
from coordinator.cli.options import attribute_docstrings
from workers.contract import logs, settings

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
SECTIONS: tuple[tuple[str, type, str], ...] = (
    ("Coordinator", config.CoordinatorConfig, "`CoordinatorConfig`: cycles, timeouts, retention."),
    ("Limits of requests", config.Limits, "`Limits`: sizes of requests, the same for every tenant."),
    (
        "Limits of a tenant",
        tenant_limits.TenantLimits,
        "`TenantLimits`: what one tenant may use. Defaults for all: `serve --tenant-limit NAME=VALUE`; for one tenant, "
        "at once and for good: `tinkerpool tenant limit TENANT NAME=VALUE`. Values may end in KiB, MiB, GiB or TiB.",
    ),
    ("Doors", config.DoorConfig, "`DoorConfig`: settings of both doors."),
    ("gRPC", config.GrpcConfig, "`GrpcConfig`: the gRPC door."),
    ("HTTP", config.HttpConfig, "`HttpConfig`: the door for the Tinker SDK and OpenAI's clients."),
    ("Process", config.ServerConfig, "`ServerConfig`: the process that serves a pool."),
    ("Workers", settings.PoolConfig, "`PoolConfig`: the pool, and the engine on each of its workers."),
    ("Logs", logs.LogConfig, "`LogConfig`: what the processes of a pool log, and how."),
    ("Base models", settings.PoolModel, "`PoolModel`: one base model and its workers."),
)
HEAD = """# Configuration

Every setting of a pool, with its default. Most are options of `tinkerpool serve` (see its `--help`); the others are for
programs that start a pool themselves. Names end with their unit: `_s` is seconds.

This page is generated: `.venv/bin/python -m scripts.generate_configuration` writes it from the docstrings in
`coordinator/base/config.py`, `coordinator/base/tenant_limits.py`, `workers/contract/settings.py` and
`workers/contract/logs.py`. Advice for slots, cycle tokens, recompute and threads is in [running.md](running.md#advice).

## Environment variables

| variable | read by | meaning |
|---|---|---|
| `TINKERPOOL_BASE_URL` | clients, commands | the pool's address: `http://HOST:PORT`, `https://...` for TLS |
| `TINKERPOOL_API_KEY` | clients, commands | the key |
| `TINKERPOOL_CLIENT_CERTIFICATE` | clients, commands | file with their certificate, for a pool with `--tls-client-ca` |
| `TINKERPOOL_CLIENT_KEY` | clients, commands | file with its private key; by default the certificate's file |
| `TINKERPOOL_HOME` | everything | the folder of credentials and data, by default `~/.tinkerpool` |
| `TINKERPOOL_TRACEBACK` | commands | if set, an unexpected error shows where it happened |
| `OTEL_EXPORTER_OTLP_ENDPOINT` | the pool | where [traces](running.md#traces) go, without `--otlp-endpoint` |
| `TINKERPOOL_RAY_OWNER` | the pool | set by the pool in the processes of its Ray. Do not set it |
| `TINKERPOOL_FAILPOINTS` | the pool | for tests: where to crash. Do not set it |
"""


GROUPS = {"coordinator", "grpc", "http", "limits", "log", "tenant_limits"}
"""Fields that hold the settings of another section."""


def default_of(field: "Field[object]") -> str:
    """Return a default as the page shows it; empty for a required setting."""
    value = field.default
    if value is MISSING:
        return ""
    if field.name in tenant_limits.LIMIT_NAMES and (value is None or isinstance(value, int)):
        return tenant_limits.as_text(field.name, value)
    if value and isinstance(value, int) and field.name.endswith("bytes_max"):
        for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
            if value % (1 << shift) == 0:
                return f"{value >> shift} {unit}"
    if isinstance(value, float):
        return f"{value:g}" if value < 1e5 else f"{value:.0f}"
    return f"`{value}`" if isinstance(value, str) else str(value)


def page() -> str:
    """Return the whole page."""
    texts: dict[tuple[str, str], str] = {}
    for module in (config, tenant_limits, settings, logs):
        texts |= attribute_docstrings(module)
    parts = [HEAD]
    for title, section, about in SECTIONS:
        parts.append(f"\n## {title}\n\n{about}\n\n| setting | default | meaning |\n|---|---|---|\n")
        parts += [
            f"| `{field.name}` | {default_of(field)} | {texts[section.__name__, field.name]} |\n"
            for field in fields(section)
            if field.name in section.__annotations__ and field.name not in GROUPS
        ]
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
