"""What came of a source: an artifact with its resources, or a failure with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias, cast

from cutegen.build.toolchain import Toolchain
from cutegen.digest import Json
from cutegen.errors import BuildError
from cutegen.store import Entry

__all__ = ["Artifact", "Failure", "KernelResources", "Resources", "Result", "from_entry", "gave_up_before"]

#: Names of the files of an entry.
SOURCE, OBJECT, LIBRARY, LOG = "kernel.py", "kernel.o", "kernel.so", "log.txt"


@dataclass(frozen=True)
class KernelResources:
    """What one device function takes.

    Attributes:
        name: Its symbol.
        registers: 32-bit registers per thread at entry.
        stack_bytes: Stack per thread, in bytes; more than 0 mostly means spills.
        spill_store_bytes: Bytes per thread stored by spills.
        spill_load_bytes: Bytes per thread loaded by spills.
        smem_bytes: Shared memory per thread block, in bytes.
        barriers: Named barriers.
        threads: Threads per block.
    """

    name: str
    registers: int = 0
    stack_bytes: int = 0
    spill_store_bytes: int = 0
    spill_load_bytes: int = 0
    smem_bytes: int = 0
    barriers: int = 0
    threads: int = 0


@dataclass(frozen=True)
class Resources:
    """What an artifact takes: the worst of its device functions, each also listed.

    Attributes:
        registers: 32-bit registers per thread at entry.
        stack_bytes: Stack per thread, in bytes.
        spill_store_bytes: Bytes per thread stored by spills.
        spill_load_bytes: Bytes per thread loaded by spills.
        smem_bytes: Shared memory per thread block, in bytes.
        barriers: Named barriers.
        threads: Threads per block.
        notes: Performance notes of the assembler, such as ``C7508 ... 'setmaxnreg' ignored``.
        kernels: The device functions.
    """

    registers: int = 0
    stack_bytes: int = 0
    spill_store_bytes: int = 0
    spill_load_bytes: int = 0
    smem_bytes: int = 0
    barriers: int = 0
    threads: int = 0
    notes: tuple[str, ...] = ()
    kernels: tuple[KernelResources, ...] = ()

    @classmethod
    def of(cls, kernels: tuple[KernelResources, ...], notes: tuple[str, ...] = ()) -> Resources:
        """Return the worst of ``kernels``, number by number."""

        def worst(field: str) -> int:
            return max((int(getattr(kernel, field)) for kernel in kernels), default=0)

        return cls(
            registers=worst("registers"),
            stack_bytes=worst("stack_bytes"),
            spill_store_bytes=worst("spill_store_bytes"),
            spill_load_bytes=worst("spill_load_bytes"),
            smem_bytes=worst("smem_bytes"),
            barriers=worst("barriers"),
            threads=worst("threads"),
            notes=notes,
            kernels=kernels,
        )

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON data."""
        return {**asdict(self), "notes": list(self.notes), "kernels": [asdict(k) for k in self.kernels]}

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> Resources:
        """Return the resources that :meth:`to_json` described.

        Raises:
            TypeError: The data is not of that form.
        """
        kernels = cast("list[dict[str, int]]", data.get("kernels") or [])
        notes = cast("list[str]", data.get("notes") or [])
        # The totals are worked out again: one fact, one place.
        return cls.of(tuple(KernelResources(**kernel) for kernel in kernels), tuple(notes))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Artifact:
    """A compiled kernel in the store.

    Attributes:
        key: Its name in the store.
        symbol: The function's name in the library.
        arch: The architecture it was compiled for.
        folder: Where its files are.
        resources: What it takes on the device.
        build_s: Seconds that compiling, exporting and linking took.
        source_digest: The digest of its source text.
        toolchain: What compiled it.
    """

    key: str
    symbol: str
    arch: str
    folder: Path
    resources: Resources
    build_s: float
    source_digest: str
    toolchain: Toolchain

    @property
    def shared_object(self) -> Path:
        """The loadable library."""
        return self.folder / LIBRARY

    @property
    def object(self) -> Path:
        """The object file before linking."""
        return self.folder / OBJECT

    @property
    def source(self) -> Path:
        """The rendered source."""
        return self.folder / SOURCE


@dataclass(frozen=True)
class Failure:
    """A source that did not become an artifact.

    Attributes:
        key: Its name in the store.
        outcome: ``error`` (the compiler refused), ``abort`` (it died), ``timeout``, or ``rejected``
            (compiled, but no GPU of that architecture could launch it).
        message: The reason on one line.
        log: All that the compiler said, without colour codes.
    """

    key: str
    outcome: str
    message: str
    log: str

    def error(self) -> BuildError:
        """Return the exception that says the same."""
        return BuildError(f"build of {self.key} failed: {self.message}", outcome=self.outcome, log=self.log)


Result: TypeAlias = "Artifact | Failure"


def from_entry(entry: Entry) -> Result:
    """Return what the entry of a store records.

    Raises:
        BuildError: The entry is from another version of cutegen and cannot be understood.
    """
    meta = entry.meta
    try:
        if meta["outcome"] != "ok":
            log = entry.folder / LOG
            text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
            return Failure(entry.key, str(meta["outcome"]), str(meta["message"]), text)
        return Artifact(
            key=entry.key,
            symbol=str(meta["symbol"]),
            arch=entry.arch,
            folder=entry.folder,
            resources=Resources.from_json(cast("Mapping[str, Json]", meta["resources"])),
            build_s=float(cast("float", meta["build_s"])),
            source_digest=str(meta["source_digest"]),
            toolchain=Toolchain.from_json(cast("Mapping[str, Json]", meta["toolchain"])),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BuildError(f"entry {entry.folder} is not an artifact of this version: {error!r}") from error


def gave_up_before(entry: Entry, timeout_s: float) -> bool:
    """Return whether ``entry`` records a compilation that was given less time than ``timeout_s`` seconds."""
    given = entry.meta.get("timeout_s")
    return entry.meta.get("outcome") == "timeout" and not (
        isinstance(given, (int, float)) and given >= timeout_s
    )
