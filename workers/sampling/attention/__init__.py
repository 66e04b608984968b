"""Attention of one decode step over key-value blocks: chunks of prompts, and one token of every running sequence.

Public interface: `step` (`Steps`, the seam; `BlockSteps`, by `block_products`; `PromptChunk`), `decode_plan.NextToken`,
and `pages` (`PageSteps`, `page_kernel_for`), which does the same on a GPU by the library's kernel or that of
`attend_kernels`, and by `page_kernels` of our own around it.
"""
