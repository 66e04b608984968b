"""What a sample takes of a worker's memory for keys and values, in blocks, and whether that can ever fit.

Knows numbers; neither tensors nor who has which block. So the coordinator can ask before it takes a request in, and the
worker asks again: both refuse with the same words.
"""

from __future__ import annotations

BLOCK_TOKENS = 64
"""Larger blocks share less of a prompt and waste more at its end; smaller ones make more and smaller products. 64
queries of a block are two slices of the CPU's kernel, whose results then depend on no other length."""


def num_blocks_for(num_tokens: int) -> int:
    """Blocks that so many tokens take."""
    return -(-num_tokens // BLOCK_TOKENS)


def num_own_blocks(max_tokens: int) -> int:
    """Blocks that a sequence takes at most behind its prompt; the last token's keys are never needed."""
    return num_blocks_for(max(0, max_tokens - 1))


def what_is_too_large(num_prompt_tokens: int, max_tokens: int, num_blocks: int) -> str:
    """What is wrong with a request of which not even one sequence fits into `num_blocks`; empty if one does."""
    num_left = num_blocks - num_blocks_for(num_prompt_tokens)
    if num_own_blocks(max_tokens) <= num_left:
        return ""
    limit = f"a worker keeps keys and values of at most {num_blocks * BLOCK_TOKENS} tokens"
    if num_left < 0:
        return f"the prompt has {num_prompt_tokens} tokens, and {limit}; send a shorter prompt"
    return (
        f"the prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}, and {limit}; with this prompt "
        f"max_tokens may be at most {num_left * BLOCK_TOKENS + 1}"
    )
