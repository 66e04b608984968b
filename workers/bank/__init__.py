"""The adapters of a worker: which of them are in a bank slot, how they move, and their files.

Public interface: `bank.Bank`, `entries` (`Row`, `Entry`, `HostRow`), `state_files`. Inside: `slabs` of rows, their
`transfers`, and `pinned` host memory.
"""
