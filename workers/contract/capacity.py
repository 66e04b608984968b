"""The sampling capacity of a worker: concurrently decoded sequences, and the memory for their keys and values.

Has numbers and formulas; neither tensors nor the state of any block. The coordinator asks before it accepts a request,
the worker asks again, and both refuse with the same message.
"""

from __future__ import annotations

SEQUENCE_SLOTS = 128
"""Sequences that a worker decodes at a time, at most; a worker announces its own number as
`ModelInfo.num_sequence_slots`."""
BLOCK_TOKENS = 64
"""Larger blocks share less of a prompt and waste more at its end; smaller ones make more and smaller products. 64
queries of a block are two slices of the CPU's kernel, whose results then depend on no other length."""


def num_blocks_for(num_tokens: int, block_tokens: int = BLOCK_TOKENS) -> int:
    """Return the number of blocks for this many tokens."""
    return -(-num_tokens // block_tokens)


def num_own_blocks(max_tokens: int, block_tokens: int = BLOCK_TOKENS) -> int:
    """Return the most blocks that a sequence needs behind its prompt; the last token's keys are never needed."""
    return num_blocks_for(max(0, max_tokens - 1), block_tokens)


def num_announced_blocks(num_blocks: int, block_tokens: int) -> int:
    """Return how many blocks of `BLOCK_TOKENS` a worker announces if it has `num_blocks` larger ones.

    A prompt, and the sequence behind it, may each waste all but one of the blocks that their last larger block is. So
    what fits into the announced number always fits.
    """
    parts = block_tokens // BLOCK_TOKENS
    return max(0, parts * num_blocks - 2 * (parts - 1))


def what_is_too_large(num_prompt_tokens: int, max_tokens: int, num_blocks: int) -> str:
    """Return why not even one sequence of a request fits into `num_blocks`; empty if one fits."""
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
