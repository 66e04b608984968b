"""Direct preference optimization (DPO): learn to prefer one reply to another.

Each line of --data is a JSON object:

  {"prompt": "...", "chosen": "...", "rejected": "..."}

The prompt is a text or a list of messages; of messages the replies are the assistant's. For example:

  python -m tinkerpool.recipes.dpo --data pairs.jsonl --start-from tinker://.../weights/sft --log-dir runs/dpo

The loss is -log sigmoid(beta (chosen - rejected)), where chosen and rejected are how much likelier, in nats, the
replies have become than they were at the start (Rafailov et al. 2023). margin is beta (chosen - rejected): it rises
from 0. accuracy is the share of pairs with a margin above 0. If replies degrade although the margin rises, lower the
learning rate (a tenth of supervised fine-tuning's is usual), raise --beta, or add --likelihood.
An interrupted run continues with the same command.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinkerpool import Datum, ServiceClient, types
from tinkerpool.data import Batches, completion_datum, read_jsonl
from tinkerpool.recipes.options import option, run_program
from tinkerpool.recipes.progress import OnMetrics, Progress, pool_metrics
from tinkerpool.recipes.run import Run, RunSettings, check_length, find_base_model, is_due

Pair = tuple[Datum, Datum]
"""Chosen and rejected."""


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """What `train` does."""

    data: Path = option("JSONL file of preferences to learn")
    test_data: Path | None = option("JSONL file to evaluate on", None)
    epochs: float = option("how often each line is learned", 1.0)
    batch_size: int = option("lines in a step", 8)
    learning_rate: float = option("highest learning rate", 1e-4)
    beta: float = option("how strongly replies are held to the start's: 0.05 to 0.5", 0.1)
    likelihood: float = option("weight of the chosen reply's own loss per token", 0.0)


def preference(tokenizer: Any, record: Mapping[str, Any], base_model: types.SupportedModel) -> Pair:
    """Return the datums of a line. Raises ValueError for another form, equal replies, and one that is too long."""
    if not {"prompt", "chosen", "rejected"} <= record.keys():
        raise ValueError(f'expected {{"prompt": ..., "chosen": ..., "rejected": ...}}; got the keys {sorted(record)}')
    chosen, rejected = (completion_datum(tokenizer, record["prompt"], record[key]) for key in ("chosen", "rejected"))
    for datum in (chosen, rejected):
        check_length(datum.model_input.length, base_model)
    if np.array_equal(chosen.loss_fn_inputs["target_tokens"].data, rejected.loss_fn_inputs["target_tokens"].data):
        raise ValueError("chosen and rejected have the same tokens, which teaches nothing: mend one, or drop the line")
    return chosen, rejected


def logprobs_of(data: Sequence[Datum], logprobs: Sequence[NDArray[np.float32]]) -> NDArray[np.float64]:
    """Return the log-probability of each reply."""
    weights = [datum.loss_fn_inputs["weights"].data for datum in data]
    return np.array([float(w @ values) for w, values in zip(weights, logprobs, strict=True)])


class Dpo:
    """The loss of a batch: chosen and rejected replies in turn."""

    def __init__(self, settings: Settings, reference: Any) -> None:
        """`reference`: the future of a `forward` with the weights at the start."""
        self._settings = settings
        self._reference = reference

    def margins(self, data: Sequence[Datum], logprobs: Sequence[NDArray[np.float32]]) -> NDArray[np.float64]:
        """Return the margin of each pair. Waits for the reference."""
        reference = [output["logprobs"].data for output in self._reference.result().loss_fn_outputs]
        ratios = logprobs_of(data, logprobs) - logprobs_of(data, reference)
        margins: NDArray[np.float64] = self._settings.beta * (ratios[0::2] - ratios[1::2])
        return margins

    def __call__(
        self, data: list[Datum], logprobs: list[NDArray[np.float32]]
    ) -> tuple[float, list[NDArray[np.float64]], dict[str, float]]:
        """Return loss, its gradient by each log-probability, and metrics. Runs in this process, between two passes."""
        margins = self.margins(data, logprobs)
        weights = [datum.loss_fn_inputs["weights"].data.astype(np.float64) for datum in data]
        lengths = np.array([w.sum() for w in weights[0::2]])
        likelihood = logprobs_of(data[0::2], logprobs[0::2]) / lengths
        loss = np.logaddexp(0, -margins).mean() - self._settings.likelihood * likelihood.mean()
        slopes = -self._settings.beta * np.exp(-np.logaddexp(0, margins)) / len(margins)  # d(loss) / d(chosen)
        chosen = slopes - self._settings.likelihood / lengths / len(margins)
        by_reply = np.stack([chosen, -slopes], axis=1).reshape(-1)
        gradients = [slope * w for slope, w in zip(by_reply, weights, strict=True)]
        return (
            float(loss),
            gradients,
            {"margin:mean": float(margins.mean()), "accuracy:mean": float((margins > 0).mean())},
        )


def train(settings: Settings, service: ServiceClient | None = None, on_metrics: OnMetrics | None = None) -> str:
    """Train, and return the path of the trained weights. `on_metrics` replaces the table at the terminal."""
    run = Run(settings)
    if (trained_weights := run.finished()) is not None:
        return trained_weights
    service = service or ServiceClient()
    base_model = find_base_model(settings, service)
    tokenizer = service.get_tokenizer(base_model.model_name)

    def read(path: Path) -> list[Pair]:
        return read_jsonl(path, lambda record: preference(tokenizer, record, base_model))

    batches = Batches(read(settings.data), settings.batch_size, seed=settings.seed)
    test_data = [datum for pair in read(settings.test_data) for datum in pair] if settings.test_data else []
    client, start = run.training_client(service), run.new_client(service)
    test_loss = Dpo(settings, start.forward(test_data, "cross_entropy")) if test_data else None
    num_steps = batches.num_steps(settings.epochs)

    # Each step is submitted before the one before it is awaited: the pool never waits for this process.
    in_flight: deque[tuple[Any, ...]] = deque()
    with Progress(settings.log_dir, run.start_step, num_steps, on_metrics) as progress:

        def finish(done: int, passed: Any, stepped: Any, tested: Any, saved: Any) -> None:
            of_pass, of_step = passed.result().metrics, stepped.result().metrics
            names = {"loss:sum": "loss", "margin:mean": "margin", "accuracy:mean": "accuracy"}
            metrics = pool_metrics(of_pass, of_step) | {name: of_pass[key] for key, name in names.items()}
            if tested is not None and test_loss is not None:
                outputs = [output["logprobs"].data for output in tested.result().loss_fn_outputs]
                margins = test_loss.margins(test_data, outputs)
                metrics |= {"test_margin": float(margins.mean()), "test_accuracy": float((margins > 0).mean())}
            progress.report(done, metrics)
            run.record(done, saved)

        for step in range(run.start_step, num_steps):
            batch, done = [datum for pair in batches.at(step) for datum in pair], step + 1
            loss = Dpo(settings, start.forward(batch, "cross_entropy"))
            passed = client.forward_backward_custom(batch, loss, with_gradients=True)
            stepped = client.optim_step(run.adam(step, num_steps))
            is_tested = test_data and is_due(done, settings.eval_every, num_steps)
            tested = client.forward(test_data, "cross_entropy") if is_tested else None
            in_flight.append((done, passed, stepped, tested, run.save(client, done, num_steps)))
            if len(in_flight) > 1:
                finish(*in_flight.popleft())
        while in_flight:
            finish(*in_flight.popleft())

        return run.finish(client, progress)


if __name__ == "__main__":
    run_program(Settings, train, __doc__, "tinkerpool.recipes.dpo")
