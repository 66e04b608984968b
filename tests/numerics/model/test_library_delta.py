"""Linear attention by a library: what is around its rule, and when the rule is not used.

The package's kernels need a GPU. A token by token twin of the rule stands in their place.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from tests.support.numerics.agreement import distance, observe
from tests.support.numerics.harness import Driver
from tests.support.numerics.tenants import TENANTS
from workers.contract.settings import EngineSettings
from workers.model import library_delta
from workers.model.base_model import BaseModel
from workers.model.delta_rule import DeltaInputs
from workers.model.library_delta import ONE_WAY, LibraryDelta, rule_of_library, switch_to_one_way
from workers.model.packed_delta import PackedDelta
from workers.selftest import library_delta as trial
from workers.selftest.library_delta import problem_of
from workers.selftest.loading import load_base_model
from workers.selftest.sequence_invariance import TRIAL_LENGTHS, packed_results, random_rows
from workers.training.memory import Load, PassMemory

pytestmark = pytest.mark.usefixtures("own_base_models")


@pytest.fixture
def hybrid(model_directories: dict[str, Path]) -> Path:
    return model_directories["qwen3.5"]


def token_by_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float,
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Tensor,
) -> tuple[Tensor, None]:
    """Implements `library_delta.Rule` by its definition; each row's numbers are of one sequence alone."""
    assert torch.equal(cu_seqlens, cu_seqlens_cpu)
    per_key = v.shape[2] // q.shape[2]
    query, key = (part[0].float().repeat_interleave(per_key, 1) for part in (q * scale, k))  # (T, H G, E)
    value, decay, strength = v[0].float(), g[0].exp().unsqueeze(-1), beta[0].unsqueeze(-1)
    outs = []
    for start, stop in pairwise(cu_seqlens_cpu.tolist()):
        state = value.new_zeros(value.shape[1], key.shape[2], value.shape[2])  # (H G, E, P)
        for row in range(start, stop):
            state = state * decay[row].unsqueeze(-1)
            delta = strength[row] * (value[row] - (state * key[row].unsqueeze(-1)).sum(1))
            state = state + key[row].unsqueeze(-1) * delta.unsqueeze(1)
            outs.append((state * query[row].unsqueeze(-1)).sum(1))
    return torch.stack(outs).unsqueeze(0).to(v.dtype), None


def test_a_layer_by_the_rule_of_a_library_has_our_results_and_gradients(hybrid: Path) -> None:
    weights = Driver(hybrid).engine.base_model.delta_layers[0].delta_weights
    rows, device = random_rows(weights, torch.float32), torch.device("cpu")
    expected = packed_results(PackedDelta(TRIAL_LENGTHS, device), weights, rows)
    actual = packed_results(LibraryDelta(token_by_token, TRIAL_LENGTHS, device), weights, rows)
    for own, theirs in zip(expected, actual, strict=True):
        assert float((own - theirs).abs().max()) <= 1e-4 * float(own.abs().max())


def test_rows_of_padding_are_finite_and_reach_no_sequence(hybrid: Path) -> None:
    weights = Driver(hybrid).engine.base_model.delta_layers[0].delta_weights
    rows = [part[:20] for part in random_rows(weights, torch.float32)]
    recur = LibraryDelta(token_by_token, [9, 8], torch.device("cpu"))
    with torch.no_grad():
        whole = recur(0, weights, DeltaInputs.of(rows))
        for part in rows:
            part[17:] = 3.0
        assert torch.equal(recur(0, weights, DeltaInputs.of(rows))[:17], whole[:17])
    assert whole.isfinite().all()


def test_passes_of_a_hybrid_by_the_rule_of_a_library_have_the_gradients_of_our_own(hybrid: Path) -> None:
    driver = Driver(hybrid)
    driver.engine.base_model.library_rule = token_by_token
    apart = distance(observe(driver, TENANTS[:2]), observe(Driver(hybrid), TENANTS[:2]))
    assert apart.logprobs < 1e-4
    assert apart.gradients < 1e-4
    assert (
        "linear attention by fla-core"
        in driver.engine.base_model.info(is_thread_count_invariant=False, are_samples_batch_invariant=False).fingerprint
    )


def other_numbers(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    out, _ = token_by_token(*args, **kwargs)
    return out * 1.1, None


def no_numbers(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    out, _ = token_by_token(*args, **kwargs)
    return out * float("nan"), None


def other_bits_in_company(*args: Any, cu_seqlens: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
    out, _ = token_by_token(*args, cu_seqlens=cu_seqlens, **kwargs)
    return out * (1 + 1e-6 * (len(cu_seqlens) > 2)), None


def out_of_memory(*_: Any, **__: Any) -> tuple[Tensor, None]:
    raise RuntimeError("out of shared memory")


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        (token_by_token, ""),
        (other_numbers, "gives other numbers"),
        (no_numbers, "gives other numbers"),
        (other_bits_in_company, "gives a sequence other bits beside others"),
        (out_of_memory, "fails: out of shared memory"),
    ],
)
def test_the_trial_finds_a_rule_that_is_wrong_or_fails_or_depends_on_company(
    hybrid: Path, rule: Any, problem: str
) -> None:
    assert problem_of(Driver(hybrid).engine.base_model, rule) == problem


def loaded(hybrid: Path, **settings: Any) -> BaseModel:
    return load_base_model(EngineSettings(model_path=str(hybrid), linear_attention="fla", **settings))


def test_a_model_whose_trial_fails_computes_with_our_rule_and_says_so(
    hybrid: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for rule, is_used in ((token_by_token, True), (other_numbers, False)):
        monkeypatch.setattr(trial, "rule_of_library", lambda *_, rule=rule: rule)
        assert (loaded(hybrid).library_rule is not None) == is_used
    assert "linear attention is ours: fla gives other numbers" in caplog.text


def test_exact_mode_computes_with_our_rule(
    hybrid: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trial, "rule_of_library", lambda *_: token_by_token)
    assert loaded(hybrid, exact=True).library_rule is None
    assert "in exact mode linear attention is ours" in caplog.text


def test_a_cpu_never_imports_the_package(hybrid: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert loaded(hybrid).library_rule is None
    assert "fla computes on GPUs in bfloat16 alone" in caplog.text
    assert [name for name in sys.modules if name.split(".")[0] == "fla"] == []


@pytest.mark.parametrize("found", ["0.5.2", PackageNotFoundError("fla-core")], ids=str)
def test_only_the_pinned_version_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, found: Any
) -> None:
    monkeypatch.setattr(library_delta, "version", Mock(side_effect=[found, found]))
    assert rule_of_library(torch.device("cuda"), torch.bfloat16) is None
    assert "linear attention is ours" in caplog.text


def test_the_pinned_version_is_that_of_the_extra() -> None:
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert f'"{library_delta.PACKAGE}=={library_delta.VERSION}"' in project


def test_the_package_is_told_to_compute_in_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ONE_WAY, raising=False)
    switch_to_one_way()
    assert os.environ[ONE_WAY] == "1"


def test_the_estimate_of_memory_counts_all_rows_at_once(hybrid: Path) -> None:
    """Our own rule holds those of a group."""
    base_model = Driver(hybrid).engine.base_model
    load = Load(num_tokens=1 << 16, lengths=[64], rank=8)
    own = PassMemory(base_model).peak_bytes(load, backward=True)
    base_model.library_rule = token_by_token
    assert PassMemory(base_model).peak_bytes(load, backward=True) > 1.5 * own
