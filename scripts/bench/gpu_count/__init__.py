"""Kernels, bytes and waits of the engine on a GPU, counted without one: `python -m scripts.bench.gpu_count`."""
