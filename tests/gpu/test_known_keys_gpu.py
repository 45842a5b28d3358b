"""A dispatch table whose artifact key is another kernel's, on a real GPU: right results, in bounds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hopper import GPU, NEEDS_HOPPER

torch = pytest.importorskip("torch")

import cutegen  # noqa: E402
from cutegen.arch import find_arch  # noqa: E402
from cutegen.build import Toolchain  # noqa: E402
from cutegen.build.render import render  # noqa: E402
from cutegen.build.store import Store  # noqa: E402
from cutegen.families.gemm.problem import Problem  # noqa: E402
from cutegen.families.registry import find_space  # noqa: E402
from cutegen.records.entry import Entry, Fingerprint  # noqa: E402
from cutegen.records.table import Table  # noqa: E402
from cutegen.runtime.dispatch import Dispatcher  # noqa: E402
from cutegen.runtime.kernel_cache import Kernels, build_one  # noqa: E402
from cutegen.space import Config  # noqa: E402

pytestmark = [*NEEDS_HOPPER, pytest.mark.dsl]
ARCH = find_arch("sm_90a")
SPACE = find_space("gemm", ARCH)
PROBLEM = Problem(64, 256, 4096)
#: Its tile is larger than the problem, and so is its workspace: four times that of the other.
WIDE = SPACE.default(PROBLEM).replace(
    tile_shape_mn=(256, 64), mma_warpgroups=2, swap_ab=False, use_tma_store=False, split_k=4
)
NARROW = WIDE.replace(tile_shape_mn=(64, 64), mma_warpgroups=1)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    from cutegen.torch_ops import gemm as ops

    cutegen.gemm  # noqa: B018  prepares the operators
    before = ops.default_dispatcher()
    yield Store(tmp_path / "cache")
    cutegen.use(before)


def dispatcher(store: Store, problem: Problem, config: Config, key: str) -> Dispatcher:
    """Use a table that says that the artifact ``key`` is the kernel of ``config``."""
    assert GPU is not None
    path = store.root.parent / "table.json"
    Table(Fingerprint.of(GPU, Toolchain.current()), [Entry(problem, config, artifact_key=key)]).save(path)
    return cutegen.use(Dispatcher(kernels=Kernels(store, build="allow")).with_table(path))


def operands(problem: Problem, dtype: Any) -> tuple[Any, Any]:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = (problem.m, problem.k), (problem.n, problem.k)
    a, w = (torch.rand(shape, generator=generator, device="cuda").sub(0.5).to(dtype) for shape in shapes)
    return a, w.t()


def test_a_changed_tile_gets_its_own_kernel_and_a_workspace_that_is_large_enough(store: Store) -> None:
    """The kernel that the key names would write three quarters of its sums behind the workspace."""
    wide = build_one(render(PROBLEM, WIDE, ARCH), store)
    used = dispatcher(store, PROBLEM, NARROW, wide.key)
    choice = used.kernel(PROBLEM)
    assert choice is not None and choice.answer.how == "exact" and choice.answer.known_key == wide.key
    elements = choice.launch.workspace_bytes // 4
    assert (
        SPACE.launch(WIDE, PROBLEM, used.device().sm_count).workspace_bytes
        == 4 * choice.launch.workspace_bytes
    )
    a, b = operands(PROBLEM, torch.bfloat16)
    want = a.float() @ b.float()
    memory = torch.full((5 * elements,), 7.0, device="cuda")
    out = torch.full((PROBLEM.m, PROBLEM.n), float("nan"), device="cuda", dtype=torch.bfloat16)
    choice.function(a, b, out, memory[:elements], *choice.launch.scalars)
    torch.cuda.synchronize()
    assert (memory[elements:] == 7.0).all()
    torch.testing.assert_close(out.float(), want, rtol=1e-2, atol=1e-1)
    torch.testing.assert_close(cutegen.gemm(a, b).float(), want, rtol=1e-2, atol=1e-1)


def test_a_key_of_another_dtype_computes_in_the_dtype_of_the_call(store: Store) -> None:
    """The bits of fp16 values, read as bf16, are other numbers."""
    half = Problem(64, 256, 4096, ab_dtype="fp16")
    bf16 = build_one(render(PROBLEM, NARROW, ARCH), store)
    dispatcher(store, half, NARROW, bf16.key)
    a, b = operands(half, torch.float16)
    torch.testing.assert_close(cutegen.gemm(a, b).float(), a.float() @ b.float(), rtol=1e-2, atol=1e-1)
