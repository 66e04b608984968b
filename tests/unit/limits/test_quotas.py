"""The limits of tenants: their table, their text, and changes that hold at once and after a restart."""

from dataclasses import fields
from pathlib import Path

import pytest

from coordinator.base.config import CoordinatorConfig
from coordinator.base.errors import Code, ServiceError
from coordinator.base.tenant_limits import (
    LIMIT_NAMES,
    LimitValue,
    TenantLimits,
    as_text,
    limits_with,
    parse_limit,
)
from coordinator.limits.quotas import Quotas
from coordinator.storage.access.audit import Act
from coordinator.storage.store import Store
from tests.support.database import TENANT, open_store

DEFAULTS = TenantLimits(adapters_max=5)
ACT = Act(at=1.0, act="tenant.limit", subject="alice", details={"adapters_max": "9"})


@pytest.mark.parametrize("name", LIMIT_NAMES)
def test_each_default_is_the_same_after_it_was_written_and_parsed(name: str) -> None:
    value = getattr(TenantLimits(), name)
    assert parse_limit(name, as_text(name, value)) == value


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("adapters_max", "0", 0),
        ("queued_bytes_max", "3GiB", 3 << 30),
        ("queued_bytes_max", "1025", 1025),
        ("weight", "0.25", 0.25),
        ("operations_per_s", "1e3", 1000.0),
        ("tokens_per_s", "unlimited", None),
        ("tokens_per_month", "5", 5),
        ("ranks", "8, 16", (8, 16)),
        ("base_models", "a/b,c", ("a/b", "c")),
    ],
)
def test_a_limit_is_parsed_as_people_type_it(name: str, text: str, value: LimitValue) -> None:
    assert parse_limit(name, text) == value
    assert parse_limit(name, as_text(name, value)) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("adapters_max", "-1"),
        ("adapters_max", "1.5"),
        ("adapters_max", "many"),
        ("adapters_max", "9999999999999999999"),
        ("queued_bytes_max", "5 GB"),
        ("weight", "0"),
        ("weight", "nan"),
        ("weight", "101"),
        ("colour", "1"),
        ("adapters_max", "unlimited"),
        ("operations_per_s", "0"),
        ("operations_per_s", "inf"),
        ("streams_max", "0"),
        ("ranks", "0"),
        ("ranks", ""),
        ("base_models", ","),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused_with_its_name(name: str, text: str) -> None:
    with pytest.raises(ServiceError, match=name) as refused:
        parse_limit(name, text)
    assert refused.value.code is Code.INVALID_ARGUMENT


def test_a_weight_is_no_default_of_all_tenants(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="share beside other tenants"):
        CoordinatorConfig(data_dir=tmp_path, tenant_limits=TenantLimits(weight=2.0))


def test_limits_are_the_pools_defaults_with_those_that_were_set() -> None:
    limits = limits_with(DEFAULTS, {"sessions_max": "7"})
    assert (limits.sessions_max, limits.adapters_max) == (7, 5)
    assert {field.name for field in fields(TenantLimits)} == set(LIMIT_NAMES)


async def test_a_change_holds_at_once_and_for_the_next_epoch_and_only_for_its_tenant(store: Store) -> None:
    quotas = Quotas(store, DEFAULTS)
    await store.tenants.create("u", Act(at=0.0, act="tenant.create", subject="bob"))
    await quotas.change(TENANT, {"adapters_max": "9", "weight": "2"}, ACT)
    for each in (quotas, Quotas(store, DEFAULTS)):
        assert (each.of(TENANT).adapters_max, each.of("u").adapters_max) == (9, 5)
        assert each.weights() == {TENANT: 2.0}
        assert (each.is_set(TENANT, "adapters_max"), each.is_set(TENANT, "sessions_max")) == (True, False)
    await quotas.change(TENANT, {"adapters_max": ""}, ACT)
    assert Quotas(store, DEFAULTS).of(TENANT).adapters_max == quotas.of(TENANT).adapters_max == 5
    assert quotas.of(TENANT).weight == 2.0
    assert [(row.act, row.subject) for row in store.audit.newest(2)] == [("tenant.limit", "alice")] * 2


async def test_a_change_with_one_wrong_value_changes_nothing(store: Store) -> None:
    quotas = Quotas(store, DEFAULTS)
    with pytest.raises(ServiceError, match="sessions_max"):
        await quotas.change(TENANT, {"adapters_max": "9", "sessions_max": "x"}, ACT)
    assert store.tenants.limits() == {}
    assert quotas.of(TENANT) == DEFAULTS


async def test_a_change_that_is_not_durable_is_not_in_effect(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "log.db")
    quotas = Quotas(store, DEFAULTS)
    await store.close()
    with pytest.raises(Exception, match="closed"):
        await quotas.change(TENANT, {"adapters_max": "9"}, ACT)
    assert quotas.of(TENANT) == DEFAULTS


async def test_a_refusal_names_what_an_administrator_types(store: Store) -> None:
    expected = "5 in use, at most 5; .*: tinkerpool tenant limit alice adapters_max=NUMBER"
    with pytest.raises(ServiceError, match=expected):
        Quotas(store, DEFAULTS).ceiling("adapters_max", lambda _: 5).check(TENANT)
