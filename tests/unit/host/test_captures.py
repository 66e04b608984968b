"""Captures of graphs, with stand-ins for what only a GPU has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from workers.host.captures import capturing


class Gpus:
    """Stands in for `torch.cuda`: the present stream, a name, and whether the end of a capture fails."""

    def __init__(self) -> None:
        self.stream, self.gpu, self.fails = "usual", 0, False
        self.captured_on: list[str] = []

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    @contextmanager
    def graph(self, _: Any, stream: str, **__: Any) -> Iterator[None]:
        """As torch's: the end of a capture comes before the stream of before, and may raise."""
        before, self.stream = self.stream, stream
        yield
        self.captured_on.append(stream)
        if self.fails:
            raise RuntimeError("the capture has ended before")
        self.stream = before


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    gpus = Gpus()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: gpus.stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: gpus.gpu)
    monkeypatch.setattr(torch.cuda, "Stream", lambda gpu: f"captures of {gpu}")
    monkeypatch.setattr(torch.cuda, "stream", gpus.on)
    monkeypatch.setattr(torch.cuda, "graph", gpus.graph)
    monkeypatch.setattr("workers.host.captures._stream", torch.cuda.Stream)
    return gpus


def test_each_gpu_has_a_stream_for_all_its_captures(gpus: Gpus) -> None:
    for gpus.gpu in (0, 1, 0):
        with capturing(object(), None):  # type: ignore[arg-type]
            assert gpus.stream == f"captures of {gpus.gpu}"
    assert gpus.stream == "usual"


def test_a_capture_that_fails_leaves_the_stream_of_before_and_others_may_capture(gpus: Gpus) -> None:
    gpus.fails = True
    for _ in range(2):
        with pytest.raises(RuntimeError, match="has ended"), capturing(object(), None):  # type: ignore[arg-type]
            pass
        assert gpus.stream == "usual"
    assert gpus.captured_on == ["captures of 0"] * 2
