"""The gRPC door. Public interface: `server.GrpcDoor`; `calls.SERVICES`, the services of the contract.

Inside: `callers`, `intake` and `statuses` of calls with a key; `public` and `places` of those without.
"""
