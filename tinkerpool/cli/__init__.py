"""The `tinkerpool` command: commands that look into a pool over the network.

Public interface: `main.main`, which runs the command line; `show.CliError` and `app.RUN_PANEL` for the commands that
run a pool, which `coordinator.cli` adds through an entry point. The commands are in `adapters`, `checkpoints`, `keys`,
`tenants`, `limits`, `workers`, `audit`, `pool`, `pools`, `top`, `history`, `sessions` and `usage`; `finding` and
`connection` lead to a pool, `references` and `times` to what an argument means.
"""
