"""Calls to a pool: transport, retries, streams of outcomes, and futures.

Public interface: `connection.Connection` (calls that survive a restart of the service), `futures.APIFuture`,
`transport.Transport` (the seam where tests put a fake), `methods` (the calls of the contract), `encoding` (the user's
types to and from messages), `versions` (which versions of client and pool fit). Inside: `retry`, `handshake`,
`tracing`. Does not depend on sessions, adapters or samplers.
"""
