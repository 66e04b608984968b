"""Decides what runs next: virtual counters, planner, ready set, quarantine, clock, cost model."""
