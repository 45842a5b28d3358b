"""Copies beside products of few rows: what they move, who takes part, what the tables say."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="copies are torch's")

from host_lane import FACTS, HostLane  # noqa: E402

from cutegen.errors import LaunchError  # noqa: E402
from cutegen.families.gemm.problem import Problem  # noqa: E402
from cutegen.measure import Candidate  # noqa: E402
from cutegen.measure.nvml import ClockMeter  # noqa: E402
from cutegen.space import Launch  # noqa: E402
from tools.benchmark import child  # noqa: E402
from tools.benchmark.bandwidth import COPY_CALL, METHODS, Copy, CopyCall  # noqa: E402
from tools.benchmark.contest import UnsupportedError  # noqa: E402

FEW = Problem(4, 40, 64)
MANY = Problem(17, 40, 64)
ARENA: Any = SimpleNamespace()


def engine() -> child.ContestEngine:
    found = child.ContestEngine(torch.device("cpu"), FACTS, HostLane(), child.load, ClockMeter("none"))
    found.open(FEW, 0)
    return found


def inverted(values: Any, method: str) -> Any:
    return values if method == "copy_" else ~values


@pytest.mark.parametrize("method", METHODS)
def test_a_copy_moves_as_many_bytes_as_the_product_must(method: str) -> None:
    """Half are read, from the beginning of B, half are written; all but what no 16 bytes hold."""
    entrant = Copy().enter(ARENA, FEW)
    (order,) = [f.candidate.symbol for f in entrant.finalists if f.config == method]
    moved = entrant.details["moved_bytes"]
    assert isinstance(moved, int) and FEW.min_bytes - 32 < moved <= FEW.min_bytes
    a, d = torch.zeros(4, 64), torch.zeros(4, 40)
    b = torch.randn(40, 64, dtype=torch.bfloat16).t()
    call = CopyCall(order)
    call(a, b, d)
    call(a, b, d, 3)
    half = b.t().flatten()[: moved // 4].view(torch.int64)
    first, second, *others = call._ring
    assert first.nbytes == moved // 2
    assert torch.equal(first, inverted(half, method)) and torch.equal(second, inverted(half, method))
    assert others and not d.any()


def test_a_copy_is_timed_although_it_leaves_the_output_alone() -> None:
    """A kernel that does so has failed; the same call under another name is refused."""
    found = engine()
    for finalist in Copy().enter(ARENA, FEW).finalists:
        assert found.prepare(finalist.candidate).launches > 0
    kernel = Candidate("k", Path("kernel"), "s", Launch((), 0), FEW)
    assert found.must_write(kernel) and not found.must_write(
        Candidate("c", Path("/anywhere") / COPY_CALL, "s", Launch((), 0), FEW)
    )


def test_products_of_more_rows_are_not_compared() -> None:
    """They are not bound by memory."""
    assert Copy.concerns(FEW) and not Copy.concerns(MANY)
    with pytest.raises(UnsupportedError, match="m of at most 16"):
        Copy().enter(ARENA, MANY)


def test_a_b_that_is_too_small_to_copy_from_is_a_failed_launch() -> None:
    """It reads nothing behind B."""
    b = torch.zeros(64)[32:]
    with pytest.raises(LaunchError, match="B holds 128 bytes; the copy is to read 144"):
        CopyCall("copy_ 144")(b, b, b)
    CopyCall("copy_ 128")(b, b, b)
