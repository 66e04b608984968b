"""Every option of a coordinator and its doors: default, unit and advice. Main invariant: checked on construction.

The options of the pool and of its engines are in `workers.contract.settings`. `tinkerpool serve` takes the defaults and
the help texts of its options from both modules.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlsplit

from coordinator.base.tenant_limits import TenantLimits
from workers.contract.capacity import SEQUENCE_SLOTS

VERSION = version("tinkerpool")
"""The version of the installed distribution."""
MESSAGE_BYTES_MAX = 16 << 20
DISK_FREE_BYTES_MIN = 256 << 20
DATUMS_MAX = 1024
"""Most datums that any request may have. The doors check it before they convert a datum."""
ELEMENTS_MAX = 256 * DATUMS_MAX
"""Most elements of a message: its fields, those of nested messages, and each byte of packed numbers.

An honest datum has up to 70: tokens and seven loss inputs, each with name, type and shape; and 20 more for each turn of
a conversation, if it names the samples that its tokens come from. The most take 100 ms of processor time, to count and
to decode. An empty datum takes two bytes: without this limit, 16 MiB of them would stop
the event loop for a quarter of a minute.
"""
POLLS_DIVISOR = 2
"""Calls that wait for a result hold at most one of this many HTTP connections: so short calls always find one."""
JSON_OBJECTS_MAX = 16 << 10
"""Most objects and lists of a JSON body. A pass of `DATUMS_MAX` datums with two loss inputs each has 11,300."""
JSON_STRINGS_MAX = 128 << 10
"""Most strings of a JSON body; they take up to 100 ms to parse."""
JSON_ITEMS_MAX = 1 << 20
"""Most items of a JSON body, which take as long: more tokens than any model takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of requests, the same for every tenant. Each refusal names the change that is needed."""

    datums_max: int = DATUMS_MAX
    """Most datums in one request, at most the default."""
    message_bytes_max: int = MESSAGE_BYTES_MAX
    """Largest request in bytes, as announced to clients."""
    metadata_bytes_max: int = 16 << 10
    """Most bytes of keys and values in one `user_metadata`."""
    pending_operations_max: int = 4096
    """Most unfinished operations of one adapter or sampler."""
    window_bytes_max: int = 1 << 30
    """Most bytes of requests between two optimizer steps of one adapter: they are kept until the step is durable."""
    num_samples_max: int = 1024
    """Most continuations in one sample request."""
    stop_strings_max: int = 16
    """Most stop strings of one sample, since each is searched for at every token. OpenAI's API allows 4; chat formats
    need one to three."""
    stop_characters_max: int = 1000
    """Most characters of one stop string."""
    stop_tokens_max: int = 1024
    """Most stop tokens of one sample."""
    topk_max: int = 100
    """Most top-k tokens, targets or draws at one position of a sample."""
    sample_logprobs_max: int = 1 << 20
    """Most log-probabilities in one sample's result, without those of its tokens; each takes 8 bytes."""
    wait_names_max: int = 10_000
    """Most operations in one wait."""

    def __post_init__(self) -> None:
        if not 1 <= self.datums_max <= DATUMS_MAX:
            raise ValueError(f"datums_max must be 1 to {DATUMS_MAX}, got {self.datums_max}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """Settings of one coordinator."""

    data_dir: Path
    """Folder of everything durable: database, checkpoints, snapshots. One coordinator at a time."""
    cycle_tokens_max: int | None = None
    """Token budget of one cycle on one worker; items and moves of adapters count as tokens that take as long. A larger
    budget raises throughput, and makes other tenants wait longer for the next cycle. A cycle takes at least one chunk.
    None: measured, up to where more tokens gain little."""
    cycle_s_max: float = 2.0
    """Longest wait, in seconds, of a request of one chunk that has just missed a cycle, when the token budget is
    measured: for the rest of that cycle, and for its own."""
    linger_s: float = 0.03
    """Longest wait, in seconds, for tenants of earlier cycles before the next cycle starts. 0: never wait."""
    session_timeout_s: float = 600.0
    """Seconds of service time without a heartbeat after which a session expires. That of the OpenAI door has
    `fetched_retention_s`, if that is longer."""
    gap_timeout_s: float = 300.0
    """Seconds of service time after which operations behind a missing sequence number fail, then it does."""
    sweep_interval_s: float = 5.0
    """Seconds between two checks of sessions, gaps and retention."""
    ping_interval_s: float = 2.0
    """Seconds between two pings of a worker. Lower: the loss of a silent worker is noticed sooner. Higher: fewer calls,
    for hundreds of workers."""
    ping_timeout_s: float = 5.0
    """Seconds without a reply to a ping after which a worker is lost. Lower: its adapters go on elsewhere sooner.
    Higher: for slow networks and hosts that stall, where a loss would cost more than the wait."""
    replay_s_max: float = 30.0
    """Engine seconds that the loss of a worker may cost: snapshots keep the replay shorter than this, and to a quarter
    of it while they take less than a tenth of the time. Lower: a shorter replay, more writing for many adapters."""
    class_wait_s: float = 600.0
    """Most seconds that adapters wait for a worker with the numerics of before, if only others are there. Then they go
    on with those: results may differ in the last bits; the log says so, and the next result of each."""
    probation_s: float = 3600.0
    """Seconds of service without a kill after which the kills of a tenant count half: a tenant whose operation killed a
    worker runs solo for this long, with back-off. 0: never; it then runs with others again at once."""
    stop_s_max: float = 10.0
    """Seconds that a stop waits for operations that have run in part; the next start runs the rest again."""
    samples_per_worker_max: int = SEQUENCE_SLOTS
    """Most sequences on one worker's sampler at a time; one request counts as at most a quarter of this, and one tenant
    takes at most seven eighths."""
    result_retention_s: float = 7 * 86400.0
    """Seconds of service time for which a finished operation can be fetched."""
    fetched_retention_s: float = 3600.0
    """Seconds of service time for which a fetched operation can be fetched again."""
    record_retention_s: float = 86400.0
    """Seconds of service time, since its sample or its last use, for which a recorded sequence can be trained on with
    the loss stable_reinforce; the end of its session ends it sooner."""
    history_rows: int = 20_000
    """Entries of a tenant's history that are kept: what its operations waited for, and their metrics. 0: none are
    written."""
    history_days: float = 30.0
    """Days of service time for which an entry of the history is kept at most."""
    otlp_endpoint: str | None = None
    """URL of an OpenTelemetry collector, to which the pool sends a trace of each operation by OTLP over HTTP, as
    protobuf: http://localhost:4318; spans go to /v1/traces below it. Needs tinkerpool[otel]. None: no traces."""
    ended_retention_s: float = 86400.0
    """Seconds of service time for which the rows of an ended session or a deleted adapter are kept at least: a late
    call is told that it has ended, and not that it is unknown. A day, so that a notebook that is opened the next
    morning learns what happened."""
    disk_free_bytes_min: int = DISK_FREE_BYTES_MIN
    """New work is refused while the disk of the data directory has fewer bytes free: what was accepted can still be
    finished, and a full disk would end it. 0: only a full disk refuses it."""
    limits: Limits = field(default_factory=Limits)
    """Limits of requests."""
    tenant_limits: TenantLimits = field(default_factory=TenantLimits)
    """The limits of every tenant for which an administrator set no others. Their weight is 1: it is relative."""

    def __post_init__(self) -> None:
        if self.cycle_tokens_max is not None and self.cycle_tokens_max < 1:
            raise ValueError(f"cycle_tokens_max must be at least 1, got {self.cycle_tokens_max}")
        waits = ("linger_s", "session_timeout_s", "gap_timeout_s", "class_wait_s", "probation_s", "stop_s_max")
        retentions = ("result_retention_s", "fetched_retention_s", "record_retention_s", "ended_retention_s")
        for name in ("replay_s_max", *waits, *retentions):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be a number of seconds, 0 or more, got {getattr(self, name)}")
        for name in ("history_rows", "history_days"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if self.otlp_endpoint is not None and not _is_base_url(self.otlp_endpoint):
            raise ValueError(
                "the OTLP endpoint must be http:// or https:// with a host, and may have a port and a path: "
                f"http://localhost:4318, got {self.otlp_endpoint!r}"
            )
        if self.disk_free_bytes_min < 0:
            raise ValueError(f"disk_free_bytes_min must be 0 or more, got {self.disk_free_bytes_min}")
        _check_positive(self, "cycle_s_max", "ping_interval_s", "ping_timeout_s", "sweep_interval_s")
        if self.tenant_limits.weight != 1.0:
            raise ValueError("a weight is a share beside other tenants: set it for one tenant, not for all")


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorConfig:
    """Settings that both doors have."""

    host: str = "127.0.0.1"
    """Address to listen on. Addresses that other machines can reach need TLS, or plaintext allowed explicitly."""
    tls_cert: Path | None = None
    """Certificate chain (PEM); clients then use https://. Read again when the file changes. None: no TLS."""
    tls_key: Path | None = None
    """Private key of the certificate (PEM)."""
    tls_client_ca: Path | None = None
    """Accept only clients with a certificate signed by these authorities (PEM). None: clients need none."""
    allow_plaintext: bool = False
    """Serve other machines without TLS. API keys and data can be read on the way."""
    message_bytes_max: int = MESSAGE_BYTES_MAX
    """Largest request in bytes."""

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("TLS needs both a certificate and its key")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("client certificates are checked over TLS only: give a certificate and its key, too")
        _check_positive(self, "message_bytes_max")

    @property
    def is_tls(self) -> bool:
        """Whether clients connect over TLS."""
        return self.tls_cert is not None

    @property
    def local_host(self) -> str:
        """The host that clients on this machine connect to."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104  # compared, not bound

    def url(self, port: int) -> str:
        """Return the address for clients on this machine of a door that listens on `port`."""
        host = f"[{self.local_host}]" if ":" in self.local_host else self.local_host
        return f"{'https' if self.is_tls else 'http'}://{host}:{port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcConfig(DoorConfig):
    """Settings of the gRPC door."""

    port: int = 7600
    """Port for gRPC. 0: any free port."""
    connections_max: int = 1024
    """Most connections at once; fewer where the process may not open four times as many files. One more is closed at
    once, and its client tries again; open ones are not affected."""
    receive_bytes_max: int = 96 << 20
    """Most bytes of requests that are being received, or are held by calls until they are accepted; one tenant may hold
    a quarter. A request of unknown length counts as `message_bytes_max` while it arrives: at least six times that."""
    receive_s: float = 60.0
    """Seconds that a request may wait to be received, and that it may take to arrive."""
    streams_max: int = 256
    """Most calls at a time on one connection; more wait at the client. Calls that are reset at once count until they
    have begun, so this also bounds how long others wait behind a flood of them."""
    keepalive_s: float = 60.0
    """Seconds of silence after which a client is pinged; without a reply in 20 s its connection is closed."""
    idle_s_max: float = 600.0
    """Seconds after which a connection without calls is closed; clients open another by themselves."""
    connection_age_s_max: float = 3600.0
    """Seconds after which a connection takes no new calls."""
    connection_grace_s: float = 600.0
    """Seconds that the calls on such a connection may still take."""

    def __post_init__(self) -> None:
        DoorConfig.__post_init__(self)
        if not 0 <= self.port <= 65535:
            raise ValueError(f"the port must be 0 (any free one) to 65535, got {self.port}")
        if self.receive_bytes_max < 6 * self.message_bytes_max:
            raise ValueError(
                f"receive_bytes_max must be at least 6 times message_bytes_max ({6 * self.message_bytes_max}), got "
                f"{self.receive_bytes_max}"
            )
        _check_positive(
            self,
            "receive_s",
            "connections_max",
            "streams_max",
            "keepalive_s",
            "idle_s_max",
            "connection_age_s_max",
            "connection_grace_s",
        )
        if not (self.is_tls or self.allow_plaintext or is_loopback(self.host)):
            raise ValueError(
                f"{self.host} can be reached from other machines, and without TLS the API keys could be read on the "
                "way: give --tls-cert and --tls-key, leave --host out, or accept that with --allow-plaintext"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig(DoorConfig):
    """Settings of the HTTP door."""

    port: int = 7601
    """Port for the Tinker SDK and OpenAI's clients. 0: any free port."""
    public_url: str | None = None
    """URL of the HTTP door for clients behind a relay: https://pool.example. Download URLs begin with it, whatever
    `Host` a request names. None: they begin with the scheme of the door and the request's `Host`."""
    is_remote: bool = False
    """Whether clients may be on other machines. Needs TLS, or plaintext allowed explicitly."""
    connections_max: int = 4096
    """Most connections at once; fewer where the process may not open twice as many files. Above it, connections without
    a running call are closed, those that never sent a valid key first."""
    handshake_s: float = 10.0
    """Seconds that a TLS handshake may take."""
    idle_s: float = 75.0
    """Seconds for which a connection without a call is kept. The SDK keeps one for 5 s."""
    head_s: float = 10.0
    """Seconds that the first line and the headers of a request may take to arrive."""
    receive_bytes_max: int = 64 << 20
    """Most bytes of bodies that are being received, or are held by calls until they are accepted: half for bodies as
    they are sent, half for decompressed ones. At least four times `message_bytes_max`."""
    body_s: float = 60.0
    """Seconds that the body of a request may take to arrive."""
    poll_s: float = 30.0
    """Seconds for which a call for a result is held. The SDK ends such a call after 45 s."""

    def __post_init__(self) -> None:
        DoorConfig.__post_init__(self)
        if not 0 <= self.port <= 65535:
            raise ValueError(f"the HTTP port must be 0 (any free one) to 65535, got {self.port}")
        if self.public_url is not None and not _is_base_url(self.public_url):
            raise ValueError(
                "the public URL must be http:// or https:// with a host, and may have a port and a path: "
                f"https://pool.example, got {self.public_url!r}"
            )
        if self.receive_bytes_max < 4 * self.message_bytes_max:
            raise ValueError(
                f"receive_bytes_max must be at least 4 times message_bytes_max ({4 * self.message_bytes_max}), got "
                f"{self.receive_bytes_max}"
            )
        if self.is_remote and not (self.is_tls or self.allow_plaintext):
            raise ValueError(
                f"{self.host} can be reached from other machines: give --tls-cert and --tls-key, leave --host out, or "
                "accept that with --allow-plaintext"
            )
        _check_positive(self, "connections_max", "handshake_s", "idle_s", "head_s", "body_s", "poll_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """Settings of `/metrics`."""

    host: str = "127.0.0.1"
    """Address on which metrics are served, to anybody and without a key: numbers only, and names of tenants if they are
    asked for."""
    port: int = 7602
    """Port for Prometheus. 0: any free port."""
    num_tenants: int = 0
    """Tenants that metrics show by name, those with the most tokens; the rest are one. 0: none are named."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"the port of metrics must be 0 (any free one) to 65535, got {self.port}")
        if self.num_tenants < 0:
            raise ValueError(f"the number of tenants in metrics must be 0 or more, got {self.num_tenants}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of one process that serves a pool."""

    coordinator: CoordinatorConfig
    """Settings of the coordinator."""
    grpc: GrpcConfig
    """Settings of the gRPC door."""
    http: HttpConfig | None = None
    """Settings of the HTTP door. None: there is no such door."""
    metrics: MetricsConfig | None = None
    """Settings of `/metrics`. None: metrics are not served."""
    is_key_shown: bool = False
    """Print the API key for the Tinker SDK, and not only where it is stored: for a terminal, not for a log."""
    ready_file: Path | None = None
    """File to write when the pool is ready, as JSON, and to remove when it stops. The data directory has one anyway."""
    is_new_key_wanted: bool = False
    """Create another administrator's key and write it to credentials.json."""

    def __post_init__(self) -> None:
        announced = self.coordinator.limits.message_bytes_max
        for door in (self.grpc, self.http):
            if door is not None and door.message_bytes_max != announced:
                raise ValueError(
                    f"the coordinator announces {announced} bytes as the largest message, the door takes "
                    f"{door.message_bytes_max}"
                )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address. Names are not resolved: only `localhost` is loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_base_url(text: str) -> bool:
    """Return whether paths can be appended to the text to make URLs."""
    try:
        url = urlsplit(text)
        is_port = url.port != 0  # raises ValueError for one above 65535, and for what is no number
    except ValueError:
        return False
    is_plain = not (url.query or url.fragment or url.username is not None) and text.isprintable() and " " not in text
    return url.scheme in ("http", "https") and bool(url.hostname) and is_port and is_plain


def _check_positive(config: object, *names: str) -> None:
    for name in names:
        if not getattr(config, name) > 0:
            raise ValueError(f"{name} must be above 0, got {getattr(config, name)}")
