"""The fit's loops in C: the numbers of numpy, to the last bit; without a library, numpy."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from random import Random

import pytest

from cutegen.arch import find_arch, resident_clusters
from cutegen.build import host_compiler, host_library
from cutegen.build.host_library import build_library, open_library
from cutegen.build.store import Store
from cutegen.errors import StoreError
from cutegen.families.gemm.perf_model import few_rows
from cutegen.families.gemm.perf_model import kernel_set as module
from cutegen.families.gemm.perf_model.few_rows import FewRowsEstimator
from cutegen.families.gemm.perf_model.fitted import KEPT
from cutegen.families.gemm.perf_model.kernel_set import KernelSet, default_kernels
from cutegen.families.gemm.perf_model.native_model import SOURCE
from cutegen.families.gemm.perf_model.roofline import FEATURES, Cover, lying, rooflines
from cutegen.families.gemm.perf_model.torch_mm import load_torch_mm
from cutegen.families.gemm.perf_model.wave_order import Wave, least_loads
from cutegen.families.gemm.problem import Epilogue, Problem
from cutegen.families.registry import find_space, spaces_beside
from cutegen.runtime.needs import Wanted
from cutegen.runtime.warming import prepare_choices
from cutegen.search.defaults import default_config
from cutegen.space import as_integer
from cutegen.system.remembered import Remembered

ARCH = find_arch("sm_90a")
SPACE = find_space("gemm", ARCH)
#: Signatures, each as a problem of it.
KINDS = (
    Problem(64, 64, 64),
    Problem(64, 64, 64, ab_dtype="fp16", layout="kn"),
    Problem(64, 64, 64, layout="mn", epilogue=Epilogue(beta=True)),
    Problem(64, 64, 64, layout="mk", out_dtype="fp32"),
    Problem(64, 64, 64, batch=3, epilogue=Epilogue(bias="n", activation="silu")),
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.PyDLL:
    return built(SOURCE, tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def without_avx2(tmp_path_factory: pytest.TempPathFactory) -> ctypes.PyDLL:
    """The library as it runs on other CPUs."""
    text, asked = SOURCE.read_text(), '__builtin_cpu_supports("avx2")'
    assert text.count(asked) == 1
    folder = tmp_path_factory.mktemp("cache")
    source = folder / SOURCE.name
    source.write_text(text.replace(asked, "0"))
    return built(source, folder)


def built(source: Path, folder: Path) -> ctypes.PyDLL:
    found = build_library(source, Store(folder))
    assert found is not None  # gcc is needed for kernels too
    return found


def drawn(kind: Problem, count: int) -> list[Problem]:
    """Return problems of a kind with sizes from the smallest to the largest."""
    generator, found = Random(str(kind)), []
    for _ in range(count):
        m, n, k = (int(2 ** (14 * generator.random())) for _ in range(3))
        m = m if kind.layout[0] == "k" else -(-m // 8) * 8
        found.append(replace(kind, m=m, n=-(-n // 8) * 8, k=-(-k // 8) * 8))
    return found


def sets(kind: Problem, sm_count: int, library: ctypes.PyDLL) -> tuple[KernelSet, KernelSet]:
    """Return the default kernels twice: looked at by numpy, and in C."""
    kernels = default_kernels(SPACE, kind)
    plain, native = (KernelSet(SPACE, kind, sm_count, kernels) for _ in range(2))
    native.prepare(lambda source: library)
    assert native._native is not None
    return plain, native


@pytest.mark.parametrize("on", ["library", "without_avx2"])
@pytest.mark.parametrize("sm_count", [132, 114])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_number_is_that_of_numpy(
    kind: Problem, sm_count: int, on: str, request: pytest.FixtureRequest
) -> None:
    """Features, splits, which are likely, first looks, and the order of all kernels with their times."""
    plain, native = sets(kind, sm_count, request.getfixturevalue(on))
    assert native._native is not None
    for problem in drawn(kind, 50):
        look = plain._look(problem)
        want = list(islice(plain._found(problem), KEPT))
        assert list(native._native.best(problem, swapped=plain._swapped_is_likely(problem))) == want
        scratch = native._native._scratch(lying(problem.m, problem.n, problem.k, problem.layout))
        _, features = rooflines(problem, plain._columns, look.splits, Cover.of(problem, plain._columns))
        own = scratch.features[:, : features.shape[1]]
        differ = [
            name for name, row, other in zip(FEATURES, features, own, strict=True) if (row != other).any()
        ]
        assert not differ
        assert (look.splits == scratch.splits).all() and (look.likely == scratch.likely).all()
        assert (look.logs == scratch.found[: len(look.logs)]).all()
        assert list(plain.by_time(problem)) == list(native.by_time(problem))
        assert plain.fastest(problem) == native.fastest(problem)


def test_the_order_of_tiles_is_that_found_in_python(library: ctypes.PyDLL) -> None:
    """Of all orders and of some; one wave and several, in parts, more of them than the library counts."""
    _, native = sets(KINDS[0], 132, library)
    assert native._native is not None
    generator, orders = Random(5), list(product((1, 2, 4, 8), (False, True)))
    assert native._orders == orders
    for _ in range(600):
        m, n, parts = generator.randint(1, 30), generator.randint(1, 30), generator.choice([1, 1, 2, 3])
        m *= generator.choice([1, 1, 1, 200])
        rows, columns = 64 * generator.randint(1, 16), 8 * generator.randint(1, 64)
        blocks = generator.choice([1, 2, 4, 8])
        wave = Wave(m, n, parts, blocks, rows, columns, resident_clusters(132, blocks))
        assert native._native.least_loads(wave, native._orders) == least_loads(wave, orders)
        some = sorted(generator.sample(orders, 3))
        assert native._native.least_loads(wave, some) == least_loads(wave, some)


@pytest.mark.parametrize("sm_count", [132, 114])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_best_order_of_a_kernel_is_that_found_in_python(
    kind: Problem, sm_count: int, library: ctypes.PyDLL
) -> None:
    """Of kernels in one wave and in many, with k in parts or not; too many clusters are left to Python."""
    plain, native = sets(kind, sm_count, library)
    assert native._native is not None
    generator, waves, left = Random(str(kind)), set(), 0
    for problem in [*drawn(kind, 60), replace(kind, m=2**17, n=2**18, k=64)]:
        tiling = plain._tiling(problem)
        for at in generator.sample(range(len(plain._configs)), 20):
            config, split = plain._configs[at], generator.choice([1, 1, 3])
            found = native._native.best_order(problem, at, split)
            waves.add(tiling.is_one_wave(config, split))
            left += found is None
            assert found is None or found == tiling.best_order(config, split, plain._orders)
    assert waves == {True, False} and (left > 0) == (sm_count == 132)


def test_what_torch_takes_is_that_of_numpy(library: ctypes.PyDLL) -> None:
    """The same microseconds, of all layouts and sizes."""
    plain = load_torch_mm()
    native = replace(plain)
    native.prepare(lambda source: library)
    assert native._native and not replace(plain)._native
    generator = Random(3)
    for layout in ("kk", "kn", "mn", "mk"):
        for at in range(200):
            most = 30 if at % 4 == 0 else 14
            m, n, k = (int(2 ** (most * generator.random())) for _ in range(3))
            want = replace(plain).time_us(m, n, k, 132, layout)
            assert native.time_us(m, n, k, 132, layout) == want


def test_what_few_rows_take_is_that_of_python(library: ctypes.PyDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same microseconds, of kernels that cut up the work in all ways, on two numbers of SMs."""
    monkeypatch.setattr(few_rows, "_natives", {})
    (space,) = spaces_beside(SPACE)
    generator, compared = Random(5), 0
    for at in range(120):
        m, most = generator.randint(1, 4), 16 if at % 4 else 24
        n, k = (8 * int(2 ** (most * generator.random())) for _ in range(2))
        epilogue = Epilogue(beta=at % 3 == 0)
        problem = Problem(m, n, k, batch=generator.choice((1, 1, 3)), epilogue=epilogue)
        configs = [*islice(space.configs(problem), 0, None, 7)] if not space.explain(problem, {}) else []
        configs += [c.replace(threads_per_cta=64, warps_along_k=8) for c in configs[:2]]  # breaks a rule
        registers = [as_integer(space.derive(c, problem, ARCH)["registers"]) for c in configs]
        kernels, sm_count = list(zip(configs, registers, strict=True)), generator.choice((132, 114))
        few_rows._natives.clear()
        want = FewRowsEstimator(problem, ARCH, sm_count).times_us(kernels)
        few_rows.prepare(ARCH, sm_count, lambda source: library)
        assert FewRowsEstimator(problem, ARCH, sm_count).times_us(kernels) == want
        compared += len(kernels)
    assert few_rows._natives and compared > 2000


def test_looks_do_not_disturb_each_other(library: ctypes.PyDLL) -> None:
    """One that is still being read while another is made, and those of other threads."""
    plain, native = sets(KINDS[0], 132, library)
    problems = drawn(KINDS[0], 40)
    expected = [list(plain.by_time(problem)) for problem in problems]
    both = zip(native.by_time(problems[0]), native.by_time(problems[1]), strict=False)
    for (own, other), first, second in zip(both, expected[0], expected[1], strict=False):
        assert (own, other) == (first, second)
    wrong: list[Problem] = []

    def work() -> None:
        for problem, want in zip(problems, expected, strict=True):
            if list(native.by_time(problem)) != want:
                wrong.append(problem)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_warm_up_prepares_choices_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is compiled into the store, found there by others, and answers as numpy did."""
    problem = Problem(300, 1024, 4096)
    monkeypatch.setattr(module, "_sets", Remembered(64))  # sets of other tests may be prepared
    before = default_config(SPACE, problem, 132)
    store = Store(tmp_path / "cache")
    assert open_library(SOURCE, store) is None
    prepare_choices([Wanted(problem, before)], store, ARCH, 132)
    assert len(list(store.host_folder().iterdir())) == 1
    assert open_library(SOURCE, Store(tmp_path / "cache")) is not None
    monkeypatch.setattr(host_compiler.shutil, "which", lambda name: None)
    assert build_library(SOURCE, store) is not None  # nothing is compiled again
    assert default_config(SPACE, problem, 132) == before


def test_without_a_library_numpy_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler, one that fails, a file that is no library, a store that is only read."""
    kind = KINDS[0]
    kernels = default_kernels(SPACE, kind)
    expected = list(KernelSet(SPACE, kind, 132, kernels).by_time(kind))
    store = Store(tmp_path / "cache")
    monkeypatch.setattr(host_compiler.shutil, "which", lambda name: None)
    assert build_library(SOURCE, store) is None
    monkeypatch.setattr(host_compiler.shutil, "which", lambda name: "/bin/false")
    assert build_library(SOURCE, store) is None
    monkeypatch.undo()
    assert build_library(SOURCE, Store(tmp_path / "other", shared=True)) is None
    assert build_library(SOURCE, store) is not None
    broken = Store(tmp_path / "broken")
    path = host_library._path(SOURCE, broken)
    path.parent.mkdir(parents=True, mode=0o700)
    path.write_bytes(b"no library")
    assert open_library(SOURCE, broken) is None
    found = KernelSet(SPACE, kind, 132, kernels)
    found.prepare(lambda source: open_library(source, broken))
    assert found._native is None and list(found.by_time(kind)) == expected


def test_a_library_that_others_may_have_written_is_refused(tmp_path: Path) -> None:
    """As kernels are: it would be run."""
    store = Store(tmp_path / "cache")
    assert build_library(SOURCE, store) is not None
    store.host_folder().chmod(0o777)
    with pytest.raises(StoreError, match="another user"):
        open_library(SOURCE, Store(tmp_path / "cache"))


@pytest.mark.parametrize("damage", ["cut short", "changed", "empty"])
def test_a_damaged_library_is_made_again(tmp_path: Path, damage: str) -> None:
    """The system's loader would end the process in a signal, of each program that uses the cache folder."""
    source = tmp_path / "small.c"
    source.write_text('__attribute__((visibility("default"))) int answer(void) { return 42; }\n')
    store = Store(tmp_path / "cache")
    path = host_library._path(source, store)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_library.ctypes, "PyDLL", lambda path: None)
        build_library(source, store)
    whole = path.read_bytes()
    changed = whole[:200] + bytes(8) + whole[208:]
    path.write_bytes({"cut short": whole[: len(whole) // 2], "changed": changed, "empty": b""}[damage])
    assert open_library(source, store) is None
    found = build_library(source, store)
    assert found is not None and found["answer"]() == 42
    assert path.read_bytes() == whole
