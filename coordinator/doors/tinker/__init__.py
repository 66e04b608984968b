"""The HTTP protocol of the Tinker SDK."""
