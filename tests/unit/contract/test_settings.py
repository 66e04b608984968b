"""Settings of pools and engines: values derived from them, and values that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from workers.contract.settings import EngineSettings, PoolConfig, PoolModel


def test_threads_are_the_configured_ones_or_the_cores_divided_by_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.contract.settings.num_cores", lambda: 8)  # machines differ
    models = (PoolModel(name="a", path="a", num_workers=2), PoolModel(name="b", path="b"))

    def threads(**values: Any) -> set[int | None]:
        config = PoolConfig(models=models, **values)
        return {settings.num_threads for settings in config.engines().values()}

    assert threads() == {2}
    assert threads(num_threads=5) == {5}
    assert threads(ray_address="10.0.0.1:6379", num_cpus=3.5) == {3}


def test_workers_of_one_machine_share_its_memory_and_those_of_a_gpu_share_that() -> None:
    models = (PoolModel(name="a", path="a", num_workers=3), PoolModel(name="b", path="b"))

    def shares(**values: Any) -> set[float]:
        settings = PoolConfig(models=models, recompute="on", **values).engines().values()
        assert {each.recompute for each in settings} == {"on"}
        return {each.memory_share for each in settings}

    assert shares() == shares(kind="local", device="cuda") == {0.25}
    assert shares(ray_address="10.0.0.1:6379") == {1.0}
    assert shares(device="cuda", num_gpus=0.5) == {0.5}
    assert shares(device="cuda", num_gpus=2) == {1.0}


def test_keys_and_values_get_a_share_of_the_memory_and_by_default_little_of_a_cpus() -> None:
    def cache(**values: Any) -> tuple[float, int | None]:
        (settings,) = PoolConfig(models=(PoolModel(name="a", path="a"),), **values).engines().values()
        return settings.cache_share, settings.cache_bytes_max

    assert cache() == (0.25, 2 << 30)
    assert cache(device="cuda", num_gpus=1) == (0.25, None)
    assert cache(cache_share=0.5) == cache(cache_share=0.5, device="cuda", num_gpus=1) == (0.5, None)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"models": ()}, "at least one model"),
        ({"kind": "kubernetes"}, "kind is"),
        ({"models": (PoolModel(name="a", path="x"), PoolModel(name="a", path="y"))}, "a name of its own"),
        ({"num_slots": -1}, "num_slots is -1"),
        ({"num_threads": -1}, "num_threads is -1"),
        ({"recompute": "maybe"}, "recompute is 'maybe'"),
        ({"num_gpus": float("nan")}, "num_gpus is nan"),
        ({"device": "cuda"}, "workers on cuda need num_gpus"),
        ({"dtype": "float16"}, "dtype is 'float16'"),
        ({"num_gpus": 0.5}, "others need 0"),
        ({"cache_share": 1.0}, "cache_share is 1.0"),
        ({"start_timeout_s": 0}, "start_timeout_s is 0"),
        ({"ray_address": "here", "ray_temp_dir": "/tmp/x"}, "private Ray"),
        ({"engine": "workers.engine"}, "module:attribute"),
    ],
)
def test_invalid_settings_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PoolConfig(**{"models": (PoolModel(name="toy", path="toy"),)} | values)


def test_model_without_workers_is_refused() -> None:
    with pytest.raises(ValueError, match="num_workers is 0"):
        PoolModel(name="a", path="a", num_workers=0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_slots", 0),
        ("num_threads", 0),
        ("pass_tokens_max", 0),
        ("recompute", "sometimes"),
        ("memory_share", 0.0),
        ("memory_share", 1.5),
        ("cache_share", 0.0),
        ("cache_bytes_max", -1),
    ],
)
def test_invalid_engine_settings_are_refused_by_name(field: str, value: Any) -> None:
    fields: dict[str, Any] = {field: value}
    with pytest.raises(ValueError, match=field):
        EngineSettings(model_path="m", **fields)
