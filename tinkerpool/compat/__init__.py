"""The binary bodies of the Tinker HTTP protocol; see `protos/tinkerpool/compat/`. Nobody else needs them."""
