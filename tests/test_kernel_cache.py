"""Laws of getting a kernel: the cache first, loaded once, failures told, nothing rendered twice."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from bundles import publish
from fake_kernels import FakeGpu

from cutegen.arch import find_arch
from cutegen.build import Artifact, symbol_of
from cutegen.build.render import Source, render
from cutegen.build.store import Store
from cutegen.errors import BuildError, ConfigError, LaunchError, StoreError
from cutegen.families.gemm.problem import Epilogue, Problem
from cutegen.families.registry import find_space
from cutegen.runtime import kernel_cache as module
from cutegen.runtime.kernel_cache import Kernels, build_one

ARCH = find_arch("sm_90a")
SPACE = find_space("gemm", ARCH)
PROBLEM = Problem(1024, 1024, 1024)
FUSED = replace(PROBLEM, epilogue=Epilogue(activation="relu"))
CONFIG = SPACE.default(PROBLEM)
ENOUGH_S = 120.0


@pytest.fixture
def gpu(tmp_path: Path) -> FakeGpu:
    return FakeGpu(tmp_path)


def test_stored_artifacts_are_not_compiled(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the store has under the key of the rendered text is loaded from there, once."""
    key = publish(gpu.store, render(PROBLEM, CONFIG, ARCH)).key
    loaded: list[tuple[Path, str]] = []
    kernels = Kernels(
        gpu.store, build="never", load=lambda library, symbol: loaded.append((library, symbol)) or print
    )
    first = kernels.get(PROBLEM, CONFIG, ARCH)
    with monkeypatch.context() as patch:  # what is compiled in is the same, so the text would be
        patch.setattr(module, "render", lambda *_: pytest.fail("rendered"))
        changed = CONFIG.replace(swizzle_size=4, raster_along_m=False)
        assert first is kernels.get(Problem(1024, 1024, 1032), changed, ARCH)
    assert loaded == [(gpu.store.folder("sm_90a", key) / "kernel.so", symbol_of(key))]
    assert kernels.artifact(PROBLEM, CONFIG, ARCH) is first.artifact


def test_a_known_key_renders_nothing(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table's key leads straight to the artifact; one that is gone falls back to the text."""
    key = publish(gpu.store, render(PROBLEM, CONFIG, ARCH)).key
    loaded: list[str] = []
    kernels = Kernels(gpu.store, load=lambda library, symbol: loaded.append(symbol) or print)
    with monkeypatch.context() as patch:
        patch.setattr(module, "render", lambda *_: pytest.fail("rendered"))
        assert kernels.get(PROBLEM, CONFIG, ARCH, known_key=key).artifact.key == key
        assert kernels.get(PROBLEM, CONFIG, ARCH, known_key=key).artifact.key == key
    assert loaded == [symbol_of(key)]
    fresh = Kernels(gpu.store, load=lambda library, symbol: print)
    assert fresh.get(PROBLEM, CONFIG, ARCH, known_key="0" * 32).artifact.key == key


class SlowCompiler:
    """Compiles the kernel of ``held`` once it may go on, and all others at once."""

    def __init__(self, gpu: FakeGpu, held: Problem) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()
        self._gpu, self._held = gpu, held.signature

    def __call__(self, source: Source, store: Store) -> Artifact:
        if source.signature == self._held:
            self.began.set()
            assert self.go_on.wait(ENOUGH_S)
        return self._gpu.compile(source, store)


def test_what_is_ready_does_not_wait_for_the_compiler(gpu: FakeGpu) -> None:
    """Under ``allow`` a thread that asks for a loaded kernel goes on while another waits for its own."""
    slowly = SlowCompiler(gpu, FUSED)
    kernels = gpu.kernels(compile=slowly)
    first = kernels.get(PROBLEM, CONFIG, ARCH)
    slow = threading.Thread(target=kernels.get, args=(FUSED, CONFIG, ARCH))
    slow.start()
    try:
        assert slowly.began.wait(ENOUGH_S)
        found: list[object] = []
        changed = CONFIG.replace(swizzle_size=4, raster_along_m=False)  # the same kernel, in another order
        quick = threading.Thread(target=lambda: found.append(kernels.get(PROBLEM, changed, ARCH)))
        quick.start()
        quick.join(ENOUGH_S)
        assert found == [first] and not slowly.go_on.is_set()
        assert set(kernels.configs(ARCH, PROBLEM.signature)) >= {CONFIG, changed}
    finally:
        slowly.go_on.set()
        slow.join(ENOUGH_S)
    assert len(gpu.compiled) == 2 and kernels.configs(ARCH, FUSED.signature)


def test_a_kernel_is_compiled_while_others_are_loaded(gpu: FakeGpu) -> None:
    """A compilation that is waited for holds up those alone who want the same kernel; it is compiled once."""
    slowly = SlowCompiler(gpu, FUSED)
    kernels = gpu.kernels(compile=slowly)
    found: list[object] = []
    wanted = [FUSED, FUSED, PROBLEM]
    threads = [
        threading.Thread(target=lambda p=p: found.append(kernels.get(p, CONFIG, ARCH))) for p in wanted
    ]
    for thread in threads[:2]:
        thread.start()
    try:
        assert slowly.began.wait(ENOUGH_S)
        threads[2].start()
        threads[2].join(ENOUGH_S)
        assert len(found) == 1 and not slowly.go_on.is_set()
    finally:
        slowly.go_on.set()
    for thread in threads[:2]:
        thread.join(ENOUGH_S)
    assert len(found) == 3 and found[1] is found[2] is not found[0]
    assert len(gpu.compiled) == len(gpu.loaded) == 2


def test_a_policy_that_compiles_nothing_waits_for_nobody(gpu: FakeGpu) -> None:
    """It refuses while another policy compiles the very kernel; no trace is left of those that waited."""
    slowly = SlowCompiler(gpu, PROBLEM)
    kernels = gpu.kernels(compile=slowly)
    slow = threading.Thread(target=kernels.get, args=(PROBLEM, CONFIG, ARCH))
    slow.start()
    try:
        assert slowly.began.wait(ENOUGH_S)
        with pytest.raises(LaunchError, match="build='never'"):
            kernels.with_build("never").get(PROBLEM, CONFIG, ARCH)
        assert not slowly.go_on.is_set()
    finally:
        slowly.go_on.set()
        slow.join(ENOUGH_S)
    assert kernels.loaded and not kernels._making


def test_a_full_disk_ends_the_compilation_of_many(gpu: FakeGpu) -> None:
    """Compiling them one by one would end in the same way."""
    gpu.failure = lambda source: StoreError("cannot write to /cache: No space left on device")
    wanted = [(replace(PROBLEM, out_dtype=dtype), CONFIG, "") for dtype in ("", "fp32")]
    with pytest.raises(StoreError, match="No space left"):
        gpu.kernels().compile_all(wanted, ARCH)


def test_recorded_failures_are_told_and_not_repeated(gpu: FakeGpu) -> None:
    """What did not compile once is not compiled again; the reason is that of the first time."""
    publish(gpu.store, render(PROBLEM, CONFIG, ARCH), outcome="abort", message="the compiler died")
    with pytest.raises(BuildError, match="the compiler died") as caught:
        gpu.kernels().get(PROBLEM, CONFIG, ARCH)
    assert caught.value.outcome == "abort" and not gpu.compiled


def test_a_changed_library_is_set_aside_and_compiled_again(gpu: FakeGpu) -> None:
    """A file that is not what was published is never loaded."""
    key = publish(gpu.store, render(PROBLEM, CONFIG, ARCH)).key
    (gpu.store.folder("sm_90a", key) / "kernel.so").write_text("something else")
    gpu.kernels().get(PROBLEM, CONFIG, ARCH)
    assert len(gpu.compiled) == 1
    assert list((gpu.store.root / "v1" / "quarantine").iterdir())


def test_refusals_name_the_reason(gpu: FakeGpu) -> None:
    """Broken rules, no permission to compile, and a library that does not load."""
    with pytest.raises(ConfigError, match="pingpong_has_one_warpgroup_per_tile"):
        gpu.kernels().get(PROBLEM, CONFIG.replace(pingpong=True, mma_warpgroups=2), ARCH)
    with pytest.raises(LaunchError, match="build='never'; warm it up or tune it first, or import a bundle"):
        gpu.kernels(build="never").get(PROBLEM, CONFIG, ARCH)
    publish(gpu.store, render(PROBLEM, CONFIG, ARCH))
    with pytest.raises(LaunchError, match=r"cannot load .*kernel\.so"):
        Kernels(gpu.store).get(PROBLEM, CONFIG, ARCH)


@pytest.mark.dsl
def test_build_one_compiles_for_real(tmp_path: Path) -> None:
    """One source through the real compiler ends in the store, or in its error."""
    source = render(PROBLEM, CONFIG, ARCH)
    artifact = build_one(source, Store(tmp_path))
    assert isinstance(artifact, Artifact) and artifact.shared_object.exists()
    assert Kernels(Store(tmp_path), build="never").get(PROBLEM, CONFIG, ARCH).artifact.key == artifact.key
    broken = Source("raise ValueError('no')", source.arch, source.signature, source.config)
    with pytest.raises(BuildError, match="no"):
        build_one(broken, Store(tmp_path))
