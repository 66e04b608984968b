"""Everything durable: the database with its group commit, and the state folders on disk. All SQL of the project.

Other rooms use:

- `store.Store`: opens the log of a data directory. Its attributes are the tables: `operations`, `adapters`,
  `checkpoints`, `samplers`, `snapshots`, `sessions`, `tenants`, `api_keys`, `cycles`; each has typed functions. Reads
  are synchronous and see committed rows; a write returns a future that is done when the write is durable.
- `rows`: the rows of the tables; `cycles.CycleCommit`: everything that a cycle makes durable.
- `database.StorageError` and its subclasses: why a write was not taken.
- `folders.StateFiles`: states as folders of files; `disk.Disk`: the disk below them, a seam for simulations.

`database.Connection` is the seam of the database; tests may use `Store.database` for more than that. Must not depend on
any other room but `base`.
"""
