"""The gRPC door. Public interface: `server.GrpcDoor`.

Inside: `calls`, `callers`, `intake` and `statuses` of calls with a key; `public` and `places` of those without.
"""
