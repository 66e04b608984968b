"""Supervised fine-tuning: learn to continue prompts as a file shows.

Each line of --data is a JSON object, of one of three forms:

  {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
  {"prompt": "...", "completion": "..."}
  {"text": "..."}

The model learns the assistant's messages, the completions, or the whole texts. For example:

  python -m tinkerpool.recipes.supervised --data train.jsonl --test-data test.jsonl --log-dir runs/first --epochs 2

loss is the mean over the learned tokens, in nats: it falls; test_loss is that of lines that are not trained on: when it
rises again, stop earlier. A good learning rate is the highest at which the loss falls steadily; try factors of 3.
An interrupted run continues with the same command. The last line names the trained weights: sample from them, or
`tinkerpool checkpoint export` them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinkerpool import Datum, ServiceClient
from tinkerpool.data import Batches, load, num_weighted
from tinkerpool.data.chat import TrainOn
from tinkerpool.data.reading import TooLong
from tinkerpool.recipes.options import option, run_program
from tinkerpool.recipes.progress import OnMetrics, Progress, pool_metrics
from tinkerpool.recipes.run import Run, RunSettings, find_base_model, is_due


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """What `train` does."""

    data: Path = option("JSONL file to learn from")
    test_data: Path | None = option("JSONL file to evaluate on", None)
    epochs: float = option("how often each line is learned", 1.0)
    batch_size: int = option("lines in a step", 8)
    max_length: int | None = option("most tokens of a line; left out: what the model takes", None)
    too_long: TooLong = option("what to do with a longer line", "refuse")
    train_on: TrainOn = option("assistant messages of a chat to learn", "all")


def train(settings: Settings, service: ServiceClient | None = None, on_metrics: OnMetrics | None = None) -> str:
    """Train, and return the path of the trained weights. `on_metrics` replaces the table at the terminal."""
    run = Run(settings)
    if (trained_weights := run.finished()) is not None:
        return trained_weights
    service = service or ServiceClient()
    base_model = find_base_model(settings, service)
    tokenizer = service.get_tokenizer(base_model.model_name)
    limit = base_model.max_context_length
    if settings.max_length is not None:
        if settings.max_length < 1:
            raise ValueError(f"max_length must be at least 1, got {settings.max_length}: leave it out for no limit")
        limit = min(limit, settings.max_length)

    def read(path: Path) -> list[Datum]:
        return load(path, tokenizer, max_length=limit, too_long=settings.too_long, train_on=settings.train_on)

    batches = Batches(read(settings.data), settings.batch_size, seed=settings.seed)
    test_data = read(settings.test_data) if settings.test_data else []
    client = run.training_client(service)
    num_steps = batches.num_steps(settings.epochs)

    # Each step is submitted before the one before it is awaited: the pool never waits for this process.
    in_flight: deque[tuple[Any, ...]] = deque()
    with Progress(settings.log_dir, run.start_step, num_steps, on_metrics) as progress:

        def finish(done: int, batch: list[Datum], passed: Any, stepped: Any, tested: Any, saved: Any) -> None:
            of_pass, of_step = passed.result().metrics, stepped.result().metrics
            metrics = pool_metrics(of_pass, of_step) | {
                "loss": of_pass["loss:sum"] / num_weighted(batch),
                "learning_rate": run.adam(done - 1, num_steps).learning_rate,
                "grad_norm": of_step["grad_norm:last"],
            }
            if tested is not None:
                metrics["test_loss"] = tested.result().metrics["loss:sum"] / num_weighted(test_data)
            progress.report(done, metrics)
            run.record(done, saved)

        for step in range(run.start_step, num_steps):
            batch, done = batches.at(step), step + 1
            passed = client.forward_backward(batch, "cross_entropy")
            stepped = client.optim_step(run.adam(step, num_steps))
            is_tested = test_data and is_due(done, settings.eval_every, num_steps)
            tested = client.forward(test_data, "cross_entropy") if is_tested else None
            in_flight.append((done, batch, passed, stepped, tested, run.save(client, done, num_steps)))
            if len(in_flight) > 1:
                finish(*in_flight.popleft())
        while in_flight:
            finish(*in_flight.popleft())

        return run.finish(client, progress)


if __name__ == "__main__":
    run_program(Settings, train, __doc__, "tinkerpool.recipes.supervised")
