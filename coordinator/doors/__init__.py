"""The protocols that clients speak, thin over the use cases."""
