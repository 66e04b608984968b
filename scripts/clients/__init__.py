"""Foreign clients against a pool: the cookbook, the official SDK, Node."""
