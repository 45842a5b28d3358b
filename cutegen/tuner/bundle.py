"""Compiled candidates carried between machines: built without a GPU, measured without a compiler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from cutegen import __version__
from cutegen.arch import Arch, find_arch
from cutegen.build import Artifact, Toolchain, artifact_key, export_bundle, import_bundle
from cutegen.build.artifact import from_entry
from cutegen.digest import Json
from cutegen.errors import BuildError, CutegenError, StoreError
from cutegen.problem import Problem
from cutegen.render import render
from cutegen.space import Config
from cutegen.store import Store
from cutegen.tuner.result import TuneResult
from cutegen.tuner.setting import Setting

__all__ = ["Imported", "export_candidates", "import_candidates", "write_candidates"]

_SCHEMA = 1


@dataclass(frozen=True)
class Imported:
    """What a bundle brought.

    Attributes:
        arch: The target of its candidates.
        toolchain: What compiled them; their keys depend on it.
        candidates: The configs for each problem, all of them compiled.
    """

    arch: Arch
    toolchain: Toolchain
    candidates: Mapping[Problem, tuple[Config, ...]]


def export_candidates(path: Path, setting: Setting, results: Iterable[TuneResult]) -> int:
    """Write the artifacts behind ``results`` into the tar file ``path`` and return how many there are.

    Raises:
        StoreError: An artifact is gone from the store, or the file cannot be written.
        BuildError: There is nothing to export.
    """
    compiled = {result.problem: {row.config: row.artifact_key for row in result.rows} for result in results}
    return write_candidates(path, setting.store, setting.arch, setting.toolchain, compiled)


def write_candidates(
    path: Path,
    store: Store,
    arch: Arch,
    toolchain: Toolchain,
    compiled: Mapping[Problem, Mapping[Config, str]],
) -> int:
    """Write artifacts of ``store`` into the tar file ``path`` and return how many there are.

    Args:
        path: The file.
        store: Where the artifacts are.
        arch: Their target.
        toolchain: What compiled them.
        compiled: The configs for each problem, with the key of the artifact of each.

    Raises:
        StoreError: An artifact is gone from the store, or the file cannot be written.
        BuildError: There is nothing to export.
    """
    keys = dict.fromkeys(key for configs in compiled.values() for key in configs.values())
    if not keys:
        raise BuildError("nothing compiled, so there is nothing to export")
    problems: list[Json] = []
    for problem, configs in compiled.items():
        rows: list[Json] = [{"config": config.to_json(), "key": key} for config, key in configs.items()]
        problems.append({"problem": str(problem), "candidates": rows})
    manifest: dict[str, Json] = {
        "schema": _SCHEMA,
        "cutegen": __version__,
        "arch": arch.name,
        "toolchain": toolchain.to_json(),
        "problems": problems,
    }
    export_bundle(path, store, [_stored(store, arch, key) for key in keys], manifest)
    return len(keys)


def _stored(store: Store, arch: Arch, key: str) -> Artifact:
    entry = store.find(arch.name, key)
    result = None if entry is None else from_entry(entry)
    if not isinstance(result, Artifact):
        raise StoreError(f"artifact {key} is gone from {store.root}; run the same command again")
    return result


def import_candidates(path: Path, store: Store) -> Imported:
    """Put the artifacts of the bundle ``path`` into ``store`` and return what can be measured with them.

    A bundle holds native code: import only what you trust.

    Raises:
        BuildError: The file is no such bundle, was changed, or was rendered from other templates.
        StoreError: It cannot be read, or the store cannot be written.
    """
    manifest, artifacts = import_bundle(path, store)
    imported = _understand(path, manifest)
    keys = {artifact.key for artifact in artifacts}
    for problem, configs in imported.candidates.items():
        for config in configs:
            source = render(problem, config, imported.arch)
            if artifact_key(source, imported.toolchain) not in keys:
                raise BuildError(
                    f"bundle {path} was made by cutegen {_maker(manifest)} with other templates than this "
                    f"{__version__}; export it again with this version"
                )
    return imported


def _maker(manifest: Json) -> str:
    return str(manifest.get("cutegen", "?")) if isinstance(manifest, Mapping) else "?"


def _understand(path: Path, manifest: Json) -> Imported:
    try:
        data = cast("Mapping[str, Any]", manifest)
        if data["schema"] != _SCHEMA:
            raise BuildError(f"bundle {path} has schema {data['schema']}; this version reads {_SCHEMA}")
        candidates = {
            Problem.parse(item["problem"]): tuple(Config.from_json(c["config"]) for c in item["candidates"])
            for item in data["problems"]
        }
        return Imported(find_arch(data["arch"]), Toolchain.from_json(data["toolchain"]), candidates)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, CutegenError):
            raise
        raise BuildError(f"bundle {path} holds no candidates of the tuner: {error!r}") from error
