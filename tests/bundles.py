"""Bundles to test with: kernels that were rendered but never compiled, and tar files taken apart."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cutegen.arch import find_arch
from cutegen.build import Artifact, Resources, Toolchain, about, artifact_key, from_entry, symbol_of
from cutegen.build.kernel_resources import KernelResources
from cutegen.build.render import Source, render
from cutegen.build.store import Store
from cutegen.digest import digest
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.tuning.transfer import write_candidates

ARCH = find_arch("sm_90a")
PROBLEM = Problem(256, 256, 256)
DEFAULT = find_space("gemm", ARCH).default(PROBLEM)
#: Two candidates, each a kernel of its own.
CANDIDATES = (DEFAULT, DEFAULT.replace(use_pdl=True))
HEAD = "manifest.json"


def publish(
    store: Store,
    source: Source,
    library: bytes = b"library",
    *,
    made_with: Toolchain | None = None,
    **meta: Any,
) -> Artifact:
    """Put what a builder would have put, with a library that is none; ``meta`` replaces what it records.

    ``made_with`` is the toolchain of this interpreter unless given.
    """
    toolchain = made_with or Toolchain.current()
    key = artifact_key(source, toolchain)
    artifact = Artifact(
        key=key,
        symbol=symbol_of(key, source.signature.family),
        arch=source.arch,
        folder=store.folder(source.arch, key),
        resources=Resources.of((KernelResources(8, threads=32, name="k"),)),
        build_s=0.5,
        source_digest=source.digest,
        toolchain=toolchain,
        recipe=source.recipe,
    )
    with store.lock(source.arch, key) as lock:
        folder = store.stage(lock)
        (folder / "kernel.py").write_text(source.text)
        (folder / "kernel.o").write_text("object")
        (folder / "kernel.so").write_bytes(library)
        store.publish(lock, {**about(source), **artifact.to_meta(), **meta})
    return artifact


def write_bundle(path: Path, store: Store, library: bytes = b"library") -> None:
    """Export the kernels of :data:`CANDIDATES` to ``path``."""
    keys = {config: publish(store, render(PROBLEM, config, ARCH), library).key for config in CANDIDATES}
    write_candidates(path, store, ARCH, Toolchain.current(), {PROBLEM: keys})


def unpack(path: Path) -> dict[str, bytes]:
    """Return the files of a tar by name, in its order."""
    with tarfile.open(path) as tar:
        return {member.name: (tar.extractfile(member) or io.BytesIO()).read() for member in tar}


def pack(path: Path, files: Mapping[str, bytes], *, rehash: bool = True) -> None:
    """Write ``files`` into the tar ``path``; the digests in its head are made to fit them."""
    files = dict(files)
    if rehash:
        head = json.loads(files[HEAD])
        for entry in head["entries"]:
            for name in entry["files"]:
                data = files.get(f"{entry['arch']}/{entry['key']}/{name}")
                if data is not None:
                    entry["files"][name] = digest(data, length=64)
        files[HEAD] = json.dumps(head).encode()
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def everything_in(root: Path) -> list[str]:
    """Return all that is below ``root``, folders, locks and hidden files included."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def stored(store: Store, key: str) -> Artifact:
    """Return the artifact of ``key``, which must be there."""
    entry = store.find(ARCH.name, key)
    assert entry is not None
    found = from_entry(entry)
    assert isinstance(found, Artifact)
    return found
