"""Prompts, texts and records to datums; datums of a maximum length."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinkerpool import data
from tinkerpool.types import Datum


def unshifted(datum: Datum) -> tuple[list[int], list[float]]:
    """Return the tokens and, with 0 for the first, their weights."""
    targets = datum.loss_fn_inputs["target_tokens"].tolist()
    return [*datum.model_input.to_ints()[:1], *targets], [0.0, *datum.loss_fn_inputs["weights"].tolist()]


def test_targets_are_the_tokens_shifted_by_one() -> None:
    datum = data.shift([5, 6, 7, 8], [0, 0, 1, 0.5])
    assert datum.model_input.to_ints() == [5, 6, 7]
    assert datum.loss_fn_inputs["target_tokens"].tolist() == [6, 7, 8]
    assert datum.loss_fn_inputs["weights"].tolist() == [0, 1, 0.5]
    assert data.num_weighted([datum, datum]) == 3
    for tokens, weights in ([5], None), ([5, 6], [1]):
        with pytest.raises(ValueError, match=r"two tokens|2 tokens"):
            data.shift(tokens, weights)


def test_a_completion_and_its_end_are_weighted_behind_the_tokens_that_a_sampler_gets(shipped: Any) -> None:
    prompt, completion = "In the beginning", " God created"
    tokens, weights = unshifted(data.completion_datum(shipped, prompt, completion))
    before = data.encode_prompt(shipped, prompt)
    assert tokens[: len(before)] == before
    assert shipped.decode(tokens[len(before) :]) == completion + shipped.eos_token
    assert weights == [0] * len(before) + [1] * (len(tokens) - len(before))
    without_end = data.completion_datum(shipped, prompt, completion, with_end=False)
    assert unshifted(without_end)[0] == tokens[:-1]
    assert unshifted(data.completion_datum(shipped, prompt, completion + shipped.eos_token))[0] == tokens


def test_a_prompt_of_messages_is_completed_by_the_assistant(shipped: Any) -> None:
    messages = [{"role": "user", "content": "Who?"}]
    reply = {"role": "assistant", "content": "He."}
    expected = unshifted(data.chat_datum(shipped, [*messages, reply]))
    assert unshifted(data.completion_datum(shipped, messages, "He.")) == expected
    assert unshifted(data.completion_datum(shipped, messages, [reply])) == expected
    with pytest.raises(ValueError, match="must be a text"):
        data.completion_datum(shipped, "Who?", [reply])


def test_a_completion_of_messages_without_the_assistants_trains_on_no_message_of_the_prompt(shipped: Any) -> None:
    prompt = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "old"}]
    with pytest.raises(ValueError, match="the completion has no message of role 'assistant'"):
        data.completion_datum(shipped, prompt, [{"role": "user", "content": "new"}])


def test_what_leaves_nothing_to_learn_is_refused(shipped: Any) -> None:
    for prompt, completion in ("", "He."), ("Who?", ""):
        with pytest.raises(ValueError, match="has no tokens"):
            data.completion_datum(shipped, prompt, completion)
    endless = copy.deepcopy(shipped)
    endless.eos_token = None
    with pytest.raises(ValueError, match="with_end=False"):
        data.text_datum(endless, "In the beginning")
    assert data.text_datum(endless, "In the beginning", with_end=False).model_input.length > 1


def test_packed_datums_hold_all_tokens_in_order_and_predict_nothing_across_a_joint() -> None:
    examples = [data.shift(range(10 * i, 10 * i + length)) for i, length in enumerate([4, 3, 5, 2, 2, 6], start=1)]
    packed = data.pack(examples, max_length=8)
    assert [datum.model_input.length for datum in packed] == [6, 8, 5]
    pairs = [unshifted(datum) for datum in packed]
    assert [token for tokens, _ in pairs for token in tokens] == [t for e in examples for t in unshifted(e)[0]]
    assert [weight for _, weights in pairs for weight in weights] == [w for e in examples for w in unshifted(e)[1]]
    assert data.pack([], 8) == []
    with pytest.raises(ValueError, match=r"data\[5\] has 5 tokens, more than max_length, 4"):
        data.pack(examples, max_length=4)
    with pytest.raises(ValueError, match="advantages"):
        data.pack([Datum([1], {"target_tokens": [2], "advantages": [1.0]})], 8)
    with pytest.raises(ValueError, match="shifted by one"):
        data.pack([Datum([1, 2], {"target_tokens": [1, 2], "weights": [1, 1]})], 8)


def test_a_truncated_datum_has_its_first_tokens_and_something_to_learn() -> None:
    datum = data.shift(range(6), [0, 0, 0, 1, 1, 1])
    assert unshifted(data.truncate(datum, 3)) == ([0, 1, 2, 3], [0, 0, 0, 1])
    assert data.truncate(datum, 5) is datum
    with pytest.raises(ValueError, match="nothing to train on"):
        data.truncate(datum, 2)


LINES = [
    '{"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "He."}]}',
    '{"prompt": "And God said,", "completion": " Let there be light"}',
    "",
    '{"text": "In the beginning God created the heaven and the earth."}',
]


def file_of(folder: Path, *lines: str) -> Path:
    path = folder / "data.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_file_may_mix_chats_completions_and_texts(shipped: Any, tmp_path: Path) -> None:
    loaded = data.load(file_of(tmp_path, "\ufeff" + LINES[0], *LINES[1:]), shipped)
    assert [np.count_nonzero(datum.loss_fn_inputs["weights"].data) for datum in loaded] == [3, 5, 14]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": "In"', "line 5: expected one JSON object a line: .* at column 14"),
        ("[1]", "line 5: expected a JSON object, got list"),
        ('{"instruction": "a", "output": "b"}', r"line 5: expected .*\"completion\".* got the keys \['instruction'"),
        ('{"text": 5}', "line 5: 'text' must be a text; got int"),
        ('{"prompt": "a", "completion": null}', "line 5: 'completion' must be a text; got NoneType"),
        ('{"prompt": 5, "completion": "a"}', "line 5: 'prompt' must be a text"),
        ('{"messages": [{"role": "user", "content": "Who?"}]}', "line 5: .*one of role 'assistant'"),
    ],
)
def test_an_error_names_file_line_and_what_was_expected(shipped: Any, tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"data.jsonl, {said}"):
        data.load(file_of(tmp_path, *LINES, line), shipped)


def test_files_that_are_empty_or_no_text_are_refused(shipped: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the file is empty"):
        data.load(file_of(tmp_path), shipped)
    (tmp_path / "data.jsonl").write_bytes(b'{"text": "\xff"}')
    with pytest.raises(ValueError, match="line 1: expected UTF-8, got the byte 0xff"):
        data.load(tmp_path / "data.jsonl", shipped)


def test_long_lines_are_refused_truncated_or_dropped_as_asked_for(shipped: Any, tmp_path: Path) -> None:
    path = file_of(tmp_path, *LINES)
    lengths = [datum.model_input.length for datum in data.load(path, shipped)]
    limit = max(lengths) - 1
    at = (1, 2, 4)[lengths.index(max(lengths))]
    with pytest.raises(ValueError, match=f"line {at}: {limit + 1} tokens are more than max_length, {limit}"):
        data.load(path, shipped, max_length=limit)
    cut = data.load(path, shipped, max_length=limit, too_long="truncate")
    assert sorted(datum.model_input.length for datum in cut) == sorted([*lengths, limit])[:-1]
    assert len(data.load(path, shipped, max_length=limit, too_long="drop")) == 2
    with pytest.raises(ValueError, match="all lines are longer"):
        data.load(path, shipped, max_length=1, too_long="drop")
