"""Write docs/grafana.json: a dashboard for Grafana with every metric that a pool serves, and the alerts that fire.

python -m scripts.generate_dashboard

The panels are below, their metrics without the prefix `tinkerpool_`. What a panel says of its metrics is what
docs/metrics.md says of them, from the same source.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.generate_metrics import served_metrics

FILE = Path(__file__).resolve().parent.parent / "docs" / "grafana.json"
SCHEMA_VERSION = 41
"""Of Grafana 12; later ones migrate it."""
OF_POOL = 'instance="$pool"'
"""Selects the pool that the variable names: workers of several have the same names. The label is Prometheus's own."""
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS, HEIGHT = 24, 8
"""Grafana's columns; the rows of its grid that a panel takes."""
PANELS_IN_LINE = 3
METRIC = re.compile(r"tinkerpool_\w+?(?=_(?:bucket|count|sum)\b|\b)")


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel with one query or more."""

    title: str
    queries: Mapping[str, str]
    """Legend to expression. A legend may name labels: `{{kind}}`."""
    unit: str = "short"
    """Of Grafana's units."""
    is_stacked: bool = False
    is_stat: bool = False
    """Whether it shows the present value, and no curve."""

    def metrics(self) -> list[str]:
        """Return the metrics that the panel shows, as docs/metrics.md names them."""
        return list(dict.fromkeys(name for query in self.queries.values() for name in METRIC.findall(query)))


def _by(labels: str) -> str:
    return f"sum by ({labels}) " if labels else "sum"


def per_second(metric: str, by: str = "", where: str = "") -> str:
    """Return the rate of a counter, summed over all labels but `by`. `where`: another condition."""
    condition = f"{OF_POOL},{where}" if where else OF_POOL
    return f"{_by(by)}(rate(tinkerpool_{metric}{{{condition}}}[$__rate_interval]))"


def quantile(part: float, metric: str, by: str = "") -> str:
    """Return a quantile of a histogram."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({part}, {per_second(f'{metric}_bucket', labels)})"


def quantiles(metric: str, by: str = "") -> dict[str, str]:
    """Return the queries of the median and of what one in a hundred exceeds."""
    legend = f" {{{{{by}}}}}" if by else ""
    return {f"half{legend}": quantile(0.5, metric, by), f"99 of 100{legend}": quantile(0.99, metric, by)}


def mean(metric: str, by: str = "") -> str:
    """Return the mean of a histogram's values."""
    return f"{per_second(f'{metric}_sum', by)} / {per_second(f'{metric}_count', by)}"


def gauge(metric: str, by: str = "", how: str = "sum") -> str:
    """Return a gauge, combined over all labels but `by`."""
    labels = f" by ({by}) " if by else ""
    return f"{how}{labels}(tinkerpool_{metric}{{{OF_POOL}}})"


ROWS: Mapping[str, tuple[Panel, ...]] = {
    "Health": (
        Panel("Healthy", {"": gauge("healthy", how="min")}, "bool_yes_no", is_stat=True),
        Panel("Version", {"{{version}}": gauge("info", "version")}, "string", is_stat=True),
        Panel("Oldest operation", {"{{kind}}": gauge("oldest_operation_seconds", "kind", "max")}, "s"),
        Panel("Refused calls per second", {"{{reason}}": per_second("refusals_total", "reason")}),
        Panel("Failed operations per second", {"{{kind}}": per_second("operations_total", "kind", 'outcome="failed"')}),
        Panel("Lag of the event loop", quantiles("event_loop_lag_seconds"), "s"),
    ),
    "The clock": (
        Panel("Cycles per second", {"{{base_model}}": per_second("cycles_total", "base_model")}),
        Panel("Cycle, by phase", {"{{phase}}": mean("cycle_seconds", "phase")}, "s", is_stacked=True),
        Panel(
            "Phases of cycles that one in a hundred exceeds",
            {"{{phase}}": quantile(0.99, "cycle_seconds", "phase")},
            "s",
        ),
        Panel(
            "Work of the workers per second, by phase",
            {"{{phase}}": per_second("worker_phase_seconds_sum", "phase")},
            "s",
            is_stacked=True,
        ),
        Panel("Tenants in a cycle", {"{{base_model}}": mean("cycle_tenants", "base_model")}),
        Panel("Budget of a cycle", {"{{base_model}}": gauge("cycle_budget_tokens", "base_model", "max")}),
        Panel(
            "Part of the budget that passes use",
            {"{{base_model}}": mean("cycle_budget_used_ratio", "base_model")},
            "percentunit",
        ),
        Panel(
            "Copies installed and operations replayed per second",
            {"installs": per_second("adapter_installs_total"), "replays": per_second("replayed_operations_total")},
        ),
        Panel("Snapshots per second", {"{{outcome}}": per_second("snapshots_total", "outcome")}),
    ),
    "Tenants": (
        Panel("Active tenants", {"tenants": gauge("active_tenants")}),
        Panel("Unfinished operations", {"{{kind}}": gauge("unfinished_operations", "kind")}, is_stacked=True),
        Panel("Finished operations per second", {"{{kind}}": per_second("operations_total", "kind")}, is_stacked=True),
        Panel("Tokens per second", {"{{kind}}": per_second("tokens_total", "kind")}, is_stacked=True),
        Panel(
            "Tokens per second, by tenant", {"{{tenant}}": per_second("tenant_tokens_total", "tenant")}, is_stacked=True
        ),
        Panel(
            "Time of the engine per second",
            {"{{kind}}": per_second("engine_seconds_total", "kind")},
            "s",
            is_stacked=True,
        ),
        Panel("Time to an outcome", quantiles("operation_seconds", "kind"), "s"),
        Panel(
            "Waits per second, by reason",
            {"{{reason}}": per_second("operation_wait_seconds_total", "reason")},
            "s",
            is_stacked=True,
        ),
    ),
    "Workers": (
        Panel("Workers", {"{{base_model}} {{state}}": gauge("workers", "base_model, state")}, is_stacked=True),
        Panel(
            "Losses of workers",
            {"{{cause}}": f"sum by (cause) (increase(tinkerpool_worker_losses_total{{{OF_POOL}}}[$__rate_interval]))"},
        ),
        Panel(
            "Adapters and slots",
            {
                "{{worker}} adapters": gauge("worker_adapters", "worker"),
                "{{worker}} slots": gauge("worker_slots", "worker"),
            },
        ),
        Panel(
            "Slots per second",
            {
                "{{worker}} loads": per_second("worker_slot_loads_total", "worker"),
                "{{worker}} begun ahead": per_second("worker_slot_prefetches_total", "worker"),
                "{{worker}} evictions": per_second("worker_slot_evictions_total", "worker"),
            },
        ),
        Panel("Processor time per second", {"{{worker}}": per_second("worker_cpu_seconds_total", "worker")}, "s"),
        Panel(
            "Memory",
            {
                "{{worker}} process": gauge("worker_resident_bytes", "worker"),
                "{{worker}} copies": gauge("worker_host_memory_bytes", "worker"),
                "{{worker}} GPU": gauge("worker_device_bytes", "worker"),
            },
            "bytes",
        ),
    ),
    "Sampling": (
        Panel("Samples", {"{{worker}}": gauge("worker_samples", "worker")}, is_stacked=True),
        Panel("Time to the first token", quantiles("first_token_seconds"), "s"),
        Panel(
            "Prompt tokens per second",
            {"cached: {{cached}}": per_second("prompt_tokens_total", "cached")},
            is_stacked=True,
        ),
        Panel(
            "Blocks of keys and values",
            {
                "{{worker}} used": gauge("worker_cache_blocks_used", "worker"),
                "{{worker}} there": gauge("worker_cache_blocks", "worker"),
            },
        ),
        Panel("Time to publish", quantiles("publish_seconds"), "s"),
    ),
    "Storage": (
        Panel("Commits of the database", quantiles("database_commit_seconds"), "s"),
        Panel("Writes per second", {"writes": per_second("database_writes_total")}),
        Panel("Bytes written per second", {"bytes": per_second("database_bytes_total")}, "Bps"),
        Panel("Size of the database", {"bytes": gauge("data_bytes")}, "bytes"),
        Panel("Free room on its disk", {"bytes": gauge("disk_free_bytes", how="min")}, "bytes"),
    ),
    "Limits": (
        Panel(
            "Part of each limit that its largest user uses",
            {"{{limit}}": gauge("limit_used_ratio", "limit", "max")},
            "percentunit",
        ),
    ),
}
"""Title of a row to its panels."""


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it."""
    ids, panels, y = itertools.count(1), [], 0
    for title, row in ROWS.items():
        place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
        panels.append(
            {"id": next(ids), "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        )
        y += 1
        width = COLUMNS // PANELS_IN_LINE
        for number, panel in enumerate(row):
            line, column = divmod(number, PANELS_IN_LINE)
            place = {"x": column * width, "y": y + line * HEIGHT, "w": width, "h": HEIGHT}
            panels.append({"id": next(ids), "gridPos": place, **_panel(panel)})
        y += -(-len(row) // PANELS_IN_LINE) * HEIGHT
    return {
        "uid": "tinkerpool",
        "title": "tinkerpool",
        "description": "What a pool does. Generated by scripts/generate_dashboard.py of tinkerpool.",
        "tags": ["tinkerpool"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "timezone": "browser",
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": _variables()},
        "annotations": {"list": [_alerts()]},
        "panels": panels,
    }


def _panel(panel: Panel) -> dict[str, Any]:
    texts = {each.name: each.text for each in served_metrics()}
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.is_stat:
        options: dict[str, Any] = {
            "reduceOptions": {"calcs": ["lastNotNull"]},
            "colorMode": "background" if panel.unit == "bool_yes_no" else "none",
            "textMode": "name" if panel.unit == "string" else "value",
        }
        steps = [{"color": "red", "value": None}, {"color": "green", "value": 1}]
        defaults |= {"thresholds": {"mode": "absolute", "steps": steps}}
    else:
        options = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
        stacking = {"mode": "normal" if panel.is_stacked else "none"}
        defaults |= {"custom": {"fillOpacity": 30 if panel.is_stacked else 0, "stacking": stacking}}
    return {
        "type": "stat" if panel.is_stat else "timeseries",
        "title": panel.title,
        "description": "\n\n".join(f"`{name}`: {texts[name]}" for name in panel.metrics()),
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": DATASOURCE, "expr": query, "legendFormat": legend}
            for number, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def _variables() -> list[dict[str, Any]]:
    pools = "label_values(tinkerpool_info, instance)"
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "current": {}},
        {
            "name": "pool",
            "label": "Pool",
            "type": "query",
            "datasource": DATASOURCE,
            "definition": pools,
            "query": {"query": pools, "refId": "pools"},
            "refresh": 2,
        },
    ]


def _alerts() -> dict[str, Any]:
    """Return the annotation of the alerts of docs/alerts.yml, whose names all begin alike."""
    return {
        "name": "Alerts",
        "datasource": DATASOURCE,
        "enable": True,
        "iconColor": "red",
        "expr": 'ALERTS{alertname=~"Tinkerpool.*", alertstate="firing"}',
        "step": "30s",
        "titleFormat": "{{alertname}}",
    }


def text() -> str:
    """Return the text of the file."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
