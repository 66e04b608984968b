"""Payloads: the content of requests, as canonical bytes and decoded.

Public interface: `passes` and `samples` (check a request, make its payload, decode a payload), `passes.Chunk` (the
unit of a pass), `canonical` (bytes and hash of a message), `provenance` (samples that a datum comes from), `elements`
(a message's size before it is decoded), `peft_config` and `peft_weights` (adapters from elsewhere).

Pure; must not depend on anything but `base` and the workers' contract.
"""
