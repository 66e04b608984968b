"""Programs around the pool: demo, benchmarks, reliability runs, models, clients. Run as modules from the root."""
