"""The page on exports, as a reader would run it: commands and programs in order, with the shipped model."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.exports import vllm_refuses
from tests.support.pages import blocks
from tests.support.served_pool import ServedPool
from tinkerpool.cli.main import main
from tinkerpool.client.rest_client import log_note
from tinkerpool.model_weights import weights_id
from workers.contract.settings import SHIPPED_MODELS_DIR

pytestmark = [
    pytest.mark.slow,
    # What the page warns of; PEFT says it too.
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied:UserWarning"),
]


@pytest.fixture
def page(pool: ServedPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the page in an empty directory; return the names that its programs define."""
    monkeypatch.chdir(tmp_path)
    log_note.cache_clear()  # other tests of this process may have seen a note
    monkeypatch.setenv("TINKERPOOL_BASE_URL", pool.url)
    monkeypatch.setenv("TINKERPOOL_API_KEY", pool.key("reader"))
    names: dict[str, Any] = {}
    for language, code in blocks("docs/export.md"):
        if language == "python":
            exec(compile(code, "docs/export.md", "exec"), names)
            continue
        assert language == "bash"
        paths = {"CHECKPOINT": names["checkpoint"], "WITHOUT_UNEMBEDDING": names.get("without_unembedding")}
        for line in code.splitlines():
            monkeypatch.setattr(sys, "argv", shlex.split(Template(line).substitute(paths)))
            with pytest.raises(SystemExit) as ended:
                main()
            assert not ended.value.code, line
    return names


def test_every_directory_of_the_page_computes_what_the_pool_computes(
    page: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    lines = [record.getMessage() for record in caplog.get_records("setup")]
    [model] = page["service"].get_server_capabilities().supported_models
    assert model.has_tied_unembedding
    assert model.weights_id == weights_id(SHIPPED_MODELS_DIR / model.model_name)
    resumed = page["service"].create_training_client_from_state(page["checkpoint"])
    tokens, datum = page["tokens"], page["datum"]
    expected = resumed.forward([datum], "cross_entropy").result(60).loss_fn_outputs[0]["logprobs"].to_numpy()

    def logprobs(model: Any) -> np.ndarray[Any, Any]:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(tokens[:-1])[None]).logits[0]
        chosen: np.ndarray[Any, Any] = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()
        return chosen

    def difference(model: Any) -> float:
        return float(np.abs(logprobs(model) - expected).max())

    saved_by_peft = AutoModelForCausalLM.from_pretrained("merged-by-peft")
    assert difference(page["model"]) < 1e-4
    # The shipped model's files are bfloat16, to which merged weights are rounded.
    assert max(map(difference, (page["merged"], page["merged_by_peft"], saved_by_peft))) < 0.01

    assert page["tokenizer"].encode("The LORD is my shepherd; I shall not want.") == tokens
    assert vllm_refuses(Path("vllm-adapter"), max_lora_rank=8) == []
    assert (
        Path("adapter/adapter_config.json").read_bytes() == Path("adapter-from-python/adapter_config.json").read_bytes()
    )
    check = json.loads(Path("merged/tinkerpool.json").read_text())["check"]
    assert check["dtype"] == "bfloat16"
    assert check["difference"] <= check["tolerance"] < check["adapter_effect"]
    page["service"].create_rest_client().export_checkpoint(page["checkpoint"], "again").result(60)
    logged = [*lines, *(record.getMessage() for record in caplog.records)]
    assert sum(line.startswith("The base model ties its unembedding") for line in logged) == 1, "a note is said once"
    page["service"].close()
