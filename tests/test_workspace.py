"""Laws of scratch memory: reused along one stream, never shared between streams, threads or graphs."""

from __future__ import annotations

import threading
from typing import Any

from cutegen.runtime.workspace import Workspaces


class Buffer:
    """As much of a tensor as a workspace needs."""

    def __init__(self, elements: int, zeroed: bool) -> None:
        self.elements = elements
        self.zeroed = zeroed

    def numel(self) -> int:
        return self.elements


class World:
    """A device whose stream and capture state the test sets."""

    def __init__(self) -> None:
        self.stream = 0
        self.capturing = False
        self.made: list[Any] = []
        self.workspaces = Workspaces(
            self._allocate, lambda device: self.stream, lambda device: self.capturing
        )

    def _allocate(self, device: int, elements: int, zeroed: bool) -> Any:
        self.made.append(Buffer(elements, zeroed))
        return self.made[-1]


def test_one_stream_reuses_and_grows() -> None:
    """A smaller wish gets the same buffer, a larger one a new buffer that then serves both."""
    world = World()
    first = world.workspaces.get(0, 100)
    assert world.workspaces.get(0, 60) is first
    grown = world.workspaces.get(0, 200)
    assert grown is not first and grown.numel() >= 200
    assert world.workspaces.get(0, 100) is grown
    assert len(world.made) == 2


def test_streams_devices_and_threads_do_not_share() -> None:
    """Launches that may overlap in time never see the same buffer."""
    world = World()
    found = [world.workspaces.get(0, 100), world.workspaces.get(1, 100)]
    world.stream = 7
    found.append(world.workspaces.get(0, 100))
    thread = threading.Thread(target=lambda: found.append(world.workspaces.get(0, 100)))
    thread.start()
    thread.join()
    assert len({id(buffer) for buffer in found}) == 4
    world.stream = 0
    assert world.workspaces.get(0, 100) is found[0]


def test_captured_kernels_own_their_buffers() -> None:
    """Each launch of a graph gets a buffer of the graph's, and eager calls never meet it."""
    world = World()
    eager = world.workspaces.get(0, 100)
    world.capturing = True
    captured = [world.workspaces.get(0, 100), world.workspaces.get(0, 100)]
    world.capturing = False
    assert len({id(buffer) for buffer in (eager, *captured)}) == 3
    assert world.workspaces.get(0, 100) is eager


def test_clear_gives_back() -> None:
    """After clear the next wish allocates again."""
    world = World()
    first = world.workspaces.get(0, 100)
    world.workspaces.clear()
    assert world.workspaces.get(0, 100) is not first


def test_zeroed_buffers_are_apart() -> None:
    """A kernel that relies on zeros never gets what another left behind, captured or not."""
    world = World()
    dirty, clean = world.workspaces.get(0, 100), world.workspaces.get(0, 100, True)
    assert clean is not dirty and clean.zeroed and not dirty.zeroed
    assert world.workspaces.get(0, 50, True) is clean
    world.capturing = True
    assert world.workspaces.get(0, 100, True).zeroed
