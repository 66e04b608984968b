"""What an operator can set, checked on construction. Knows nothing of the parts that read it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What is refused, each with a message that says what to change."""

    datums_max: int = 1024
    """Sequences in one request."""
    message_bytes_max: int = 64 << 20
    """Bytes of one request."""
    metadata_bytes_max: int = 16 << 10
    """Bytes of keys and values of one `user_metadata`."""
    pending_operations_max: int = 4096
    """Unfinished operations of one adapter or sampler."""
    pending_bytes_max: int = 512 << 20
    """Bytes of unfinished requests of one tenant."""
    window_bytes_max: int = 1 << 30
    """Bytes of requests between two optimizer steps of one adapter: they are kept until the step is durable."""
    adapters_max: int = 1000
    """Adapters of one tenant."""
    num_samples_max: int = 1024
    """Continuations in one sample request."""
    topk_max: int = 100
    """Likeliest tokens, targets or draws wanted at one position of a sample."""
    sample_logprobs_max: int = 4 << 20
    """Log-probabilities that one sample request may ask for beside those of its tokens: 8 bytes each in its answer."""
    wait_names_max: int = 10_000
    """Operations in one wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """Settings of one coordinator."""

    data_dir: Path
    """Everything durable is below it. One coordinator at a time."""
    cycle_tokens_max: int | None = None
    """Token budget of one cycle on one worker; counts whole chunks, and a cycle always takes at least one. None: found
    from measured cycles."""
    cycle_s_max: float = 2.0
    """Seconds that the pass of a cycle may take by a measured budget: who has just missed one waits for no longer."""
    linger_s: float = 0.03
    """Longest wait for tenants of earlier cycles before the next one starts, however dear a cycle is; 0 never waits."""
    session_timeout_s: float = 600.0
    """Service time without a heartbeat after which a session expires."""
    gap_timeout_s: float = 300.0
    """Service time after which operations behind a seq that never came are failed."""
    sweep_interval_s: float = 5.0
    """How often sessions and gaps are looked at."""
    replay_s_max: float = 10.0
    """Engine seconds that a worker's loss may cost: snapshots are taken so that running again takes no longer."""
    stop_s_max: float = 10.0
    """How long a stop waits for operations that have been run in part; after that the next start runs them again."""
    samples_per_worker_max: int = 128
    """Sequences handed to one worker's sampler at a time, a request's counted up to a quarter of this; the rest wait
    their tenant's turn here."""
    result_retention_s: float = 7 * 86400.0
    """Service time for which a finished operation can be fetched."""
    fetched_retention_s: float = 3600.0
    """Service time for which it can be fetched again."""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.cycle_tokens_max is not None and self.cycle_tokens_max < 1:
            raise ValueError(f"cycle_tokens_max must be at least 1, got {self.cycle_tokens_max}")
        durations = ("linger_s", "session_timeout_s", "gap_timeout_s", "replay_s_max", "stop_s_max")
        for name in (*durations, "result_retention_s", "fetched_retention_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be a number of seconds, 0 or more, got {getattr(self, name)}")
        for name in ("cycle_s_max", "sweep_interval_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be a number of seconds above 0, got {getattr(self, name)}")
