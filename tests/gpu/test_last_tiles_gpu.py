"""Outputs that tiles do not divide: rows that two tiles share, and a C that is the output itself.

Operands are small integers, so that every element of the result is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hopper import NEEDS_HOPPER

torch = pytest.importorskip("torch")

import cutegen  # noqa: E402
from cutegen.arch import find_arch  # noqa: E402
from cutegen.build import Artifact, Builder  # noqa: E402
from cutegen.build.render import render  # noqa: E402
from cutegen.build.store import Store  # noqa: E402
from cutegen.families.gemm.problem import Problem  # noqa: E402
from cutegen.families.registry import find_space  # noqa: E402
from cutegen.runtime.dispatch import Dispatcher  # noqa: E402
from cutegen.runtime.kernel_cache import Kernels  # noqa: E402
from cutegen.space import Config  # noqa: E402

SPACE = find_space("gemm", find_arch("sm_90a"))
SWAPPED = "swap_ab=true tile_shape_mn=128x160 mma_warpgroups=2"
PARTS = "use_tma_store=false split_k=3"
CASES = [
    ("gemm 136x392x512 bf16 kk", "tile_shape_mn=128x112 mma_warpgroups=1 pingpong=true"),
    ("gemm 136x392x512 bf16 kk", "tile_shape_mn=128x112 mma_warpgroups=2 cluster_shape_mn=2x1"),
    ("gemm 200x392x512 bf16 kk", "tile_shape_mn=128x64 cluster_shape_mn=1x4"),
    ("gemm 431x392x512 bf16 kk", SWAPPED),
    ("gemm 431x392x512 bf16 kk", SWAPPED + " cluster_shape_mn=1x2"),
    ("gemm 431x393x512 bf16 kk", SWAPPED + " use_tma_store=false"),
    ("gemm 40x200x512 bf16 kk", SWAPPED),
    ("gemm 137x392x512 bf16 kn", "tile_shape_mn=64x256 mma_warpgroups=1"),
    ("gemm 136x392x512 bf16 mn", "tile_shape_mn=128x112 mma_warpgroups=2"),
    ("gemm 3x136x392x512 bf16 kk", "tile_shape_mn=128x112 mma_warpgroups=2 cluster_shape_mn=1x2"),
    ("gemm 136x392x1024 bf16 kk", "tile_shape_mn=128x64 mma_warpgroups=2 " + PARTS),
    ("gemm 136x392x1024 bf16 kk any_order", "tile_shape_mn=128x64 reduction=arrival " + PARTS),
    ("gemm 136x392x512 bf16 kk beta", "tile_shape_mn=128x112 mma_warpgroups=2"),
    ("gemm 431x392x512 bf16 kk beta", SWAPPED),
    ("gemm 431x392x512 bf16 kk beta", SWAPPED + " use_tma_store=false"),
    ("gemm 136x392x1024 bf16 kk beta", "tile_shape_mn=128x64 mma_warpgroups=2 " + PARTS),
    ("gemm 136x392x1024 bf16 kk beta any_order", "tile_shape_mn=128x64 reduction=arrival " + PARTS),
    ("gemm 1501x1000x1024 bf16 kk", "tile_shape_mn=128x64 stream_k=true"),
]


def chosen(line: str, words: str) -> tuple[Problem, Config]:
    """A problem, and its default config with some knobs changed."""
    problem = Problem.parse(line)
    config = SPACE.default(problem).replace(**Config.parse(words))
    SPACE.require(problem, config)
    return problem, config


def test_every_case_is_legal() -> None:
    """Without a GPU, so that a rule that forbids one of them shows at once."""
    assert all(SPACE.explain(*chosen(*case)) == () for case in CASES)


@pytest.fixture(scope="module")
def _kernels(store: Store, asked: list[dict[str, Any]]) -> Iterator[None]:
    from cutegen.torch_ops import gemm as ops

    cutegen.gemm  # noqa: B018  prepares the operators
    before = ops.default_dispatcher()
    with Builder(store) as builder:
        built = builder.build({render(*chosen(each["line"], each["words"]), SPACE.arch) for each in asked})
        assert all(isinstance(result, Artifact) for _, result in built)
    cutegen.use(Dispatcher(kernels=Kernels(store, build="never"), fallback="none"))
    yield
    cutegen.use(before)


def integers(*shape: int) -> Any:
    """Values of -1, 0 and 1."""
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").random_(-1, 2)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize(
    ("line", "words", "in_place"),
    [(*case, in_place) for in_place in (False, True) for case in CASES if "beta" in case[0] or not in_place],
)
class TestLastTiles:
    """On the GPU."""

    pytestmark = NEEDS_HOPPER

    def test_all_elements_are_exact_and_none_is_written_beyond(
        self, line: str, words: str, in_place: bool
    ) -> None:
        """Ten times, since a row that two tiles write could be wrong now and then."""
        problem, config = chosen(line, words)
        batch = (problem.batch,) if problem.batch > 1 else ()
        m, n, k = problem.m, problem.n, problem.k
        a, b = integers(*batch, m, k), integers(*batch, n, k).mT
        if problem.layout == "mn":
            a = a.mT.contiguous().mT
        if problem.layout != "kk":
            b = b.contiguous()
        c = integers(*batch, m, n)
        want = a.float() @ b.float()
        if problem.epilogue.beta:
            want = want + c.float()
        for _ in range(10):
            memory = torch.full((want.numel() + 2 * n,), float("nan"), dtype=torch.bfloat16, device="cuda")
            out = memory[n:-n].view(want.shape)
            options: dict[str, Any] = {}
            if problem.epilogue.beta:
                options["c"] = out.copy_(c) if in_place else c
            if problem.any_order:
                options["any_order"] = True
            cutegen.gemm(a, b, out=out, config=config, **options)
            assert torch.equal(out, want.bfloat16())
            assert memory[:n].isnan().all() and memory[-n:].isnan().all()
