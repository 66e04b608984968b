"""Puts the parts of a coordinator together and runs them: recovery, supervision, deletions, housekeeping.

Public interface: `core.Core` (start, stop, health, and the parts that use cases work with), `lock.DataDirInUse`,
`data_dir.Seams` (the disk and database of a simulation).

Must not depend on use cases, doors or a transport.
"""
