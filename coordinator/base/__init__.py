"""Errors, configuration, time and version: imported by every other room, imports none of them."""
