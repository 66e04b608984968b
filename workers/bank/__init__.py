"""The adapters of a worker: which of them are in a bank slot, how they move, and their files.

Public interface: `bank.Bank`, `entries` (`Row`, `Entry`, `HostRow`), `state_files`, `arriving`. Inside: `slabs` of
rows, and their `transfers` through `pinned` memory.
"""
