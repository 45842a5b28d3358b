"""The result of compiling a source: an artifact with its resources, or a failure with its reason."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from cutegen.build.kernel_resources import LARGEST_COUNT, Resources
from cutegen.build.store import LIBRARY, Store, StoredEntry
from cutegen.build.toolchain import Toolchain, is_artifact_key, key_of
from cutegen.digest import Json
from cutegen.errors import BuildError, StoreError
from cutegen.text import shown

if TYPE_CHECKING:
    from cutegen.build.render import Source

__all__ = [
    "Artifact",
    "Failure",
    "Result",
    "about",
    "find_result",
    "from_entry",
    "require_written",
]

#: Files of an entry beside :data:`~cutegen.build.store.LIBRARY`.
SOURCE, OBJECT, LOG = "kernel.py", "kernel.o", "log.txt"
#: How a build can fail.
FAILURES = ("error", "abort", "timeout", "rejected")
_SYMBOL = re.compile(r"cutegen_[a-z0-9_]+")


@dataclass(frozen=True)
class Artifact:
    """A compiled kernel in the store.

    Attributes:
        key: Its name in the store.
        symbol: The function's name in the library.
        arch: The architecture it was compiled for.
        folder: Where its files are.
        resources: Registers, shared memory and so on.
        build_s: Seconds that compiling, exporting and linking took.
        source_digest: The digest of its source text.
        toolchain: What compiled it.
        recipe: The recipe of its source (see :func:`~cutegen.build.render.recipe_of`); empty if not known.
        trace: Names the kernel that a user's code was traced to, which other sources may share; else empty.
        sm_count: Number of multiprocessors that a user's code was given and may have compiled in; else 0.
    """

    key: str
    symbol: str
    arch: str
    folder: Path
    resources: Resources
    build_s: float
    source_digest: str
    toolchain: Toolchain
    recipe: str = ""
    trace: str = ""
    sm_count: int = 0

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

    def to_meta(self) -> dict[str, Json]:
        """Return what ``meta.json`` says about it, beside :func:`about`, that :func:`from_entry` reads."""
        return {
            "outcome": "ok",
            "message": "",
            "symbol": self.symbol,
            "source_digest": self.source_digest,
            "toolchain": self.toolchain.to_json(),
            "resources": self.resources.to_json(),
            "build_s": self.build_s,
        }


@dataclass(frozen=True)
class Failure:
    """A source that did not become an artifact.

    Attributes:
        key: Its name in the store.
        outcome: ``error`` (the compiler refused), ``abort`` (it died), ``timeout``, ``rejected``
            (compiled, but no GPU of that architecture could launch it), or ``store`` (the store could not be
            written).
        message: The reason on one line.
        log: All that the compiler said, without colour codes.
        limit_s: Seconds that it was given.
        again: Whether the source is not to blame, so that another try may succeed: memory or disk was full.
    """

    key: str
    outcome: str
    message: str
    log: str
    limit_s: float = 0.0
    again: bool = False

    def stands(self, limit_s: float) -> bool:
        """Return whether a limit of ``limit_s`` seconds would change nothing: a time-out may need more."""
        return self.outcome != "timeout" or self.limit_s >= limit_s

    @property
    def unwritten(self) -> bool:
        """Whether the store could not be written, which would end other builds in the same way."""
        return self.outcome == "store"

    def error(self) -> BuildError | StoreError:
        """Return the exception that says the same."""
        if self.unwritten:
            return StoreError(self.message)
        return BuildError(f"build of {self.key} failed: {self.message}", outcome=self.outcome, log=self.log)


Result: TypeAlias = "Artifact | Failure"


def require_written(results: Iterable[tuple[Source, Result]]) -> list[tuple[Source, Result]]:
    """Return ``results`` if the store could be written.

    Raises:
        StoreError: It could not; the message is that of the first.
    """
    found = list(results)
    for _, result in found:
        if isinstance(result, Failure) and result.unwritten:
            raise result.error()
    return found


def about(source: Source) -> dict[str, Json]:
    """Return what ``meta.json`` says about where an artifact comes from, beside its digest."""
    signature = asdict(source.signature)
    return {"config": source.config.to_json(), "signature": signature, "recipe": source.recipe}


def from_entry(entry: StoredEntry) -> Result:
    """Return what the entry of a store records.

    Raises:
        BuildError: Its ``meta.json`` is not of this version's form, or not that of its key.
    """
    try:
        return _failure(entry) if entry.meta["outcome"] != "ok" else _artifact(entry)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise BuildError(
            f"entry {entry.folder} is not an artifact of this version: {shown(error)}"
        ) from error


def find_result(store: Store, arch: str, key: str) -> Result | None:
    """Return what ``store`` has under ``key``, or None; an entry that cannot be understood is set aside.

    Raises:
        StoreError: The store cannot be read.
    """
    entry = store.find(arch, key)
    try:
        return None if entry is None else from_entry(entry)
    except BuildError:
        with suppress(StoreError):  # a cache that is only read keeps it
            store.set_aside(arch, key)
        return None


def _failure(entry: StoredEntry) -> Failure:
    meta, log = entry.meta, ""
    outcome = _text(meta, "outcome")
    if outcome not in FAILURES:
        raise ValueError(f"outcome is {shown(outcome)}; valid: ok, {', '.join(FAILURES)}")
    with suppress(OSError):  # only some failures have one
        log = (entry.folder / LOG).read_text(encoding="utf-8", errors="replace")
    limit_s = _seconds(meta, "timeout_s") if outcome == "timeout" else 0.0
    return Failure(entry.key, outcome, _text(meta, "message"), log, limit_s)


def _artifact(entry: StoredEntry) -> Artifact:
    meta = entry.meta
    resources = meta["resources"]
    if not isinstance(resources, Mapping):
        raise TypeError(f"resources is {shown(resources)}, not an object")
    artifact = Artifact(
        key=entry.key,
        symbol=_text(meta, "symbol"),
        arch=entry.arch,
        folder=entry.folder,
        resources=Resources.from_json(resources),
        build_s=_seconds(meta, "build_s"),
        source_digest=_text(meta, "source_digest"),
        toolchain=Toolchain.from_json(cast("Mapping[str, Json]", meta["toolchain"])),
        recipe=_text(meta, "recipe") if "recipe" in meta else "",
        trace=_text(meta, "trace") if "trace" in meta else "",
        sm_count=_sm_count(meta),
    )
    if key_of(artifact.source_digest, artifact.arch, artifact.toolchain) != artifact.key:
        raise ValueError("its key is not that of its source, target and toolchain")
    # It becomes a file name when the kernel is pinned.
    compiled_as = _text(meta, "same_as") if "same_as" in meta else artifact.key
    if not is_artifact_key(compiled_as):
        raise ValueError(f"same_as is {shown(compiled_as)}, which is no key")
    if not _SYMBOL.fullmatch(artifact.symbol) or not artifact.symbol.endswith(f"_{compiled_as[:12]}"):
        raise ValueError(f"symbol is {shown(artifact.symbol)}, which is not that of its key")
    return artifact


def _sm_count(meta: Mapping[str, Json]) -> int:
    facts = meta.get("facts") or {}
    count = facts.get("sm_count", 0) if isinstance(facts, Mapping) else None
    if type(count) is not int or not 0 <= count <= LARGEST_COUNT:
        raise TypeError(f"facts are {shown(facts)}, not counts")
    return count


def _text(meta: Mapping[str, Json], name: str) -> str:
    value = meta[name]
    if not isinstance(value, str):
        raise TypeError(f"{name} is {shown(value)}, not text")
    return value


def _seconds(meta: Mapping[str, Json], name: str) -> float:
    value = meta[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= LARGEST_COUNT:
        raise TypeError(f"{name} is {shown(value)}, not a number of seconds")
    return float(value)
