"""Facts of this machine and its process: free memory, processor time, the allocator, GPUs.

Public: `free_memory.free_bytes`, `MemoryShare`; `threads.ThreadChoice`; `allocator.keep_freed_memory`, `without_holes`
and `is_out_of_memory`; `captures.capturing`; `gpus.gpu_problem`; `uploads.on_device`; `downloads.Download`;
`input_block.InputBlock`; `process_use`.
"""
