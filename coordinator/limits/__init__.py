"""What a tenant may have and use at most: the limits, and the mechanisms that hold calls to them.

Public interface:

- `quotas.Quotas`: the limits of every tenant;
- a call above a limit is refused: `ceiling.Streams` counts open calls, `rates.Rates` measures by time;
- or it waits: `budget.Budget` shares amounts, `turns.Turns` work, `results.Responses` the memory of results.

Must not depend on what is limited.
"""
