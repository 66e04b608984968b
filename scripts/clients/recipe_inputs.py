"""What recipes of the cookbook read and a machine without internet lacks: data sets, a grader, a state to begin from.

The recipes run unmodified. Each finds the name that it asks for in the folder that it runs in.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import tinkerpool
from coordinator.base_models import DEFAULT_MODEL
from scripts.embedded_pool import EmbeddedPool
from workers.contract.settings import SHIPPED_MODELS_DIR

MODEL = str(SHIPPED_MODELS_DIR / DEFAULT_MODEL)
LISTED_MODEL = "Qwen/Qwen3.5-9B-Base"
"""The name under which recipes that know models by name find the shipped one: the default of `rl_loop`."""
GRADER_TOKENS = 4096
"""The rubric recipe lets its grader write 2,048 tokens: more than the shipped model takes."""
SUMS = [(1, 1), (1, 2), (2, 1), (2, 2)]
NUM_STEPS, BATCH, LEARNING_RATE = 60, 8, 5e-3


def write_grader(folder: Path) -> Path:
    """Write a copy of the shipped model that takes longer texts; return its directory."""
    grader = folder / "grader"
    grader.mkdir()
    for path in Path(MODEL).iterdir():
        if path.name != "config.json":
            (grader / path.name).symlink_to(path)
    config = json.loads((Path(MODEL) / "config.json").read_text(encoding="utf-8"))
    (grader / "config.json").write_text(json.dumps(config | {"max_position_embeddings": GRADER_TOKENS}))
    return grader


def write_rubrics(folder: Path) -> None:
    """Write questions with rubrics to `rubrics.jsonl`, in the form of the rubric recipe."""
    lines = [
        {
            "convo": [{"role": "user", "content": f"What is {a} + {b}?"}],
            "rubric_items": [
                {
                    "rubric_str": f"Is the answer {a + b}?",
                    "extraction_regex": "<score>(.*?)</score>",
                    "grader_output_format_instruction": "Write <score>1</score> or <score>0</score>.",
                }
            ],
        }
        for a, b in SUMS
    ]
    (folder / "rubrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_sums(folder: Path) -> None:
    """Write a data set of sums under the name and in the form that `rl_loop` loads, and the model's tokenizer."""
    data_set = folder / "openai" / "gsm8k"
    data_set.mkdir(parents=True)
    (data_set / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: train.jsonl\n---\n"
    )
    lines = [{"question": f"What is {a} + {b}?", "answer": f"#### {a + b}"} for a, b in SUMS * 4]
    (data_set / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    link = folder / LISTED_MODEL
    link.parent.mkdir()
    link.symlink_to(MODEL)


def save_guesser(pool: EmbeddedPool, logs: Path) -> None:
    """Train an adapter to answer sums with a boxed guess, and let a recipe whose log is in `logs` begin there.

    The untrained model never writes a box: all rewards would be 0, and `rl_loop` would take no step.
    """
    draws = random.Random(0)
    with tinkerpool.ServiceClient(pool.url, pool.admin_key) as service:
        client = service.create_lora_training_client(LISTED_MODEL, rank=8)
        tokenizer = service.get_tokenizer(LISTED_MODEL)

        def turn(guess: int) -> str:
            a, b = draws.choice(SUMS)
            return f"User: What is {a} + {b}? Write the number inside \\boxed{{}}.\n\nAssistant: \\boxed{{{guess}}}\n\n"

        for _ in range(NUM_STEPS):
            data = []
            for _ in range(BATCH):
                before, _, reply = (turn(draws.randint(2, 4)) + turn(draws.randint(2, 4))).rpartition(" ")
                prompt, drawn = (list(tokenizer.encode(text)) for text in (before, f" {reply}User:"))
                tokens = prompt + drawn
                weights = [0.0] * (len(prompt) - 1) + [1 / len(drawn)] * len(drawn)
                data.append(tinkerpool.Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": weights}))
            client.train_step(data, "cross_entropy", tinkerpool.AdamParams(learning_rate=LEARNING_RATE)).result()
        path = client.save_state("guesser").result().path
    logs.mkdir()
    (logs / "checkpoints.jsonl").write_text(json.dumps({"name": "guesser", "batch": 0, "state_path": path}) + "\n")
