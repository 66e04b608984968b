"""Chats: the weights of tokens are the masks of transformers, with marks in the template and without."""

import copy
from typing import Any

import numpy as np
import pytest

from tinkerpool.client.tokenizer import PlainTokenizer
from tinkerpool.data import chat_datum, encode_prompt, split_turns
from tinkerpool.types import Datum

TOKENIZERS = ("shipped", "trimmed", "spaced")
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_2 = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ ' ' + m['content'] + ' ' + eos_token }}"
    "{% endgeneration %}{% else %}{{ '<s>[INST] ' + m['content'] + ' [/INST]' }}{% endif %}{% endfor %}"
)
HEADERS = (
    "<s>{% for m in messages %}{{ '<|im_start|>' + m['role'] + '<|im_start|>\n\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] | trim }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m['content'] | trim }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_start|>\n\n' }}{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}Assistant:{% generation %}"
    "{{ ' ' + m['content'] + '\n\n' }}{% endgeneration %}{% else %}{{ 'User: ' + m['content'] + '\n\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "llama_2": LLAMA_2, "headers": HEADERS, "plain": PLAIN}

QWEN_3 = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Reasoning is shown behind the last message of the user only."""

CHATS: dict[str, list[dict[str, str]]] = {
    "one turn": [{"role": "user", "content": "How are you?"}, {"role": "assistant", "content": "I am fine."}],
    "turns": [
        {"role": "system", "content": "Hello there"},
        {"role": "user", "content": "How are you?"},
        {"role": "assistant", "content": "I  am\n\nfine, é ☃ you"},
        {"role": "user", "content": "And you?"},
        {"role": "assistant", "content": "Good night."},
    ],
    "the same text twice": [
        {"role": "user", "content": "Good night."},
        {"role": "assistant", "content": "Good night."},
        {"role": "user", "content": "Good night."},
        {"role": "assistant", "content": "Good night."},
        {"role": "user", "content": "Good night."},
    ],
}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return copy.deepcopy(request.getfixturevalue(request.param))


def unmarked(template: str) -> str:
    return template.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def weights(datum: Datum) -> list[float]:
    values: list[float] = datum.loss_fn_inputs["weights"].tolist()
    return values


def weighted_texts(tokenizer: Any, datum: Datum) -> list[str]:
    """Return the texts of the unbroken runs of weighted targets."""
    targets, is_weighted = datum.loss_fn_inputs["target_tokens"].data, datum.loss_fn_inputs["weights"].data > 0
    runs = np.split(np.arange(targets.size), np.flatnonzero(np.diff(is_weighted)) + 1)
    return [tokenizer.decode(targets[run]) for run in runs if is_weighted[run[0]]]


@pytest.mark.parametrize("is_marked", [True, False], ids=["marked", "unmarked"])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize(
    ("tokenizer", "template"),
    # transformers loses masks that begin with a space which offsets leave out: the next test is about them.
    [(t, name) for t in TOKENIZERS for name in TEMPLATES if t != "trimmed" or name in {"chatml", "headers"}],
    indirect=["tokenizer"],
)
def test_weights_are_the_assistant_mask_of_transformers(
    tokenizer: Any, template: str, chat: str, is_marked: bool
) -> None:
    tokenizer.chat_template = TEMPLATES[template]
    expected = tokenizer.apply_chat_template(CHATS[chat], return_dict=True, return_assistant_tokens_mask=True)
    if not is_marked:
        tokenizer.chat_template = unmarked(TEMPLATES[template])
    datum = chat_datum(tokenizer, CHATS[chat])
    assert datum.model_input.to_ints() == expected["input_ids"][:-1]
    assert datum.loss_fn_inputs["target_tokens"].tolist() == expected["input_ids"][1:]
    assert weights(datum) == expected["assistant_masks"][1:]


@pytest.mark.parametrize("is_marked", [True, False], ids=["marked", "unmarked"])
def test_a_leading_space_that_the_offsets_leave_out_is_weighted(trimmed: Any, is_marked: bool) -> None:
    tokenizer = copy.deepcopy(trimmed)
    tokenizer.chat_template = LLAMA_2 if is_marked else unmarked(LLAMA_2)
    texts = weighted_texts(tokenizer, chat_datum(tokenizer, CHATS["turns"]))
    assert texts == [f" {message['content']} </s>" for message in CHATS["turns"] if message["role"] == "assistant"]


def test_spaces_that_end_a_message_and_that_the_offsets_leave_out_are_weighted(trimmed: Any) -> None:
    tokenizer = copy.deepcopy(trimmed)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{{ eos_token }}{% endfor %}"
    )
    chat = [{"role": "user", "content": "How are you?"}, {"role": "assistant", "content": "I am fine.  "}]
    assert weighted_texts(tokenizer, chat_datum(tokenizer, chat)) == ["I am fine.  "]


@pytest.mark.parametrize("is_marked", [True, False], ids=["marked", "unmarked"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_only_the_last_message_is_weighted_if_asked_for(tokenizer: Any, template: str, is_marked: bool) -> None:
    tokenizer.chat_template = TEMPLATES[template] if is_marked else unmarked(TEMPLATES[template])
    every = weighted_texts(tokenizer, chat_datum(tokenizer, CHATS["turns"]))
    assert len(every) == 2
    assert weighted_texts(tokenizer, chat_datum(tokenizer, CHATS["turns"], train_on="last")) == every[-1:]


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ("{% generation %}{{ m.plan }}{% endgeneration %}</plan>{% generation %}{{ m.content }}.{% endgeneration %}",
         ["Plan B", "Two."]),
        ("{% generation %}<a>{{ m.content }}.{% endgeneration %}", ["<a>Two."]),
    ],
    ids=["two blocks in a message", "blocks that touch"],
)  # fmt: skip
def test_the_last_message_has_all_its_blocks_and_none_of_the_one_before(
    shipped: Any, marks: str, expected: list[str]
) -> None:
    tokenizer = copy.deepcopy(shipped)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        + marks
        + "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    replies = [
        {"role": "assistant", "content": word, "plan": f"Plan {letter}"}
        for word, letter in (("One", "A"), ("Two", "B"))
    ]
    chat = [{"role": "user", "content": "Go on. "}, *replies]
    assert weighted_texts(tokenizer, chat_datum(tokenizer, chat, train_on="last")) == expected


def test_weighted_tokens_continue_the_prompt_of_a_sampler_up_to_the_token_that_ends_them(shipped: Any) -> None:
    chat = CHATS["turns"]
    datum = chat_datum(shipped, chat, train_on="last")
    prompt = encode_prompt(shipped, chat[:-1])
    assert datum.model_input.to_ints()[: len(prompt)] == prompt
    assert weights(datum).index(1.0) == len(prompt) - 1
    assert weighted_texts(shipped, datum) == ["Good night.<|im_end|>"]


def test_a_template_that_rewrites_earlier_turns_is_refused_and_trained_on_turn_by_turn(shipped: Any) -> None:
    tokenizer = copy.deepcopy(shipped)
    tokenizer.chat_template = QWEN_3
    with pytest.raises(ValueError, match=r"rewrites earlier turns: messages\[2\].*split_turns"):
        chat_datum(tokenizer, CHATS["turns"])
    turns = [chat_datum(tokenizer, turn, train_on="last") for turn in split_turns(CHATS["turns"])]
    assert [weighted_texts(tokenizer, datum)[0].count("</think>") for datum in turns] == [1, 1]
    assert weighted_texts(tokenizer, turns[1]) == ["<think>\n\n</think>\n\nGood night.<|im_end|>"]


def test_a_template_whose_prompt_is_no_beginning_of_the_reply_is_refused(shipped: Any) -> None:
    tokenizer = copy.deepcopy(shipped)
    tokenizer.chat_template = unmarked(CHATML).removesuffix("{% endif %}") + "{{ '<think>\n' }}{% endif %}"
    with pytest.raises(ValueError, match=r"not as a continuation of the prompt .*'<think>"):
        chat_datum(tokenizer, CHATS["one turn"])
    tokenizer.chat_template = unmarked(CHATML)
    reasoned = [*CHATS["one turn"][:1], {"role": "assistant", "content": "<think>\nwell</think>Good"}]
    assert weighted_texts(tokenizer, chat_datum(tokenizer, reasoned)) == ["<think>\nwell</think>Good<|im_end|>"]


def test_options_reach_the_template(shipped: Any) -> None:
    tokenizer = copy.deepcopy(shipped)
    tokenizer.chat_template = "{{ tools[0].name }}{{ tone }}" + unmarked(CHATML)
    datum = chat_datum(tokenizer, CHATS["one turn"], tools=[{"name": "Hello"}], tone="Good")
    assert tokenizer.decode(datum.model_input.to_numpy()).startswith("HelloGood<|im_start|>user")


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ("Hello", "must be a list of messages"),
        ([{"content": "Hello"}], r"messages\[0\] must have a role"),
        (["Hello"], r"messages\[0\] must have a role"),
        ([{"role": "user", "content": "Hello"}], "one of role 'assistant'"),
        ([], "one of role 'assistant'"),
        ([{"role": "assistant", "content": "Hello"}], r"messages\[0\] is the assistant's"),
    ],
)
def test_malformed_messages_are_refused_with_what_is_expected(shipped: Any, messages: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        chat_datum(shipped, messages)


@pytest.mark.parametrize(
    ("role", "meant"),
    [("usr", "user"), ("usre", "user"), ("User", "user"), ("Assistant", "assistant"), ("sytem ", "system")],
)
def test_a_misspelled_role_is_refused_with_the_usual_ones(shipped: Any, role: str, meant: str) -> None:
    chat = [{"role": "user", "content": "Who?"}, {"role": role, "content": "He."}, *CHATS["one turn"]]
    said = rf"messages\[1\] has the role '{role}': did you mean '{meant}'\? .*system, developer, user, assistant, tool"
    with pytest.raises(ValueError, match=said):
        chat_datum(shipped, chat)
    with pytest.raises(ValueError, match=said):
        encode_prompt(shipped, chat)


@pytest.mark.parametrize("role", ["developer", "tool", "ipython", "observation", "function", "model", "user_2"])
def test_roles_that_templates_have_are_theirs_to_take(shipped: Any, role: str) -> None:
    datum = chat_datum(shipped, [{"role": role, "content": "Who?"}, *CHATS["one turn"]])
    assert weighted_texts(shipped, datum) == ["I am fine.<|im_end|>"]


def test_templates_that_show_nothing_of_the_assistant_are_refused(shipped: Any) -> None:
    tokenizer = copy.deepcopy(shipped)
    tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(ValueError, match=r"renders nothing for messages\[1\]"):
        chat_datum(tokenizer, CHATS["one turn"])
    tokenizer.chat_template = "{{ messages[0].content }}{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    with pytest.raises(ValueError, match="marks no token"):
        chat_datum(tokenizer, CHATS["one turn"])
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat template"):
        chat_datum(tokenizer, CHATS["one turn"])


@pytest.mark.parametrize("is_marked", [True, False], ids=["marked", "unmarked"])
def test_messages_that_the_template_refuses_are_an_error_with_its_words(shipped: Any, is_marked: bool) -> None:
    tokenizer = copy.deepcopy(shipped)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}" + (CHATML if is_marked else "")
    with pytest.raises(ValueError, match="cannot render these messages: roles must alternate"):
        chat_datum(tokenizer, CHATS["one turn"])


def test_tokenizers_without_chat_templates_or_offsets_are_refused_with_what_to_do(
    shipped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = PlainTokenizer.__new__(PlainTokenizer)
    with pytest.raises(TypeError, match="pip install transformers"):
        chat_datum(plain, CHATS["one turn"])
    with pytest.raises(ValueError, match="'all' or 'last'"):
        chat_datum(shipped, CHATS["one turn"], train_on="first")  # type: ignore[arg-type]
    # Patched: transformers has hardly any slow tokenizers left.
    monkeypatch.setattr(type(shipped), "is_fast", False)
    with pytest.raises(ValueError, match="a fast one is needed"):
        chat_datum(shipped, CHATS["one turn"])
