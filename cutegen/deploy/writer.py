"""Write the deployment folder: table, rendered sources, libraries, manifest and loader, in one step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from cutegen import __version__
from cutegen.arch import Arch
from cutegen.build import Artifact
from cutegen.build.toolchain import host_flags
from cutegen.deploy.cpp_library import build_library, tables_text
from cutegen.deploy.described import call_of, describe, same_call, why_no_call
from cutegen.deploy.folder import SCHEMA, ready_place, replace_folder
from cutegen.deploy.manifest import (
    CPP_LIBRARY,
    FAMILY_CALLS,
    FIELDS,
    KERNELS,
    MANIFEST,
    OUTSIDE,
    RANGE_LOOKUP,
    TABLE,
    TRACED,
)
from cutegen.deploy.selection import PINNED_FALLBACKS, Pinned, PinnedRange, Selection, require_countable
from cutegen.deploy.shipped_loader import LOADER, bytecode, loader_text, part_text, sealed
from cutegen.digest import Json
from cutegen.dtypes import TORCH_DTYPES
from cutegen.errors import CutegenError, PinError, UsageError
from cutegen.families.declared import DeclaredFamily, DeclaredProblem
from cutegen.families.gemm.problem import Problem as Gemm
from cutegen.families.ranges import Range
from cutegen.family import Problem
from cutegen.records.entry import Fingerprint
from cutegen.records.table import Table
from cutegen.runtime.kernel_cache import Kernels
from cutegen.space import Launch
from cutegen.text import shown

__all__ = ["Pinned", "PinnedRange", "pin_table"]


def pin_table(
    table: Path,
    out: Path,
    *,
    kernels: Kernels | None = None,
    problems: Iterable[Problem | Range] = (),
    outside: str = "none",
    fallback: str = "none",
    cpp: bool = False,
    whole_table: bool = True,
    leave_out: Callable[[Problem | Range, str], None] = lambda problem, why: None,
    arch: Arch | None = None,
) -> tuple[Pinned | PinnedRange, ...]:
    """Write the winners of ``table`` into the folder ``out``, ready to ship, and return them.

    The folder appears complete or not at all. An earlier deployment in its place is replaced, if it holds
    nothing but what was pinned into it; where ``out`` is a symbolic link, the folder that it names. Entries
    that no call can pose are left out if there are others.

    Args:
        table: A dispatch table.
        out: The folder.
        kernels: Where compiled kernels come from, and whether missing ones are compiled.
        problems: Further problems, answered from the table as a library call would be; so is every size of a
            range among them. Ranges of the table are pinned anyway.
        outside: What answers a call that is not pinned: ``none`` refuses it, ``torch`` computes a plain
            GEMM.
        fallback: What answers a plain GEMM that a table's entry or range holds: ``none`` its kernel,
            ``measured`` torch, where that was measured to be faster.
        cpp: Whether the folder also gets ``libcutegen_ops.so``, for C++ programs and packages of AOTInductor:
            the GEMMs as the operator ``cutegen_pinned::gemm`` in torch's stable ABI.
        whole_table: Whether everything that the table answers is pinned, or ``problems`` alone.
        leave_out: Told of each entry or range that is left out, and why.
        arch: The target; needed where the table is for any compute capability.

    Raises:
        PinError: The table is empty, does not say for what, or is for another target or version of cutegen; a
            kernel is not to be had; no call can pose one of ``problems`` or any entry; ``out`` holds
            something else or cannot be written; or the C++ library cannot be built.
        UsageError: There is no such ``outside`` or ``fallback``.
        StoreError: The table or the cache cannot be read.
        TableError: The table is malformed.
    """
    if outside not in OUTSIDE:
        raise UsageError(f"outside is {shown(outside)}; valid: {', '.join(OUTSIDE)}")
    if fallback not in PINNED_FALLBACKS:
        raise UsageError(f"fallback is {shown(fallback)}; valid: {', '.join(PINNED_FALLBACKS)}")
    source = Table.load(table)
    selection = Selection(source, kernels or Kernels(), fallback, arch)
    wanted, left_out = _wanted(source, problems, whole_table=whole_table)
    if not wanted:
        raise PinError(f"dispatch table {table} has no entries, so there is nothing to pin; tune first")
    try:
        place = ready_place(out)
        pinned = tuple(
            selection.range(problem) if isinstance(problem, Range) else selection.problem(problem)
            for problem in wanted
        )
        replace_folder(
            place, out, _files(table, _gpu(source.fingerprint, selection.arch), pinned, outside, cpp=cpp)
        )
    except CutegenError:
        raise
    except OSError as error:
        raise PinError(f"cannot write {out}: {error.strerror or error}{_place(error)}") from error
    for problem, why in left_out.items():
        leave_out(problem, why)
    return pinned


def _place(error: OSError) -> str:
    """Return which file the system refused, where it says so: it may be one of the cache."""
    return "" if error.filename is None else f" ({error.filename})"


def _wanted(
    table: Table, problems: Iterable[Problem | Range], *, whole_table: bool
) -> tuple[list[Problem | Range], dict[Problem | Range, str]]:
    """Return what is to be pinned, and which entries of the table are left out, and why."""
    asked: dict[Problem | Range, None] = dict.fromkeys(problems)
    held = [entry.range for entry in table.ranges if not _is_within(entry.range, asked)]
    known: list[Problem | Range] = [*table.entries, *held] if whole_table else []
    left_out = _left_out([*asked, *known])
    wanted = [problem for problem in dict.fromkeys([*known, *asked]) if problem not in left_out]
    for problem in [*asked] if wanted else [*asked, *left_out]:
        if problem in left_out:
            raise PinError(f"{problem} cannot be pinned: {left_out[problem]}")
    for item in wanted:
        if isinstance(item, Range):
            require_countable(item)
    return wanted, left_out


def _is_within(of: Range, others: Iterable[Problem | Range]) -> bool:
    return any(
        isinstance(other, Range) and other != of and of.low in other and of.high in other for other in others
    )


def _left_out(problems: Iterable[Problem | Range]) -> dict[Problem | Range, str]:
    """Return the problems that no call of a deployment can pose, and why; of a range its first one tells."""
    found: dict[Problem | Range, str] = {}
    calls: dict[Hashable, Problem | Range] = {}
    for item in dict.fromkeys(problems):
        problem = item.low if isinstance(item, Range) else item
        if isinstance(problem, DeclaredProblem):
            more = (item.size, item.last) if isinstance(item, Range) else ()
            first = calls.setdefault((same_call(problem), more), item)
            why = why_no_call(problem)
            why = why or (f"no call can tell it from {first}" if first is not item else "")
        elif isinstance(problem, Gemm):
            known = problem.ab_dtype in TORCH_DTYPES
            why = "" if known else f"torch has no dtype {problem.ab_dtype}, so no call poses it"
            why = "gemm() of a deployment takes no factors of blocks" if problem.has_factors else why
        else:
            why = f"deployments hold GEMMs and declared families, and {problem.family} is neither"
        if why:
            found[item] = why
    return found


# --- the folder ---


def _files(
    table: Path,
    gpu: Mapping[str, Json],
    pinned: Sequence[Pinned | PinnedRange],
    outside: str,
    *,
    cpp: bool,
) -> dict[str, bytes]:
    """Return the contents of the folder by name: the manifest first, the loader and its bytecode last."""
    every = [each for item in pinned for each in (item.pinned if isinstance(item, PinnedRange) else [item])]
    artifacts = [item.artifact for item in every if item.artifact is not None]
    families = _families(pinned)
    parts = _loader_parts(pinned, with_families=bool(families))
    listed = {TABLE: table.read_bytes(), **_kernel_files(artifacts), **parts}
    hosts = {artifact.toolchain.host for artifact in artifacts}
    loader = loader_text()
    manifest: dict[str, Json] = {
        "schema": SCHEMA,
        "cutegen": __version__,
        "gpu": {**gpu},
        "cpu_flags": sorted(frozenset().union(*(host_flags(host) for host in hosts))),
        **_lists([item for item in pinned if isinstance(_first(item), Gemm)]),
        "outside": outside,
        "families": families,
        "loader": _sha256(loader),
    }
    if cpp:
        objects = {artifact.symbol: artifact.object for artifact in artifacts}
        listed[CPP_LIBRARY] = build_library(_called(manifest, objects), tables_text(manifest))
    manifest["files"] = {name: _sha256(data) for name, data in sorted(listed.items())}
    text = (json.dumps(manifest, indent=1) + "\n").encode()
    own = sealed(loader, text)
    compiled: dict[str, bytes] = {}
    for name, part in parts.items():
        if name != TRACED:  # who traces waits for seconds anyway
            compiled |= bytecode(part, name)
    return {MANIFEST: text, **listed, **compiled, LOADER: own, **bytecode(own)}


def _kernel_files(artifacts: Iterable[Artifact]) -> dict[str, bytes]:
    """Return the libraries and sources of kernels by name.

    Raises:
        PinError: Two kernels have one name.
    """
    found: dict[str, bytes] = {}
    for artifact in artifacts:
        library, source = artifact.shared_object.read_bytes(), artifact.source.read_bytes()
        same_library = found.setdefault(_library(artifact), library) == library
        same_source = found.setdefault(_source(artifact), source) == source
        # Several texts may be traced to one kernel, which ships with one of them.
        if not (same_library and (same_source or artifact.trace)):
            raise PinError(f"two kernels of the cache are both called {artifact.symbol}; build them again")
    return found


def _loader_parts(pinned: Sequence[Pinned | PinnedRange], *, with_families: bool) -> dict[str, bytes]:
    """Return the files that the loader runs for some calls, as far as there are such calls."""
    needed = {
        FAMILY_CALLS: with_families,
        RANGE_LOOKUP: any(isinstance(item, PinnedRange) for item in pinned),
        TRACED: bool(pinned),
    }
    return {name: part_text(name) for name, wanted in needed.items() if wanted}


def _called(manifest: Mapping[str, Any], objects: Mapping[str, Path]) -> dict[str, Path]:
    """Return the object files of the kernels of GEMMs.

    Raises:
        PinError: One is missing: the cache has the library alone.
    """
    kernels = [k for record in manifest["ranges"] for k in record["kernels"]] + manifest["kernels"]
    found = {kernel["symbol"]: objects[kernel["symbol"]] for kernel in kernels if kernel["symbol"]}
    for symbol, path in found.items():
        if not path.is_file():
            raise PinError(f"{path}, the object file of {symbol}, is missing in the cache; build it again")
    return found


def _families(pinned: Sequence[Pinned | PinnedRange]) -> dict[str, Json]:
    """Return what the manifest says of declared families, by name."""
    found: dict[DeclaredFamily, list[Pinned | PinnedRange]] = {}
    for item in pinned:
        problem = _first(item)
        if isinstance(problem, DeclaredProblem):
            found.setdefault(problem.declared, []).append(item)
    return {family.name: {**describe(family), **_lists(items)} for family, items in found.items()}


def _lists(pinned: Sequence[Pinned | PinnedRange]) -> dict[str, Json]:
    """Return what the manifest says of the problems and ranges of one family."""
    return {
        "kernels": [_record(item) for item in pinned if isinstance(item, Pinned)],
        "ranges": [_range(item) for item in pinned if isinstance(item, PinnedRange)],
    }


def _first(item: Pinned | PinnedRange) -> Problem:
    return item.range.low if isinstance(item, PinnedRange) else item.answer.problem


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _gpu(fingerprint: Fingerprint, arch: Arch) -> dict[str, Json]:
    return {
        "gpu_name": fingerprint.gpu_name,
        "compute_capability": ".".join(map(str, arch.compute_capability)),
        "sm_count": fingerprint.sm_count,
    }


def _record(item: Pinned) -> dict[str, Json]:
    answer, launch = item.answer, item.launch
    return {
        "problem": str(answer.problem),
        "how": answer.how,
        **_call(answer.problem),
        **_kernel(item),
        "scalars": list(launch.scalars) if launch else [],
        "workspace_bytes": launch.workspace_bytes if launch else 0,
        "zeroed": launch.zeroed if launch else False,
    }


def _range(item: PinnedRange) -> dict[str, Json]:
    """Return what the loader finds the kernel and the integers of each size of a range by."""
    shipped = [_kernel(step.pinned) for step in item.steps if step.pinned is not None]
    kernels = {(str(kernel["symbol"]), str(kernel["config"])): kernel for kernel in shipped}
    call = _call(item.range.low)
    sizes = [*FIELDS] if "key" in call else [*item.range.low.sizes]
    values = cast("list[Json]", call["key" if "key" in call else "sizes"])
    values[sizes.index(item.range.size)] = None
    steps: list[Json] = []
    for step in item.steps:
        if step.pinned is None:
            steps.append([step.last, None, 0, False, []])
            continue
        launch = step.pinned.launch or Launch((), 0)
        kernel = _kernel(step.pinned)
        at = [*kernels].index((str(kernel["symbol"]), str(kernel["config"])))
        steps.append([step.last, at, launch.workspace_bytes, launch.zeroed, list(launch.scalars)])
    return {
        "problem": str(item.range),
        **call,
        "size": item.range.size,
        "first": item.range.first,
        "multiple_of": item.multiple_of,
        "kernels": cast("list[Json]", [*kernels.values()]),
        "steps": steps,
    }


def _kernel(item: Pinned) -> dict[str, Json]:
    artifact = item.artifact
    return {
        "config": None if item.answer.config is None else str(item.answer.config),
        "symbol": artifact.symbol if artifact else "",
        "library": _library(artifact) if artifact else "",
        "source": _source(artifact) if artifact else "",
    }


def _call(problem: Problem) -> dict[str, Json]:
    """Return what the loader looks a call up by."""
    return call_of(problem) if isinstance(problem, DeclaredProblem) else {"key": _key(problem)}


def _key(problem: Problem) -> list[Json]:
    """What the loader looks a GEMM up by, in the order of its FIELDS."""
    signature = problem.signature  # its layout has the letters that manifests have always had
    places = (signature, problem, getattr(problem, "epilogue", None))
    values: list[Any] = [
        next(getattr(place, name) for place in places if hasattr(place, name)) for name in FIELDS
    ]
    return values


def _library(artifact: Artifact) -> str:
    return f"{KERNELS}/{artifact.symbol}.so"


def _source(artifact: Artifact) -> str:
    return f"{KERNELS}/{artifact.symbol}.py"
