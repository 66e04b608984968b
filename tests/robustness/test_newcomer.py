"""The quickstart as a newcomer follows it: from a clean wheel to a model of their own text that transformers loads."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path
from string import Template

import pytest

from tests.support.pages import ROOT, blocks

PAGE = "docs/quickstart.md"
COMMAND_S = 180.0
Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a function that runs a command in a new folder, with the wheel as the only tinkerpool.

    The wheel's requirements are those of this test's environment, which has no other copy of them to install.
    """
    building = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(building, cwd=ROOT, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    environment = tmp_path / "venv"
    venv.create(environment, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    into = ["--python", str(environment / "bin" / "python")]
    subprocess.run([sys.executable, "-m", "pip", *into, "install", "-qq", "--no-index", "--no-deps", wheel], check=True)
    # A line of a .pth file is a folder to search last. That folder's own .pth files, among them the one of an editable
    # install, are not read.
    (packages / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")
    folder = tmp_path / "home"
    folder.mkdir()
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("TINKERPOOL_", "PYTHON"))}
    variables |= {"PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}", "HOME": str(folder)}

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=folder, env=variables, capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
        assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


@pytest.mark.ray
@pytest.mark.slow
def test_a_newcomer_trains_on_their_own_text_and_takes_the_model_with_them(run: Run, tmp_path: Path) -> None:
    where = run("python", "-c", "import coordinator, tinkerpool, workers; print(tinkerpool.__file__)")
    assert Path(where).is_relative_to(tmp_path / "venv"), "the wheel is not what is tried"
    with pytest.raises(AssertionError, match="No module named 'scripts'"):
        run("python", "-c", "import scripts")
    outputs = []
    checkpoint = ""
    try:
        for language, code in blocks(PAGE):
            if language == "python":
                name = code.split("\n", 1)[0].removeprefix("# ")
                (tmp_path / "home" / name).write_text(code)
                continue
            assert language == "bash"
            for line in code.splitlines():
                command = shlex.split(Template(line).substitute(CHECKPOINT=checkpoint))
                if command == ["tinkerpool", "up"]:
                    command += ["--port", "0"]  # another test may have the port of the page
                outputs.append(run(*command))
                if command == ["python", "first.py"]:
                    checkpoint = outputs[-1].splitlines()[-1]
    except BaseException:
        run("tinkerpool", "down")
        raise
    _, first, _, used, _ = outputs
    [*losses, sample, checkpoint] = first.splitlines()
    assert losses[-1] == "step 40: loss 0.0000 per token"
    assert sample == used.strip() == "In spring the ferry waits for the fishermen."
    assert checkpoint.startswith("tinker://")
