"""The Python client of a pool: training, sampling, checkpoints.

Public interface, all of it importable from `tinkerpool`: `ServiceClient`, `TrainingClient`, `SamplingClient`,
`RestClient`, and `APIFuture`, which most of their methods return.

Imports run down this line: `service_client`, `training_client`, `sampling_client` and `rest_client`, `session`,
`training` (one adapter's passes and sequence numbers), `calls` (from one attempt at a call to a committed outcome).
Also `tokenizer`, `imports`, `archive` and `export`, for files.
"""
