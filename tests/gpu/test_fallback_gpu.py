"""Calls that are left to torch.mm on a real GPU: eager, compiled, and captured into graphs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hopper import NEEDS_HOPPER

torch = pytest.importorskip("torch")

import cutegen  # noqa: E402
from cutegen.build.store import Store  # noqa: E402
from cutegen.families.gemm.problem import Problem  # noqa: E402
from cutegen.families.registry import find_space  # noqa: E402
from cutegen.measure.device import present_device  # noqa: E402
from cutegen.records.entry import Entry, Fingerprint  # noqa: E402
from cutegen.records.table import Table  # noqa: E402
from cutegen.runtime.dispatch import Dispatcher  # noqa: E402
from cutegen.runtime.kernel_cache import Kernels  # noqa: E402

pytestmark = NEEDS_HOPPER


@pytest.fixture(autouse=True)
def never_built(tmp_path: Path) -> Iterator[None]:
    """A table in which torch is faster at m = 96, and a store that may compile nothing."""
    from cutegen.torch_ops import gemm as ops

    problem = Problem(96, 512, 256)
    config = find_space("gemm", present_device().arch).default(problem)
    table = Table(Fingerprint.of(present_device()), [Entry(problem, config, ratio_to_baseline=0.5)])
    cutegen.gemm  # noqa: B018  prepares the operators
    before = ops.default_dispatcher()
    cutegen.use(Dispatcher(table, kernels=Kernels(Store(tmp_path), build="never"), fallback="measured"))
    yield
    cutegen.use(before)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_call_left_to_torch_can_be_captured_first_thing(compiled: bool) -> None:
    """No kernel is needed, so the first call may be in a capture; replays follow new inputs."""
    a, w = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((96, 256), (512, 256)))
    out = torch.empty(96, 512, device="cuda", dtype=torch.bfloat16)

    def call() -> None:
        cutegen.gemm(a, w.t(), out=out)

    run = torch.compile(call) if compiled else call
    if compiled:
        run()
    torch.mm(a, w.t(), out=out)  # cuBLAS makes its handle
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    a.copy_(torch.randn_like(a))
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, torch.mm(a, w.t()))
