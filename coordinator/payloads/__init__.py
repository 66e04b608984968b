"""Payloads: the content of requests, as canonical bytes and decoded.

Public interface: `passes` and `samples` (check a request, make its payload, decode a payload), `passes.Chunk` (the
unit of a pass), `passes.serialize` and `passes.digest` (canonical bytes and hash of a message).

Pure; must not depend on anything but `base` and the workers' contract.
"""
