"""Makes adapter states durable: checkpoints, published weights, snapshots.

Public interface:

- `states.States`: writes, reads and deletes states, also orphaned folders; `saver.Saver`: saves and loads of a cycle;
- `published_weights`: `Publishing`, the versions that are sampled from before their file exists, and their names;
- `snapshots.Snapshots`: when an adapter is snapshotted, and the writing of snapshots; `uploads`: parts of imports.

Must not depend on the order in which operations run, or on how workers are called.
"""
