"""A program for `tinker` 0.18.2, which sends its passes as JSON. It needs a process without a newer SDK.

Run it with the URL and the key of a pool that serves `toy`; it prints its results as JSON.
"""

# mypy: ignore-errors
# mypy would check it against the newer SDK that is installed.

import json
import sys

import tinker
from tinker import types


def main(url: str, key: str) -> None:
    service = tinker.ServiceClient(base_url=url, api_key=key)
    client = service.create_lora_training_client("toy", rank=8, seed=3)
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints(tokens),
            loss_fn_inputs={"target_tokens": tokens, "weights": [1.0] * len(tokens)},
        )
        for tokens in ([1, 2, 3], [4])
    ]
    forward = client.forward(data, "cross_entropy").result(60)
    passed = client.forward_backward(data, "cross_entropy")
    step = client.optim_step(types.AdamParams(learning_rate=1e-3))
    output = passed.result(60)
    unequal = {"target_tokens": [1], "weights": [1.0]}
    wrong = types.Datum(model_input=types.ModelInput.from_ints([1, 2]), loss_fn_inputs=unequal)
    refusals = []
    for failing in (client.forward_backward([wrong], "cross_entropy"), client.optim_step(types.AdamParams())):
        try:
            failing.result(60)
        except tinker.RequestFailedError as error:
            refusals.append(str(error))
    path = client.save_state("old").result(60).path
    client.load_state(path).result(60)
    again = service.create_training_client_from_state(path)
    sampler = client.save_weights_and_get_sampling_client("old-sampler")
    params = types.SamplingParams(max_tokens=3, seed=1)
    sampled = sampler.sample(types.ModelInput.from_ints([1, 2]), 2, params).result(60)
    logprobs = sampler.compute_logprobs(types.ModelInput.from_ints([1, 2, 3])).result(60)
    rest = service.create_rest_client()
    runs = rest.list_training_runs().result(60).training_runs
    archive = rest.get_checkpoint_archive_url_from_tinker_path(path).result(60).url
    report = {
        "version": tinker.__version__,
        "model_id": client.model_id,
        "again": again.model_id,
        "shapes": [d["logprobs"].shape for d in output.loss_fn_outputs],
        "forward": [d["logprobs"].data for d in forward.loss_fn_outputs],
        "backward": [d["logprobs"].data for d in output.loss_fn_outputs],
        "num_datums": step.result(60).metrics["num_datums:sum"],
        "refusals": refusals,
        "path": path,
        "num_tokens": [len(sequence.tokens) for sequence in sampled.sequences],
        "prompt_logprobs": logprobs,
        "runs": [run.training_run_id for run in runs],
        "archive": archive,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
