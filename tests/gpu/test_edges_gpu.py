"""Products at the edge of 32-bit coordinates: the largest sizes, and outputs of more than 2**31 elements.

Operands are small integers, so that every element of the result is exact and all of them are compared.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from typing import Any

import pytest
from hopper import GPU, NEEDS_HOPPER

torch = pytest.importorskip("torch")

import cutegen  # noqa: E402
from cutegen.arch import find_arch  # noqa: E402
from cutegen.build import Artifact, Builder  # noqa: E402
from cutegen.build.render import render  # noqa: E402
from cutegen.build.store import Store  # noqa: E402
from cutegen.errors import ProblemError  # noqa: E402
from cutegen.families.gemm.problem import LARGEST_SIZE, Problem  # noqa: E402
from cutegen.families.registry import find_space  # noqa: E402
from cutegen.runtime.dispatch import Dispatcher  # noqa: E402
from cutegen.runtime.kernel_cache import Kernels  # noqa: E402
from cutegen.space import Config  # noqa: E402

SPACE = find_space("gemm", find_arch("sm_90a"))
#: Elements around the output that must stay as they are.
GUARD = 4096
#: Elements along k that are not zero where k is too long to multiply all of them for comparison.
PICKED = 32
#: Elements that are compared at a time.
PIECE = 2**26
EDGES = [
    # More than 2**31 elements of D: by TMA, from registers, one by one, transposed, in batches, with C.
    ("gemm 65664x65536x64 bf16 kk", "use_tma_store=true"),
    ("gemm 65664x65536x64 bf16 kk", "use_tma_store=false"),
    ("gemm 65664x65537x64 bf16 kk", ""),
    ("gemm 65664x65536x64 bf16 kk beta", ""),
    ("gemm 512x8388736x64 bf16 kk", "tile_shape_mn=128x128 cluster_shape_mn=1x1 swap_ab=true"),
    (
        "gemm 512x8388736x64 bf16 kk",
        "tile_shape_mn=128x128 cluster_shape_mn=1x1 swap_ab=true use_tma_store=false",
    ),
    ("gemm 3x32768x32776x64 bf16 kk", ""),
    ("gemm 3x32768x32769x64 bf16 kk", ""),
    # The largest sizes there are: rows, columns, and along k.
    (f"gemm {LARGEST_SIZE}x8x8 bf16 kk", "use_tma_store=true"),
    (f"gemm {LARGEST_SIZE}x8x8 bf16 kk", "use_tma_store=false"),
    (f"gemm {LARGEST_SIZE}x1x8 bf16 kk bias=m", ""),
    (f"gemm {LARGEST_SIZE}x1x8 bf16 kk", "tile_shape_mn=192x64 mma_warpgroups=3 cluster_shape_mn=4x1"),
    (f"gemm 8x{LARGEST_SIZE}x8 bf16 kk", ""),
    (f"gemm 1x{LARGEST_SIZE}x8 bf16 kk", "swap_ab=true use_tma_store=false"),
    (f"gemm 8x8x{LARGEST_SIZE} bf16 kk", ""),
    (f"gemm 8x8x{LARGEST_SIZE} bf16 kk", "use_tma_store=false split_k=33"),
]


def chosen(line: str, words: str) -> tuple[Problem, Config]:
    """A problem, and its default config with some knobs changed."""
    problem = Problem.parse(line)
    config = SPACE.default(problem).replace(**Config.parse(words))
    SPACE.require(problem, config)
    return problem, config


def test_every_edge_has_a_legal_config() -> None:
    """Without a GPU, so that a rule that forbids one of them shows where nobody has 80 GB."""
    assert all(SPACE.explain(*chosen(*edge)) == () for edge in EDGES)


@pytest.fixture(scope="module")
def dispatcher(store: Store, asked: list[dict[str, Any]]) -> Iterator[Dispatcher]:
    from cutegen.torch_ops import gemm as ops

    cutegen.gemm  # noqa: B018  prepares the operators
    before = ops.default_dispatcher()
    sources = {render(*chosen(each["line"], each["words"]), SPACE.arch) for each in asked}
    with Builder(store) as builder:  # all at a time: one by one takes longer than the tests
        failed = [result for _, result in builder.build(sources) if not isinstance(result, Artifact)]
    assert not failed, failed[0]
    yield cutegen.use(Dispatcher(kernels=Kernels(store, build="never"), fallback="none"))
    cutegen.use(before)


@pytest.fixture(autouse=True)
def _give_memory_back() -> Iterator[None]:
    yield
    gc.collect()
    if GPU is not None:
        torch.cuda.empty_cache()


def integers(*shape: int, device: str = "cuda") -> Any:
    """Values of -1, 0 and 1."""
    return torch.empty(shape, dtype=torch.bfloat16, device=device).random_(-1, 2)


def operand(rows: int, k: int, batch: tuple[int, ...], device: str) -> tuple[Any, Any]:
    """A matrix that is contiguous along k, and where along k it is not zero."""
    if k <= 64:
        return integers(*batch, rows, k, device=device), slice(None)
    matrix = torch.zeros(*batch, rows, k, dtype=torch.bfloat16, device=device)
    where = torch.linspace(0, k - 1, PICKED, dtype=torch.float64).long().to(device)
    matrix[..., where] = integers(*batch, rows, PICKED, device=device)
    return matrix, where


def require_right(problem: Problem, config: Config, device: str = "cuda") -> None:
    """Compute ``problem`` into poisoned memory, and compare all of it and what lies around it."""
    batch = (problem.batch,) if problem.batch > 1 else ()
    a, where = operand(problem.m, problem.k, batch, device)
    w, _ = operand(problem.n, problem.k, batch, device)
    shape = (*batch, problem.m, problem.n)
    count = math.prod(shape)
    memory = torch.full((count + 2 * GUARD,), float("nan"), dtype=torch.bfloat16, device=device)
    out = memory[GUARD : GUARD + count].view(shape)
    options: dict[str, Any] = {}
    if problem.epilogue.beta:
        options["c"] = integers(*shape, device=device)
    if problem.epilogue.bias:
        options["bias"] = integers(problem.m, 1, device=device)
    cutegen.gemm(a, w.mT, out=out, config=config, **options)
    assert memory[:GUARD].isnan().all() and memory[GUARD + count :].isnan().all()
    along = -2 if problem.m >= problem.n else -1
    step = max(1, PIECE // min(problem.m, problem.n))
    for start in range(0, shape[along], step):
        end = min(start + step, shape[along])
        rows, columns = (slice(start, end), slice(None)) if along == -2 else (slice(None), slice(start, end))
        want = a[..., rows, :][..., where].float() @ w[..., columns, :][..., where].float().mT
        for name in options:
            part = options[name][..., rows, :]
            want += (part if name == "bias" else part[..., columns]).float()
        assert torch.equal(out[..., rows, columns].float(), want), f"{along} from {start}"


@pytest.mark.parametrize(("line", "words"), EDGES, ids=lambda text: text or "default")
@pytest.mark.dsl
@NEEDS_HOPPER[1]
@pytest.mark.gpu
def test_the_edge_is_right(line: str, words: str, dispatcher: Dispatcher) -> None:
    """Every element, and nothing outside of the output."""
    problem, config = chosen(line, words)
    needed = problem.min_bytes + 6 * 2**30
    free = torch.cuda.mem_get_info()[0]
    if free < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of free GPU memory, there are {free / 2**30:.0f}")
    require_right(problem, config)


@NEEDS_HOPPER[1]
@pytest.mark.gpu
def test_an_extent_behind_the_edge_is_refused(dispatcher: Dispatcher) -> None:
    """With the rule's reason, before anything is launched."""
    rows = LARGEST_SIZE + 1
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free GPU memory")
    a = torch.empty(rows, 8, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(ProblemError, match="sizes_round_up_below_2_to_31"):
        cutegen.gemm(a, torch.empty(1, 8, dtype=torch.bfloat16, device="cuda").mT)
