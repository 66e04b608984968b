"""What the HTTP protocols share: calls, connections, downloads, rendering, tokenizers."""
