"""Chaos: kill a working pool repeatedly, and show that nothing is lost. `make chaos`."""
