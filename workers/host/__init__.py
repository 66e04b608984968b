"""Facts of this machine and its process: free memory, processor time, the allocator.

Public: `free_resources.free_bytes`, `MemoryShare` and `ThreadChoice`; `allocator.keep_freed_memory`, `without_holes`
and `is_out_of_memory`.
"""
