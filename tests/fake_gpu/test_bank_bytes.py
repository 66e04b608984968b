"""What the bank of an engine takes of a GPU's memory."""

from __future__ import annotations

import pytest

from tests.support.fake_cuda.processes import FakeCudaProcess

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fake_gpu")]
BANK_OF = "tests.support.fake_cuda.scenarios:bank_of"


@pytest.mark.long
def test_the_bank_takes_half_of_what_is_free_and_no_more(fake_gpu: FakeCudaProcess) -> None:
    free_bytes, num_bytes, num_resident = fake_gpu.call(BANK_OF, "8b", [128] * 12)
    assert 0.75 * free_bytes / 2 < num_bytes <= free_bytes / 2
    assert num_resident < 12


@pytest.mark.long
def test_adapters_of_many_ranks_take_at_most_twice_their_bytes(fake_gpu: FakeCudaProcess) -> None:
    ranks = [8, 16, 32, 64]
    _, four_bytes, _ = fake_gpu.call(BANK_OF, "0.6b@2", ranks)
    _, num_bytes, num_resident = fake_gpu.call(BANK_OF, "0.6b@2", ranks * 4)
    assert num_resident == 16
    assert num_bytes <= 2 * 4 * four_bytes
