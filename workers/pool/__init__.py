"""Pools: where engines run, and how the coordinator reaches them.

Public: `factory.make_pool` and `factory.describe_model` (`description`), for the coordinator. The rest serves a pool's
own processes: `local`, `ray_pool` with `ray_starts`, `ray_incarnation`, `ray_nodes`, `ray_calls`, `ray_host`,
`ray_head`, `processes` and `actor` with `large_contents`, the engine's thread in `loop`, with its `environment`, and
the `version` of the code that a process runs.
"""
