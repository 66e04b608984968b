"""Makes adapter states durable: checkpoints, published weights, snapshots.

Public interface:

- `saver.Saver`: saves and loads of a cycle, files of checkpoints, orphaned folders;
- `publishing.Publishing`: versions that are sampled from before their file exists (`named`, `unnamed`, `version_of`);
- `snapshots.Snapshots`: when an adapter is snapshotted, and the writing of snapshots;
- `staging.StagedStates`: the rows of one cycle's saves and loads; `folders.StateFolders`: the state folders on disk.

Must not depend on the order in which operations run, or on how workers are called.
"""
