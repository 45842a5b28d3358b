"""The launch runtime on a real driver: right results, streams, graphs, threads and errors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from cutegen.build import Artifact, Builder
from cutegen.build.loader import load_kernel
from cutegen.build.render import Source
from cutegen.build.store import Store
from cutegen.errors import LaunchError
from cutegen.families.gemm.problem import Problem
from cutegen.space import Config

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.dsl,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a GPU of compute capability 9.0",
    ),
]
TEXT = (Path(__file__).parent.parent / "data" / "two_kernels.py").read_text()


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    wanted = Source(TEXT, "sm_90a", Problem(64, 64, 64).signature, Config({"tile_k": 64}))
    with Builder(Store(tmp_path_factory.mktemp("cache"))) as builder:
        [(_, result)] = builder.build([wanted])
    assert isinstance(result, Artifact), result
    return load_kernel(result.shared_object, result.symbol)


def operands(n: int = 100_003):  # type: ignore[no-untyped-def]
    x = torch.arange(n, dtype=torch.float32, device="cuda")
    return x, torch.full_like(x, float("nan"))


def test_two_launches_with_clusters_and_64_kb_of_shared_memory(kernel: Callable[..., None]) -> None:
    x, y = operands()
    kernel(x, y, 2.0)
    assert torch.equal(y, 2 * x + 1)


def test_launches_follow_torchs_current_stream(kernel: Callable[..., None]) -> None:
    x, y = operands()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)  # 0.3 s; only what comes later on this stream waits
        kernel(x, y, 2.0)
        finished = stream.query()
    stream.synchronize()
    assert not finished and torch.equal(y, 2 * x + 1)


def test_a_graph_captures_and_replays_both_launches(kernel: Callable[..., None]) -> None:
    x, y = operands()
    kernel(x, y, 2.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(x, y, 3.0)
    x += 5
    y.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, 3 * x + 1)


def test_a_thread_without_a_context_can_launch(kernel: Callable[..., None]) -> None:
    x, y = operands()
    torch.cuda.synchronize()
    thread = threading.Thread(target=kernel, args=(x, y, 2.0))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(y, 2 * x + 1)


def test_a_refused_launch_is_a_launch_error_and_the_next_one_works(kernel: Callable[..., None]) -> None:
    x, y = operands()
    with pytest.raises(LaunchError, match=r"grid 0x1x1.*CUDA_ERROR_INVALID_VALUE \(1\): invalid argument"):
        kernel(x[:0], y[:0], 2.0)
    kernel(x, y, 2.0)
    assert torch.equal(y, 2 * x + 1)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_device_is_made_ready_when_first_used(kernel: Callable[..., None]) -> None:
    for device in (1, 0, 1):
        x = torch.arange(1000, dtype=torch.float32, device=f"cuda:{device}")
        y = torch.empty_like(x)
        kernel(x, y, 2.0)
        torch.cuda.synchronize(device)
        assert torch.equal(y, 2 * x + 1)
        assert torch.cuda.current_device() == 0
