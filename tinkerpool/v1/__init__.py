"""The contract in Python: code generated from protos/tinkerpool/v1 by `make protos`. Do not edit it by hand."""
