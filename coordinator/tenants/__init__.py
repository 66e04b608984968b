"""The tenants, their API keys and their limits: who calls, and how much of everything they may use.

Public interface:

- `keys.Authenticator`: admits calls; creates, rotates and revokes keys; ends the calls of a key that ends;
- `principals`: `Role`, `Caller`, `Principal`; `accounts.Accounts`: the tenants;
- `limits.Quotas`: the limits of every tenant; `rates`: operations a second; `streams`: open calls.

Must not depend on operations, use cases or transports.
"""
