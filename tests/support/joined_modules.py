"""Modules that transformers joins in one linear: as in Qwen3.5, one below the other, and as in Qwen3-Next, by heads.

And those of experts, of which it joins all: gates above ups, as in Qwen 3, or alternating, as in gpt-oss.
"""

from __future__ import annotations

import numpy as np

from tests.support.adapters import PREFIX, Tensors
from workers.contract.adapted_modules import AdaptedModule, JoinedRows

D_IN = 6
ROWS: dict[str, dict[str, list[int]]] = {
    "in_proj_qkv": {"in_proj_q": [0, 1, 2, 3], "in_proj_k": [4, 5, 6, 7], "in_proj_v": [8, 9, 10, 11, 12, 13]},
    "in_proj_qkvz": {
        "in_proj_q": [0, 1, 8, 9],
        "in_proj_k": [2, 3, 10, 11],
        "in_proj_v": [4, 5, 12, 13],
        "in_proj_z": [6, 7, 14, 15],
    },
}
"""The rows of each module, by the linear that they are in."""


def hybrid_modules(linear: str, num_layers: int = 2) -> tuple[AdaptedModule, ...]:
    """Return the modules of a model with a layer of linear attention and an MLP in each layer, and an unembedding."""
    modules = []
    for layer in range(num_layers):
        parent = f"model.layers.{layer}"
        for leaf, rows in ROWS[linear].items():
            num_consecutive = next((at for at in range(1, len(rows)) if rows[at] != rows[at - 1] + 1), len(rows))
            num_periods = len(rows) // num_consecutive
            joined = JoinedRows(
                linear=linear,
                begin=rows[0],
                width=num_consecutive,
                period=sum(map(len, ROWS[linear].values())) // num_periods,
            )
            name = f"{parent}.linear_attn.{leaf}"
            modules.append(AdaptedModule(name=name, kind="attn", d_in=D_IN, d_out=len(rows), joined=joined))
        modules.append(AdaptedModule(name=f"{parent}.linear_attn.out_proj", kind="attn", d_in=5, d_out=D_IN))
        modules.append(AdaptedModule(name=f"{parent}.mlp.up_proj", kind="mlp", d_in=D_IN, d_out=10))
    return (*modules, AdaptedModule(name="lm_head", kind="unembed", d_in=D_IN, d_out=20))


EXPERTS = "model.layers.0.mlp.experts"
NUM_EXPERTS, INNER = 3, 5


def expert_modules(*, is_interleaved: bool) -> tuple[AdaptedModule, ...]:
    """Return the modules of a layer of experts, with the two orders of the rows of gates and ups."""
    gate, up = (
        JoinedRows(
            linear="gate_up_proj",
            begin=number if is_interleaved else number * INNER,
            width=1 if is_interleaved else INNER,
            period=2 if is_interleaved else 2 * INNER,
            is_of_experts=True,
        )
        for number in range(2)
    )
    down = JoinedRows(linear="down_proj", begin=0, width=D_IN, period=D_IN, is_of_experts=True)
    return (
        *(
            AdaptedModule(
                name=f"{EXPERTS}.{leaf}", kind="mlp", d_in=D_IN, d_out=INNER, joined=joined, num_Bs=NUM_EXPERTS
            )
            for leaf, joined in (("w1", gate), ("w3", up))
        ),
        AdaptedModule(name=f"{EXPERTS}.w2", kind="mlp", d_in=INNER, d_out=D_IN, joined=down, num_As=NUM_EXPERTS),
    )


def experts_in_peft(stored: Tensors, rank: int, *, is_interleaved: bool) -> Tensors:
    """Return PEFT's matrices of the experts of a state, value by value."""
    tensors: Tensors = {}
    for leaves, name in ((("w1", "w3"), f"{EXPERTS}.base_layer"), (("w2",), EXPERTS)):
        n = len(leaves)
        As, Bs = ([stored[f"{PREFIX}{EXPERTS}.{leaf}.lora_{matrix}.weight"] for leaf in leaves] for matrix in "AB")
        num_rows = Bs[0].shape[1]
        A = np.zeros((NUM_EXPERTS * n * rank, As[0].shape[2]), np.float32)
        B = np.zeros((n * num_rows, n * rank * NUM_EXPERTS), np.float32)
        for expert in range(NUM_EXPERTS):
            for number in range(n):
                own_A, own_B = (each[number][expert % len(each[number])] for each in (As, Bs))
                begin = (expert * n + number) * rank
                A[begin : begin + rank] = own_A
                for row in range(num_rows):
                    at = row * n + number if is_interleaved else number * num_rows + row
                    for column in range(rank):
                        B[at, (number * rank + column) * NUM_EXPERTS + expert] = own_B[row, column]
        tensors |= {f"{PREFIX}{name}.lora_A.weight": A, f"{PREFIX}{name}.lora_B.weight": B}
    return tensors
