"""Write docs/metrics.md: every metric that a pool serves, with its type, labels and buckets.

python -m scripts.generate_metrics
"""

from __future__ import annotations

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

[alerts.yml](alerts.yml) has rules for Prometheus, each with what to do. Tokens a second are
`sum by (kind) (rate(tinkerpool_tokens_total[1m]))`; what operations wait for is
`sum by (reason) (rate(tinkerpool_operation_wait_seconds_total[5m]))`. `tinkerpool why OPERATION` tells it for one
operation. The process's own memory, processor time and open files are there as `process_*`.

This page is generated: `.venv/bin/python -m scripts.generate_metrics` writes it from the code.

| metric | type | labels | what it says |
|---|---|---|---|
"""


def page() -> str:
    """Return the text of the page."""
    rows = []
    for instrument in vars(metrics).values():
        if isinstance(instrument, Counter | Histogram):
            [family] = instrument.describe()
            name = f"{family.name}_total" if isinstance(instrument, Counter) else family.name
            rows.append((name, family.type, instrument._labelnames, family.documentation))
    rows += [(f"tinkerpool_{name}", "gauge", labels, text) for name, (text, labels) in GAUGES.items()]
    rows += [(f"tinkerpool_{name}_total", "counter", OF_WORKER, text) for name, text in COUNTERS.items()]
    rows.append(
        ("tinkerpool_tenant_tokens_total", "counter", ("tenant",), f"{TENANT_TOKENS} With `--metrics-tenants`.")
    )
    lines = [
        f"| `{name}` | {kind} | {', '.join(f'`{label}`' for label in labels)} | {text} |"
        for name, kind, labels, text in rows
    ]
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
