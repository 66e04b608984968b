"""Train a little with the official SDK, then download and merge with the cookbook's own functions; print a report.

    python cookbook_weights.py URL KEY BASE_MODEL BASE_DIRECTORY OUT [train_unembed] [to_peft]

Runs in a process of its own, because the cookbook is not installed beside the tests. `forward` in the report are the
pool's log-probabilities, `merged` those of the merged model, both of TOKENS; with `to_peft` also `in_peft`, those of
the adapter that the cookbook converts, in PEFT.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import peft
import tinker
import torch
from tinker_cookbook import weights
from transformers import AutoModelForCausalLM

TOKENS = [5, 9, 60, 61, 5, 9, 60, 62, 63, 64, 65]


def main() -> None:
    """Run the program."""
    url, key, base_model, base_directory, out, *options = sys.argv[1:]
    inputs: Any = {"target_tokens": TOKENS[1:]}
    datum = tinker.Datum(model_input=tinker.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=inputs)
    with tinker.ServiceClient(base_url=url, api_key=key) as service:
        client = service.create_lora_training_client(
            base_model, rank=8, seed=1, train_unembed="train_unembed" in options
        ).result(60)
        for _ in range(4):
            client.forward_backward([datum], "cross_entropy")
            client.optim_step(tinker.AdamParams(learning_rate=2e-2)).result(60)
        path = client.save_state("done").result(60).path
        forward = client.forward([datum], "cross_entropy").result(60).loss_fn_outputs[0]["logprobs"].tolist()
        before = tinker.RestClient(base_url=url, api_key=key).list_user_checkpoints().result(60).checkpoints
    adapter, model = Path(out) / "adapter", Path(out) / "merged"
    weights.download(tinker_path=path, output_dir=str(adapter), base_url=url)
    after = tinker.RestClient(base_url=url, api_key=key).list_user_checkpoints().result(60).checkpoints
    weights.build_hf_model(
        base_model=base_directory,
        adapter_path=str(adapter),
        output_path=str(model),
        dtype="float32",
        # Of a mixture "full" takes transformers' joined gates and ups for interleaved ones.
        merge_strategy="shard" if "to_peft" in options else "full",
    )
    report = {
        "files": sorted(file.name for file in adapter.iterdir()),
        "left": len(after) - len(before),
        "forward": forward,
        "merged": logprobs(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)),
    }
    if "to_peft" in options:
        converted = Path(out) / "peft"
        weights.build_lora_adapter(base_model=base_directory, adapter_path=str(adapter), output_path=str(converted))
        base = AutoModelForCausalLM.from_pretrained(base_directory, dtype=torch.float32)
        report["in_peft"] = logprobs(peft.PeftModel.from_pretrained(base, converted))
    print(json.dumps(report))


@torch.no_grad()
def logprobs(model: Any) -> list[float]:
    """Return the log-probabilities of TOKENS but the first."""
    rows = model(torch.tensor([TOKENS[:-1]])).logits[0].log_softmax(-1)
    return [float(row[token]) for row, token in zip(rows, TOKENS[1:], strict=True)]


if __name__ == "__main__":
    main()
