"""Programs in other languages at a real pool, and what they print compared with Python's.

`python -m scripts.clients.languages` installs, builds, runs and compares. `toolchains` has what each language takes,
`runs` the pool and its restart; `reference` is the scenario of all programs, in Python.
"""
