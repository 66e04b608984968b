"""Everything durable: the database with its group commit, and the state folders on disk. All SQL of the project.

Public interface:

- `store.Store`: opens the log of a data directory. Its attributes are the tables: `operations`, `adapters`,
  `checkpoints`, `samplers`, `snapshots`, `sessions`, `tenants`, `drained_workers`, `worker_classes`, `api_keys`,
  `audit`, `usage`, `cycles`; each has typed functions. Reads are synchronous and see committed rows; a write returns a
  future that is done once it is durable.
- `rows`: the rows of the tables; `cycles.CycleCommit`: everything that a cycle makes durable, with its `StagedStates`.
- `database.StorageError` and its subclasses: why a write was refused.
- `folders`: `StateFiles`, states as folders of files; `StateFolders`, the roots of a data directory; `disk.Disk`: the
  disk below them, a seam for simulations; `identity` and `copies`: whose files these are; `sent_files.Sent`: what
  leaves a folder, made by `exported_folder`, `exports` and `joined_exports`.
- Below the store: `schema`, `migrations` and `sqlite`; `operations`, `records`, `history`, `tenants`, `usage`,
  `workers` and `access` with the SQL.

`database.Connection` is the seam of the database; tests may use `Store.database` for more than that. Must not depend on
any other room but `base`.
"""
