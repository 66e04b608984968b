"""Layers of experts: where tokens go, what adapters add to, and what a tenant's bits depend on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support.mini_model import Architecture, build_mini_model
from tests.support.numerics.cases import long
from tests.support.numerics.harness import Driver, Tenant, make_data, make_spec
from tests.support.numerics.random_experts import NUM_ROWS, Layer
from tests.support.numerics.samplers import next_tokens, request, sampling
from tests.support.numerics.tenants import train
from workers.model import expert_shares, experts
from workers.model.expert_groups import can_group
from workers.model.expert_products import Dispatch, Ints
from workers.model.expert_shares import Share, SharesOfPart, share_rows
from workers.model.experts import GivenChoices, Router
from workers.model.pretrained import UnsupportedModelError
from workers.rows import GroupShape
from workers.selftest import expert_invariance
from workers.selftest.expert_invariance import find_expert_rows

DATA = make_data("cross_entropy", [200, 120])


@pytest.fixture(params=["qwen3.5-moe", "gpt-oss", *long("qwen3-moe")])
def mixture(request: pytest.FixtureRequest, model_directories: dict[str, Path]) -> Path:
    """Experts beside one that all tokens share, and with biases; in long runs also without either."""
    return model_directories[request.param]


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> list[Ints]:
    """The experts (T, k) that each layer of each pass has chosen."""
    seen: list[Ints] = []

    def each(chosen: Tensor) -> Ints:
        seen.append(chosen.cpu().numpy())
        return seen[-1]

    monkeypatch.setattr(experts, "each_choice", each)
    return seen


def test_tokens_go_to_the_experts_of_transformers_with_a_margin(mixture: Path, choices: list[Ints]) -> None:
    """The margin is that of the tests' model: all its comparisons in fp32 are of tokens that are routed alike."""
    driver = Driver(mixture)
    driver.install(make_spec("a"))
    choices.clear()  # of the trials of a model that is loaded
    driver.train(driver.forward("a", DATA))
    model: Any = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32)
    logits: list[Tensor] = []
    for layer in model.model.layers:
        router = layer.mlp.router if hasattr(layer.mlp, "router") else layer.mlp.gate
        router.register_forward_hook(lambda _, __, output: logits.append(output[0]))
    with torch.no_grad():
        for datum in DATA:
            model(input_ids=torch.from_numpy(datum.tokens).long()[None], use_cache=False)
    num_layers = len(model.model.layers)
    for number, own in enumerate(choices):
        theirs = torch.cat(logits[number::num_layers])
        top = theirs.topk(own.shape[1] + 1).values
        assert float((top[:, -2] - top[:, -1]).min()) > 1e-5
        assert np.array_equal(own[: len(theirs)], theirs.topk(own.shape[1]).indices.numpy())


@pytest.mark.parametrize(("dtype", "part_of_others"), [("float32", 0.0), ("bfloat16", 0.05)])
def test_the_sampler_sends_tokens_of_an_adapter_to_the_experts_of_the_trainer(
    mixture: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, part_of_others: float
) -> None:
    """In fp32 each token's margin is larger than rounding; in bf16 one token in twenty may go elsewhere."""
    seen: list[Tensor] = []
    forward = Router.forward

    def noted(router: Router, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        seen.append(forward(router, hidden)[0].clone())
        return forward(router, hidden)

    s = sampling(mixture, dtype=dtype)
    s.publish("a")
    wanted = request("r", "a/v", 60, max_tokens=30)
    monkeypatch.setattr(Router, "forward", noted)
    (sequences,) = s.sequences(wanted)
    num_layers = len(s.driver.engine.base_model.expert_layers)
    sampled = [
        torch.cat([seen[layer][:60], *(step[:1] for step in seen[num_layers + layer :: num_layers])])
        for layer in range(num_layers)
    ]
    seen.clear()
    s.driver.train(s.driver.forward("a", [next_tokens(np.concatenate([wanted.prompt, sequences[0].tokens]))]))
    others = []
    for trained, own in zip(seen, sampled, strict=True):
        assert len(own) == 89
        top = trained[: len(own)].topk(3)
        if dtype == "float32":
            margins = top.values[:, 1] - top.values[:, 2]
            assert (margins > 2 * (trained[: len(own)] - own).abs().max(1).values).all()
        others.append((top.indices[:, :2].sort().values != own.topk(2).indices.sort().values).any(1).float().mean())
    assert float(max(others)) <= part_of_others


def test_few_tokens_go_to_other_experts_in_bf16(mixture: Path, choices: list[Ints]) -> None:
    chosen = []
    for dtype in ("float32", "bfloat16"):
        driver = Driver(mixture, dtype=dtype)
        driver.install(make_spec("a"))
        choices.clear()
        driver.train(driver.forward("a", DATA))
        chosen.append(list(choices))
    flips = [float((np.sort(one) != np.sort(other)).any(1).mean()) for one, other in zip(*chosen, strict=True)]
    assert max(flips) < 0.1


@pytest.mark.parametrize(("architecture", "seed"), [("gpt-oss", 1), ("gpt-oss", 3), ("qwen3-moe", 0), ("qwen3-moe", 5)])
def test_a_mixture_is_served_in_bf16_though_rounding_sends_a_token_of_the_probe_elsewhere(
    tmp_path: Path, architecture: Architecture, seed: int
) -> None:
    """Of such a token all values differ, by more than rounding."""
    directory = build_mini_model(tmp_path, architecture, seed)
    assert Driver(directory, dtype="bfloat16").engine.base_model.expert_layers


@pytest.mark.usefixtures("own_base_models")
def test_a_mixture_whose_routers_choose_other_experts_is_refused_in_bf16(
    mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = GivenChoices.in_place_of
    monkeypatch.setattr(GivenChoices, "in_place_of", lambda self, own, layer: given(self, (own + 1) % 8, layer))
    with pytest.raises(UnsupportedModelError, match=r"choose other experts than the model's own code, [4-9]\d% of all"):
        Driver(mixture, dtype="bfloat16")


def test_a_second_segment_of_an_adapter_adds_to_the_gradients_of_the_same_experts(mixture: Path) -> None:
    """A write of several gradients of one expert at once would keep the last."""
    layer = Layer(Driver(mixture).engine.base_model)
    both = layer.gradient([(0, 0, 40), (0, 40, 70)])
    first, second = layer.gradient([(0, 0, 40)]), layer.gradient([(0, 40, 70)])
    assert torch.equal(both, first + second)
    assert (first != 0).logical_and(second != 0).sum() > 1000, "both go to the same experts"


def test_matrices_that_are_adjacent_in_memory_give_the_bits_of_copied_ones(
    mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which of the two a batch takes depends on the company: on which pairs of adapter and expert it has."""
    layer = Layer(Driver(mixture).engine.base_model)
    segments = [(0, 0, 40), (1, 40, 200), (0, 200, NUM_ROWS)]
    in_place = layer.results(segments)
    monkeypatch.setattr(expert_shares, "STRETCH_SHARES", 1 << 30)
    for one, other in zip(layer.results(segments).all, in_place.all, strict=True):
        assert torch.equal(one, other)


def test_rows_of_padding_add_nothing_to_gradients(mixture: Path) -> None:
    layer = Layer(Driver(mixture).engine.base_model)
    layer.choices[:] = [0, 1]
    one = layer.gradient([(0, 0, 1)])
    layer.choices[1:] = [2, 3]  # rows behind it, which a share of one row must not take
    assert torch.equal(layer.gradient([(0, 0, 1)]), one)
    layer.x[1:], layer.dout[1:] = float("nan"), float("nan")
    assert torch.equal(layer.gradient([(0, 0, 1)]), one)
    doubled = Layer(Driver(mixture).engine.base_model)
    doubled.x[:17], doubled.dout[:17] = doubled.x[0].clone(), doubled.dout[0].clone()
    doubled.choices[:17], doubled.weights[:17] = doubled.choices[0].copy(), doubled.weights[0].clone()
    once, often = doubled.gradient([(0, 0, 1)]), doubled.gradient([(0, 0, 17)])  # padded to 16 and to 32 rows
    torch.testing.assert_close(often, 17 * once, rtol=1e-4, atol=1e-4)


def test_gradients_of_a_share_do_not_depend_on_the_longest_share_beside_it(
    mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros behind a sum over rows change its bits on some processors only: the rows of padding are compared, too."""
    padded: list[tuple[int, int]] = []
    shares_of_part = expert_shares._shares_of_part

    def noted(shares: Mapping[tuple[int, int], list[Share]], dispatch: Dispatch) -> SharesOfPart:
        padded.extend((num_rows, share.length) for (_, num_rows), batch in shares.items() for share in batch)
        return shares_of_part(shares, dispatch)

    monkeypatch.setattr(expert_shares, "_shares_of_part", noted)
    layer = Layer(Driver(mixture).engine.base_model)
    layer.choices[:] = [0, 1]
    for length in (17, 129, 500):
        alone = layer.gradient([(0, 0, length)])
        assert torch.equal(layer.gradient([(0, 0, length), (1, length, NUM_ROWS)]), alone)
    assert padded
    assert all(num_rows == share_rows(length) for num_rows, length in padded)


def test_only_gpus_with_the_kernel_use_grouped_matmul(monkeypatch: pytest.MonkeyPatch) -> None:
    def allowed(capability: tuple[int, int], d_out: int = 64) -> bool:
        report: Callable[..., tuple[int, int]] = lambda *_: capability  # noqa: E731
        monkeypatch.setattr(torch.cuda, "get_device_capability", report)  # of GPUs that are not here
        shape = GroupShape(index=0, kind="mlp", names=("a",), d_in=64, d_outs=(d_out,), num_Bs=4)
        return can_group(torch.device("cuda"), [shape])

    assert allowed((9, 0))
    assert allowed((10, 0))
    assert not allowed((8, 0))
    assert not allowed((12, 0))
    assert not allowed((9, 0), d_out=258)


def test_the_segments_of_a_pass_that_has_ended_keep_no_adapter_in_memory(mixture: Path) -> None:
    driver = Driver(mixture)
    driver.install(make_spec("a"))
    driver.train(driver.backward("a", DATA))
    model = driver.engine.base_model
    model.reset()
    assert not model.expert_layers[0].shared._segments


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 100, 500, 4096])
def test_a_share_is_padded_by_its_own_length_by_a_quarter_at_most(length: int) -> None:
    rows = share_rows(length)
    assert length <= rows <= max(16 * -(-length // 16), 1.25 * length)


@pytest.mark.usefixtures("own_base_models")
def test_a_model_whose_experts_keep_no_bits_promises_none(mixture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Driver(mixture).engine.base_model
    assert model.numerics.rows_min is not None
    assert model.expert_layers[0].shared.rows_min == find_expert_rows(model)
    monkeypatch.setattr(expert_invariance._Trial, "keeps", lambda *_: False)
    assert Driver(mixture).engine.base_model.numerics.rows_min is None


def test_tenants_on_the_same_and_on_other_experts_have_the_bits_of_solo(mixture: Path, choices: list[Ints]) -> None:
    """Equal tokens go to the same experts; single tokens to few."""
    tenants = [
        Tenant(spec=make_spec("a", 8), passes=[make_data("cross_entropy", [64], 1)]),
        Tenant(spec=make_spec("b", 8), passes=[make_data("cross_entropy", [64], 1)]),
        Tenant(spec=make_spec("c", 16), passes=[make_data("cross_entropy", [1], 2)]),
        Tenant(spec=make_spec("d", 4), passes=[make_data("cross_entropy", [2, 1], 3)]),
    ]
    together = train(Driver(mixture), tenants, num_steps=2)
    assert len(np.unique(np.concatenate(choices))) == 8
    for tenant in tenants:
        together[tenant.key].assert_equal(train(Driver(mixture), [tenant], num_steps=2)[tenant.key])


@pytest.mark.parametrize("theirs", [[0, 1], [1, 2], [6, 7]], ids=["the same", "overlapping", "disjoint"])
@pytest.mark.parametrize("value", [1.0, float("nan"), float("inf")])
def test_a_tenants_rows_have_the_bits_of_solo_beside_any_rows_on_the_same_or_on_other_experts(
    mixture: Path, theirs: list[int], value: float
) -> None:
    layer = Layer(Driver(mixture).engine.base_model)
    own = slice(40, 110)
    layer.choices[own] = [0, 1]
    layer.choices[:40], layer.choices[110:] = theirs, theirs
    segments = [(1, 0, 40), (0, 40, 110), (1, 110, 200)]
    solo = layer.results(segments[1:2])
    layer.x[:40], layer.x[110:200] = value * layer.x[:40], value * layer.x[110:200]
    layer.dout[110:200] *= value
    together = layer.results(segments)
    assert together.gradients[0].any()
    assert torch.equal(together.gradients[0], solo.gradients[0])
    assert bool(together.gradients[1].isfinite().all()) == (value == 1.0)
    for one, other in zip(together.of_rows, solo.of_rows, strict=True):
        assert torch.equal(one[own], other[own])
