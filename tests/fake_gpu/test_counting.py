"""The counting itself: what an operation counts for, what waits, what memory is in use, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.fake_cuda import guard
from tests.support.fake_cuda.processes import FakeCudaProcess

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fake_gpu")]  # one process, so that torch is imported once
OPERATIONS = "tests.support.fake_cuda.operations"
X = "x = torch.empty(64, 32, device='cuda')"


@pytest.mark.parametrize(
    ("setup", "program", "num_kernels", "num_bytes"),
    [
        (X, "x + x", 1, 3 * 8192),
        (X, "x.add_(1)", 1, 2 * 8192),
        (X, "x + torch.empty(32, device='cuda')", 1, 2 * 8192 + 128),
        (X, "x + torch.empty(1, 32, device='cuda').expand(64, 32)", 1, 2 * 8192 + 128),
        (X, "x.view(-1)[:7].unsqueeze(0)", 0, 0),
        (X, "x.zero_()", 1, 8192),
        (X, "x.copy_(torch.empty(64, 32, device='cuda'))", 1, 2 * 8192),
        (X, "x.to(torch.bfloat16)", 1, 8192 + 4096),
        (X, "x.t().contiguous()", 1, 2 * 8192),
        (X, "x @ torch.empty(32, 16, device='cuda')", 1, 8192 + 2048 + 4096),
        (X, "torch.addmm(x, x, x[:32], beta=0, out=x)", 1, 8192 + 4096 + 8192),
        (X, "torch.addmm(x[0, :16], x, x[:32, :16])", 1, 8192 + 2048 + 64 + 4096),
        (X, "torch.addmm(x[:, :16], x, x[:32, :16])", 2, 8192 + 2048 + 4096 + 2 * 4096),
        (X, "x.cpu()", 0, 0),
        (X, "x[:, :16].cpu()", 1, 2 * 4096),
        (X, "torch.cat([x] * 129)", 2, 2 * 129 * 8192),
        (X, "x.index_select(0, torch.empty(4, dtype=torch.long, device='cuda'))", 1, 32 + 2 * 512),
        (X, "F.rms_norm(x, (32,), torch.empty(32, device='cuda'))", 1, 2 * 8192 + 128 + 256),
        (X, "F.silu(x.requires_grad_()).sum().backward()", 4, 8192 * 2 + 8192 + 4 + 4 + 4 + 8192 * 2),
        (X, "x.topk(4, -1)", 2, 8192 + 3 * (1024 + 2048)),
        (X, "x.index_fill_(0, torch.empty(3, dtype=torch.long, device='cuda'), 0.0)", 1, 24 + 3 * 128),
        (X, "x.index_copy_(0, torch.empty(3, dtype=torch.long, device='cuda'), x[:3])", 1, 24 + 2 * 3 * 128),
        (X, "torch.linalg.solve_triangular(x[:32], x[:32], upper=False)", 4, 3 * 4096 + 2 * 4096),
        ("", "torch.eye(32, device='cuda')", 2, 4096 + 128),
        (
            "x = torch.empty(4, 64, 64, device='cuda')",  # few and large: one call for each, after the copy
            "torch.linalg.solve_triangular(x, x, upper=False)",
            5,
            3 * 65_536 + 2 * 65_536,
        ),
        (
            f"{X}\ni = torch.empty(4, 2, dtype=torch.long, device='cuda')",  # and numbers of four bags
            "F.embedding_bag(i, x, mode='sum')",
            2,
            32 + (64 + 32 + 8 * 128 + 4 * 128),
        ),
        ("x = torch.empty(2, 64 << 10, device='cuda')", "x.softmax(-1)", 1, 4 * 524_288),
        # Places are written, 4 digits of values and 1 of rows are counted and moved, and values and places taken apart.
        ("x = torch.empty(32, 5000, device='cuda')", "x.argsort(1)", 11, 160_000 * (8 + 100 + 24 + 8 + 16)),
        # 4 GB and more: offsets do not fit into 32 bits, so torch launches a kernel for each part.
        ("x = torch.empty(1 << 30, device='cuda')", "x.add_(1)", 2, 2 << 32),
        ("x = torch.empty(4, 1 << 29, device='cuda')", "x.mul_(2)", 4, 2 << 33),
    ],
)
def test_an_operation_counts_for_its_kernels_and_their_traffic(
    fake_gpu: FakeCudaProcess, setup: str, program: str, num_kernels: int, num_bytes: int
) -> None:
    counts = fake_gpu.call(f"{OPERATIONS}:count", program, setup)
    assert (counts.num_kernels, counts.num_bytes) == (num_kernels, num_bytes)


@pytest.mark.parametrize(("num_tensors", "num_values", "num_launches"), [(1, 65_536 * 2240, 1), (1, 65_536 * 2241, 2),
                                                                         (253, 10, 2)])  # fmt: skip
def test_an_optimizer_step_launches_a_kernel_for_as_many_chunks_and_tensors_as_one_takes(
    fake_gpu: FakeCudaProcess, num_tensors: int, num_values: int, num_launches: int
) -> None:
    setup = f"rows = [[torch.empty({num_values}, device='cuda') for _ in range({num_tensors})] for _ in range(4)]\n"
    setup += f"counts = [torch.empty((), device='cuda') for _ in range({num_tensors})]"
    options = "lr=0., beta1=0., beta2=0., weight_decay=0., eps=0., amsgrad=False, maximize=False"
    program = f"torch._fused_adamw_(*rows, [], counts, {options})"
    assert fake_gpu.call(f"{OPERATIONS}:count", program, setup).num_kernels == num_launches


@pytest.mark.parametrize(
    ("program", "num_waits"),
    [
        ("x.sum().item()", 1),
        ("x.tolist()", 1),
        ("x.cpu()", 1),
        ("x.to('cpu', non_blocking=True)", 1),  # to memory that is not pinned
        ("torch.empty(64, 32, pin_memory=True).copy_(x, non_blocking=True)", 0),
        ("torch.zeros(3).to('cuda')", 1),
        ("torch.zeros(3).to('cuda', non_blocking=True)", 0),
        ("torch.zeros(1 << 15).to('cuda', non_blocking=True)", 1),  # too large to be kept in the command
        ("torch.zeros(3).pin_memory().to('cuda', non_blocking=True)", 0),
        ("x[torch.tensor([1, 2])]", 1),  # the index is copied to the device
        ("x[torch.tensor([1, 2]).to('cuda', non_blocking=True)]", 0),
        ("x[torch.tensor([1, 2])] = 1", 1),
        ("torch.cuda.Event().synchronize()", 1),
        ("torch.cuda.Event().record(); torch.cuda.Stream().wait_stream(torch.cuda.current_stream())", 0),
    ],
)
def test_the_host_waits_where_it_reads_and_where_it_copies_without_pinned_memory(
    fake_gpu: FakeCudaProcess, program: str, num_waits: int
) -> None:
    assert fake_gpu.call(f"{OPERATIONS}:count", program, X).num_waits == num_waits


@pytest.mark.parametrize(
    ("program", "what"),
    [
        ("torch.linalg.qr(x)", "aten::linalg_qr"),
        ("x.index_put_((torch.empty(3, dtype=torch.long, device='cuda'),), x[:3], True)", "aten::index_put_ that adds"),
        ("torch.use_deterministic_algorithms(True); x.index_add_(0, i, x)", "aten::index_add_ by deterministic"),
        ("F.rms_norm(x, (32,), w).sum().backward()", "with a gradient of the weight"),
    ],
)
def test_an_operation_without_a_source_for_its_kernels_is_a_fault(
    fake_gpu: FakeCudaProcess, program: str, what: str
) -> None:
    setup = f"{X}\ni = torch.empty(64, dtype=torch.long, device='cuda')\nw = x[0].detach().requires_grad_()"
    with pytest.raises(BaseException, match=what):
        fake_gpu.call(f"{OPERATIONS}:count", program, setup)


def test_a_kernel_of_our_own_counts_as_it_is_declared(fake_gpu: FakeCudaProcess) -> None:
    counts = fake_gpu.call(f"{OPERATIONS}:count_kernel_of_our_own")
    assert (counts.num_kernels, counts.num_bytes) == (1, 512)


def test_memory_is_in_use_as_long_as_a_tensor_refers_to_it(fake_gpu: FakeCudaProcess) -> None:
    assert fake_gpu.call(f"{OPERATIONS}:memory_in_use") == [0, 4000, 4000, 0]


def test_the_peak_is_that_of_the_tensors_that_exist_at_once(fake_gpu: FakeCudaProcess) -> None:
    counts = fake_gpu.call(f"{OPERATIONS}:count", "y = x + 1; del y; y = (x + 2) + 3", X)
    assert counts.peak_bytes == 2 * 8192


def test_a_device_that_is_full_refuses_a_tensor(fake_gpu: FakeCudaProcess) -> None:
    with pytest.raises(Exception, match="CUDA out of memory"):
        fake_gpu.call(f"{OPERATIONS}:count", "x + x", X, total_bytes=10_000)


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"CPU_BUILD": "+other"}, "is not the build for CPUs"), ({"COMPILER": "no-such-compiler"}, "no C.. compiler")],
)
def test_a_machine_that_cannot_build_the_device_says_why(
    change: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(guard, "CACHE", tmp_path)
    for name, value in change.items():
        monkeypatch.setattr(guard, name, value)
    with pytest.raises(guard.NoGuardError, match=reason):
        FakeCudaProcess()
