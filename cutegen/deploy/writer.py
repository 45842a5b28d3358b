"""Write the deployment folder: table, rendered sources, libraries, manifest and loader, in one step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from cutegen import __version__
from cutegen.arch import Arch, find_arch
from cutegen.build import Artifact
from cutegen.build.toolchain import host_flags
from cutegen.deploy.described import call_of, describe, same_call, why_no_call
from cutegen.deploy.folder import SCHEMA, ready_place, replace_folder
from cutegen.deploy.manifest import FAMILY_CALLS, FIELDS, KERNELS, MANIFEST, TABLE, is_symbol
from cutegen.deploy.shipped_loader import LOADER, bytecode, family_calls_text, loader_text, sealed
from cutegen.digest import Json
from cutegen.dtypes import TORCH_DTYPES
from cutegen.errors import ArchError, CutegenError, PinError
from cutegen.families.declared import DeclaredProblem
from cutegen.families.gemm.problem import Problem as Gemm
from cutegen.families.registry import find_space, space_of
from cutegen.family import Problem
from cutegen.records.entry import ANY, Fingerprint
from cutegen.records.table import Table
from cutegen.runtime.dispatch import Answer, look_up
from cutegen.runtime.kernel_cache import Kernels
from cutegen.space import Launch

__all__ = ["Pinned", "pin_table"]


@dataclass(frozen=True)
class Pinned:
    """One problem of a deployment.

    Attributes:
        answer: What the table answered, and how.
        artifact: The kernel that ships; None where torch computes the problem.
        launch: Its scalars and workspace; None likewise.
    """

    answer: Answer
    artifact: Artifact | None
    launch: Launch | None


def pin_table(
    table: Path,
    out: Path,
    *,
    kernels: Kernels | None = None,
    problems: Iterable[Problem] = (),
    leave_out: Callable[[Problem, str], None] = lambda problem, why: None,
) -> tuple[Pinned, ...]:
    """Write the winners of ``table`` into the folder ``out``, ready to ship, and return them.

    The folder appears complete or not at all. An earlier deployment in its place is replaced, if it holds
    nothing but what was pinned into it; where ``out`` is a symbolic link, the folder that it names. Entries
    that no call can pose are left out if there are others.

    Args:
        table: A dispatch table.
        out: The folder.
        kernels: Where compiled kernels come from, and whether missing ones are compiled.
        problems: Further problems, answered from the table as a library call would be.
        leave_out: Told of each entry that is left out, and why.

    Raises:
        PinError: The table is empty or does not say for what, a kernel is not to be had, no call can pose one
            of ``problems`` or any entry, or ``out`` holds something else or cannot be written.
        StoreError: The table or the cache cannot be read.
        TableError: The table is malformed.
    """
    kernels = kernels or Kernels()
    source = Table.load(table)
    arch, sm_count = _target(source.fingerprint)
    asked = dict.fromkeys(problems)
    left_out = _left_out([*asked, *source.entries])
    wanted = [problem for problem in dict.fromkeys([*source.entries, *asked]) if problem not in left_out]
    for problem in [*asked] if wanted else [*asked, *left_out]:
        if problem in left_out:
            raise PinError(f"{problem} cannot be pinned: {left_out[problem]}")
    if not wanted:
        raise PinError(f"dispatch table {table} has no entries, so there is nothing to pin; tune first")
    try:
        place = ready_place(out)
        pinned = tuple(_pin(problem, source, arch, sm_count, kernels) for problem in wanted)
        replace_folder(place, out, _files(table, source.fingerprint, pinned))
    except CutegenError:
        raise
    except OSError as error:
        raise PinError(f"cannot write {out}: {error}") from error
    for problem, why in left_out.items():
        leave_out(problem, why)
    return pinned


def _left_out(problems: Iterable[Problem]) -> dict[Problem, str]:
    """Return the problems that no call of a deployment can pose, and why."""
    found: dict[Problem, str] = {}
    calls: dict[Hashable, Problem] = {}
    for problem in dict.fromkeys(problems):
        if isinstance(problem, DeclaredProblem):
            first = calls.setdefault(same_call(problem), problem)
            why = why_no_call(problem)
            why = why or (f"no call can tell it from {first}" if first is not problem else "")
        elif isinstance(problem, Gemm):
            known = problem.ab_dtype in TORCH_DTYPES
            why = "" if known else f"torch has no dtype {problem.ab_dtype}, so no call poses it"
        else:
            why = f"deployments hold GEMMs and declared families, and {problem.family} is neither"
        if why:
            found[problem] = why
    return found


def _target(fingerprint: Fingerprint) -> tuple[Arch, int]:
    """Return what the table's kernels run on."""
    name = f"sm_{fingerprint.compute_capability.replace('.', '')}"
    try:
        arch = find_arch(name)
    except ArchError as error:
        raise PinError(
            f"the table is for compute capability {fingerprint.compute_capability}: {error}"
        ) from error
    if isinstance(fingerprint.sm_count, int):
        return arch, fingerprint.sm_count
    return arch, arch.nominal_sm_count


def _pin(problem: Problem, table: Table, arch: Arch, sm_count: int, kernels: Kernels) -> Pinned:
    space = find_space(problem.family, arch)
    answer = look_up(table, problem, space, sm_count)
    entry = table.entries.get(problem)
    if entry is not None and entry.config is not None and answer.entry is not entry:
        # A call would take the next best answer; who pins winners wants to know.
        raise PinError(f"the winner of {problem} is not valid in this version: {entry.config}; tune again")
    if answer.config is None:
        return Pinned(answer, None, None)
    try:
        artifact = kernels.artifact(problem, answer.config, arch, known_key=answer.known_key)
    except CutegenError as error:
        raise PinError(f"no kernel to pin for {problem}: {error}") from error
    if not is_symbol(artifact.symbol):
        raise PinError(
            f"no kernel to pin for {problem}: the cache calls its function {artifact.symbol!r}, which is no "
            f"C identifier; remove {artifact.folder} and build it again"
        )
    here, measured = artifact.toolchain.compiler_version, table.fingerprint.cutlass_dsl
    if measured not in (ANY, here):
        raise PinError(
            f"the kernel that was measured for {problem} is not in the cache; it was compiled by "
            f"nvidia-cutlass-dsl {measured}, and {here} would make another; tune again"
        )
    launch = space_of(answer.config, problem.family, arch).launch(answer.config, problem, sm_count)
    return Pinned(answer, artifact, launch)


# --- the folder ---


def _files(table: Path, fingerprint: Fingerprint, pinned: tuple[Pinned, ...]) -> dict[str, bytes]:
    """Return the contents of the folder by name: the manifest first, the loader and its bytecode last."""
    listed = {TABLE: table.read_bytes()}
    for artifact in (item.artifact for item in pinned if item.artifact is not None):
        for name, path in (
            (_library(artifact), artifact.shared_object),
            (_source(artifact), artifact.source),
        ):
            data = path.read_bytes()
            if listed.setdefault(name, data) != data:
                raise PinError(
                    f"two kernels of the cache are both called {artifact.symbol}; build them again"
                )
    families = _families(pinned)
    parts = {}
    if families:
        listed[FAMILY_CALLS] = family_calls_text()
        parts = bytecode(listed[FAMILY_CALLS], FAMILY_CALLS)
    hosts = {item.artifact.toolchain.host for item in pinned if item.artifact is not None}
    loader = loader_text()
    manifest: dict[str, Json] = {
        "schema": SCHEMA,
        "cutegen": __version__,
        "gpu": _gpu(fingerprint),
        "cpu_flags": sorted(frozenset().union(*(host_flags(host) for host in hosts))),
        "kernels": [_record(item) for item in pinned if isinstance(item.answer.problem, Gemm)],
        "families": families,
        "loader": _sha256(loader),
        "files": {name: _sha256(data) for name, data in sorted(listed.items())},
    }
    text = (json.dumps(manifest, indent=1) + "\n").encode()
    own = sealed(loader, text)
    return {MANIFEST: text, **listed, **parts, LOADER: own, **bytecode(own)}


def _families(pinned: tuple[Pinned, ...]) -> dict[str, Json]:
    """Return what the manifest says of declared families, by name."""
    found: dict[str, dict[str, Json]] = {}
    for item in pinned:
        problem = item.answer.problem
        if isinstance(problem, DeclaredProblem):
            family = found.setdefault(problem.family, {**describe(problem.declared), "kernels": []})
            cast("list[Json]", family["kernels"]).append(_record(item))
    return dict(found)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _gpu(fingerprint: Fingerprint) -> dict[str, Json]:
    capability = fingerprint.compute_capability.rstrip("abcdefghijklmnopqrstuvwxyz")
    return {
        "gpu_name": fingerprint.gpu_name,
        "compute_capability": capability,
        "sm_count": fingerprint.sm_count,
    }


def _record(item: Pinned) -> dict[str, Json]:
    answer, artifact, launch = item.answer, item.artifact, item.launch
    return {
        "problem": str(answer.problem),
        "how": answer.how,
        "config": None if answer.config is None else str(answer.config),
        **_call(answer.problem),
        "symbol": artifact.symbol if artifact else "",
        "library": _library(artifact) if artifact else "",
        "source": _source(artifact) if artifact else "",
        "scalars": list(launch.scalars) if launch else [],
        "workspace_bytes": launch.workspace_bytes if launch else 0,
        "zeroed": launch.zeroed if launch else False,
    }


def _call(problem: Problem) -> dict[str, Json]:
    """Return what the loader looks a call up by."""
    return call_of(problem) if isinstance(problem, DeclaredProblem) else {"key": _key(problem)}


def _key(problem: Problem) -> list[Json]:
    """What the loader looks a GEMM up by, in the order of its FIELDS."""
    signature = problem.signature  # its layout has the letters that manifests have had since version 0.1
    places = (signature, problem, getattr(problem, "epilogue", None))
    values: list[Any] = [
        next(getattr(place, name) for place in places if hasattr(place, name)) for name in FIELDS
    ]
    return values


def _library(artifact: Artifact) -> str:
    return f"{KERNELS}/{artifact.symbol}.so"


def _source(artifact: Artifact) -> str:
    return f"{KERNELS}/{artifact.symbol}.py"
