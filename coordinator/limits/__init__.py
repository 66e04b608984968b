"""What a tenant may have and use at most: the limits, and the mechanisms that hold calls to them.

Public interface:

- `quotas.Quotas`: the values of every tenant, and a list of all limits, each with its use and maximum;
- a call above a limit is refused: `ceiling.Ceiling` counts, `rates.Rates` measures by time;
- or it waits: `budget.Budget` shares amounts, `turns.Turns` work, `results.Responses` the memory of results;
- `polls.Polls`: or it is answered early.

Must not depend on what is limited.
"""
