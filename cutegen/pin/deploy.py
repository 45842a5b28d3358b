"""Write the deployment folder: table, rendered sources, libraries, manifest and loader, in one step."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cutegen import __version__
from cutegen.arch import Arch, find_arch
from cutegen.build import Artifact
from cutegen.build.toolchain import host_flags
from cutegen.catalog import find_space, space_of
from cutegen.digest import Json
from cutegen.dispatch import Answer, look_up
from cutegen.entry import ANY, Fingerprint
from cutegen.errors import ArchError, CutegenError, PinError
from cutegen.kernels import Kernels
from cutegen.operands import TORCH_DTYPES
from cutegen.pin.pinned import FIELDS
from cutegen.problem import Problem
from cutegen.space import Launch
from cutegen.store import file_digest
from cutegen.table import Table

__all__ = ["Pinned", "pin_table"]

SCHEMA = 1
LOADER = Path(__file__).with_name("pinned.py")
_MANIFEST, _TABLE, _KERNELS = "manifest.json", "table.json", "kernels"


@dataclass(frozen=True)
class Pinned:
    """One problem of a deployment.

    Attributes:
        answer: What the table answered, and how.
        artifact: The kernel that ships; None where torch computes the product.
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

    The folder appears complete or not at all; an earlier deployment in its place is replaced. Entries that no
    call can pose are left out if there are others.

    Args:
        table: A dispatch table.
        out: The folder.
        kernels: Where compiled kernels come from, and whether missing ones are compiled.
        problems: Further problems, answered from the table as a library call would be.
        leave_out: Told of each entry that is left out, and why.

    Raises:
        PinError: The table is empty or does not say for what, a kernel is not to be had, no call can pose one
            of ``problems`` or any entry, or ``out`` holds something else.
        StoreError: The table or the cache cannot be read.
        TableError: The table is malformed.
    """
    kernels = kernels or Kernels()
    source = Table.load(table)
    arch, sm_count = _target(source.fingerprint)
    posed = [problem for problem in source.entries if not _why_no_call(problem)]
    wanted = dict.fromkeys([*posed, *problems]) or dict.fromkeys(source.entries)
    if not wanted:
        raise PinError(f"dispatch table {table} has no entries, so there is nothing to pin; tune first")
    _check_place(out)
    pinned = tuple(_pin(problem, source, arch, sm_count, kernels) for problem in wanted)
    staged = out.with_name(f".{out.name}.{uuid.uuid4().hex[:12]}")
    try:
        _write(staged, table, source.fingerprint, pinned)
        _swap(staged, out)
    except OSError as error:
        raise PinError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    for problem in source.entries:
        if problem not in wanted:
            leave_out(problem, _why_no_call(problem))
    return pinned


def _why_no_call(problem: Problem) -> str:
    """Return why no call can pose ``problem``; empty if one can."""
    if problem.ab_dtype in TORCH_DTYPES:
        return ""
    return f"torch has no dtype {problem.ab_dtype}, so no call poses it"


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
    if why := _why_no_call(problem):
        raise PinError(f"{problem} cannot be pinned: {why}")
    space = find_space(problem.family, arch)
    answer = look_up(table, problem, space, sm_count)
    entry = table.entries.get(problem)
    if entry is not None and entry.config is not None and answer.entry is not entry:
        # A call would take the next best answer; who pins winners wants to know.
        raise PinError(f"the winner of {problem} is not legal in this version: {entry.config}; tune again")
    if answer.config is None:
        return Pinned(answer, None, None)
    try:
        artifact = kernels.artifact(problem, answer.config, arch, known_key=answer.known_key)
    except CutegenError as error:
        raise PinError(f"no kernel to pin for {problem}: {error}") from error
    here, measured = artifact.toolchain.compiler_version, table.fingerprint.cutlass_dsl
    if measured not in (ANY, here):
        raise PinError(
            f"the kernel that was measured for {problem} is not in the cache; it was compiled by "
            f"nvidia-cutlass-dsl {measured}, and {here} would make another; tune again"
        )
    launch = space_of(answer.config, problem.family, arch).launch(answer.config, problem, sm_count)
    return Pinned(answer, artifact, launch)


# --- the folder ---


def _check_place(out: Path) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    with suppress(OSError, ValueError):
        if "kernels" in json.loads((out / _MANIFEST).read_bytes()):
            return
    raise PinError(f"{out} exists and is no deployment; name a new or empty folder")


def _write(folder: Path, table: Path, fingerprint: Fingerprint, pinned: tuple[Pinned, ...]) -> None:
    (folder / _KERNELS).mkdir(parents=True)
    shutil.copyfile(table, folder / _TABLE)
    for item in pinned:
        if item.artifact is not None:
            shutil.copyfile(item.artifact.shared_object, folder / _library(item.artifact))
            shutil.copyfile(item.artifact.source, folder / _source(item.artifact))
    files = {
        path.relative_to(folder).as_posix(): file_digest(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    hosts = {item.artifact.toolchain.host for item in pinned if item.artifact is not None}
    flags = sorted(frozenset().union(*(host_flags(host) for host in hosts)))
    manifest: dict[str, Json] = {
        "schema": SCHEMA,
        "cutegen": __version__,
        "gpu": _gpu(fingerprint),
        "cpu_flags": list(flags),
        "kernels": [_record(item) for item in pinned],
        "files": dict(files),
    }
    text = json.dumps(manifest, indent=1) + "\n"
    (folder / _MANIFEST).write_text(text, encoding="utf-8")
    loader = LOADER.read_text(encoding="utf-8")
    empty = 'MANIFEST_SHA256 = ""'
    assert loader.count(empty) == 1
    loader = loader.replace(empty, f'MANIFEST_SHA256 = "{file_digest(folder / _MANIFEST)}"')
    (folder / LOADER.name).write_text(loader, encoding="utf-8")


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
        "key": _key(answer.problem),
        "symbol": artifact.symbol if artifact else "",
        "library": _library(artifact) if artifact else "",
        "source": _source(artifact) if artifact else "",
        "scalars": list(launch.scalars) if launch else [],
        "workspace_bytes": launch.workspace_bytes if launch else 0,
        "zeroed": launch.zeroed if launch else False,
    }


def _key(problem: Problem) -> list[Json]:
    """What the loader looks a call up by, in the order of its FIELDS."""
    values: list[Any] = [
        getattr(problem if hasattr(problem, name) else problem.epilogue, name) for name in FIELDS
    ]
    return values


def _library(artifact: Artifact) -> str:
    return f"{_KERNELS}/{artifact.symbol}.so"


def _source(artifact: Artifact) -> str:
    return f"{_KERNELS}/{artifact.symbol}.py"


def _swap(staged: Path, out: Path) -> None:
    """Put ``staged`` in the place of ``out``."""
    out.parent.mkdir(parents=True, exist_ok=True)
    old = staged.with_name(f"{staged.name}.old")
    if out.exists():
        out.rename(old)
    staged.rename(out)
    shutil.rmtree(old, ignore_errors=True)
