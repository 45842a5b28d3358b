"""Graphs replayed back to back, with events that a test makes come true."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="events are torch's")


def test_a_feed_keeps_three_batches_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """It queues as the device goes on, never waits meanwhile, and counts every replay in the end."""
    from cutegen.measure.cuda_graphs import _CudaFeed

    events: list[Any] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.over = self.waited = False
            events.append(self)

        def record(self) -> None:
            return None

        def query(self) -> bool:
            return self.over

        def synchronize(self) -> None:
            self.waited = True

        def elapsed_time(self, end: Event) -> float:
            return float(events.index(end) - events.index(self))  # a millisecond for each batch

    monkeypatch.setattr(torch.cuda, "Event", Event)
    replays: list[int] = []
    feed = _CudaFeed(SimpleNamespace(replay=lambda: replays.append(1)), 5)
    assert len(replays) == 15
    feed.top_up()
    assert len(replays) == 15, "three are waiting still"
    events[1].over = events[2].over = True
    feed.top_up()
    assert len(replays) == 25 and not any(event.waited for event in events)
    assert feed.finish() == 1000 / 5
    assert events[-1].waited
