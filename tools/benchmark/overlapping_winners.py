"""The winners of a table with launches that all overlap their neighbours, as a model may run them."""

from __future__ import annotations

from dataclasses import replace

from cutegen.arch import Arch
from cutegen.families.registry import space_of
from cutegen.records.table import Table
from cutegen.search.twins import overlapped

__all__ = ["with_overlap"]


def with_overlap(table: Table, arch: Arch) -> Table:
    """Return ``table`` with each winner's twin that overlaps most, where it has one; ranges stay."""
    changed = []
    for problem, entry in table.entries.items():
        if entry.config is None:
            continue
        twin = overlapped(space_of(entry.config, problem.family, arch), problem, entry.config, {})
        if twin != entry.config:
            changed.append(replace(entry, config=twin, artifact_key=""))
    return table.with_entries(changed)
