"""Rows of a family's results file: which shapes to measure, and how they join those measured before."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cutegen.errors import StoreError, UsageError

__all__ = ["joined", "row_slice"]

#: What is recorded of each row beside its times: when, from which checkout and on which GPU.
_ORIGIN = ("measured_at", "commit", "gpu", "machine")


def row_slice(text: str) -> slice:
    """Return the rows that ``A:B`` names, counted from 0, without B; either may be left out.

    Raises:
        argparse.ArgumentTypeError: It is not of that form.
    """
    first, colon, last = text.partition(":")
    if not colon or not all(part.isdecimal() for part in (first, last) if part):
        raise argparse.ArgumentTypeError(f"{text!r} names no rows; valid: A:B, such as 0:20 or 20:")
    return slice(int(first or 0), int(last) if last else None)


def joined(
    path: Path, facts: Mapping[str, Any], order: Sequence[str], rows: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return ``rows`` and those of the file at ``path`` that they do not replace, in the shapes' order.

    Args:
        path: A results file; there may be none yet.
        facts: What the new file says beside its rows.
        order: Names of all shapes.
        rows: What was measured now.

    Raises:
        StoreError: The file cannot be read.
        UsageError: Its rows were measured under other conditions.
    """
    found = {row["name"]: {**row, **_origin(facts)} for row in rows}
    kept = {row["name"]: row for row in _rows_before(path, facts)}
    return [{**kept, **found}[name] for name in order if name in kept or name in found]


def _origin(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {key: facts[key] for key in _ORIGIN}


def _rows_before(path: Path, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        rows = [{**_origin(before), **row} for row in before["rows"]]
        differing = [key for key in ("kind", "family") if before[key] != facts[key]]
        old, new = before["conditions"], facts["conditions"]
        differing += [key for key in {**old, **new} if key != "shapes" and old.get(key) != new.get(key)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"results file {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is no results file of a family: {error!r}") from error
    if differing:
        raise UsageError(
            f"rows of {path} were measured with other {' and '.join(differing)}; valid: the same, or another "
            "--out"
        )
    return rows
