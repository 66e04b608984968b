"""Train a little with the official SDK, then download and merge with the cookbook's own functions; print a report.

    python cookbook_weights.py URL KEY

Each line of input is a JSON list: BASE_MODEL, BASE_DIRECTORY, OUT, and options: `train_unembed`, `shard`, `to_peft`,
`to_vllm`. The program replies with a line: `report` and a JSON object. It ends with the input, or with an error.

Runs in a process of its own, because the cookbook is not installed beside the tests. One process serves many lines,
because importing takes longer than a line. `forward` in the report are the pool's log-probabilities, `merged` those of
the merged model, both of TOKENS. With `to_peft` also `in_peft`, those of the adapter that the cookbook converts, in
PEFT; with `to_vllm`, of gpt-oss, the largest difference between what the converted adapter adds to an expert's weights,
as vLLM reads it, and what merging added.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import peft
import tinker
import torch
from safetensors.torch import load_file
from tinker_cookbook import weights
from transformers import AutoModelForCausalLM

TOKENS = [5, 9, 60, 61, 5, 9, 60, 62, 63, 64, 65]


def main() -> None:
    """Run the program."""
    url, key = sys.argv[1:]
    for line in sys.stdin:
        print("report", json.dumps(report_of(url, key, *json.loads(line))), flush=True)


def report_of(url: str, key: str, base_model: str, base_directory: str, out: str, *options: str) -> dict[str, Any]:
    """Return the report of one line."""
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
        merge_strategy="shard" if "shard" in options else "full",
    )
    report: dict[str, Any] = {
        "files": sorted(file.name for file in adapter.iterdir()),
        "left": len(after) - len(before),
        "forward": forward,
        "merged": logprobs(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)),
    }
    converted = Path(out) / "converted"
    if "to_peft" in options or "to_vllm" in options:
        weights.build_lora_adapter(base_model=base_directory, adapter_path=str(adapter), output_path=str(converted))
    if "to_peft" in options:
        base = AutoModelForCausalLM.from_pretrained(base_directory, dtype=torch.float32)
        report["in_peft"] = logprobs(peft.PeftModel.from_pretrained(base, converted))
    if "to_vllm" in options:
        report["of_experts"] = difference_of_experts(converted, Path(base_directory), model)
    return report


def difference_of_experts(adapter: Path, base: Path, merged: Path) -> float:
    """Return the largest difference between an adapter's products and what merged experts of gpt-oss have more."""
    factors = load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    before, after = (load_file(directory / "model.safetensors") for directory in (base, merged))
    differences, changes = [], []
    for name, B in factors.items():
        if ".experts." not in name or not name.endswith(".lora_B.weight"):
            continue
        product = config["lora_alpha"] / config["r"] * B @ factors[name.replace(".lora_B.", ".lora_A.")]
        layer, _, rest = name.removeprefix("base_model.model.").partition(".experts.")
        expert, module, *_ = rest.split(".")
        stored = "down_proj" if module == "down_proj" else "gate_up_proj"
        change = (after[f"{layer}.experts.{stored}"] - before[f"{layer}.experts.{stored}"])[int(expert)].T
        columns = {"gate_proj": change[::2], "up_proj": change[1::2], "down_proj": change}[module]
        changes.append(float(columns.abs().max()))
        differences.append(float((columns - product).abs().max()))
    assert max(changes) > 1e-2, "the adapter changed little: the comparison would show nothing"
    return max(differences)


@torch.no_grad()
def logprobs(model: Any) -> list[float]:
    """Return the log-probabilities of TOKENS but the first."""
    rows = model(torch.tensor([TOKENS[:-1]])).logits[0].log_softmax(-1)
    return [float(row[token]) for row, token in zip(rows, TOKENS[1:], strict=True)]


if __name__ == "__main__":
    main()
