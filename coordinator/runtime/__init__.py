"""Puts the parts of a coordinator together and runs them: recovery, supervision, deletions, housekeeping.

Public interface: `core.Core` (start, stop, health, and the parts that use cases work with),
`data_dir.DataDirInUse`, `data_dir.Seams` (the disk, database and lock of a simulation), and `backup`, `restore` and
`doctor` for the commands on a data directory. `assembly` makes what `core` runs: `recovery`, `supervision`,
`housekeeping`, `deletion`, `tenant_deletion` and `tasks`. `drains` says which workers a start leaves out,
`base_weights` which must not take work. `mounts` finds the file system of a directory, `gauges` shows what a running
coordinator has.

Must not depend on use cases, doors or a transport.
"""
