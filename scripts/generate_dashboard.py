"""Write docs/grafana.json: a dashboard for Grafana with every metric that a pool serves, and the alerts that fire.

python -m scripts.generate_dashboard

The panels are below. What a panel says of its metrics is what docs/metrics.md says of them, from the same source.
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


@dataclass(frozen=True, slots=True, kw_only=True)
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
    return f"{_by(by)}(rate({metric}{{{condition}}}[$__rate_interval]))"


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
    return f"{how}{labels}({metric}{{{OF_POOL}}})"


ROWS: Mapping[str, tuple[Panel, ...]] = {
    "Health": (
        Panel(title="Healthy", queries={"": gauge("tinkerpool_healthy", how="min")}, is_stat=True, unit="bool_yes_no"),
        Panel(
            title="Version", queries={"{{version}}": gauge("tinkerpool_info", "version")}, is_stat=True, unit="string"
        ),
        Panel(
            title="Oldest operation",
            queries={"{{kind}}": gauge("tinkerpool_oldest_operation_seconds", "kind", "max")},
            unit="s",
        ),
        Panel(
            title="Refused calls per second", queries={"{{reason}}": per_second("tinkerpool_refusals_total", "reason")}
        ),
        Panel(
            title="Failed operations per second",
            queries={"{{kind}}": per_second("tinkerpool_operations_total", "kind", 'outcome="failed"')},
        ),
        Panel(title="Lag of the event loop", queries=quantiles("tinkerpool_event_loop_lag_seconds"), unit="s"),
    ),
    "The clock": (
        Panel(
            title="Cycles per second", queries={"{{base_model}}": per_second("tinkerpool_cycles_total", "base_model")}
        ),
        Panel(
            title="Cycle, by phase",
            queries={"{{phase}}": mean("tinkerpool_cycle_seconds", "phase")},
            unit="s",
            is_stacked=True,
        ),
        Panel(
            title="Phases of cycles that one in a hundred exceeds",
            queries={"{{phase}}": quantile(0.99, "tinkerpool_cycle_seconds", "phase")},
            unit="s",
        ),
        Panel(
            title="Work of the workers per second, by phase",
            queries={"{{phase}}": per_second("tinkerpool_worker_phase_seconds_sum", "phase")},
            unit="s",
            is_stacked=True,
        ),
        Panel(title="Tenants in a cycle", queries={"{{base_model}}": mean("tinkerpool_cycle_tenants", "base_model")}),
        Panel(
            title="Budget of a cycle",
            queries={"{{base_model}}": gauge("tinkerpool_cycle_budget_tokens", "base_model", "max")},
        ),
        Panel(
            title="Part of the budget that passes use",
            queries={"{{base_model}}": mean("tinkerpool_cycle_budget_used_ratio", "base_model")},
            unit="percentunit",
        ),
        Panel(
            title="Copies installed and operations replayed per second",
            queries={
                "installs": per_second("tinkerpool_adapter_installs_total"),
                "replays": per_second("tinkerpool_replayed_operations_total"),
            },
        ),
        Panel(
            title="Snapshots per second", queries={"{{outcome}}": per_second("tinkerpool_snapshots_total", "outcome")}
        ),
    ),
    "Tenants": (
        Panel(title="Active tenants", queries={"tenants": gauge("tinkerpool_active_tenants")}),
        Panel(
            title="Unfinished operations",
            queries={"{{kind}}": gauge("tinkerpool_unfinished_operations", "kind")},
            is_stacked=True,
        ),
        Panel(
            title="Finished operations per second",
            queries={"{{kind}}": per_second("tinkerpool_operations_total", "kind")},
            is_stacked=True,
        ),
        Panel(
            title="Tokens per second",
            queries={"{{kind}}": per_second("tinkerpool_tokens_total", "kind")},
            is_stacked=True,
        ),
        Panel(
            title="Tokens per second, by tenant",
            queries={"{{tenant}}": per_second("tinkerpool_tenant_tokens_total", "tenant")},
            is_stacked=True,
        ),
        Panel(
            title="Time of the engine per second",
            queries={"{{kind}}": per_second("tinkerpool_engine_seconds_total", "kind")},
            unit="s",
            is_stacked=True,
        ),
        Panel(title="Time to an outcome", queries=quantiles("tinkerpool_operation_seconds", "kind"), unit="s"),
        Panel(
            title="Waits per second, by reason",
            queries={"{{reason}}": per_second("tinkerpool_operation_wait_seconds_total", "reason")},
            unit="s",
            is_stacked=True,
        ),
    ),
    "Workers": (
        Panel(
            title="Workers",
            queries={"{{base_model}} {{state}}": gauge("tinkerpool_workers", "base_model, state")},
            is_stacked=True,
        ),
        Panel(
            title="Losses of workers",
            queries={
                "{{cause}}": f"sum by (cause) (increase(tinkerpool_worker_losses_total{{{OF_POOL}}}[$__rate_interval]))"
            },
        ),
        Panel(
            title="Adapters and slots",
            queries={
                "{{worker}} adapters": gauge("tinkerpool_worker_adapters", "worker"),
                "{{worker}} slots": gauge("tinkerpool_worker_slots", "worker"),
            },
        ),
        Panel(
            title="Slots per second",
            queries={
                "{{worker}} loads": per_second("tinkerpool_worker_slot_loads_total", "worker"),
                "{{worker}} begun ahead": per_second("tinkerpool_worker_slot_prefetches_total", "worker"),
                "{{worker}} evictions": per_second("tinkerpool_worker_slot_evictions_total", "worker"),
            },
        ),
        Panel(
            title="Processor time per second",
            queries={"{{worker}}": per_second("tinkerpool_worker_cpu_seconds_total", "worker")},
            unit="s",
        ),
        Panel(
            title="Memory",
            queries={
                "{{worker}} process": gauge("tinkerpool_worker_resident_bytes", "worker"),
                "{{worker}} copies": gauge("tinkerpool_worker_host_memory_bytes", "worker"),
                "{{worker}} GPU": gauge("tinkerpool_worker_device_bytes", "worker"),
            },
            unit="bytes",
        ),
    ),
    "Sampling": (
        Panel(title="Samples", queries={"{{worker}}": gauge("tinkerpool_worker_samples", "worker")}, is_stacked=True),
        Panel(title="Time to the first token", queries=quantiles("tinkerpool_first_token_seconds"), unit="s"),
        Panel(
            title="Prompt tokens per second",
            queries={"cached: {{cached}}": per_second("tinkerpool_prompt_tokens_total", "cached")},
            is_stacked=True,
        ),
        Panel(
            title="Blocks of keys and values",
            queries={
                "{{worker}} used": gauge("tinkerpool_worker_cache_blocks_used", "worker"),
                "{{worker}} there": gauge("tinkerpool_worker_cache_blocks", "worker"),
            },
        ),
        Panel(title="Time to publish", queries=quantiles("tinkerpool_publish_seconds"), unit="s"),
    ),
    "Storage": (
        Panel(title="Commits of the database", queries=quantiles("tinkerpool_database_commit_seconds"), unit="s"),
        Panel(title="Writes per second", queries={"writes": per_second("tinkerpool_database_writes_total")}),
        Panel(
            title="Bytes written per second",
            queries={"bytes": per_second("tinkerpool_database_bytes_total")},
            unit="Bps",
        ),
        Panel(title="Size of the database", queries={"bytes": gauge("tinkerpool_data_bytes")}, unit="bytes"),
        Panel(
            title="Free room on its disk",
            queries={"bytes": gauge("tinkerpool_disk_free_bytes", how="min")},
            unit="bytes",
        ),
    ),
    "Limits": (
        Panel(
            title="Part of each limit that its largest user uses",
            queries={"{{limit}}": gauge("tinkerpool_limit_used_ratio", "limit", "max")},
            unit="percentunit",
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
