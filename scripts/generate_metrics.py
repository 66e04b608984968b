"""Write docs/metrics.md: every metric that a pool serves, with its type, labels and buckets.

python -m scripts.generate_metrics
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import Counter, Histogram

from coordinator.observe import metrics
from coordinator.runtime.gauges import COUNTERS, GAUGES, OF_WORKER, TENANT_TOKENS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
HEAD = """# Metrics

A pool serves its metrics for Prometheus at `http://127.0.0.1:7602/metrics` (`--metrics-port`, `--metrics-host`;
`--no-metrics` turns them off), in Prometheus's text format and in OpenMetrics, without a key: they are numbers, and no
label names an adapter, an operation or a tenant. `--metrics-tenants 10` names the ten tenants with the most tokens.

```yaml
scrape_configs:
  - job_name: tinkerpool
    static_configs: [{targets: ["127.0.0.1:7602"]}]
rule_files: [alerts.yml]
```

[alerts.yml](alerts.yml) has rules for Prometheus, each with what to do.

[grafana.json](grafana.json) is a dashboard for Grafana: each metric of this page is in one of its panels, and alerts
that fire are marked. To import it, choose *Dashboards*, *New*, *Import* in Grafana, and upload the file. Above the
panels, *Data source* is the Prometheus that scrapes the pool, and *Pool* is one of the pools that it scrapes. A Grafana
that is set up by files takes the dashboard from the folder of a provider as it is. The queries were checked by
Prometheus, and the form of the file by Grafana's library for Python; no Grafana has shown it yet.

Tokens a second are
`sum by (kind) (rate(tinkerpool_tokens_total[1m]))`; what operations wait for is
`sum by (reason) (rate(tinkerpool_operation_wait_seconds_total[5m]))`. `tinkerpool why OPERATION` tells it for one
operation. The process's own memory, processor time and open files are there as `process_*`.

This page is generated: `.venv/bin/python -m scripts.generate_metrics` writes it from the code.

| metric | type | labels | what it says |
|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class ServedMetric:
    """A metric as a pool serves it."""

    name: str
    """As in a query; a histogram's without `_bucket`, `_count` and `_sum`."""
    kind: str
    labels: Sequence[str]
    text: str


def served_metrics() -> list[ServedMetric]:
    """Return every metric that a pool serves."""
    found = []
    for instrument in vars(metrics).values():
        if isinstance(instrument, Counter | Histogram):
            [family] = instrument.describe()
            name = f"{family.name}_total" if isinstance(instrument, Counter) else family.name
            found.append(ServedMetric(name, family.type, instrument._labelnames, family.documentation))
    found += [ServedMetric(f"tinkerpool_{name}", "gauge", labels, text) for name, (text, labels) in GAUGES.items()]
    found += [ServedMetric(f"tinkerpool_{name}_total", "counter", OF_WORKER, text) for name, text in COUNTERS.items()]
    of_tenants = f"{TENANT_TOKENS} With `--metrics-tenants`."
    return [*found, ServedMetric("tinkerpool_tenant_tokens_total", "counter", ("tenant",), of_tenants)]


def page() -> str:
    """Return the text of the page."""
    lines = [
        f"| `{each.name}` | {each.kind} | {', '.join(f'`{label}`' for label in each.labels)} | {each.text} |"
        for each in served_metrics()
    ]
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
