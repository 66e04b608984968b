"""The cycles of a base model: plan, log, run, commit.

Public interface: `assembly.make_loops`, `loop.CycleLoop` (runs the cycles of one base model), and
`commit.CycleJournal` (ids, recent cycles, and `watchers`). Inside: `phases`, `dispatch`, `items` and `results`.

Must not depend on sampling, doors, use cases or SQL.
"""
