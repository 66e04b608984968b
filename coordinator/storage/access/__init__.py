"""Who may call, and what administrators did: API keys and the audit log. Part of `storage`."""
