"""The estimate of a pass's memory holds; passes that do not fit are cut, recomputed or refused as too long."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.numerics.allocations import Allocations
from tests.support.numerics.cases import long
from tests.support.numerics.harness import RARER_ARCHITECTURES, VOCAB_SIZE, Driver, assemble_again, make_data, make_spec
from workers.bank.bank import Bank
from workers.host.free_memory import MemoryShare
from workers.model import packed_delta
from workers.model.attention import PackedAttention
from workers.model.base_model import BaseModel
from workers.model.gpu_attention import FlashKernel, VarlenAttention
from workers.selftest.loading import fitting_tokens
from workers.training.logits import block_rows_of
from workers.training.memory import USED_FRACTION, Load, PassMemory
from workers.training.passes import PassRunner

LENGTHS = (512, 200, 312, 512)
RANKS = {"a": 8, "b": 16}
MODES = [
    *product(("qwen3", "qwen3.5-moe"), ("off", "on", "forward")),
    *(("gemma3", "on"), ("gpt-oss", "off")),
    *long(*product(("gemma3",), ("off", "forward")), *product(("gpt-oss",), ("on", "forward"))),
    *long(*product(RARER_ARCHITECTURES, ("off", "on", "forward"))),
]


def memory_of(driver: Driver) -> PassMemory:
    return PassMemory(driver.engine.base_model)


def limit_memory(driver: Driver, num_bytes: int) -> None:
    """Give an engine this much free memory for passes."""
    assemble_again(driver.engine, free_bytes=round(num_bytes / USED_FRACTION) + 1)


@pytest.mark.slow
@pytest.mark.parametrize(("model_directory", "mode"), MODES, indirect=["model_directory"])
def test_the_estimate_is_between_the_peak_memory_of_a_pass_and_half_more(
    model_directory: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_delta, "GROUP_VALUES", 1 << 14)  # few of the pass's tokens, as with larger models
    backward = mode != "forward"
    driver = Driver(model_directory, recompute="on" if mode == "on" else "off")
    driver.install(*(make_spec(key, rank) for key, rank in RANKS.items()))
    data = make_data("cross_entropy", LENGTHS)
    driver.train(*(driver.backward(key, data) for key in RANKS))  # fills the blocks of logits, leaves gradients pending
    items = [driver.backward(key, data, backward=backward) for key in RANKS]
    load = Load(
        num_tokens=2 * sum(LENGTHS),
        lengths=LENGTHS,
        rank=16,
        num_adapters=2,
        pending_values=sum(driver.gradient(key).numel() for key in RANKS) if backward else 0,
    )
    with Allocations() as allocations:
        driver.train(*items)
    estimate = memory_of(driver).peak_bytes(load, backward=backward, recompute=mode == "on")
    assert allocations.peak_bytes <= estimate <= 1.5 * allocations.peak_bytes


def test_masks_of_a_window_are_counted_while_they_are_made(model_directories: dict[str, Path]) -> None:
    """For long sequences of a small model, a mask takes more memory while it is made than the whole pass."""
    driver = Driver(model_directories["mistral-window"])
    driver.install(make_spec("a"))
    data = make_data("cross_entropy", [512])
    driver.train(driver.forward("a", data))
    item = driver.forward("a", data)
    with Allocations() as allocations:
        driver.train(item)
    load = Load(num_tokens=512, lengths=[512], rank=8)
    assert allocations.peak_bytes <= memory_of(driver).peak_bytes(load, backward=False)
    without = memory_of(driver).peak_bytes(Load(num_tokens=512, lengths=[8] * 64, rank=8), backward=False)
    assert allocations.peak_bytes > without


class WithoutMasks(PackedAttention):
    makes_masks = False


@pytest.mark.usefixtures("own_base_models")
def test_attention_that_makes_no_masks_is_charged_for_none(model_directories: dict[str, Path]) -> None:
    driver = Driver(model_directories["mistral-window"])
    base_model, bank = driver.engine.base_model, driver.engine.bank

    def fitting() -> int | None:
        memory = MemoryShare(base_model.device, measure=lambda _: 4_000_000)
        return fitting_tokens(PassRunner(base_model, bank, memory))

    with_masks = fitting()
    base_model.attend_packed = WithoutMasks
    without = fitting()
    assert with_masks is not None
    assert without is None or with_masks < without


@pytest.mark.usefixtures("own_base_models")
def test_many_short_sequences_take_more_memory_where_each_has_buffers(qwen3: Path) -> None:
    engine = Driver(qwen3).engine
    engine.base_model.attend_packed = lambda lengths, _: VarlenAttention(FlashKernel(), lengths)
    memory = PassMemory(engine.base_model)
    few, many = (
        memory.peak_bytes(Load(num_tokens=512, lengths=[8], num_sequences=number, rank=8), backward=True)
        for number in (1, 64)
    )
    num_heads, head_dim = engine.base_model.num_heads, engine.base_model.head_dim
    assert many - few == 4 * 63 * 128 * num_heads * (-(-head_dim // 32) * 32 + 1)


def test_flash_attention_of_short_sequences_of_a_large_model_takes_gigabytes() -> None:
    """1,024 sequences of 8 tokens, of a model of 8B."""
    assert 2.1e9 < FlashKernel().buffer_bytes(8 * 1024, 1024, 32, 128) < 2.6e9


def test_room_is_measured_when_the_adapters_of_a_batch_are_resident(qwen3: Path) -> None:
    """A GPU gives memory to rows when they are loaded."""
    banks: list[Bank] = []
    num_resident: list[int] = []

    def measure(_: torch.device) -> int:
        num_resident.extend(bank.num_resident for bank in banks)
        return 1 << 40

    driver = Driver(qwen3, num_slots=2, free_bytes=measure)
    driver.install(*(make_spec(key) for key in "abc"))
    banks.append(driver.engine.bank)
    driver.train(*(driver.backward(key, make_data("cross_entropy", [20])) for key in "abc"))
    assert num_resident == [2]


@pytest.fixture
def driver(qwen3: Path) -> Driver:
    driver = Driver(qwen3)
    driver.install(make_spec("a"), make_spec("b"))
    return driver


def gradients(driver: Driver, *lengths: int) -> tuple[list[bytes], int]:
    """Run a batch; return both adapters' gradients, and its number of products with frozen weights."""
    for key in "ab":
        driver.engine.bank.entry(key).drop_grad()
    taken = driver.num_base_matmuls(*(driver.backward(key, make_data("cross_entropy", lengths)) for key in "ab"))
    return [driver.gradient(key).numpy().tobytes() for key in "ab"], taken


def test_requests_that_fit_one_by_one_are_passes_of_their_own_and_none_runs_twice(driver: Driver) -> None:
    expected, together = gradients(driver, 500, 500)
    load = Load(num_tokens=1500, lengths=[500], rank=8, num_adapters=2)
    limit_memory(driver, memory_of(driver).peak_bytes(load, backward=True))
    actual, apart = gradients(driver, 500, 500)
    assert actual == expected
    # Of one pass of 2000 tokens, 14 products in the layers; the unembedding goes block by block either way.
    assert apart - together == 14


def test_a_request_that_fits_only_with_recomputed_layers_runs_them_twice(driver: Driver) -> None:
    expected, together = gradients(driver, 500, 500)
    memory, load = memory_of(driver), Load(num_tokens=1000, lengths=[500], rank=8)
    limit_memory(driver, memory.peak_bytes(load, backward=True, recompute=True))
    assert memory.peak_bytes(load, backward=True) > memory.peak_bytes(load, backward=True, recompute=True)
    actual, apart = gradients(driver, 500, 500)
    assert actual == expected
    assert apart - together == 3 * 14, "two passes for one, and each runs its layers again"


def test_a_request_that_finds_less_memory_than_was_measured_runs_its_layers_twice(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.train(*(driver.backward(key, make_data("cross_entropy", [20])) for key in "ab"))
    expected, forward = Driver(Path(driver.engine.settings.model_path)), BaseModel.forward
    expected.install(make_spec("a"), make_spec("b"))
    expected.train(*(expected.backward(key, make_data("cross_entropy", [20])) for key in "ab"))

    # Patched: memory does not run out on demand between the measurement and the pass.
    def short_of_memory(self: BaseModel, *args: Any, recompute: bool, **kwargs: Any) -> Any:
        if not recompute:
            raise MemoryError
        return forward(self, *args, recompute=recompute, **kwargs)

    data = make_data("cross_entropy", [100])
    expected.train(*(expected.backward(key, data) for key in "ab"))
    monkeypatch.setattr(BaseModel, "forward", short_of_memory)
    driver.train(*(driver.backward(key, data) for key in "ab"))
    for key in "ab":
        assert driver.gradient(key).equal(expected.gradient(key))


def test_the_copy_of_a_pending_gradient_takes_memory_too(driver: Driver) -> None:
    limit_memory(driver, memory_of(driver).peak_bytes(Load(num_tokens=500, lengths=[500], rank=8), backward=True))
    data = make_data("cross_entropy", [500])
    first, second = (driver.num_base_matmuls(driver.backward("a", data)) for _ in range(2))
    assert second - first == 14, "the second pass, with a copy of the gradient, recomputes its layers"


def test_short_requests_still_share_a_pass_where_memory_is_short(driver: Driver) -> None:
    _, together = gradients(driver, 30)
    limit_memory(
        driver, memory_of(driver).peak_bytes(Load(num_tokens=64, lengths=[30], rank=8, num_adapters=2), backward=True)
    )
    assert gradients(driver, 30)[1] == together


def test_forwards_share_a_pass_that_would_not_fit_with_a_backward(driver: Driver) -> None:
    memory, load = memory_of(driver), Load(num_tokens=2000, lengths=[500], rank=8, num_adapters=2)
    limit_memory(driver, memory.peak_bytes(load, backward=False))
    assert memory.peak_bytes(load, backward=True) > memory.peak_bytes(load, backward=False)
    data = make_data("cross_entropy", [500, 500])
    blocks = -(-2000 // block_rows_of(VOCAB_SIZE))
    assert driver.num_base_matmuls(*(driver.forward(key, data) for key in "ab")) == 14 + blocks
