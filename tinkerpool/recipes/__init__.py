"""Fine-tuning programs to run, read, copy and change: `python -m tinkerpool.recipes.supervised --help`.

- `supervised`: learn from chats, completions or texts.
- `dpo`: prefer one reply to another (direct preference optimization).
- `reinforcement`: sample replies, score them, learn from those that are better than their group (as in GRPO).

A copy needs nothing of this package but `run`, `progress` and `options`: the folder of a run, its bar, its options.
"""
