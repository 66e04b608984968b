"""Adapter rows: where they lie, how they move, how they are saved."""
