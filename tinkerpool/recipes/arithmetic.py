"""Problems with checkable answers, to try the recipes on: sums and differences of two numbers from 10 to 99.

Writes four files into --folder, with no problem in two of them:

  shown.jsonl       problems worked digit by digit, to learn from by supervised fine-tuning
  shown_test.jsonl  problems worked in the same way, to evaluate that on
  train.jsonl       problems with their answers alone, for reinforcement
  test.jsonl        problems with their answers, to evaluate on

For example:

  python -m tinkerpool.recipes.arithmetic --folder arithmetic
  python -m tinkerpool.recipes.reinforcement --data arithmetic/train.jsonl --test-data arithmetic/test.jsonl \\
      --reward tinkerpool.recipes.arithmetic:is_right --log-dir runs/arithmetic

The reward is 1 if the last number of the reply is the answer, else 0. The same seed writes the same files.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tinkerpool import ModelInput, SamplingClient, SamplingParams
from tinkerpool.data import encode_prompt, read_jsonl

SYSTEM = {"role": "system", "content": "Calculate."}
"""Short: a model's own system prompt is often longer than the problem."""
MAX_TOKENS = 64
"""Of a reply that `accuracy` judges: room for the explanations of a model that has seen no worked problem."""
NUM_SHOWN, NUM_SHOWN_TEST, NUM_TEST = 200, 50, 200
Problem = tuple[int, str, int]
"""The numbers, and + or - between them."""


def problems(seed: int) -> list[Problem]:
    """Return every problem once, in random order. No difference is negative."""
    numbers = range(10, 100)
    found = [(a, sign, b) for a in numbers for b in numbers for sign in "+-" if sign == "+" or a >= b]
    random.Random(seed).shuffle(found)
    return found


def answer(problem: Problem) -> int:
    """Return the answer."""
    a, sign, b = problem
    return a + b if sign == "+" else a - b


def chat(problem: Problem) -> list[dict[str, str]]:
    """Return the messages that ask for the answer."""
    a, sign, b = problem
    return [SYSTEM, {"role": "user", "content": f"What is {a} {sign} {b}?"}]


def steps(problem: Problem) -> str:
    """Return how the answer is found, digit by digit from the right: `7 + 5 = 12, 4 + 8 + 1 = 13, so 132`."""
    a, sign, b = problem
    (a_tens, a_units), (b_tens, b_units) = divmod(a, 10), divmod(b, 10)
    if sign == "+":
        units = a_units + b_units
        carried = " + 1" if units > 9 else ""
        tens = a_tens + b_tens + (units > 9)
        return f"{a_units} + {b_units} = {units}, {a_tens} + {b_tens}{carried} = {tens}, so {answer(problem)}"
    is_borrowed = a_units < b_units
    a_units, a_tens = a_units + 10 * is_borrowed, a_tens - is_borrowed
    units, tens = a_units - b_units, a_tens - b_tens
    return f"{a_units} - {b_units} = {units}, {a_tens} - {b_tens} = {tens}, so {answer(problem)}"


def worked(problem: Problem) -> dict[str, Any]:
    """Return a line for `supervised`."""
    return {"messages": [*chat(problem), {"role": "assistant", "content": steps(problem)}]}


def task(problem: Problem) -> dict[str, Any]:
    """Return a line for `reinforcement`."""
    return {"prompt": chat(problem), "answer": answer(problem)}


def is_right(record: Mapping[str, Any], reply: str) -> float:
    """Return 1 if the last number of a reply is the line's answer, else 0."""
    return float(re.findall(r"\d+", reply)[-1:] == [str(record["answer"])])


def accuracy(sampler: SamplingClient, tasks: Path) -> float:
    """Return the share of the problems in a file, such as test.jsonl, whose likeliest reply is right."""
    tokenizer, params = sampler.get_tokenizer(), SamplingParams(max_tokens=MAX_TOKENS, temperature=0)
    lines = read_jsonl(tasks, dict)
    prompts = [ModelInput.from_ints(encode_prompt(tokenizer, line["prompt"])) for line in lines]
    futures = [sampler.sample(prompt, 1, params) for prompt in prompts]
    replies = [future.result().sequences[0].tokens for future in futures]
    texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in replies]
    return sum(is_right(line, text) for line, text in zip(lines, texts, strict=True)) / len(lines)


def write(folder: Path, seed: int = 0) -> None:
    """Write the files."""
    rest = iter(problems(seed))
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "shown.jsonl", (worked(next(rest)) for _ in range(NUM_SHOWN)))
    _write(folder / "shown_test.jsonl", (worked(next(rest)) for _ in range(NUM_SHOWN_TEST)))
    _write(folder / "test.jsonl", (task(next(rest)) for _ in range(NUM_TEST)))
    _write(folder / "train.jsonl", (task(problem) for problem in rest))


def _write(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def main() -> None:
    """Write the files that the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m tinkerpool.recipes.arithmetic",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", type=Path, required=True, help="folder of the files (required)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the problems (default: 0)")
    arguments = parser.parse_args()
    write(arguments.folder, arguments.seed)
    print(*sorted(str(path) for path in arguments.folder.glob("*.jsonl")), sep="\n")


if __name__ == "__main__":
    main()
