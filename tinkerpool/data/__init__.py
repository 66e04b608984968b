"""From a user's texts to batches: datums with loss weights, JSONL files, order of batches, learning rates.

    from tinkerpool import data

    examples = data.load("train.jsonl", client.get_tokenizer(), max_length=1024)
    batches = data.Batches(examples, batch_size=8, seed=0)
    schedule = data.Schedule(learning_rate=1e-3, num_steps=batches.num_steps(epochs=2), kind="cosine", warmup_steps=10)
    for step in range(schedule.num_steps):
        batch, learning_rate = batches.at(step), schedule.at(step)

Needs numpy; a tokenizer is passed in, and chats need one of transformers. Makes no calls. The same file, tokenizer,
seed and step give the same batch, so a program continues where it stopped if it keeps the number of its step.
"""

from tinkerpool.data.batches import Batches
from tinkerpool.data.chat import chat_datum, render_prompt, split_turns
from tinkerpool.data.examples import completion_datum, encode_prompt, text_datum, text_of, to_datum
from tinkerpool.data.lengths import num_tokens, pack, truncate
from tinkerpool.data.reading import load, read_jsonl
from tinkerpool.data.schedule import Schedule
from tinkerpool.data.tokens import num_weighted, shift

__all__ = [
    "Batches",
    "Schedule",
    "chat_datum",
    "completion_datum",
    "encode_prompt",
    "load",
    "num_tokens",
    "num_weighted",
    "pack",
    "read_jsonl",
    "render_prompt",
    "shift",
    "split_turns",
    "text_datum",
    "text_of",
    "to_datum",
    "truncate",
]
