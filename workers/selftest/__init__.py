"""Trials that run when a base model is loaded: what its bits depend on, and what fits into the memory.

Public: `loading.load_base_model` (with the trials of rows and batching), `threads.is_thread_count_invariant`.
"""
