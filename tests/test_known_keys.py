"""What a table or a record of the store says about a kernel is compared with what is asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bundles import publish
from fake_kernels import H200, FakeGpu

from cutegen.arch import Calibration, find_arch, with_calibration
from cutegen.build import Builder, Toolchain, artifact_key, symbol_of
from cutegen.build import render as module
from cutegen.build.render import recipe_of, render
from cutegen.build.store import Store
from cutegen.errors import LaunchError, ResourceError
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.records.entry import Entry, Fingerprint
from cutegen.records.table import Table
from cutegen.runtime.dispatch import Dispatcher
from cutegen.runtime.kernel_cache import Kernels
from cutegen.space import Config

ARCH = find_arch("sm_90a")
SPACE = find_space("gemm", ARCH)
PROBLEM = Problem(1024, 1024, 1024)
CONFIG = SPACE.default(PROBLEM)
DEEP = Problem(64, 256, 4096)
#: A config that splits k, and the same with another tile: a larger workspace, and another grid.
NARROW = SPACE.default(DEEP).replace(
    tile_shape_mn=(64, 64), mma_warpgroups=1, swap_ab=False, use_tma_store=False, split_k=4
)
WIDE = NARROW.replace(tile_shape_mn=(256, 64), mma_warpgroups=2)


@pytest.fixture
def gpu(tmp_path: Path) -> FakeGpu:
    return FakeGpu(tmp_path)


def one_entry(problem: Problem, config: Config, key: str) -> Table:
    """A table that says that the artifact ``key`` is the kernel of ``config``."""
    return Table(Fingerprint.of(H200, Toolchain.current()), [Entry(problem, config, artifact_key=key)])


def asked(table: Table, problem: Problem, store: Store, build: str = "never") -> str:
    """Return the symbol that a call of ``problem`` loads."""
    loaded: list[str] = []
    kernels = Kernels(store, build=build, load=lambda library, symbol: loaded.append(symbol) or print)
    assert Dispatcher(table, kernels=kernels, device=lambda index: H200).kernel(problem) is not None
    [symbol] = loaded
    return symbol


def test_a_table_whose_config_was_changed_gets_the_kernel_of_its_config(
    gpu: FakeGpu, caplog: pytest.LogCaptureFixture
) -> None:
    """Workspace and grid follow from the config in the table, so the kernel must be that config's too."""
    narrow, wide = (publish(gpu.store, render(DEEP, config, ARCH)) for config in (NARROW, WIDE))
    assert SPACE.launch(NARROW, DEEP, 132).workspace_bytes < SPACE.launch(WIDE, DEEP, 132).workspace_bytes
    table = one_entry(DEEP, NARROW, wide.key)
    assert asked(one_entry(DEEP, WIDE, wide.key), DEEP, gpu.store) == wide.symbol
    with caplog.at_level("INFO", "cutegen"):
        kernels = Kernels(gpu.store, build="never", load=lambda library, symbol: print)
        for _ in range(2):
            assert kernels.artifact(DEEP, NARROW, ARCH, known_key=wide.key).key == narrow.key
    assert [wide.key in record.getMessage() for record in caplog.records] == [True]
    assert asked(table, DEEP, gpu.store) == narrow.symbol
    gpu.store.discard(ARCH.name, narrow.key)
    with pytest.raises(LaunchError, match="no compiled kernel"):
        asked(table, DEEP, gpu.store)


def test_every_knob_that_is_compiled_in_counts(gpu: FakeGpu) -> None:
    """Also one from which a space derives nothing."""
    plain, early = (
        publish(gpu.store, render(DEEP, NARROW.replace(use_pdl=on), ARCH)) for on in (False, True)
    )
    assert asked(one_entry(DEEP, NARROW.replace(use_pdl=True), plain.key), DEEP, gpu.store) == early.symbol


def test_a_loaded_kernel_is_not_taken_for_another_by_its_key(gpu: FakeGpu) -> None:
    """The key is known and its kernel in use, but it is not that of the config."""
    narrow, wide = (publish(gpu.store, render(DEEP, config, ARCH)) for config in (NARROW, WIDE))
    kernels = Kernels(gpu.store, build="never", load=lambda library, symbol: print)
    assert kernels.get(DEEP, NARROW, ARCH, known_key=narrow.key).artifact.key == narrow.key
    assert kernels.get(DEEP, WIDE, ARCH, known_key=narrow.key).artifact.key == wide.key


def test_a_key_of_another_dtype_is_not_used(gpu: FakeGpu) -> None:
    """An fp16 entry that names a bf16 kernel loads the fp16 one."""
    half = Problem(1024, 1024, 1024, ab_dtype="fp16")
    bf16, fp16 = (publish(gpu.store, render(problem, CONFIG, ARCH)) for problem in (PROBLEM, half))
    assert asked(one_entry(half, CONFIG, bf16.key), half, gpu.store) == fp16.symbol


def test_a_key_from_before_a_template_changed_is_not_used(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout that is updated under one version renders other text, and its kernels are others."""
    old = publish(gpu.store, render(PROBLEM, CONFIG, ARCH))
    texts = module._texts
    # Without the caches of this process it stands for a later one, which reads the files anew.
    for name in ("_template", "_base"):
        monkeypatch.setattr(module, name, getattr(module, name).__wrapped__)
    monkeypatch.setattr(module, "_texts", lambda at: {n: t + "# new\n" for n, t in texts(at).items()})
    new = publish(gpu.store, render(PROBLEM, CONFIG, ARCH))
    assert new.key != old.key and new.recipe != old.recipe
    assert asked(one_entry(PROBLEM, CONFIG, old.key), PROBLEM, gpu.store) == new.symbol


def test_what_a_space_derives_is_part_of_the_recipe(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that changes what a template is filled with changes the recipe, as the template does."""
    old = publish(gpu.store, render(PROBLEM, CONFIG, ARCH))
    fewer = replace(SPACE, derive=lambda *a: {**SPACE.derive(*a), "stages": 3})
    monkeypatch.setattr(module, "space_of", lambda *arguments: fewer)
    assert render(PROBLEM, CONFIG, ARCH).recipe == recipe_of(PROBLEM, CONFIG, ARCH) != old.recipe


def test_where_a_calibration_is_stored_is_no_part_of_the_recipe(tmp_path: Path) -> None:
    """Kernels are compiled before and after calibrating, and carried to other machines."""
    here = Calibration(str(tmp_path / "calibration.json"), "0" * 16)
    kernel = CONFIG.source, CONFIG.algorithm
    assert module._base("gemm", with_calibration(ARCH, here), *kernel) == module._base("gemm", ARCH, *kernel)


def test_how_templates_are_filled_is_part_of_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code of rendering itself may change between two versions of a checkout."""
    before = recipe_of(PROBLEM, CONFIG, ARCH)
    (tmp_path / "render.py").write_text(Path(module.__file__).read_text() + "# changed\n")
    monkeypatch.setattr(module, "_base", module._base.__wrapped__)
    assert recipe_of(PROBLEM, CONFIG, ARCH) == before
    monkeypatch.setattr(module, "__file__", str(tmp_path / "render.py"))
    assert recipe_of(PROBLEM, CONFIG, ARCH) != before


@pytest.mark.parametrize("recipe", ["", "0" * 32])
def test_an_artifact_without_the_recipe_is_compared_by_its_source(
    recipe: str, gpu: FakeGpu, caplog: pytest.LogCaptureFixture
) -> None:
    """Artifacts from before recipes were recorded, or of a recipe that changed in vain, are found by text.

    The toolchain is another, so the key that is worked out here would not lead to it.
    """
    elsewhere = replace(Toolchain.current(), packages=())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Toolchain, "current", lambda: elsewhere)
        made = publish(gpu.store, render(PROBLEM, CONFIG, ARCH), recipe=recipe)
    with caplog.at_level("INFO", "cutegen"):
        assert asked(one_entry(PROBLEM, CONFIG, made.key), PROBLEM, gpu.store) == made.symbol
    assert caplog.records == []


def test_a_kernel_of_another_source_is_known_without_its_package(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its artifact was compiled where the package was; rendering asks for it."""
    config = next(find_space("gemm", ARCH, "operators").configs(PROBLEM))
    monkeypatch.setattr("cutegen.families.gemm.family.require_package", lambda: "package 1")
    made = publish(gpu.store, render(PROBLEM, config, ARCH))

    def missing() -> str:
        raise ResourceError("it is not installed")

    monkeypatch.setattr("cutegen.families.gemm.family.require_package", missing)
    kernels = Kernels(gpu.store, build="never")
    assert kernels.artifact(PROBLEM, config, ARCH, known_key=made.key).key == made.key
    other = replace(PROBLEM, ab_dtype="fp16", out_dtype="fp16")
    with pytest.raises(ResourceError, match="not installed"):
        kernels.artifact(other, config, ARCH, known_key=made.key)


def test_the_order_of_knobs_changes_no_kernel() -> None:
    """Equal configs are one kernel, though a file may have sorted their knobs."""
    other = Config(dict(sorted(CONFIG.items())))
    assert render(PROBLEM, other, ARCH) == render(PROBLEM, CONFIG, ARCH)
    assert recipe_of(PROBLEM, other, ARCH) == recipe_of(PROBLEM, CONFIG, ARCH)


def test_an_edited_source_has_no_recipe() -> None:
    """Tools that break a kernel on purpose replace its text; it must not pass for the unbroken one."""
    source = render(PROBLEM, CONFIG, ARCH)
    assert source.recipe == recipe_of(PROBLEM, CONFIG, ARCH)
    assert replace(source, text=source.text + "# edited").recipe == ""


@pytest.mark.parametrize("key", ["x", "../../etc/passwd", "0" * 32, "0" * 64, "ABCDEF" * 6, "\x1b[31m"])
def test_a_key_that_names_no_entry_falls_back_to_rendering(key: str, gpu: FakeGpu) -> None:
    """Whoever passes it on, from whatever file."""
    made = publish(gpu.store, render(PROBLEM, CONFIG, ARCH))
    kernels = Kernels(gpu.store, build="never", load=lambda library, symbol: print)
    assert kernels.get(PROBLEM, CONFIG, ARCH, known_key=key).artifact.key == made.key


def test_a_key_of_a_failed_build_falls_back_to_rendering(gpu: FakeGpu) -> None:
    """The failure is another kernel's."""
    failed = publish(gpu.store, render(DEEP, NARROW, ARCH), outcome="error", message="no")
    made = publish(gpu.store, render(PROBLEM, CONFIG, ARCH))
    assert asked(one_entry(PROBLEM, CONFIG, failed.key), PROBLEM, gpu.store) == made.symbol


def test_a_kernel_for_a_better_cpu_is_not_loaded(gpu: FakeGpu) -> None:
    """A cache on a shared disk may hold what this machine's CPU cannot run."""
    better = replace(Toolchain.current(), host="linux-x86_64_v9")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Toolchain, "current", lambda: better)
        theirs = publish(gpu.store, render(PROBLEM, CONFIG, ARCH))
    ours = publish(gpu.store, render(PROBLEM, CONFIG, ARCH))
    assert asked(one_entry(PROBLEM, CONFIG, theirs.key), PROBLEM, gpu.store) == ours.symbol


#: Of the artifact that the records below are about.
KEY = artifact_key(render(PROBLEM, CONFIG, ARCH), Toolchain.current())
MALFORMED: dict[str, dict[str, Any]] = {
    "symbol missing": {"symbol": None},
    "symbol a path": {"symbol": f"../../../etc/x_{KEY[:12]}"},
    "symbol of another key": {"symbol": symbol_of("0" * 32)},
    "outcome a list": {"outcome": []},
    "outcome unknown": {"outcome": "fine"},
    "failure without words": {"outcome": "error", "message": 3},
    "timeout without a limit": {"outcome": "timeout", "message": "slow", "timeout_s": "long"},
    "resources a list": {"resources": [1]},
    "kernels a number": {"resources": {"kernels": 7}},
    "registers text": {"resources": {"kernels": [{"name": "k", "registers": "many"}]}},
    "registers negative": {"resources": {"kernels": [{"name": "k", "registers": -1}]}},
    "registers a flag": {"resources": {"kernels": [{"name": "k", "registers": True}]}},
    "build_s text": {"build_s": "soon"},
    "build_s NaN": {"build_s": float("nan")},
    "source_digest a number": {"source_digest": 0},
    "source_digest of another": {"source_digest": "0" * 32},
    "toolchain a list": {"toolchain": []},
    "toolchain of numbers": {"toolchain": {"packages": {"a": 1}, "schema": 1}},
    "recipe a list": {"recipe": []},
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_records_are_set_aside_and_the_kernel_is_built_anew(name: str, gpu: FakeGpu) -> None:
    """By both ways to it: the rendered key, and the table's."""
    made = publish(gpu.store, render(PROBLEM, CONFIG, ARCH), **MALFORMED[name])
    found = gpu.kernels().get(PROBLEM, CONFIG, ARCH, known_key=made.key)
    assert found.artifact.key == made.key and len(gpu.compiled) == 1
    assert len(list((gpu.store.root / "v1" / "quarantine").iterdir())) == 1
    assert not made.folder.exists()


def test_malformed_records_of_a_shared_cache_stay_and_count_as_absent(gpu: FakeGpu) -> None:
    """Who may only read sets nothing aside."""
    made = publish(gpu.store, render(PROBLEM, CONFIG, ARCH), symbol=3)
    kernels = Kernels(Store(gpu.store.root, shared=True), build="never")
    with pytest.raises(LaunchError, match="no compiled kernel"):
        kernels.get(PROBLEM, CONFIG, ARCH, known_key=made.key)
    assert made.folder.exists()


def test_nested_records_are_set_aside_too(gpu: FakeGpu) -> None:
    """JSON that Python does not follow is a corrupt entry, not a traceback."""
    made = publish(gpu.store, render(PROBLEM, CONFIG, ARCH))
    (made.folder / "meta.json").write_text("[" * 100_000)
    assert gpu.kernels().get(PROBLEM, CONFIG, ARCH).artifact.key == made.key and len(gpu.compiled) == 1


def test_a_builder_sets_malformed_records_aside(gpu: FakeGpu) -> None:
    """A time-out whose limit is no number is built anew."""
    source = render(PROBLEM, CONFIG, ARCH)
    made = publish(gpu.store, source, outcome="timeout", message="slow", timeout_s=[])
    assert Builder(gpu.store).find(source) is None and not made.folder.exists()
