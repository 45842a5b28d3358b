"""Frozen programs compile and load nothing, say what they missed, and count; swaps and broken kernels."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fake_kernels import H200, FakeGpu, operators_ask  # noqa: E402
from test_norms import FakeNorms  # noqa: E402

import cutegen  # noqa: E402
from cutegen.arch import find_arch  # noqa: E402
from cutegen.build import Toolchain  # noqa: E402
from cutegen.errors import FrozenError, LaunchError, UsageError  # noqa: E402
from cutegen.families.registry import find_space, is_legal, parse_problem  # noqa: E402
from cutegen.records.entry import Entry, Fingerprint  # noqa: E402
from cutegen.records.table import Table  # noqa: E402
from cutegen.runtime.tally import Tally  # noqa: E402
from cutegen.search.defaults import default_config, default_set  # noqa: E402
from cutegen.torch_ops import gemm as ops  # noqa: E402

BF16 = torch.bfloat16
SPACE = find_space("gemm", find_arch("sm_90a"))
KNOWN = "gemm 16x24x32 bf16 kn"


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    with operators_ask(FakeGpu(tmp_path), monkeypatch) as fake:
        yield fake


def rand(*shape: int, dtype: Any = BF16) -> Any:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.rand(shape, generator=generator) * 2 - 1).to(dtype)


def near(found: Any, want: Any) -> None:
    torch.testing.assert_close(found.float(), want.float(), rtol=1e-2, atol=1e-2)


def table_with(tmp_path: Path, line: str, at: int = 0) -> tuple[Path, Entry]:
    """Return a table whose winner for a problem is another kernel than the default."""
    problem = parse_problem(line)
    default = SPACE.compile_view(default_config(SPACE, problem, 132))
    others = [c for _, c in default_set(SPACE, problem, 132) if is_legal(c, problem, SPACE.arch)]
    entry = Entry(problem, [c for c in others if SPACE.compile_view(c) != default][at])
    path = tmp_path / f"table{at}.json"
    Table(Fingerprint.of(H200, Toolchain.current()), [entry]).save(path)
    return path, entry


# --- freeze ---


def test_a_frozen_call_launches_what_has_run(gpu: FakeGpu) -> None:
    a, b = rand(16, 32), rand(32, 24)
    cutegen.gemm(a, b)
    compiled, loaded = len(gpu.compiled), len(gpu.loaded)
    cutegen.freeze("error")
    for _ in range(3):
        near(cutegen.gemm(a, b), a.float() @ b.float())
    assert len(gpu.calls) == 4 and (len(gpu.compiled), len(gpu.loaded)) == (compiled, loaded)
    found = cutegen.counters()
    assert found["frozen"] == "error" and found["calls"] == {"default": 3} and found["fallbacks"] == {}


@pytest.mark.parametrize("on_miss", ["fallback", "warn"])
def test_a_miss_is_computed_by_something_else_and_counted(
    gpu: FakeGpu, on_miss: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A plain product, and one with an epilogue, for which no kernel is loaded; the log has one line each."""
    a, b, bias = rand(16, 32), rand(32, 24), rand(24)
    cutegen.freeze(on_miss)
    with caplog.at_level(logging.WARNING, "cutegen"):
        for _ in range(3):
            near(cutegen.gemm(a, b), a.float() @ b.float())
            near(cutegen.gemm(a, b, bias=bias), a.float() @ b.float() + bias.float())
    assert not gpu.compiled and not gpu.loaded and not gpu.builders
    found = cutegen.counters()
    assert found["calls"] == {"missed": 6} and found["problems"] == {"missed": 2}
    assert sorted(found["fallbacks"].values()) == [3, 3]
    assert any(KNOWN in reason for reason in found["fallbacks"]) and found["late_compiles"] == 0
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == (2 if on_miss == "warn" else 0)
    assert all("cutegen.warmup(problems=" in line for line in lines)


def test_a_miss_may_be_an_error_before_anything_is_compiled(gpu: FakeGpu) -> None:
    """In calls, in optimized layers, and through the registered operator."""
    a, b = rand(16, 32), rand(32, 24)
    cutegen.freeze("error")
    with pytest.raises(FrozenError, match="16x24x32 bf16 kn is not loaded, and cutegen is frozen"):
        cutegen.gemm(a, b)
    model = torch.nn.Sequential(torch.nn.Linear(32, 24, bias=False)).to(BF16)
    cutegen.optimize(model)
    with pytest.raises(FrozenError, match="16x24x32 bf16 kk"), torch.no_grad():
        model(a)
    assert not gpu.compiled and not gpu.loaded


def test_an_explicit_config_is_never_replaced(gpu: FakeGpu) -> None:
    a, b = rand(16, 32), rand(32, 24)
    config = default_config(SPACE, parse_problem(KNOWN), 132).replace(swizzle_size=2)
    cutegen.freeze()
    with pytest.raises(FrozenError):
        cutegen.gemm(a, b, config=config)


def test_what_is_being_compiled_is_given_up(gpu: FakeGpu) -> None:
    a, b = rand(16, 32), rand(32, 24)
    gpu.gate.clear()
    cutegen.use(gpu.dispatcher(build="background"))
    near(cutegen.gemm(a, b), a.float() @ b.float())
    assert cutegen.counters()["problems"] == {"awaited": 1}
    cutegen.freeze()
    gpu.gate.set()
    assert gpu.builders[0].closed
    near(cutegen.gemm(a, b), a.float() @ b.float())
    assert not gpu.compiled and not gpu.calls
    cutegen.configure(build="background")
    assert cutegen.counters()["frozen"] == ""
    gpu.gate.clear()  # a kernel that is ready at once would answer the call that asks for it
    cutegen.gemm(a, b)
    gpu.gate.set()
    assert cutegen.wait_for_kernels(20)
    cutegen.gemm(a, b)
    assert len(gpu.compiled) == len(gpu.calls) == 1
    assert cutegen.counters()["late_compiles"] == 2  # asked for twice


def test_freezing_twice_takes_the_later_answer(gpu: FakeGpu) -> None:
    cutegen.freeze("error")
    cutegen.freeze("fallback")
    cutegen.gemm(rand(16, 32), rand(32, 24))
    with pytest.raises(UsageError, match="fallback, warn, error"):
        cutegen.freeze("ignore")


def test_a_plan_made_before_counts_nothing_and_one_made_after_does(gpu: FakeGpu) -> None:
    """Nothing is counted in calls while nothing is frozen."""
    a, b = rand(16, 32), rand(32, 24)
    for _ in range(3):
        cutegen.gemm(a, b)
    assert cutegen.counters()["calls"] == {} and cutegen.counters()["problems"] == {"default": 1}
    cutegen.freeze()
    cutegen.gemm(a, b)
    assert cutegen.counters()["calls"] == {"default": 1}
    cutegen.reset_counters()
    assert cutegen.counters()["calls"] == {}
    cutegen.gemm(a, b)
    assert cutegen.counters()["calls"] == {"default": 1}


def test_counts_of_many_threads_add_up() -> None:
    tally = Tally()
    tick = tally.of_call("exact")

    def call() -> None:
        for _ in range(1000):
            tick()

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    seen = [tally.calls.get("exact", 0) for _ in range(50)]
    for thread in threads:
        thread.join()
    assert tally.calls == {"exact": 4000} and all(x <= y for x, y in itertools.pairwise(seen))
    tally.reset()
    assert tally.calls == {}
    tick()
    assert tally.calls == {"exact": 1}


# --- tables: digests and swaps ---


def test_a_swapped_table_answers_the_next_call(gpu: FakeGpu, tmp_path: Path) -> None:
    """Frozen too: what the new table names is a miss until it has run; warmed plans stay."""
    path, entry = table_with(tmp_path, KNOWN)
    other, _ = table_with(tmp_path, KNOWN, 1)
    a, b = rand(16, 32), rand(32, 24)
    cutegen.load_table(path)
    first = cutegen.counters()["table"]
    cutegen.gemm(a, b)
    assert entry.config is not None and cutegen.counters()["problems"] == {"exact": 1}
    assert gpu.compiled[-1].config == SPACE.compile_view(entry.config)
    cutegen.load_table(other)
    assert cutegen.counters()["table"] not in ("", first)
    cutegen.load_table(path)
    assert cutegen.counters()["table"] == first == Table.load(path).digest


def test_no_swap_where_bits_must_stay(gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = table_with(tmp_path, KNOWN)
    before = ops.default_dispatcher()
    torch.use_deterministic_algorithms(True)
    try:
        cutegen.gemm(rand(16, 32), rand(32, 24))
        with pytest.raises(UsageError, match="deterministic"):
            cutegen.load_table(path)
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UsageError, match="captured"):
        cutegen.load_table(path)
    assert ops.default_dispatcher() is before


# --- kernels that cannot be loaded ---


@pytest.mark.parametrize("build", ["allow", "background"])
def test_a_kernel_that_cannot_be_loaded_is_set_aside_once(
    gpu: FakeGpu, tmp_path: Path, build: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The default answers, with a line in the log and one attempt."""
    path, entry = table_with(tmp_path, KNOWN)
    assert entry.config is not None
    broken = SPACE.compile_view(entry.config)
    load, attempts = gpu.load, []

    def fail(library: Path, symbol: str) -> Any:
        if gpu._signatures[symbol].config == broken:
            attempts.append(symbol)
            raise LaunchError("cannot load kernel.so: truncated")
        return load(library, symbol)

    cutegen.use(gpu.dispatcher(Table.load(path), build=build, load=fail))
    a, b = rand(16, 32), rand(32, 24)
    with caplog.at_level(logging.WARNING, "cutegen"):
        for _ in range(3):
            near(cutegen.gemm(a, b), a.float() @ b.float())
            assert cutegen.wait_for_kernels(20)
            ops.drop_plans()
    assert len(attempts) == 1 and gpu.calls
    lines = [r.getMessage() for r in caplog.records if "truncated" in r.getMessage()]
    assert len(lines) == 1 and KNOWN in lines[0]
    assert cutegen.counters()["problems"] == {"default": 1}


def test_a_default_that_cannot_be_loaded_leaves_torch(gpu: FakeGpu) -> None:
    def fail(library: Path, symbol: str) -> Any:
        raise LaunchError("cannot load kernel.so: truncated")

    cutegen.use(gpu.dispatcher(load=fail))
    a, b = rand(16, 32), rand(32, 24)
    near(cutegen.gemm(a, b, activation="relu"), torch.relu(a.float() @ b.float()))
    assert cutegen.counters()["problems"] == {"awaited": 1}


def test_other_families_are_frozen_too(tmp_path: Path) -> None:
    """An operator of a declared family: what has run, a miss that its reference computes, an error."""
    fake, before = FakeNorms(tmp_path), ops.default_dispatcher()
    cutegen.use(fake.dispatcher())
    try:
        x, wide, weight = rand(8, 256), rand(8, 512), rand(1, 256)[0]
        cutegen.rms_norm(x, weight)
        compiled = len(fake.compiled)
        cutegen.freeze()
        near(cutegen.rms_norm(x, weight), torch.nn.functional.rms_norm(x, (256,), weight, 1e-6))
        near(cutegen.rms_norm(wide), torch.nn.functional.rms_norm(wide, (512,), None, 1e-6))
        assert cutegen.counters()["calls"] == {"default": 1, "missed": 1} and len(fake.compiled) == compiled
        cutegen.freeze("error")
        with pytest.raises(FrozenError, match="rmsnorm 8x512"):
            cutegen.rms_norm(wide)
    finally:
        cutegen.use(before)


def test_a_frozen_program_is_not_tuned(gpu: FakeGpu) -> None:
    cutegen.freeze()
    with pytest.raises(UsageError, match="frozen"):
        cutegen.autotune(torch.nn.Linear(8, 8), torch.ones(1, 8))
