"""`make load`: hundreds of clients on one pool: memory, errors, shares of tokens, waiting times."""
