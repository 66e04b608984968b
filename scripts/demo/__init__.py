"""The demo: three tenants train at the same time on one small pool. `python -m scripts.demo`, or `make demo`."""
