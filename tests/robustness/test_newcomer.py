"""The package as a newcomer installs it: the quickstart from a wheel, the light client, and the version before."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from string import Template

import pytest

from tests.support.packages import ROOT, build, build_from_sdist, environment, variables
from tests.support.pages import blocks
from tests.support.served_pool import SHIPPED_MODEL, shipped_pool
from tests.support.waiting import wait_until

PAGE = "docs/quickstart.md"
COMMAND_S = 180.0
[EARLIER] = (ROOT / "tests" / "data" / "earlier").glob("*.whl")
Run = Callable[..., str]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel that is built from the sdist."""
    return build_from_sdist(tmp_path_factory.mktemp("built"))


def runner(commands: Path, folder: Path, **more: str) -> Run:
    """Return a function that runs a command of an environment in a folder, and returns what it prints."""

    def run(*command: str) -> str:
        done = subprocess.run(
            command,
            cwd=folder,
            env=variables(commands, folder, **more),
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


@pytest.mark.ray
@pytest.mark.xdist_group("scripts")
@pytest.mark.slow
@pytest.mark.timeout(300)  # a dozen commands, each a process, beside other tests
def test_a_newcomer_trains_on_their_own_text_and_takes_the_model_with_them(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    run = runner(environment(tmp_path / "venv", wheel, "pool"), home)
    where = run("python", "-c", "import coordinator, tinkerpool, workers; print(tinkerpool.__file__)")
    assert Path(where).is_relative_to(tmp_path / "venv"), "the wheel is not what is tried"
    for name in ("scripts", "pytest"):
        with pytest.raises(AssertionError, match=f"No module named '{name}'"):
            run("python", "-c", f"import {name}")
    outputs = []
    checkpoint = ""
    try:
        for language, code in blocks(PAGE):
            if language == "python":
                name = code.split("\n", 1)[0].removeprefix("# ")
                (home / name).write_text(code)
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


@pytest.mark.xdist_group("wheels")
def test_the_wheel_of_the_sdist_is_that_of_the_checkout(wheel: Path, tmp_path: Path) -> None:
    assert wheel.read_bytes() == build("wheel", ROOT, tmp_path).read_bytes()


PROGRAM = """
import importlib.util, json
import tinkerpool

with tinkerpool.ServiceClient() as service:
    client = service.create_lora_training_client(base_model="kjv-2m", rank=8)
    tokens = [459, 342, 343, 386, 505]
    datum = tinkerpool.Datum(tokens[:-1], {"target_tokens": tokens[1:]})
    waiting = []
    for _ in range(10):
        waiting.append(client.forward_backward([datum], "cross_entropy"))
        client.optim_step(tinkerpool.AdamParams(learning_rate=3e-3))
    losses = [each.result().metrics["loss:sum"] for each in waiting]
    path = client.save_state("last").result().path
    again = service.create_training_client_from_state_with_optimizer(path)
    sampler = again.save_weights_and_get_sampling_client()
    params = tinkerpool.SamplingParams(max_tokens=3, temperature=0.0)
    sampled = sampler.sample(tinkerpool.ModelInput.from_ints(tokens[:2]), 1, params).result()
    names = [each.checkpoint_id for each in service.create_rest_client().list_user_checkpoints().result().checkpoints]
    print(json.dumps({
        "client": tinkerpool.__version__,
        "pool": service.get_server_capabilities().version,
        "losses": losses,
        "sampled": sampled.sequences[0].tokens,
        "names": names,
        "heavy": [name for name in ("torch", "ray", "transformers", "typer") if importlib.util.find_spec(name)],
    }))
"""


@contextmanager
def earlier_pool(folder: Path) -> Iterator[tuple[str, str]]:
    """Serve the version before; yield its URL and key."""
    home = folder / "pool-home"
    home.mkdir()
    commands = environment(folder / "pool-venv", EARLIER, "pool")
    options = ["--pool", "local", "--model", f"kjv-2m={SHIPPED_MODEL}", "--port", "0", "--threads", "1", "--no-http"]
    command = [str(commands / "tinkerpool"), "serve", *options, "--ready-file", str(home / "ready")]
    with (folder / "pool.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=home, env=variables(commands, home), stdout=log, stderr=log)
    try:
        wait_until(lambda: (home / "ready").exists() or process.poll() is not None, COMMAND_S)
        assert process.poll() is None, (folder / "pool.log").read_text()
        credentials = json.loads((home / ".tinkerpool" / "credentials.json").read_text())
        yield credentials["url"], credentials["api_key"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(COMMAND_S)


@contextmanager
def present_pool(folder: Path) -> Iterator[tuple[str, str]]:
    """Serve this version; yield its URL and key."""
    with shipped_pool(folder / "pool") as pool:
        yield pool.url, pool.key()


@pytest.mark.slow
@pytest.mark.xdist_group("wheels")  # one process, for the wheel
@pytest.mark.parametrize(
    ("is_client_earlier", "is_pool_earlier"),
    [(False, False), (True, False), pytest.param(False, True, marks=pytest.mark.long)],
    ids=["this version", "client of the one before", "pool of the one before"],
)
def test_a_light_client_uses_pools_of_its_own_minor_version_and_of_the_next_and_last(
    is_client_earlier: bool, is_pool_earlier: bool, wheel: Path, tmp_path: Path
) -> None:
    commands = environment(tmp_path / "venv", EARLIER if is_client_earlier else wheel)
    serve = earlier_pool if is_pool_earlier else present_pool
    with serve(tmp_path) as (url, key):
        run = runner(commands, tmp_path, TINKERPOOL_BASE_URL=url, TINKERPOOL_API_KEY=key)
        found = json.loads(run("python", "-W", "error", "-c", PROGRAM))
    earlier, present = EARLIER.name.split("-")[1], version("tinkerpool")
    assert found["client"] == (earlier if is_client_earlier else present)
    assert found["pool"] == (earlier if is_pool_earlier else present)
    assert found["losses"][-1] < 0.2 * found["losses"][0]
    assert found["sampled"] == [343, 386, 505]
    assert found["names"] == ["weights/last"]
    assert found["heavy"] == [], "the light client was installed with more than it asks for"


def test_the_earlier_wheel_is_of_the_minor_version_before_this_one_and_of_its_commit(tmp_path: Path) -> None:
    earlier, present = EARLIER.name.split("-")[1].split("."), version("tinkerpool").split(".")
    assert (earlier[0], int(earlier[1]) + 1) == (present[0], int(present[1])), "see tests/data/earlier/README.md"
    [commit] = [
        line.split(" | ")[1].strip(" |")
        for line in (EARLIER.parent / "README.md").read_text(encoding="utf-8").splitlines()
        if EARLIER.name in line and line.startswith("|")
    ]
    folders = ("coordinator", "tinkerpool", "workers")
    archive = tmp_path / "source.zip"
    command = ["git", "archive", "--format=zip", f"--output={archive}", commit, *folders]
    if not shutil.which("git") or subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode != 0:
        pytest.skip("the history of this checkout does not reach back to the earlier version")
    with zipfile.ZipFile(archive) as source, zipfile.ZipFile(EARLIER) as built:
        wanted = {name for name in source.namelist() if not name.endswith("/") and "/models/" not in name}
        found = {name for name in built.namelist() if name.startswith(folders)}
        metadata = {name for name in found if ".dist-info/" in name}
        assert found - metadata == wanted
        assert [name for name in wanted if source.read(name) != built.read(name)] == []
