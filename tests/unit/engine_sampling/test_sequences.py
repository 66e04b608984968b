"""A running sequence with tokens that were drawn for it and that the host has not read."""

from workers.sampling.drawing import uniforms
from workers.sampling.sequences import NUMBERS_AHEAD, ActiveSequence

SEED, INDEX, BLOCK_TOKENS = 7, 2, 16


def sequence_of(num_tokens: int) -> ActiveSequence:
    return ActiveSequence(INDEX, BLOCK_TOKENS, tokens=[1] * num_tokens, blocks=[5])


def test_the_numbers_behind_unread_tokens_are_those_of_their_positions_in_any_order() -> None:
    expected = uniforms(SEED, INDEX, 0, 2 * NUMBERS_AHEAD).tolist()
    for position in (0, 1, NUMBERS_AHEAD - 1, NUMBERS_AHEAD, NUMBERS_AHEAD + 1):
        sequence = sequence_of(position)
        assert sequence.next_number(SEED, 1) == expected[position + 1]
        assert sequence.next_number(SEED) == expected[position], "again, after the one behind it"
        assert sequence.next_number(SEED, 1) == expected[position + 1]


def test_a_step_behind_an_unread_token_needs_the_block_of_its_own_position() -> None:
    sequence = sequence_of(BLOCK_TOKENS)  # the last one's keys and values are written by the next step
    assert sequence.num_blocks_wanted() == 1
    assert sequence.num_blocks_wanted(1) == 2
    assert (sequence.location().length, sequence.location(1).length) == (BLOCK_TOKENS - 1, BLOCK_TOKENS)
