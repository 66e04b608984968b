"""The HTTP protocol of the official Tinker SDK.

Public interface: the handlers in `sessions`, `models`, `training`, `sampling`, `futures` and `runs`, which `http_app`
maps to paths, and `errors.error_response`. The others convert: `schemas` (JSON bodies), `tensors`, `results`;
`unreadable` refuses malformed bodies at their sequence number, and `sdk_versions` tells what a client knows.
"""
