"""Tokens to text and messages to prompts in OpenAI's door."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from coordinator.base.errors import ServiceError
from coordinator.doors.openai.detokenizer import BROKEN, Detokenizer
from coordinator.doors.openai.templates import ChatTemplateError, read_template
from coordinator.doors.openai.text_models import TextModel, read_text_model
from tests.support.served_pool import SHIPPED_MODEL
from tinkerpool.v1 import sessions_pb2

FILES = {path.name: path.read_bytes() for path in SHIPPED_MODEL.glob("*") if path.suffix in (".json", ".jinja")}
BASE = sessions_pb2.BaseModel(name="m", max_sequence_tokens=1024, eos_token_ids=[0, 3], vocab_size=2048)
MODEL = read_text_model(BASE, FILES)
TOKENIZER = MODEL.tokenizer
END = 3
SHOWN = [token for token in range(TOKENIZER.get_vocab_size()) if token not in MODEL.hidden]
MESSAGES = [{"role": "user", "content": "Who made thee?"}]


def token_of(text: str) -> int:
    token: int = TOKENIZER.token_to_id(text)  # type: ignore[assignment]  # never None here
    return token


def shown(tokens: list[int], stops: list[str], detokenizer: Detokenizer | None = None) -> list[str]:
    """Return the pieces after each token, and at the end."""
    detokenizer = detokenizer or MODEL.detokenizer(stops)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.finish()]


def cut_when_complete(tokens: list[int], stops: list[str]) -> str:
    """Decode all tokens again after each token, and stop at the first that completes a stop string: the naive twin."""
    for size in range(1, len(tokens) + 1):
        text = TOKENIZER.decode(tokens[:size], skip_special_tokens=False)
        if found := [text.index(stop) for stop in stops if stop in text]:
            return text[: min(found)]
    return TOKENIZER.decode(tokens, skip_special_tokens=False)


@given(st.text(max_size=60))
def test_pieces_are_whole_characters_and_join_to_the_text(text: str) -> None:
    pieces = shown(TOKENIZER.encode(text).ids, [])
    assert "".join(pieces) == text
    assert BROKEN in text or not any(BROKEN in piece for piece in pieces)


@given(st.lists(st.sampled_from(SHOWN), max_size=30))
def test_pieces_of_any_tokens_join_to_the_tokenizers_text(tokens: list[int]) -> None:
    assert "".join(shown(tokens, [])) == TOKENIZER.decode(tokens, skip_special_tokens=False)


@given(
    st.text("ab\u00e9\U0001f600", max_size=30),
    st.lists(st.text("ab\u00e9\U0001f600", min_size=1, max_size=4), min_size=1, max_size=4),
)
def test_no_part_of_a_stop_string_is_shown(text: str, stops: list[str]) -> None:
    tokens = TOKENIZER.encode(text).ids
    assert "".join(shown(tokens, stops)) == cut_when_complete(tokens, stops)


def test_text_is_held_back_only_while_it_may_begin_a_stop_string() -> None:
    tokens = [token_of(character) for character in "abcabx"]
    assert shown(tokens, ["abd"]) == ["", "", "abc", "", "", "abx", ""]
    assert shown(tokens[:5], ["abd"]) == ["", "", "abc", "", "", "ab"]


def test_special_tokens_are_not_shown_but_may_be_part_of_a_stop_string() -> None:
    start, a, b = (token_of(text) for text in ("<|im_start|>", "a", "b"))
    assert shown([a, start, b, END], []) == ["a", "", "b", "", ""]
    assert "".join(shown([b, a, start, b], ["a<|im_start|>"])) == "b"
    assert "".join(shown([b, a, start, b], ["a<|im_end|>"])) == "bab"


def test_invalid_bytes_are_held_back_for_a_bounded_number_of_tokens() -> None:
    broken = next(token for token in SHOWN if TOKENIZER.decode([token]) == BROKEN)
    pieces = shown([broken] * 200, [])
    assert "".join(pieces) == BROKEN * 200
    assert pieces[:100] != [""] * 100


def test_byte_tokens_become_a_character_once_it_is_complete() -> None:
    vocabulary = {"\u2581the": 0, **{f"<0x{value:02X}>": value + 1 for value in range(256)}, "<unk>": 257}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokens = [0, *(value + 1 for value in "\U0001f600".encode()), 0]
    assert shown(tokens, [], Detokenizer(tokenizer, (), (), ())) == ["the", "", "", "", "\U0001f600", " the", ""]


def test_the_leading_space_of_a_continuation_is_kept() -> None:
    vocabulary = {"\u2581the": 0, "\u2581": 1, ":": 2, "<unk>": 3, "</s>": 4}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    files = {"tokenizer.json": tokenizer.to_str().encode()}
    model = read_text_model(sessions_pb2.BaseModel(vocab_size=5, eos_token_ids=[4]), files)
    assert shown([0, 0], [], model.detokenizer()) == [" the", " the", ""]
    assert shown([0, 4, 0], [], model.detokenizer()) == [" the", "", " the", ""]
    assert shown([0, 0], [], model.prompt_detokenizer([0, 0], "the the")) == ["the", " the", ""]
    assert model.token_text(0) == (" the", b" the")


def test_saved_truncation_and_padding_of_a_tokenizer_are_off() -> None:
    tokenizer = Tokenizer.from_str(FILES["tokenizer.json"].decode())
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=9)
    files = {"tokenizer.json": tokenizer.to_str().encode()}
    for text in ("a", "And the LORD said unto Moses"):
        assert read_text_model(BASE, files).tokenizer.encode(text).ids == TOKENIZER.encode(text).ids


@given(st.text(max_size=200), st.booleans())
def test_a_text_has_the_same_tokens_whether_the_interpreter_is_held_or_not(text: str, add_special_tokens: bool) -> None:
    assert MODEL._tokens(text, add_special_tokens) == TOKENIZER.encode(text, add_special_tokens=add_special_tokens).ids


async def test_of_a_text_far_beyond_the_model_only_a_prefix_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded, tokens_of = list[int](), TextModel._tokens

    def counted(self: TextModel, text: str, add_special_tokens: bool) -> list[int]:
        encoded.append(len(text))
        return tokens_of(self, text, add_special_tokens)

    monkeypatch.setattr(TextModel, "_tokens", counted)
    with pytest.raises(ServiceError, match="more than 2048: shorten") as raised:
        await MODEL.encode(["And the LORD said, " * 400_000], "t", add_special_tokens=True)
    assert raised.value.reason == "CONTEXT_LENGTH_EXCEEDED"
    assert sum(encoded) <= 16 * 1024


async def test_other_calls_run_while_long_texts_are_encoded_or_decoded() -> None:
    on_loop: list[bool] = []
    turns_inside: list[int] = []
    num_turns = 0

    class Watched:
        """A tokenizer that notes where it runs, and how often the event loop turns meanwhile."""

        def __getattr__(self, name: str) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                on_loop.append(threading.current_thread() is threading.main_thread())
                before = num_turns
                result = getattr(TOKENIZER, name)(*args, **kwargs)
                turns_inside.append(num_turns - before)
                return result

            return call

    base = sessions_pb2.BaseModel(max_sequence_tokens=100_000, vocab_size=2048)
    model = replace(read_text_model(base, FILES), tokenizer=Watched())  # type: ignore[arg-type]
    encoding = asyncio.create_task(model.encode(["And the LORD said, " * 20_000], "t", add_special_tokens=False))
    while not encoding.done():
        num_turns += 1
        await asyncio.sleep(0.001)
    tokens = encoding.result()[0][:100_000]
    decoded = await model.texts_of([tokens, "text"], "t")
    assert turns_inside[-2] > 10  # at most 2 if the thread held the interpreter
    assert set(on_loop) == {False}
    assert decoded == [TOKENIZER.decode(tokens, skip_special_tokens=False), "text"]


def test_a_single_token_has_its_text_and_its_bytes() -> None:
    [space] = TOKENIZER.encode(" the").ids
    assert MODEL.token_text(space) == (" the", b" the")
    pieces = [MODEL.token_text(token) for token in TOKENIZER.encode("\u20ac").ids]
    assert b"".join(data or b"" for _, data in pieces) == "\u20ac".encode()
    assert pieces[0][0].startswith("bytes:\\xe2")
    assert MODEL.token_text(END) == ("<|im_end|>", b"<|im_end|>")


@pytest.mark.parametrize(
    "template",
    [
        FILES["chat_template.jinja"].decode(),
        "{%- for m in messages %}\n  {% if m.role == 'user' %}\n[{{ m.content }}]\n  {% else %}{% continue %}"
        "{% endif %}\n{% endfor %}",
        "{% generation %}{{ bos_token ~ messages|tojson ~ eos_token }}{% endgeneration %}",
        "{{ messages[0] | tojson(indent=2) }}{{ strftime_now('%Y')|length }}{% if thinking %}yes{% endif %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    ],
)
def test_a_template_is_rendered_as_transformers_renders_it(tmp_path: Path, template: str) -> None:
    from transformers import AutoTokenizer

    files = FILES | {"chat_template.jinja": template.encode()}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    theirs: Any = AutoTokenizer.from_pretrained(str(tmp_path))
    messages = [*MESSAGES, {"role": "assistant", "content": "The <LORD>'s & \u20ac"}]
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, thinking=True)
    ours = read_template(files)
    assert ours is not None
    assert ours.render(messages, {"thinking": True}) == expected


def test_a_template_reports_its_errors_and_cannot_leave_its_sandbox() -> None:
    def render(source: str) -> str:
        template = read_template({"chat_template.jinja": source.encode()})
        assert template is not None
        return template.render(MESSAGES, {})

    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ChatTemplateError, match="unsafe"):
        render("{{ messages.__class__.__base__.__subclasses__() }}")
    with pytest.raises(ChatTemplateError, match="unsafe"):
        render("{{ messages.append(1) }}")
    with pytest.raises(ChatTemplateError, match="Unexpected end"):
        render("{% if messages %}")
    with pytest.raises(ChatTemplateError, match="has no attribute"):
        render("{{ messages|dictsort }}")


def test_a_template_is_found_in_every_file_that_models_keep_it_in() -> None:
    def found(**files: str) -> str | None:
        template = read_template({name.replace("_j", ".j"): text.encode() for name, text in files.items()})
        return template.render(MESSAGES, {}) if template is not None else None

    config = '{"eos_token": {"content": "</s>"}, "chat_template": '
    assert found() is None
    assert found(tokenizer_config_json="{}") is None
    assert found(tokenizer_config_json=config + '"A{{ eos_token }}"}') == "A</s>"
    named = config + '[{"name": "tool_use", "template": "B"}, {"name": "default", "template": "C"}]}'
    assert found(tokenizer_config_json=named) == "C"
    assert found(tokenizer_config_json=named, chat_template_jinja="D") == "D"
    mapped = found(special_tokens_map_json='{"bos_token": "<s>"}', chat_template_jinja="{{ bos_token }}")
    assert mapped == "<s>"
