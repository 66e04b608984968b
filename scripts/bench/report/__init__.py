"""Tables and pictures of the benchmarks from `docs/results`."""
