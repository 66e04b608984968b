"""Decides which worker samples what, and streams tokens back."""
