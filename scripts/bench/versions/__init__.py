"""An old and a new version of the project, measured alternately: `python -m scripts.bench.versions OLD_DIR NEW_DIR`."""
