"""One packed pass over many adapters: packing, logits, losses, optimizer, memory."""
