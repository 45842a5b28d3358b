"""What compiled kernels take on the device: registers, stack, spills, shared memory, threads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import cast

from cutegen.digest import Json
from cutegen.text import shown

__all__ = ["LARGEST_COUNT", "Counts", "KernelResources", "Resources"]

#: More than any count of resources or seconds; what is larger is no measurement.
LARGEST_COUNT = 2**31 - 1


@dataclass(frozen=True)
class Counts:
    """How much of each resource is taken.

    Attributes:
        registers: 32-bit registers per thread at entry.
        stack_bytes: Stack per thread, in bytes; more than 0 mostly means spills.
        spill_store_bytes: Bytes per thread stored by spills.
        spill_load_bytes: Bytes per thread loaded by spills.
        smem_bytes: Shared memory per thread block, in bytes.
        barriers: Named barriers.
        threads: Threads per block.
    """

    registers: int = 0
    stack_bytes: int = 0
    spill_store_bytes: int = 0
    spill_load_bytes: int = 0
    smem_bytes: int = 0
    barriers: int = 0
    threads: int = 0


@dataclass(frozen=True)
class KernelResources(Counts):
    """The resources of one device function.

    Attributes:
        name: Its symbol.
    """

    name: str = field(kw_only=True)


@dataclass(frozen=True)
class Resources(Counts):
    """The resources of an artifact: the largest of its device functions, which are listed as well.

    Attributes:
        notes: Performance notes of the assembler, such as ``C7508 ... 'setmaxnreg' ignored``.
        kernels: The device functions.
    """

    notes: tuple[str, ...] = ()
    kernels: tuple[KernelResources, ...] = ()

    @classmethod
    def of(cls, kernels: tuple[KernelResources, ...], notes: tuple[str, ...] = ()) -> Resources:
        """Return the largest of each number over ``kernels``."""
        counts = [f.name for f in fields(Counts)]
        worst = {name: max((getattr(each, name) for each in kernels), default=0) for name in counts}
        return cls(**worst, notes=notes, kernels=kernels)

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON data."""
        return {**asdict(self), "notes": list(self.notes), "kernels": [asdict(k) for k in self.kernels]}

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> Resources:
        """Return the resources that :meth:`to_json` described.

        Raises:
            TypeError: The data is not of that form.
        """
        kernels, notes = _as_list(data, "kernels"), _as_list(data, "notes")
        if not all(isinstance(note, str) for note in notes):
            raise TypeError(f"notes are texts, not {shown(notes)}")
        # The totals are computed again, so that they cannot contradict the list.
        return cls.of(tuple(_parse_kernel(each) for each in kernels), tuple(map(str, notes)))


def _as_list(data: Mapping[str, Json], name: str) -> list[Json]:
    value = data.get(name) or []
    if not isinstance(value, list):
        raise TypeError(f"{name} is {shown(value)}, not a list")
    return value


def _parse_kernel(data: Json) -> KernelResources:
    if not isinstance(data, Mapping):
        raise TypeError(f"a device function is an object, not {shown(data)}")
    counts = {name: value for name, value in data.items() if name != "name"}
    if not isinstance(data.get("name"), str):
        raise TypeError(f"a device function has no name: {shown(data)}")
    for name, value in counts.items():
        if type(value) is not int or not 0 <= value <= LARGEST_COUNT:
            raise TypeError(f"{name} is {shown(value)}, not a count")
    return KernelResources(**cast("dict[str, int]", counts), name=str(data["name"]))
