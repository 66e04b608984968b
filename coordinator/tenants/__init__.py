"""The tenants, their API keys and their limits: who calls, and how much of everything they may use.

Public interface:

- `keys`: `Authenticator` (checks, creates and revokes keys; ends the calls of a revoked one), `Principal` (the caller);
- `limits`: `Quotas`, the limits of every tenant.

Must not depend on operations, use cases or transports.
"""
