"""Renders what copies say of GEMMs that do little but read: bytes per second of both, side by side."""

from __future__ import annotations

from collections.abc import Sequence

from tools.benchmark.bandwidth import FEW_ROWS
from tools.benchmark.markdown import down, line, up
from tools.benchmark.results import COPY, OWN, ShapeResult

__all__ = ["summary", "table"]

#: The share of a copy's rate that kernels of few rows are built to reach.
GOAL = 0.9


def summary(rows: Sequence[ShapeResult]) -> list[str]:
    """Return a line that sums up how near GEMMs of few rows come to a copy; none without copies."""
    shares = {row.name: share for row in rows if (share := row.ratio(COPY)) is not None}
    failed = [row.name for row in rows if COPY in row.entries and row.name not in shares]
    lines = []
    if failed:
        lines.append(f"- **not compared with a copy, since one of both failed: {', '.join(failed)}**")
    if shares:
        worst = min(shares, key=lambda name: shares[name])
        enough = sum(share >= GOAL for share in shares.values())
        lines.append(
            f"- the {len(shares)} with m of at most {FEW_ROWS}: share of the bandwidth of a copy of as many "
            f"bytes at least **{down(shares[worst], 3)}** ({worst}), {GOAL:g} or more on {enough} of "
            f"{len(shares)}"
        )
    return lines


def table(rows: Sequence[ShapeResult]) -> list[str]:
    """Return the lines of the table, a row for each GEMM beside which a copy ran."""
    cells = [found for row in rows if (found := _cells(row))]
    if not cells:
        return []
    head = ["shape", "M x N x K", "MB", "cutegen TB/s", "copy TB/s", "cutegen / copy", "the faster copy"]
    align = ["---", "---", *["---:"] * 4, "---"]
    return [line(head), line(align), *map(line, cells)]


def _cells(row: ShapeResult) -> list[str]:
    own, copy, share = row.timing(OWN), row.timing(COPY), row.ratio(COPY)
    if own is None or copy is None or share is None:
        return []
    p = row.problem
    return [
        row.name,
        row.shape,
        f"{p.min_bytes / 1e6:.1f}",
        down(p.min_bytes / own.median_us / 1e6, 2),
        up(p.min_bytes / copy.median_us / 1e6, 2),
        down(share, 3),
        row.entries[COPY].config,
    ]
