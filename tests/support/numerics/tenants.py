"""Tenants of every kind that train together, and the trace of each."""

from __future__ import annotations

from collections.abc import Sequence

from tests.support.numerics.harness import Driver, Tenant, Trace, make_data, make_spec, note, training_items
from workers.contract.messages import AdamParams

NUM_STEPS = 2
"""The second one has gradients of A, and moments."""

TENANTS = (
    Tenant(spec=make_spec("small", 2), passes=[make_data("cross_entropy", [5])]),
    Tenant(spec=make_spec("plain", 8), passes=[make_data("cross_entropy", [16, 16, 40])]),
    Tenant(spec=make_spec("wide", 32), loss_fn="ppo", passes=[make_data("ppo", [31, 7]), make_data("ppo", [16], 1)]),
    Tenant(spec=make_spec("attn", 4, train_mlp=False), loss_fn="gspo", passes=[make_data("gspo", [20, 33, 1])]),
    Tenant(
        spec=make_spec("head", 16, train_attn=False, train_mlp=False), loss_fn="dro", passes=[make_data("dro", [70])]
    ),
    Tenant(spec=make_spec("many", 8), passes=[make_data("cross_entropy", [12, 30], num_targets=3)], num_chunks=2),
    Tenant(spec=make_spec("most", 8), passes=[make_data("cross_entropy", [256], num_targets=200)]),
    Tenant(spec=make_spec("drawn", 4), loss_fn="stable_reinforce", passes=[make_data("stable_reinforce", [21, 80, 2])]),
    Tenant(spec=make_spec("cispo", 1), loss_fn="cispo", passes=[make_data("cispo", [300])]),
    Tenant(
        spec=make_spec("is", 64),
        loss_fn="importance_sampling",
        passes=[make_data("importance_sampling", [11])],
        params=AdamParams(learning_rate=3e-2),
    ),
)


def train(
    driver: Driver, tenants: Sequence[Tenant], *, num_steps: int = NUM_STEPS, beside: Sequence[Tenant] = ()
) -> dict[str, Trace]:
    """Train all tenants together, each step in two batches as the clock does; return their traces.

    `beside`: others in the same batches, which may fail. Those that are installed already stay as they are.
    """
    traces = {tenant.key: Trace() for tenant in tenants}
    everybody = [*tenants[:1], *beside, *tenants[1:]]
    driver.install(*(each.spec for each in everybody if each not in beside or each.key not in driver.seqs))
    for _ in range(num_steps):
        items = [item for tenant in everybody for item in training_items(driver, tenant)]
        for item, result in zip(items, driver.run(*items), strict=True):
            if item.adapter_id in traces:
                note(traces[item.adapter_id], result)
        for tenant in tenants:
            traces[tenant.key].gradients.append(driver.gradient(tenant.key).numpy().tobytes())
        steps = driver.run(*(driver.step(tenant.key, tenant.params) for tenant in everybody))
        for tenant, result in zip(everybody, steps, strict=True):
            if tenant.key in traces:
                note(traces[tenant.key], result)
        for tenant in tenants:
            traces[tenant.key].states.append(driver.state(tenant.key))
    return traces


def assert_same(traces: dict[str, Trace], solo: dict[str, Trace]) -> None:
    for key, trace in solo.items():
        traces[key].assert_equal(trace)
