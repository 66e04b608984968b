"""The tenants and their API keys: who calls.

Public interface:

- `keys.Authenticator`: admits calls; creates, rotates and revokes keys; ends the calls of a key that ends;
- `principals`: `Role`, `Caller`, `Principal`; `accounts.Accounts`: the tenants.

Must not depend on operations, use cases or transports.
"""
