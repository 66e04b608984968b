"""What this machine has: free memory, processor time, the allocator."""
