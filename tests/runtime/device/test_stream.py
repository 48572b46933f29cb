"""Points in the stream of a GPU, from what is asked of torch.cuda: no GPU is needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from penstock.runtime.device import stream


def test_a_point_is_of_its_own_gpu_whatever_gpu_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.5.0: with device="cuda:1" in one process events were recorded on GPU 0."""
    current = [torch.device("cuda:0")]
    asked: list[tuple[str, torch.device]] = []

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    class Event:
        def __init__(self, **options: Any) -> None:
            """It is of the GPU of the stream that records it."""

        def record(self, of: torch.device) -> None:
            asked.append(("record", of))

        def __getattr__(self, name: str) -> Any:
            asked.append((name, current[-1]))
            return lambda *_: 1.0

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    moment = stream.stream_of(torch.device("cuda:1")).now()
    assert not isinstance(moment, float)
    moment.query()
    moment.synchronize()
    assert {name for name, _ in asked} == {"record", "query", "synchronize"}
    assert {device for _, device in asked} == {torch.device("cuda:1")}


def test_points_of_a_step_are_of_the_stream_that_was_the_current_one_as_it_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is asked for once a step: to ask took longer than to record. A step may follow on another stream."""
    asked: list[str] = []
    recorded: list[str] = []
    current = ["first"]

    def ask(device: torch.device) -> str:
        asked.append(current[0])
        return current[0]

    class Event:
        def __init__(self, **options: Any) -> None:
            """It is of the GPU of the stream that records it."""

        def record(self, of: str) -> None:
            recorded.append(of)

    monkeypatch.setattr(torch.cuda, "current_stream", ask)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    gpu = stream.stream_of(torch.device("cuda:1"))
    for name in ("first", "second"):
        current[0] = name
        gpu.begin_step()
        gpu.now()
        gpu.now()
    assert asked == ["first", "second"]
    assert recorded == ["first", "first", "second", "second"]


def test_a_stream_stands_still_by_a_kernel_on_the_stream_that_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It counts cycles: too few for no GPU's clock, of which the fastest reach 2.9 GHz."""
    on: list[Any] = []
    slept: list[tuple[Any, int]] = []

    @contextmanager
    def stream_of_it(which: Any) -> Iterator[None]:
        on.append(which)
        yield
        on.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "stream", stream_of_it)
    monkeypatch.setattr(stream, "cuda_sleep", lambda cycles: slept.append((on[-1], cycles)))
    gpu = stream.stream_of(torch.device("cuda:1"))
    gpu.begin_step()
    gpu.hold(0.5)
    ((where, cycles),) = slept
    assert where == "stream of cuda:1"
    assert 0.5 * 2.9e9 < cycles < 0.5 * 4e9
