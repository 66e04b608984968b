"""The `tinkerpool` command: what looks into a pool over the network. What runs one joins from `coordinator.cli`."""
