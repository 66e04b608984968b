"""Other clients of a pool: the Tinker cookbook, the official SDK, Node."""
