"""Compiled candidates carried between machines: built without a GPU, measured without a compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from cutegen import __version__
from cutegen.arch import Arch, find_arch
from cutegen.build import (
    Artifact,
    Bundle,
    Toolchain,
    about,
    artifact_key,
    export_bundle,
    find_result,
    open_bundle,
    symbol_of,
)
from cutegen.build.artifact import SOURCE
from cutegen.build.render import Source, render
from cutegen.build.store import Store
from cutegen.digest import Json, digest
from cutegen.errors import BuildError, CutegenError, StoreError
from cutegen.families.registry import parse_problem
from cutegen.family import Problem
from cutegen.space import Config
from cutegen.text import shown
from cutegen.tuning.result import TuneResult
from cutegen.tuning.setting import Setting

__all__ = ["Imported", "export_candidates", "import_candidates", "write_candidates"]

_SCHEMA = 1


@dataclass(frozen=True)
class Imported:
    """The content of an imported bundle.

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
    result = find_result(store, arch.name, key)
    if not isinstance(result, Artifact):
        raise StoreError(f"artifact {key} is gone from {store.root}; run the same command again")
    return result


def import_candidates(
    path: Path, store: Store, require: Callable[[Arch], None] = lambda arch: None
) -> Imported:
    """Put the artifacts of the bundle ``path`` into ``store`` and return what can be measured with them.

    Before anything is written, every candidate is rendered here, and what the bundle holds must be the
    kernels of these candidates and no others. That shows that source text, key and symbol belong together; of
    the native code only the digest is compared, so import only what you trust.

    Args:
        path: The bundle.
        store: Where its artifacts go; a bundle that is refused leaves nothing there.
        require: Raises an error if a bundle for this target is not wanted.

    Raises:
        BuildError: The file is no such bundle, was changed, or was rendered from other templates.
        StoreError: It cannot be read, or the store cannot be written.
    """
    with open_bundle(path) as bundle:
        imported = _parse(path, bundle.manifest)
        require(imported.arch)
        sources = _render(path, imported)
        _require_kernels(path, bundle, sources)
        bundle.adopt(store, {key: about(source) for key, source in sources.items()})
    return imported


def _parse(path: Path, manifest: Json) -> Imported:
    try:
        data = cast("Mapping[str, Any]", manifest)
        if data["schema"] != _SCHEMA:
            raise BuildError(
                f"bundle {path} has schema {shown(data['schema'])}; this version reads {_SCHEMA}"
            )
        candidates = {
            parse_problem(item["problem"]): tuple(Config.from_json(c["config"]) for c in item["candidates"])
            for item in data["problems"]
        }
        if not any(candidates.values()):
            raise BuildError(f"bundle {path} has no candidates")
        return Imported(find_arch(data["arch"]), Toolchain.from_json(data["toolchain"]), candidates)
    except BuildError:
        raise
    except CutegenError as error:
        raise BuildError(f"bundle {path} holds no candidates of the tuner: {error}") from error
    except KeyError as error:
        raise BuildError(
            f"bundle {path} holds no candidates of the tuner: its manifest lacks {shown(error.args[0])}"
        ) from error
    except (TypeError, AttributeError, ValueError, RecursionError) as error:
        raise BuildError(
            f"bundle {path} holds no candidates of the tuner: a value in its manifest has the wrong type"
        ) from error


def _render(path: Path, imported: Imported) -> dict[str, Source]:
    """Return the kernel of every candidate by the key of its artifact."""
    sources: dict[str, Source] = {}
    try:
        for problem, configs in imported.candidates.items():
            for config in configs:
                source = render(problem, config, imported.arch)
                sources[artifact_key(source, imported.toolchain)] = source
    except CutegenError as error:
        raise BuildError(f"bundle {path} has a candidate that cannot be rendered here: {error}") from error
    return sources


def _require_kernels(path: Path, bundle: Bundle, sources: Mapping[str, Source]) -> None:
    """Do nothing if the bundle holds the kernels of ``sources`` and no others.

    Raises:
        BuildError: It lacks one, holds another, or a source does not match its key.
    """
    packed = {each.artifact.key: each for each in bundle.packed}
    maker = shown(cast("Mapping[str, Any]", bundle.manifest).get("cutegen"))
    if sources.keys() - packed.keys():
        raise BuildError(
            f"bundle {path} was made by cutegen {maker} with other templates than this {__version__}; "
            "export it again with this version"
        )
    for key, each in packed.items():
        source = sources.get(key)
        if source is None:
            raise BuildError(f"bundle {path} holds artifact {key}, a kernel of none of its candidates")
        if each.text_digest != digest(source.text, length=64):
            raise BuildError(f"bundle {path}: {SOURCE} of artifact {key} is not the source of its candidate")
        if each.artifact.symbol != symbol_of(key, source.signature.family):
            raise BuildError(f"bundle {path}: artifact {key} has the symbol {shown(each.artifact.symbol)}")
