"""Attention of one decode step over key-value blocks: chunks of prompts, and one token of every running sequence.

Public interface, for `sample_pass` only: `step` (`StepAttention`, `PromptChunk`, `DecodeAttention`),
`decode_plan.NextToken`, `block_products.find_rows_multiple`.
"""
