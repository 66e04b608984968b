"""`serve`, `up`, `down` and `logs`: the commands that run a pool. Joins `tinkerpool.cli` through an entry point.

Imports the pool only when a command needs it, so that `tinkerpool --help` stays quick and works without its libraries.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
import typer.core
from rich.console import Console

from coordinator import background
from coordinator.background import BackgroundError, Serving
from tinkerpool.cli.app import RUN_PANEL
from tinkerpool.cli.errors import CliError
from tinkerpool.credentials import credentials_file, home, kept_credentials

if TYPE_CHECKING:
    from coordinator.base.config import ServerConfig
    from workers.contract.settings import PoolConfig

_log = logging.getLogger(__name__)
_LIBRARIES = (
    "grpc_health",
    "grpc_reflection",
    "pydantic",
    "ray",
    "safetensors",
    "starlette",
    "tokenizers",
    "torch",
    "transformers",
    "uvicorn",
    "zstandard",
)
_ARGUMENTS = "tinkerpool.arguments"
RAY_FILE = "ray.json"
"""In the data directory: what a private Ray has on this machine, as long as it has."""

EXAMPLE = """\
import tinkerpool
client = tinkerpool.ServiceClient().create_lora_training_client("{model}", rank=8)
tokens = client.get_tokenizer().encode("The LORD is my shepherd; I shall not want.")
datum = tinkerpool.Datum(tokens[:-1], {{"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}})
adam = tinkerpool.AdamParams(learning_rate=1e-2)
steps = [client.train_step([datum], "cross_entropy", adam) for _ in range(10)]
print([round(step.result().forward_backward.metrics["loss:sum"], 3) for step in steps])
sampler = client.save_weights_and_get_sampling_client()
prompt, params = tinkerpool.ModelInput.from_ints(tokens[:3]), tinkerpool.SamplingParams(max_tokens=12, temperature=0.0)
print(client.get_tokenizer().decode(sampler.sample(prompt, 1, params).result().sequences[0].tokens))
"""
"""A first program, to paste into Python."""


class _KeepsArguments(typer.core.TyperCommand):
    """Remembers what was typed, so that `up` can hand it to `serve` as it is."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[_ARGUMENTS] = list(args)
        return super().parse_args(ctx, args)


DataDirOption = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Everything durable. Default: pool in ~/.tinkerpool (or in TINKERPOOL_HOME)."),
]
_SERVE_HELP = (
    "Run a pool in this terminal, until Ctrl-C or SIGTERM.\n\n"
    "The first start on a data directory makes an administrator's key and leaves it, with the address, in "
    "~/.tinkerpool/credentials.json, where programs on this machine find it. The line 'tinkerpool is ready at URL' "
    "says that it serves; --ready-file says so to scripts."
)
_UP_HELP = (
    "Start a pool in the background, and wait until it is ready.\n\n"
    "Takes the options of 'tinkerpool serve'. Its log is serve.log in the data directory: see 'tinkerpool logs'."
)


def register(app: typer.Typer) -> None:
    """Add the commands to the `tinkerpool` command."""
    for name, text in (("up", _UP_HELP), ("serve", _SERVE_HELP)):
        app.command(name, help=text, cls=_KeepsArguments, rich_help_panel=RUN_PANEL)(_serve_or_up)
    app.command("down", rich_help_panel=RUN_PANEL)(down)
    app.command("logs", rich_help_panel=RUN_PANEL)(logs)


def _serve_or_up(
    ctx: typer.Context,
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="[NAME=]PATH_OR_NAME",
            help="Base model: a Hugging Face directory, organisation/model from the local hub cache, or a name that "
            "comes with tinkerpool. Several times for several. Default: the small model that comes with tinkerpool.",
        ),
    ] = None,
    data_dir: DataDirOption = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port for gRPC; 0 takes any free one.")] = 7600,
    http_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Port for the Tinker SDK, over HTTP. Default: the one after --port.",
            show_default=False,
        ),
    ] = None,
    is_http: Annotated[bool, typer.Option("--http/--no-http", help="Whether the Tinker SDK is served.")] = True,
    host: Annotated[str, typer.Option(help="Address to listen on; anything but loopback needs TLS.")] = "127.0.0.1",
    pool: Annotated[
        Literal["ray", "local"], typer.Option(help="Workers as Ray actors, or as threads of this process.")
    ] = "ray",
    num_workers: Annotated[int, typer.Option("--workers", min=1, help="Workers of each base model.")] = 1,
    num_slots: Annotated[
        int,
        typer.Option("--slots", min=0, help="Adapters in each worker's bank at once; 0: 64 on a CPU, 16 on a GPU."),
    ] = 0,
    num_threads: Annotated[
        int, typer.Option("--threads", min=0, help="Threads of each worker; 0: the cores, shared out.")
    ] = 0,
    num_cpus: Annotated[float, typer.Option("--cpus", min=0, help="CPUs that each worker claims from Ray.")] = 1.0,
    num_gpus: Annotated[float, typer.Option("--gpus", min=0, help="GPUs that each worker claims from Ray.")] = 0.0,
    device: Annotated[
        str, typer.Option(help="Torch device of each worker. Default: cuda with --gpus, else cpu.", show_default=False)
    ] = "",
    recompute: Annotated[
        Literal["off", "on", "auto"],
        typer.Option(help="Run layers again in the backward, slower in less memory; auto: where a pass is too long."),
    ] = "auto",
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"],
        typer.Option(help="Of base models' weights; adapters are float32. auto: bfloat16 on cuda, else float32."),
    ] = "auto",
    exact: Annotated[
        bool, typer.Option("--exact", help="No tenant's bits depend on others, also on cuda and in bfloat16; slower.")
    ] = False,
    ray_address: Annotated[
        str | None, typer.Option(help="A Ray cluster to join. Default: a private one on this machine.")
    ] = None,
    cycle_tokens: Annotated[
        str,
        typer.Option(
            metavar="NUMBER|auto",
            help="Token budget of one cycle on one worker: more is faster, and later for others. auto: found by "
            "measuring, where more would hardly be faster.",
        ),
    ] = "auto",
    cycle_seconds: Annotated[
        float,
        typer.Option(min=0.01, help="With --cycle-tokens auto: seconds that a cycle's pass may take, and others wait."),
    ] = 2.0,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain (PEM); clients then use https://.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key (PEM).")] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="Accept only clients with a certificate signed by these (PEM).")
    ] = None,
    allow_plaintext: Annotated[
        bool, typer.Option("--allow-plaintext", help="Listen beyond loopback without TLS. Keys can be read on the way.")
    ] = False,
    new_key: Annotated[
        bool, typer.Option("--new-key", help="Make another administrator's key and put it in credentials.json.")
    ] = False,
    ready_file: Annotated[
        Path | None, typer.Option(help="Written as JSON when the pool is ready, removed when it stops.")
    ] = None,
    engine: Annotated[str | None, typer.Option(hidden=True, help="module:attribute of another engine.")] = None,
    log_level: Annotated[Literal["debug", "info", "warning", "error"], typer.Option(help="What to log.")] = "info",
) -> None:
    _check_libraries()
    from coordinator.base.config import CoordinatorConfig, GrpcConfig, HttpConfig, ServerConfig, is_loopback
    from coordinator.base_models import DEFAULT_MODEL, resolve_model
    from workers.contract.settings import ENGINE, PoolConfig

    data_dir = _data_dir(data_dir)
    try:
        coordinator_config = CoordinatorConfig(
            data_dir=data_dir, cycle_tokens_max=_cycle_tokens(cycle_tokens), cycle_s_max=cycle_seconds
        )
        config = ServerConfig(
            coordinator=coordinator_config,
            grpc=GrpcConfig(
                host=host,
                port=port,
                tls_cert=tls_cert,
                tls_key=tls_key,
                tls_client_ca=tls_client_ca,
                allow_plaintext=allow_plaintext,
                message_bytes_max=coordinator_config.limits.message_bytes_max,
            ),
            http=HttpConfig(
                host=host,
                port=_http_port(port) if http_port is None else http_port,
                tls_cert=tls_cert,
                tls_key=tls_key,
                tls_client_ca=tls_client_ca,
                is_remote=not is_loopback(host),
                allow_plaintext=allow_plaintext,
                message_bytes_max=coordinator_config.limits.message_bytes_max,
            )
            if is_http
            else None,
            ready_file=ready_file,
            is_key_shown=sys.stdout.isatty(),
            is_new_key_wanted=new_key,
        )
        pool_config = PoolConfig(
            models=tuple(resolve_model(text, num_workers) for text in models or [DEFAULT_MODEL]),
            kind=pool,
            num_slots=num_slots,
            num_threads=num_threads,
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            device=device or ("cuda" if num_gpus else "cpu"),
            recompute=recompute,
            dtype=dtype,
            exact=exact,
            ray_address=ray_address,
            owner_file=data_dir / RAY_FILE,
            engine=engine or ENGINE,
        )
    except ValueError as error:
        raise CliError(str(error)) from None
    if ctx.info_name == "up":
        _up(data_dir, ctx.meta[_ARGUMENTS], pool_config.start_timeout_s)
    else:
        _serve(config, pool_config, log_level.upper())


def _http_port(grpc_port: int) -> int:
    """The port after the other door's, any free one if that takes any."""
    return grpc_port + 1 if 0 < grpc_port < 65535 else 0


def _serve(config: ServerConfig, pool_config: PoolConfig, log_level: str) -> None:
    from coordinator.server import Server, StartError
    from workers.pool.factory import make_pool

    logging.basicConfig(level=log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    names = ", ".join(model.name for model in pool_config.models)
    workers = f"{pool_config.num_workers} worker{'s' if pool_config.num_workers > 1 else ''}"
    _say(f"Starting a pool: {names}; {workers} ({pool_config.kind}); data in {config.coordinator.data_dir}")
    try:
        asyncio.run(Server(config, make_pool(pool_config), _say).run())
    except StartError as error:
        _log.debug("the pool did not start", exc_info=error)
        raise CliError(str(error)) from None
    except Exception as error:  # noqa: BLE001  # whatever it is, it ends here: in the log, and as a sentence
        _log.error("the pool ended", exc_info=error)
        raise CliError(f"the pool ended; what it acknowledged is kept: {type(error).__name__}: {error}") from None


def _up(data_dir: Path, arguments: list[str], start_timeout_s: float) -> None:
    console = Console(stderr=True, highlight=False)
    with console.status("Starting a pool ...") as spinner:

        def on_wait(line: str) -> None:
            spinner.update(f"Starting a pool ... [dim]{line[:90]}[/dim]")

        try:
            serving = background.start(data_dir, arguments, on_wait, start_timeout_s + 60)
        except BackgroundError as error:
            raise CliError(str(error)) from None
    _say_ready(serving, data_dir)


def _say_ready(serving: Serving, data_dir: Path) -> None:
    _say(
        f"tinkerpool is ready at {serving.url} (process {serving.pid}), serving {', '.join(serving.models)}.\n"
        f"{_for_the_sdk(serving)}"
        f"Its log: tinkerpool logs -f. Stop it: tinkerpool down{_other_data_dir(data_dir)}\n\n"
        f"Try it in Python:\n"
    )
    _say("\n".join(f"    {line}" for line in EXAMPLE.format(model=serving.models[0]).splitlines()))


def _for_the_sdk(serving: Serving) -> str:
    """What users of the Tinker SDK and of OpenAI's clients set, if they are served."""
    if not serving.http_url:
        return ""
    keys = [found.api_key for found in kept_credentials() if found.url == serving.url]
    key = keys[0] if keys and sys.stdout.isatty() else f"<the key in {credentials_file()}>"
    return (
        f"For the Tinker SDK: export TINKER_BASE_URL={serving.http_url} TINKER_API_KEY=tml-{key}\n"
        f"For OpenAI's clients: export OPENAI_BASE_URL={serving.http_url}/v1 OPENAI_API_KEY=tml-{key}\n"
    )


def down(
    data_dir: DataDirOption = None,
    timeout: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="How long to wait for it.")] = 120.0,
) -> None:
    """Stop the pool on this machine: it finishes its cycle and keeps everything for the next start."""
    console = Console(stderr=True, highlight=False)
    with console.status("Stopping the pool ..."):
        try:
            pid = background.stop(_data_dir(data_dir), timeout)
        except BackgroundError as error:
            raise CliError(str(error)) from None
    _say(f"Stopped (process {pid}).")


def logs(
    data_dir: DataDirOption = None,
    num_lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the last lines.")] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines, until Ctrl-C.")] = False,
) -> None:
    """Show the log of the pool that `tinkerpool up` started."""
    try:
        for line in background.tail(_data_dir(data_dir), num_lines, follow=follow):
            print(line, end="", flush=follow)
    except BackgroundError as error:
        raise CliError(str(error)) from None
    except KeyboardInterrupt:
        pass


def _data_dir(given: Path | None) -> Path:
    return (given or home() / "pool").expanduser().absolute()


def _other_data_dir(data_dir: Path) -> str:
    return "" if data_dir == _data_dir(None) else f" --data-dir {shlex.quote(str(data_dir))}"


def _cycle_tokens(text: str) -> int | None:
    """The operator's budget; None: found by measuring. Raises ValueError."""
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"--cycle-tokens takes a whole number from 1 up, or auto; got {text!r}")
    return int(text)


def _check_libraries() -> None:
    missing = [name for name in _LIBRARIES if find_spec(name) is None]
    if missing:
        raise CliError(
            f"running a pool needs more than the client ({', '.join(missing)} not found); install it with: "
            "pip install 'tinkerpool[pool]'"
        )


def _say(text: str) -> None:
    print(text, flush=True)
