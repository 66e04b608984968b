"""Small batches and sample requests for engines without torch, and states that are installed by reference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workers.contract.messages import (
    AdapterInstall,
    AdapterSpec,
    AdapterState,
    Batch,
    Datum,
    PassItem,
    SampleRequest,
    SamplerVersion,
    SamplingParams,
)
from workers.contract.protocols import Owner

OWNER = Owner(pool_id="0123456789abcdef", epoch=1)
"""The coordinator of a pool that a test starts by itself."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Implements `StateReference`; without a state it leads nowhere."""

    state: AdapterState | None

    @property
    def num_bytes(self) -> int:
        return self.state.num_bytes if self.state is not None else 0

    def fetch(self) -> AdapterState:
        if self.state is None:
            raise LookupError("the holder of the state has ended")
        return self.state


def batch(cycle_id: int, token: int = 1, decode_share: float = 0.5) -> Batch:
    """Return a batch that installs one fresh adapter and runs one pass of three tokens."""
    spec = AdapterSpec(
        adapter_id="a", rank=8, alpha=32.0, seed=cycle_id, train_attn=True, train_mlp=True, train_unembed=True
    )
    tokens = np.full(3, token, np.int32)
    item = PassItem(
        op_id="op",
        adapter_id="a",
        prev_seq=0,
        seq=1,
        chunk_index=0,
        num_chunks=1,
        data=(Datum(tokens=tokens, loss_inputs={"target_tokens": tokens}),),
        loss_fn="cross_entropy",
        loss_config={},
        backward=True,
    )
    installs = (AdapterInstall(spec=spec, state=None),)
    return Batch(epoch=1, cycle_id=cycle_id, installs=installs, items=(item,), decode_share=decode_share)


def request(op_id: str, max_tokens: int) -> SampleRequest:
    """Return a streamed request for one sample of the base model."""
    return SampleRequest(
        op_id=op_id,
        version=SamplerVersion(key=""),
        prompt=np.ones(2, np.int32),
        num_samples=1,
        params=SamplingParams(max_tokens=max_tokens),
        stream=True,
    )
