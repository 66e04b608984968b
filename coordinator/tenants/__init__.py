"""The tenants and their API keys: who calls.

Public interface, all in `keys`: `Authenticator` (checks, creates and revokes keys; ends the calls of a revoked one),
`Principal` (the caller).

Must not depend on operations, use cases or transports.
"""
