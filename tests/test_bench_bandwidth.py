"""Copies beside products of few rows: what they move, who takes part, what the tables say."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_results_table as tables

torch = pytest.importorskip("torch", reason="copies are torch's")

from host_lane import FACTS, HostLane  # noqa: E402

from cutegen.errors import LaunchError  # noqa: E402
from cutegen.families.gemm.problem import Problem  # noqa: E402
from cutegen.measure import Candidate  # noqa: E402
from cutegen.measure.device import ClockMeter  # noqa: E402
from cutegen.space import Launch  # noqa: E402
from tools import results_table as rt  # noqa: E402
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


# --- tables ---


def few(name: str, own: float | None, copy: float | None) -> Any:
    return tables.row(name, {"cutegen": tables.entry(own), "copy": tables.entry(copy)}, (16, 8192, 8192))


def test_the_table_holds_both_rates_and_the_share() -> None:
    """134.7 MB in 50 and 40 us; nothing is rounded in favour of cutegen."""
    text = rt.render(tables.results(few("S3", 50.0, 40.0), tables.row("S", {"cutegen": tables.entry(9.0)})))
    assert "| S3 | 16 x 8192 x 8192 | 134.7 | 2.69 | 3.37 | 0.800 | 128x256 2x1 |" in text
    assert text.count("| S |") == 1


def test_the_summary_names_the_worst_and_counts_the_rest() -> None:
    """Copies are no peers: they have no column of their own."""
    text = rt.render(tables.results(few("S3", 50.0, 44.99), few("S4", 50.0, 45.0), few("S5", 50.0, 60.0)))
    assert "the 3 with m of at most 16: share of the bandwidth of a copy of as many bytes at least" in text
    assert "**0.899** (S3), 0.9 or more on 2 of 3" in text
    assert "copy / cutegen |" not in text.split("share of the bandwidth")[0] and "torch.mm / copy" not in text


@pytest.mark.parametrize(("own", "copy"), [(None, 40.0), (50.0, None)])
def test_a_copy_or_product_that_failed_does_not_vanish(own: float | None, copy: float | None) -> None:
    """The summary names the shape."""
    text = rt.render(tables.results(few("S3", own, copy)))
    assert "not compared with a copy, since one of both failed: S3" in text
    assert "share of the bandwidth" not in text
