"""Fine-tuning programs to run, read, copy and change.

    python -m tinkerpool.recipes.supervised --help       learn from chats, completions or texts
    python -m tinkerpool.recipes.dpo --help              prefer one reply to another (direct preference optimization)
    python -m tinkerpool.recipes.reinforcement --help    sample replies, score them, learn from those better than their
                                                         group (as in GRPO)
    python -m tinkerpool.recipes.arithmetic --help       write problems with checkable answers, to try the recipes on

A copy needs nothing of this package but `run`, `progress`, `metrics` and `options`: the folder of a run, its bar, its
metrics, its options.
"""
