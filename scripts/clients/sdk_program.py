"""What a program does with a version of the Tinker SDK: train, save, load, sample, list, download, correct a mistake.

`sdk_versions` runs it in a process that imports the version. It prints a line of JSON for each check: its name, and
what it found, or its error. It imports nothing of ours.
"""

# mypy: ignore-errors
# mypy would check it against the one version that is installed.

import io
import json
import sys
import tarfile
import urllib.request

import tinker
from tinker import types

VERSION = tuple(int(part) for part in tinker.__version__.split(".")[:2])
WAIT_S = 120
TOKENS = list(range(10, 26))
LARGE = 1025
"""More sequences than any version sends in one request."""


def done(made):
    """Return what a call made: later versions return a future of it."""
    return made.result(WAIT_S) if hasattr(made, "result") else made


def datum(tokens=TOKENS, num_targets=None):
    """Return a sequence to train on."""
    targets = tokens[1:][:num_targets]
    inputs = {"target_tokens": targets, "weights": [1.0] * len(targets)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


BAD, FAULT = datum(num_targets=3), "has length 3 but"
"""A sequence with fewer targets than tokens, and what the pool says of it."""


class Program:
    """The checks; each returns what it found, and raises an exception if that is wrong. `train` must be the first."""

    def __init__(self, url, key, base_model, external, num_steps):
        self.base_model, self.external, self.num_steps = base_model, external, num_steps
        self.service = tinker.ServiceClient(base_url=url, api_key=key)
        self.rest = self.service.create_rest_client()

    def train(self):
        """Make a model and train it: the loss falls."""
        self.client = done(self.service.create_lora_training_client(self.base_model, rank=8, seed=3))
        losses = []
        for _ in range(self.num_steps):
            passed = self.client.forward_backward([datum()], "cross_entropy")
            self.client.optim_step(types.AdamParams(learning_rate=5e-3)).result(WAIT_S)
            losses.append(passed.result(WAIT_S).metrics["loss:sum"])
        assert losses[-1] < losses[0], losses
        return f"loss {losses[0]:.1f} to {losses[-1]:.1f}"

    def save_and_load(self):
        """Save, load into the same model, and make another one: both compute the same."""
        self.path = self.client.save_state("saved").result(WAIT_S).path
        self.client.load_state(self.path).result(WAIT_S)
        other = done(self.service.create_training_client_from_state(self.path))
        losses = [
            model.forward([datum()], "cross_entropy").result(WAIT_S).metrics["loss:sum"]
            for model in (self.client, other)
        ]
        assert losses[0] == losses[1], losses
        return "equal losses"

    def sample(self):
        """Sample several prompts at once, twice: a seed gives the same tokens."""
        sampler = done(self.client.save_weights_and_get_sampling_client("sampler"))
        params = types.SamplingParams(max_tokens=8, seed=5)
        texts = []
        for _ in range(2):
            asked = [sampler.sample(types.ModelInput.from_ints(TOKENS[:n]), 2, params) for n in (2, 4, 6)]
            texts.append([list(each.tokens) for future in asked for each in future.result(WAIT_S).sequences])
        assert texts[0] == texts[1], texts
        assert len(texts[0]) == 6
        return "6 samples, repeated"

    def list(self):
        """List the tenant's checkpoints: of a kind that is new to the version, none."""
        listed = [each.tinker_path for each in self.rest.list_user_checkpoints(limit=1000).result(WAIT_S).checkpoints]
        assert self.path in listed, listed
        is_listed = self.external in listed
        assert is_listed is (VERSION >= (0, 28)), listed
        return "external listed" if is_listed else "external left out"

    def download(self):
        """Download weights as the version does: an archive, or a file for each URL."""
        if VERSION < (0, 36):
            url = self.rest.get_checkpoint_archive_url_from_tinker_path(self.path).result(WAIT_S).url
            with tarfile.open(fileobj=io.BytesIO(read(url))) as archive:
                files = {name: archive.extractfile(name).read() for name in archive.getnames()}
        else:
            path = self.client.save_weights_external("out").result(WAIT_S).path
            urls = self.rest.get_external_weights_urls(path).result(WAIT_S).urls
            files = {name: read(url) for name, url in urls.items()}
        assert set(files) == {"adapter_config.json", "adapter_model.safetensors"}, list(files)
        weights = files["adapter_model.safetensors"]
        header = json.loads(weights[8 : 8 + int.from_bytes(weights[:8], "little")])
        assert "base_model.model.model.unembed_tokens.lora_A.weight" in header, list(header)
        return "archive" if VERSION < (0, 36) else "URLs"

    def correct(self):
        """Correct a refused call: from 0.20 on that works at once, before only behind a step, which fails."""
        refused(self.client.forward_backward([BAD], "cross_entropy"), FAULT)
        works_at_once = VERSION >= (0, 20)
        if not works_at_once:
            refused(self.client.forward_backward([datum()], "cross_entropy"), "GRADIENT_WINDOW_CLOSED")
            refused(self.client.optim_step(types.AdamParams()), "GRADIENT_WINDOW_CLOSED")
        self.client.forward_backward([datum()], "cross_entropy").result(WAIT_S)
        assert self.client.optim_step(types.AdamParams()).result(WAIT_S).metrics["num_datums:sum"] == 1
        return "at once" if works_at_once else "after a step"

    def large(self):
        """Send a batch of several requests whose first one is refused: nothing of it is stepped on."""
        data = [BAD, *[datum([1, 2])] * (LARGE - 1)]
        refused(self.client.forward_backward(data, "cross_entropy"), FAULT)
        refused(self.client.forward_backward([datum()], "cross_entropy"), "GRADIENT_WINDOW_CLOSED")
        refused(self.client.optim_step(types.AdamParams()), "GRADIENT_WINDOW_CLOSED")
        self.client.forward_backward([datum()], "cross_entropy").result(WAIT_S)
        assert self.client.optim_step(types.AdamParams()).result(WAIT_S).metrics["num_datums:sum"] == 1
        return "whole batch fails"


def refused(future, reason):
    """Wait for an operation that must fail for this reason."""
    message = "it succeeded"
    try:
        future.result(WAIT_S)
    except tinker.RequestFailedError as error:
        message = str(error)
    if reason not in message:
        raise AssertionError(f"it should fail with {reason!r}, but: {message}")


def read(url):
    """Return what a URL has."""
    with urllib.request.urlopen(url, timeout=WAIT_S) as response:
        return response.read()


def main(url, key, base_model, external, num_steps, *checks):
    """Run checks, by name."""
    print(json.dumps({"check": "version", "found": tinker.__version__}), flush=True)
    program = Program(url, key, base_model, external, int(num_steps))
    for name in checks:
        try:
            line = {"check": name, "found": getattr(program, name)()}
        except Exception as error:  # noqa: BLE001  # every error is a result
            line = {"check": name, "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
