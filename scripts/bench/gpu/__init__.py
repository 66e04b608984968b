"""The engine on a GPU: `python -m scripts.bench.gpu`, or `make bench-gpu`."""
