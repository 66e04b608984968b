"""`python -m scripts.bench.gpu`."""

from scripts.bench.gpu.run import main

main()
