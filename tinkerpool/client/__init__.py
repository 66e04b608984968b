"""The Python client: training loops on the user's machine, the work in the pool."""
