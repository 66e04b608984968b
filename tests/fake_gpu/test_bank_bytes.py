"""What the bank of an engine takes of a GPU's memory."""

from __future__ import annotations

import pytest

from tests.support.fake_cuda.processes import FakeCudaProcess

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fake_gpu")]
BYTES_OF = "tests.support.fake_cuda.banks:bytes_of"


def test_the_bank_takes_at_most_half_of_what_is_free(fake_gpu: FakeCudaProcess) -> None:
    row_bytes, _ = fake_gpu.call(BYTES_OF, "0.6b@2", [32], free_bytes=60 << 30)
    num_bytes, num_resident = fake_gpu.call(BYTES_OF, "0.6b@2", [32] * 12, free_bytes=20 * row_bytes)
    assert num_bytes <= 10 * row_bytes
    assert 9 <= num_resident <= 10


def test_adapters_of_many_ranks_take_at_most_twice_their_bytes(fake_gpu: FakeCudaProcess) -> None:
    alone = {rank: fake_gpu.call(BYTES_OF, "0.6b@2", [rank], free_bytes=60 << 30)[0] for rank in (8, 16, 32, 64)}
    ranks = [8, 16, 32, 64] * 4
    num_bytes, num_resident = fake_gpu.call(BYTES_OF, "0.6b@2", ranks, free_bytes=60 << 30)
    assert num_resident == len(ranks)
    assert num_bytes <= 2 * sum(alone[rank] for rank in ranks)
