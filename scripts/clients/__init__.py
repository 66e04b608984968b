"""Other clients of a pool: the Tinker cookbook, the official SDK in several versions, programs in other languages."""
