"""``cutegen.record`` and ``cutegen.autotune`` on compiled kernels: a small model, then exact answers only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hopper import NEEDS_HOPPER

torch = pytest.importorskip("torch")

import cutegen  # noqa: E402
from cutegen.build.store import Store  # noqa: E402
from cutegen.records.recorded_calls import read_recordings  # noqa: E402
from cutegen.runtime.dispatch import Dispatcher  # noqa: E402
from cutegen.runtime.kernel_cache import Kernels  # noqa: E402
from cutegen.torch_ops.inductor import compile_with_cutegen  # noqa: E402

pytestmark = [*NEEDS_HOPPER, pytest.mark.dsl, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _dispatcher(tmp_path: Path) -> Iterator[None]:
    from cutegen.torch_ops import gemm as ops

    cutegen.gemm  # noqa: B018  prepares the operators
    before = ops.default_dispatcher()
    cutegen.use(Dispatcher(kernels=Kernels(Store(tmp_path / "cache"), build="allow")))
    cutegen.reset_counters()
    yield
    cutegen.use(before)
    torch._dynamo.reset()


def network() -> Any:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 512))
    return layers.to("cuda", BF16)


@pytest.mark.alone
def test_after_autotune_every_product_is_answered_exactly(tmp_path: Path) -> None:
    """Forward and backward; a second call tunes nothing; results are those of torch within bf16."""
    model, x = network(), torch.randn(256, 512, device="cuda", dtype=BF16)
    want = model(x).float()
    found = cutegen.autotune(model, x, training=True)
    assert not found.failed and found.tuned
    assert all(gain.tuned_us and gain.default_us and gain.baseline_us for gain in found.gains)
    cutegen.optimize(model)
    path = tmp_path / "model.jsonl"
    with cutegen.record(path) as recording:
        result = model(x)
        result.float().square().mean().backward()
    assert cutegen.counters()["fallbacks"] == {}
    assert {call.how for call in recording.calls} == {"exact"}
    assert {call.phase for call in recording.calls} == {"forward", "backward"}
    assert set(recording.problems) == {gain.problem for gain in found.gains}
    torch.testing.assert_close(result.float(), want, rtol=2e-2, atol=2e-2)
    assert read_recordings([path], torch.cuda.get_device_name()).problems == recording.problems
    assert not cutegen.autotune(model, x, training=True).tuned


def test_compiled_and_captured_calls_are_counted() -> None:
    """Compiled with the backend, calls count; a captured graph counts once, not when it is replayed."""
    model, x = network(), torch.randn(256, 512, device="cuda", dtype=BF16)
    compiled = torch.compile(model, backend=compile_with_cutegen)
    with cutegen.record() as recording, torch.no_grad():
        for _ in range(3):
            compiled(x)
    assert sum(recording.problems.values()) == 6
    a, b = torch.randn(64, 256, device="cuda", dtype=BF16), torch.randn(128, 256, device="cuda", dtype=BF16)
    out = torch.empty(64, 128, device="cuda", dtype=BF16)
    with cutegen.record() as captured:
        cutegen.gemm(a, b.t(), out=out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            cutegen.gemm(a, b.t(), out=out)
        for _ in range(5):
            graph.replay()
    assert list(captured.problems.values()) == [2]
    before = out.clone()
    graph.replay()  # after the recording: the graph keeps what it captured
    assert torch.equal(out, before)
