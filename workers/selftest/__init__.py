"""Trials when a model is loaded: which row counts and thread counts keep bits."""
