"""Build base models and training text."""
