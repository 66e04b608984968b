"""Chaos: kill a working pool again and again, and show that nothing is lost. `make chaos`."""
