"""Benchmarks: one module per item of `make bench`."""
