"""Who may call, and what administrators did: `api_keys`, `admins` (one remains) and `audit`. Part of `storage`."""
