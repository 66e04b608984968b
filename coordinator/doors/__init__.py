"""The protocols that clients speak: gRPC (`grpc`), the Tinker SDK's HTTP API (`tinker`), OpenAI's HTTP API (`openai`).

`web` is the page for browsers, with the contract's RPCs in JSON; `rpcs` lists these for all doors.

A door authenticates a call, converts it, calls one use case of `coordinator.service`, and converts the result or the
refusal. Public interface: `grpc.server.GrpcDoor` and `http_server.HttpDoor`, which serve a `door.Backend` and raise
`door.DoorError`. `http_app` maps paths to the handlers of `tinker` and `openai`; `http` holds the parts of both,
`tls` and `peers` those of all doors. `metrics` serves numbers without a key.
"""
