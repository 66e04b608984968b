"""Reads the large states of messages before the engine needs them, in another thread than the engine's.

Of the bank it uses only what any thread may call. Main invariant: a message means the same before and after. A state
that cannot be read stays a file, so the engine finds the error at its place in the order.
"""

from __future__ import annotations

from dataclasses import replace

from workers.bank.bank import Bank
from workers.bank.state_files import read_ahead
from workers.contract.contents import LARGE_BYTES
from workers.contract.messages import (
    AdapterInstall,
    AdapterSpec,
    AdapterState,
    Item,
    LoadItem,
    SampleRequest,
    SamplerVersion,
)
from workers.contract.protocols import Arriving


def with_read_states(bank: Bank, message: Arriving) -> Arriving:
    """Return a batch or sample request whose large states are read; see `Engine.read_ahead`."""
    if isinstance(message, SampleRequest):
        return replace(message, version=_version(bank, message.version))
    specs = {install.spec.adapter_id: install.spec for install in message.installs}
    return replace(
        message,
        installs=tuple(_install(bank, install) for install in message.installs),
        items=tuple(_item(bank, item, specs.get(item.adapter_id)) for item in message.items),
    )


def _version(bank: Bank, version: SamplerVersion) -> SamplerVersion:
    state = version.state
    if state is None or version.spec is None:
        return version
    return replace(version, state=_read(bank, version.spec, replace(state, optimizer=None, gradient=None)))


def _install(bank: Bank, install: AdapterInstall) -> AdapterInstall:
    try:
        state = install.fetch()
    except LookupError:
        return install
    return install if state is None else replace(install, state=_read(bank, install.spec, state))


def _item(bank: Bank, item: Item, spec: AdapterSpec | None) -> Item:
    """Return an item of an adapter; `spec` None: it is not installed by the same batch."""
    if not isinstance(item, LoadItem):
        return item
    try:
        spec = spec or bank.entry(item.adapter_id).spec
    except KeyError:
        return item
    optimizer = item.state.optimizer if item.with_optimizer else None
    return replace(item, state=_read(bank, spec, replace(item.state, optimizer=optimizer, gradient=None)))


def _read(bank: Bank, spec: AdapterSpec, state: AdapterState) -> AdapterState:
    if state.num_bytes <= LARGE_BYTES:
        return state
    try:
        return read_ahead(bank.layout(spec), spec, state, bank.host_zeros)
    except (ValueError, MemoryError):  # of one state: this thread's errors would end the engine
        return state
