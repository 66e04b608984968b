"""Modules that transformers joins in one linear: as in Qwen3.5, one below the other, and as in Qwen3-Next, by heads."""

from __future__ import annotations

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
