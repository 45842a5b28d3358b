"""Results of ranges as people and programs read them: a table of pieces, and JSON."""

from __future__ import annotations

from math import log2

from cutegen.arch import find_arch
from cutegen.cli.wrapped_text import Column, columns, fold
from cutegen.digest import Json
from cutegen.families.registry import find_family, space_of
from cutegen.measure.statistics import geometric_mean
from cutegen.records.range_entry import Piece, RangeEntry
from cutegen.runtime.answer_lookup import MEASURED_LEAD
from cutegen.text import how_many
from cutegen.tuning import RangeResult

__all__ = ["range_json", "range_lines"]

#: Pieces that are shown unless all are asked for.
_MOST_PIECES = 40


def range_lines(name: str, result: RangeResult, width: int | None = None) -> list[str]:
    """Return the lines that show what one range came to.

    Args:
        name: What the user calls it; printable.
        result: What became of it.
        width: Columns of the terminal; None for the long form, with all pieces and names of knobs.
    """
    entry = result.entry
    shown = entry.pieces if width is None else entry.pieces[:_MOST_PIECES]
    lines = [_headline(name, result), *columns(_table(result, shown, width), width)]
    if len(shown) < len(entry.pieces):
        lines.append(f"  ... and {len(entry.pieces) - len(shown)} more pieces; --wide shows all")
    lines += [f"  {note}" for note in _notes(result)]
    return [piece for line in lines for piece in ([line] if width is None else fold(line, width))]


def _headline(name: str, result: RangeResult) -> str:
    bad = {k: v for k, v in sorted(result.outcomes.items()) if k != "ok"}
    how = "from records" if result.reused else f"{result.kernels} kernels measured at {result.sizes} sizes"
    how += f", {result.seconds:.1f} s" + "".join(f", {count} {outcome}" for outcome, count in bad.items())
    timed = result.entry.context.replace("_", " ")
    return f"{name}: {result.range} on {result.device} ({how}, timed {timed})"


def _table(result: RangeResult, shown: tuple[Piece, ...], width: int | None) -> list[Column]:
    entry, low = result.entry, result.range.low
    arch = find_arch(result.arch)
    ratios = ["" if p.ratio_to_baseline is None else f"{p.ratio_to_baseline:.3f}" for p in shown]
    names = [
        entry.baseline or "torch"
        if piece.source == "torch" or piece.config is None
        else space_of(piece.config, low.family, arch).short(piece.config, names=width is None)
        for piece in shown
    ]
    return [
        Column(result.range.size, [f"{piece.first}..{piece.last}" for piece in shown]),
        Column(f"vs {entry.baseline or 'baseline'}", ratios),
        Column("config", names, left=True),
    ]


def _notes(result: RangeResult) -> list[str]:
    entry, notes = result.entry, []
    configs = {piece.config for piece in entry.pieces}
    notes.append(f"{how_many(len(entry.pieces), 'piece')}, {how_many(len(configs), 'config')}")
    if result.ratios:
        found = result.ratios.values()
        notes.append(
            f"{entry.baseline} over cutegen at {len(found)} measured sizes: geometric mean "
            f"{geometric_mean(found):.3f}, smallest {min(found):.3f}"
        )
    notes += _left(entry)
    if entry.regret is not None:
        notes.append(
            f"at {entry.regret.sizes} sizes taken at random the answers were {entry.regret.mean:.1%} behind "
            f"the best candidate, {entry.regret.worst:.1%} at worst"
        )
    if entry.contended_by:
        notes.append(f"contended: {entry.contended_by} used the GPU meanwhile; run again when it is free")
    return notes


def _left(entry: RangeEntry) -> list[str]:
    """Return a note on the pieces that calls with default settings leave to the baseline, if any."""
    if entry.contended_by or not find_family(entry.range.low.family).is_library_call(entry.range.low):
        return []
    ours = [piece for piece in entry.pieces if piece.source != "torch"]
    slower = [piece for piece in ours if (piece.ratio_to_baseline or 1.0) < 1 - MEASURED_LEAD]
    if not slower:
        return []
    share = sum(map(_doublings, slower)) / sum(map(_doublings, entry.pieces))
    return [
        f"{entry.baseline or 'the library'} was faster in {len(slower)} piece{'s' * (len(slower) > 1)}, "
        f"{share:.0%} of the doublings: calls leave these to it unless fallback is none"
    ]


def _doublings(piece: Piece) -> float:
    return log2((piece.last + 1) / piece.first)


def range_json(name: str, result: RangeResult) -> dict[str, Json]:
    """Return everything as plain JSON data; the answers are those of the table."""
    return {
        "name": name,
        "range": str(result.range),
        "seconds": round(result.seconds, 3),
        "reused": result.reused,
        "outcomes": dict(result.outcomes),
        "sizes": result.sizes,
        "kernels": result.kernels,
        **result.entry.to_json(),
    }
