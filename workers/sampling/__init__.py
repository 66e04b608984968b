"""Continuous batching: sequences, key-value blocks, decode attention, drawing."""
