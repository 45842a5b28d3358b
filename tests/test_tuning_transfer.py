"""Candidates carried between machines: what is not understood to the last byte leaves nothing behind."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bundles import (
    ARCH,
    CANDIDATES,
    DEFAULT,
    HEAD,
    PROBLEM,
    everything_in,
    pack,
    publish,
    stored,
    unpack,
    write_bundle,
)

from cutegen.arch import Arch
from cutegen.build import bundle as module
from cutegen.build.render import recipe_of, render
from cutegen.build.store import Store
from cutegen.digest import digest
from cutegen.errors import BuildError, CutegenError, LaunchError, StoreError, UsageError
from cutegen.families.gemm.problem import Problem
from cutegen.runtime.kernel_cache import Kernels
from cutegen.tuning.transfer import import_candidates

Files = dict[str, bytes]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A good bundle of two kernels."""
    write_bundle(tmp_path / "good.tar", Store(tmp_path / "here"))
    return tmp_path / "good.tar"


def of_head(change: Callable[[Any], None]) -> Callable[[Files], None]:
    """A change of the bundle's manifest."""

    def changed(files: Files) -> None:
        head = json.loads(files[HEAD])
        change(head)
        files[HEAD] = json.dumps(head).encode()

    return changed


def of_manifest(**values: Any) -> Callable[[Files], None]:
    """Other values in the tuner's part of the manifest."""
    return of_head(lambda head: head["manifest"].update(values))


def of_meta(**values: Any) -> Callable[[Files], None]:
    """Other values in the first artifact's ``meta.json``."""

    def changed(files: Files) -> None:
        name = next(name for name in files if name.endswith("meta.json"))
        files[name] = json.dumps({**json.loads(files[name]), **values}).encode()

    return changed


def of_file(ending: str, data: bytes) -> Callable[[Files], None]:
    """Other content of the first file of that name, which its ``meta.json`` then lists too."""

    def changed(files: Files) -> None:
        name = next(name for name in files if name.endswith(ending))
        files[name] = data
        folder, _, base = name.rpartition("/")
        if base.startswith("kernel"):
            meta = json.loads(files[f"{folder}/meta.json"])
            meta["files"][base] = digest(data, length=64)
            files[f"{folder}/meta.json"] = json.dumps(meta).encode()

    return changed


def resources(**counts: object) -> dict[str, object]:
    return {"notes": [], "kernels": [{"name": "k", **counts}]}


def drop_candidate(head: Any) -> None:
    del head["manifest"]["problems"][0]["candidates"][1]


def test_a_bundle_brings_its_candidates(path: Path, tmp_path: Path) -> None:
    """They are found by what is rendered here, and a second import changes nothing."""
    store = Store(tmp_path / "there")
    for _ in range(2):
        imported = import_candidates(path, store)
        assert dict(imported.candidates) == {PROBLEM: CANDIDATES} and imported.arch == ARCH
    kernels = Kernels(store, build="never", load=lambda library, symbol: print)
    for config in CANDIDATES:
        artifact = kernels.get(PROBLEM, config, ARCH).artifact
        assert artifact.shared_object.read_bytes() == b"library"
        assert artifact.recipe == recipe_of(PROBLEM, config, ARCH)
    assert not [name for name in everything_in(store.root) if name.endswith((".lock", ".tmp"))]


def of_another_family(files: Files) -> None:
    """A symbol of the right form for the key, but not what rendering gives."""
    name = next(name for name in files if name.endswith("meta.json"))
    of_meta(symbol=f"cutegen_gemm_blockscaled_{name.split('/')[1][:12]}")(files)


NESTED = b"[" * 100_000
REFUSED: dict[str, tuple[Callable[[Files], None], str]] = {
    "schema": (of_manifest(schema=99), "schema 99; this version reads 1"),
    "manifest is a list": (
        of_head(lambda head: head.update(manifest=[])),
        "holds no candidates of the tuner",
    ),
    "arch is another": (of_manifest(arch="sm_100a"), "cannot be rendered here"),
    "arch is unknown": (of_manifest(arch="sm_12"), "holds no candidates of the tuner"),
    "arch is a list": (of_manifest(arch=["x"]), "its manifest has the wrong type$"),
    "no toolchain": (
        of_head(lambda head: head["manifest"].pop("toolchain")),
        "holds no candidates of the tuner: its manifest lacks 'toolchain'$",
    ),
    "toolchain is a list": (of_manifest(toolchain=[]), "holds no candidates of the tuner"),
    "toolchain is another": (
        of_head(lambda head: head["manifest"]["toolchain"].update(flavour="cu99")),
        "export it again with this version",
    ),
    "no problems": (of_manifest(problems=[]), "has no candidates"),
    "no candidates": (of_manifest(problems=[{"problem": str(PROBLEM), "candidates": []}]), "no candidates"),
    "problem of 5000 digits": (
        of_manifest(problems=[{"problem": f"gemm {'9' * 5000}x1x1 bf16 kk", "candidates": []}]),
        "holds no candidates of the tuner",
    ),
    "family is a path": (
        of_head(lambda head: head["manifest"]["problems"][0].update(problem="../../x 64x64x64 bf16 kk")),
        "names no kernel family",
    ),
    "config injects code": (
        of_head(
            lambda head: head["manifest"]["problems"][0]["candidates"][0]["config"].update(
                tile_k="64\nimport os"
            )
        ),
        "cannot be rendered here",
    ),
    "config is not legal": (
        of_head(lambda head: head["manifest"]["problems"][0]["candidates"][0]["config"].update(split_k=33)),
        "cannot be rendered here",
    ),
    "config renders another kernel": (
        of_head(
            lambda head: head["manifest"]["problems"][0]["candidates"][0]["config"].update(stream_k=True)
        ),
        "cannot be rendered here|export it again",
    ),
    "an artifact of no candidate": (of_head(drop_candidate), "a kernel of none of its candidates"),
    "source is another": (of_file("kernel.py", b"import os"), "is not the source of its candidate"),
    "outcome is error": (of_meta(outcome="error", message="no"), r"a build that failed \(error\)"),
    "outcome is unknown": (of_meta(outcome="fine"), "is not an artifact of this version"),
    "symbol is a path": (of_meta(symbol="../../../../etc/x"), "is not an artifact of this version"),
    "symbol is of another key": (of_meta(symbol="cutegen_gemm_000000000000"), "is not an artifact"),
    "symbol is of another family": (of_another_family, "has the symbol 'cutegen_gemm_blockscaled_"),
    "source_digest lies": (of_meta(source_digest="0" * 32), "is not an artifact of this version"),
    "key lies": (of_meta(key="f" * 32), "is that of another artifact"),
    "arch of meta lies": (of_meta(arch="sm_100a"), "is that of another artifact"),
    "digests of meta lie": (of_meta(files={}), "is that of another artifact"),
    "toolchain of meta": (of_meta(toolchain=[]), "is not an artifact of this version"),
    "host of meta": (of_meta(toolchain={"host": None}), "is not an artifact of this version"),
    "build_s huge": (of_meta(build_s=10**400), "401 digits"),
    "build_s NaN": (of_meta(build_s=float("nan")), "no finite number"),
    "build_s text": (of_meta(build_s="1"), "is not an artifact of this version"),
    "resources text": (of_meta(resources="many"), "is not an artifact of this version"),
    "registers negative": (of_meta(resources=resources(registers=-1)), "is not an artifact"),
    "registers huge": (of_meta(resources=resources(registers=2**40)), "is not an artifact"),
    "registers text": (of_meta(resources=resources(registers="8")), "is not an artifact"),
    "resources unknown": (of_meta(resources=resources(colour=1)), "is not an artifact"),
    "notes numbers": (of_meta(resources={"notes": [1], "kernels": []}), "is not an artifact"),
    "meta not JSON": (of_file("meta.json", b"{"), "is not JSON"),
    "meta not UTF-8": (of_file("meta.json", b"\xff\xfe{}"), "is not UTF-8"),
    "meta a list": (of_file("meta.json", b"[]"), "is not an object"),
    "meta nested": (of_file("meta.json", NESTED), "nested too deeply"),
    "meta 5000 digits": (of_file("meta.json", b'{"a":' + b"1" * 5000 + b"}"), "5000 digits"),
    "meta large": (of_file("meta.json", b" " * (2**20 + 1)), "more than 1048576"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bundle_that_is_not_understood_is_refused_and_leaves_nothing(
    name: str, path: Path, tmp_path: Path
) -> None:
    """Its digests are right, so only what they are digests of is wrong. No lock and no folder stays."""
    change, message = REFUSED[name]
    files = unpack(path)
    change(files)
    pack(path, files)
    root = tmp_path / "there"
    with pytest.raises(BuildError, match=message):
        import_candidates(path, Store(root))
    assert not root.exists()


def test_what_was_there_before_a_refusal_stays_as_it_was(path: Path, tmp_path: Path) -> None:
    """The store has one of the kernels already."""
    store = Store(tmp_path / "there")
    publish(store, render(PROBLEM, DEFAULT, ARCH))
    before = everything_in(store.root)
    files = unpack(path)
    of_manifest(schema=2)(files)
    pack(path, files)
    with pytest.raises(BuildError, match="schema 2"):
        import_candidates(path, store)
    assert everything_in(store.root) == before


def test_a_refused_bundle_cannot_plant_a_kernel(path: Path, tmp_path: Path) -> None:
    """Its library under a key of this toolchain is not what a later lookup loads."""
    files = unpack(path)
    of_manifest(schema=99)(files)
    of_file("kernel.so", b"\x7fELF planted")(files)
    pack(path, files)
    store = Store(tmp_path / "there")
    with pytest.raises(BuildError, match="schema"):
        import_candidates(path, store)
    kernels = Kernels(store, build="never", load=lambda library, symbol: pytest.fail("it was loaded"))
    for config in CANDIDATES:
        with pytest.raises(LaunchError, match="no compiled kernel"):
            kernels.get(PROBLEM, config, ARCH)


def test_a_bundle_for_an_unwanted_target_leaves_nothing(path: Path, tmp_path: Path) -> None:
    """Whoever imports may refuse the target, with an error of their own."""

    def refuse(arch: Arch) -> None:
        raise UsageError(f"not {arch}")

    with pytest.raises(UsageError, match="not sm_90a"):
        import_candidates(path, Store(tmp_path / "there"), refuse)
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize("error", [StoreError("no space"), KeyboardInterrupt()])
def test_what_an_import_published_is_taken_back_when_it_fails(
    error: BaseException, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two artifacts cannot be published: neither stays, nor a lock or a staged folder."""
    real, calls = Store.publish, []

    def publish_once(store: Store, lock: Any, meta: Any) -> Any:
        calls.append(lock.key)
        if len(calls) == 2:
            raise error
        return real(store, lock, meta)

    monkeypatch.setattr(Store, "publish", publish_once)
    store = Store(tmp_path / "there")
    with pytest.raises(type(error)):
        import_candidates(path, store)
    assert len(calls) == 2 and store.keys("sm_90a") == ()
    assert [name for name in everything_in(store.root) if Path(name).suffix or len(Path(name).name) > 6] == []


def test_what_the_store_had_is_not_taken_back(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed import removes its own artifacts only."""
    store = Store(tmp_path / "there")
    own = publish(store, render(PROBLEM, DEFAULT, ARCH))

    def full(store: Store, lock: Any, meta: Any) -> Any:
        raise StoreError("no space")

    monkeypatch.setattr(Store, "publish", full)
    with pytest.raises(StoreError, match="no space"):
        import_candidates(path, store)
    assert store.keys("sm_90a") == (own.key,)


def test_a_bundle_that_changes_while_it_is_read_is_refused(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file's digest is compared again while it is copied."""
    real = module.Bundle.adopt

    def swap_then_adopt(self: module.Bundle, *arguments: Any) -> None:
        name = next(name for name in unpack(path) if name.endswith("kernel.so"))
        with tarfile.open(path) as tar:
            place = tar.getmember(name).offset_data
        with path.open("r+b") as file:
            file.seek(place)
            file.write(b"X")
        real(self, *arguments)

    monkeypatch.setattr(module.Bundle, "adopt", swap_then_adopt)
    store = Store(tmp_path / "there")
    with pytest.raises(BuildError, match=r"kernel\.so has changed"):
        import_candidates(path, store)
    assert store.keys("sm_90a") == ()


def test_the_records_of_an_artifact_are_made_anew(path: Path, tmp_path: Path) -> None:
    """Config, signature and recipe in the bundle are claims: what is stored comes from rendering here."""
    files = unpack(path)
    other = render(Problem(256, 256, 256, ab_dtype="fp16"), DEFAULT, ARCH)
    of_meta(recipe=other.recipe, config={"tile_k": 1}, signature={}, more="x" * 1000)(files)
    pack(path, files)
    store = Store(tmp_path / "there")
    import_candidates(path, store)
    for config in CANDIDATES:
        source = render(PROBLEM, config, ARCH)
        found = Kernels(store, build="never").artifact(PROBLEM, config, ARCH)
        meta = json.loads((found.folder / "meta.json").read_text())
        assert (meta["recipe"], meta["config"]) == (source.recipe, source.config.to_json())
        assert meta["signature"]["ab_dtype"] == "bf16" and "more" not in meta


@pytest.mark.parametrize(
    "record", [{"outcome": "timeout", "message": "slow", "timeout_s": 1.0}, {"symbol": 3}]
)
def test_a_recorded_failure_gives_way_to_a_kernel(record: dict[str, Any], path: Path, tmp_path: Path) -> None:
    """What did not compile in time here, or was recorded in vain, may come from a bundle."""
    store = Store(tmp_path / "there")
    publish(store, render(PROBLEM, DEFAULT, ARCH), **record)
    import_candidates(path, store)
    assert stored(store, Kernels(store).artifact(PROBLEM, DEFAULT, ARCH).key).build_s == 0.5


def test_an_export_follows_no_planted_link(path: Path, tmp_path: Path) -> None:
    """A link in the place of the unfinished file leads nowhere."""
    victim = tmp_path / "victim.txt"
    victim.write_text("precious")
    (tmp_path / "out.tar.part").symlink_to(victim)
    write_bundle(tmp_path / "out.tar", Store(tmp_path / "here"))
    assert victim.read_text() == "precious" and not (tmp_path / "out.tar").is_symlink()
    assert [p.name for p in tmp_path.iterdir() if "out.tar" in p.name and p.name != "out.tar.part"] == [
        "out.tar"
    ]


def test_errors_of_a_bundle_are_ours() -> None:
    """A folder and a device are no bundles."""
    for name in (".", "/dev/null"):
        with pytest.raises(CutegenError, match="bundle"):
            import_candidates(Path(name), Store(Path("unused")))
