"""Puts the parts together and runs them: assembly, supervision, recovery, housekeeping."""
