"""What a request asks for, as canonical bytes and decoded. Pure; depends on limits and the workers' messages alone.

Public: `canonical` (bytes and hash of a message), `chunks` (the units of a pass), `passes` and `samples` (check, make
canonical, decode).
"""
