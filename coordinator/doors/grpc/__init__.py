"""The gRPC door. Public interface: `server.GrpcDoor`; `calls.SERVICES`, the services of the contract."""
