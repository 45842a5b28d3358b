"""The loader that ships: one file made of several modules, sealed with the SHA-256 of its manifest.

What it needs for ranges, and for kernels that are no GEMMs, are files of their own, which it runs in its
own names. Loader and manifest vouch for each other: the loader holds the digest of the manifest, and the
manifest that of the loader before the first was written in.
"""

from __future__ import annotations

import hashlib
import importlib.util
import py_compile
import re
import tempfile
from pathlib import Path

from cutegen.deploy.manifest import LOADER, MANIFEST

__all__ = ["LOADER", "bytecode", "changed_of_pair", "loader_text", "part_text", "sealed"]

_PART = re.compile(r"^from cutegen\.deploy\.(\w+) import (?:\([^)]*\)|[^\n]*)\n", re.MULTILINE)
_SEAL = b'MANIFEST_SHA256 = "%s"'
_SEALED = re.compile(_SEAL % b"[0-9a-f]{64}")


def loader_text() -> bytes:
    """Return the loader with what it imports from this package in the place of the imports."""
    folder = Path(__file__).parent

    def part(found: re.Match[str]) -> str:
        text = (folder / f"{found[1]}.py").read_text(encoding="utf-8")
        return _PART.sub("", text).replace("from __future__ import annotations\n", "")

    text = _PART.sub(part, (folder / LOADER).read_text(encoding="utf-8")).encode()
    assert text.count(_SEAL % b"") == 1
    return text


def part_text(name: str) -> bytes:
    """Return a further file of the loader, without the imports of what the loader defines."""
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    return _PART.sub("", text).encode()


def sealed(loader: bytes, manifest: bytes) -> bytes:
    """Return the text of a loader that accepts this manifest and no other."""
    return loader.replace(_SEAL % b"", _SEAL % hashlib.sha256(manifest).hexdigest().encode())


def bytecode(text: bytes, name: str = LOADER) -> dict[str, bytes]:
    """Return the compiled form of a source by the name under which this version of Python looks for it.

    Compiling takes longer than a first call should. Python uses it only for exactly this source, whose hash
    it checks (PEP 552); another version of Python compiles the source itself.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, compiled = Path(folder, name), Path(folder, "compiled")
        source.write_bytes(text)
        py_compile.compile(
            str(source),
            cfile=str(compiled),
            dfile=name,
            doraise=True,
            invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH,
        )
        return {importlib.util.cache_from_source(name): compiled.read_bytes()}


def changed_of_pair(folder: Path, loader_digest: str) -> list[str]:
    """Return which of a folder's loader and manifest is missing or not as it was.

    Args:
        folder: A deployment.
        loader_digest: What its manifest says of the loader.

    Raises:
        OSError: They cannot be read.
    """
    try:
        text = (folder / LOADER).read_bytes()
    except FileNotFoundError:
        return [LOADER]
    plain = _SEALED.sub(_SEAL % b"", text, count=1)
    if hashlib.sha256(plain).hexdigest() != loader_digest:
        return [LOADER]
    return [] if sealed(plain, (folder / MANIFEST).read_bytes()) == text else [MANIFEST]
