"""Kernels of users on a real GPU: tuned, called, captured, pinned; broken ones, in place, scratch."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hopper import GPU, NEEDS_HOPPER
from own_registry import without_user_families

from cutegen.arch import find_arch
from cutegen.build import Artifact, Builder
from cutegen.build.render import render
from cutegen.build.store import Store
from cutegen.cli.main import main
from cutegen.families import registry
from cutegen.families.user.closure import file_identity
from cutegen.measure import Bench, Candidate
from cutegen.measure.torch_engine import open_cuda
from cutegen.runtime.dispatch import Dispatcher
from cutegen.runtime.kernel_cache import Kernels

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from own_kernels import ROPE, SPLIT, SUMS, write_kernel

pytestmark = [*NEEDS_HOPPER, pytest.mark.dsl]
ARCH = find_arch("sm_90a")
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_kernel"
#: An edit of my_norm.py, and what the check must say of it, on 300 rows of 1024 elements.
STORE = "cute.autovec_copy(out, ys[None, vector])\n"
BROKEN = {
    "half of the rows unwritten": (
        "inside = at < x.shape[0]",
        "inside = at < x.shape[0] // 2",
        r"y: 153600 of 307200 elements .*never written, first at \(150, 0\)",
    ),
    "stale output": (
        "if inside and vector",
        "if inside and at != 5 and vector",
        r"y: 1024 of 307200 elements .*never written, first at \(5, 0\)",
    ),
    "one element past the end": (
        STORE,
        STORE
        + "        if at == x.shape[0] - 1 and lane == 0:\n            y[at, self.n] = self.dtype(0.0)\n",
        r"y: 1 elements outside of the output were written",
    ),
    "input modified": (
        STORE,
        STORE + "        if at == 17 and lane == 0:\n            x[at, 3] = self.dtype(77.0)\n",
        r"wrote its input x, first at \(17, 3\)",
    ),
    "scalar compiled in": ("self.n + eps", "self.n + 1e-6", r"y\[\d+.* should be"),
    "tail column skipped": (
        "if inside and vector < self.vectors",
        "if inside and vector < self.vectors - 1",
        r"y: 2400 of 307200 elements .*never written, first at \(0, 1016\)",
    ),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with Bench(timeout_s=60) as opened:
        yield opened


def family_of(path: Path) -> Any:
    return registry.load_kernel(path)


def check(bench: Bench, result: Any, problem: Any, config: Any, seed: int = 0) -> Any:
    assert GPU is not None and isinstance(result, Artifact), result
    bench.open(problem, seed)
    space = registry.find_space(problem.family, ARCH)
    return bench.check(
        Candidate.of("kernel", result.shared_object, result.symbol, space, config, problem, GPU.sm_count)
    )


def test_broken_kernels_are_rejected(store: Store, bench: Bench, tmp_path: Path) -> None:
    """Each by the output and the place where it is wrong; the sound one passes."""
    family = family_of(EXAMPLE / "my_norm_kernel.py")
    problem = family.parse("my_rmsnorm 300x1024 bf16")
    config = registry.find_space(family.name, ARCH).default(problem)
    sound = render(problem, config, ARCH)
    sources = {"": sound}
    for number, (name, (old, new, _)) in enumerate(BROKEN.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        text = (EXAMPLE / "my_norm.py").read_text()
        assert text.count(old) == 1, f"{name}: the kernel's text has changed"
        file = folder / "my_norm.py"
        file.write_text(text.replace(old, new))
        assert sound.opening is not None
        opening = replace(sound.opening, folders=(str(folder),), files=((str(file), file_identity(file)),))
        sources[name] = replace(sound, text=f"{sound.text}# {name}\n", opening=opening)
    with Builder(store) as builder:
        results = {source.text: result for source, result in builder.build(sources.values())}
    said = {
        name: check(bench, results[source.text], problem, config, seed)
        for seed, (name, source) in enumerate(sources.items())
    }
    assert said.pop("").ok
    wrong = {n: v.error for n, v in said.items() if v.ok or not re.search(BROKEN[n][2], v.error)}
    assert not wrong, wrong


#: A problem, an edit of a kernel's file or declaration, and what the check must say; nothing of sound ones.
WRONG: tuple[tuple[dict[str, str], str, str, str, str, str], ...] = (
    (SUMS, "own_sums 300x777 bf16 sums", "sums.py", "", "", ""),
    (SUMS, "own_sums 300x777 bf16", "sums.py", "", "", ""),
    (
        SUMS,
        "own_sums 300x777 bf16 sums",
        "sums.py",
        "rstd[row] = factor",
        "rstd[row] = 1.001 * factor",
        r"rstd\[\d+\] is",
    ),
    (
        SUMS,
        "own_sums 300x777 bf16 sums",
        "sums.py",
        "if lane == 0:",
        "if lane == 0 and row != 7:",
        r"rstd: 1 of 300 elements .*never written, first at \(7,\)",
    ),
    (
        SPLIT,
        "split_sum 300x5000 bf16",
        "declaration.py",
        "workspace()",
        "workspace(zeroed=True)",
        "left numbers in its workspace of 1200 bytes, which must be zero",
    ),
)


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_several_outputs_and_zeroed_scratch_are_looked_at(
    case: int, store: Store, bench: Bench, tmp_path: Path
) -> None:
    files, line, name, old, new, said = WRONG[case]
    kind = line.partition(" ")[0]
    assert not old or files[name].count(old) == 1
    changed = {**files, name: files[name].replace(old, new) if old else files[name]}
    # The measuring process keeps what it has loaded, so each case is a kernel of its own.
    changed["declaration.py"] = changed["declaration.py"].replace(f'"{kind}"', f'"{kind}_{case}"')
    family = family_of(write_kernel(tmp_path / "own", changed))
    problem = family.parse(line.replace(kind, f"{kind}_{case}", 1))
    config = registry.find_space(family.name, ARCH).default(problem)
    with Builder(store) as builder:
        [(_, result)] = builder.build([render(problem, config, ARCH)])
    found = check(bench, result, problem, config)
    assert found.ok == (not said) and re.search(said, found.error or ""), found.error


@pytest.mark.parametrize(
    ("files", "lines"),
    [
        (SPLIT, ("300x5000 bf16", "7x777 fp32", "1x1 fp32")),
        (ROPE, ("513x8x128x64 bf16", "3x2x64x32 fp32")),
    ],
)
def test_scratch_and_updates_in_place(
    files: dict[str, str], lines: tuple[str, ...], store: Store, bench: Bench, tmp_path: Path
) -> None:
    """Every config is right, again with the same bits, and what is beside the tensor stays as it is."""
    family = family_of(write_kernel(tmp_path / "own", files))
    space = registry.find_space(family.name, ARCH)
    with Builder(store) as builder:
        for line in lines:
            problem = family.parse(f"{family.name} {line}")
            configs = list(space.configs(problem))
            built = {s.text: r for s, r in builder.build({render(problem, c, ARCH) for c in configs})}
            for config in configs:
                result = check(bench, built[render(problem, config, ARCH).text], problem, config)
                assert result.ok, f"{problem} {config}: {result.error}"


def test_scratch_serves_two_streams_at_once(tmp_path: Path, store: Store) -> None:
    import torch

    import cutegen

    files = {
        **SPLIT,
        "declaration.py": SPLIT["declaration.py"].replace('"split_sum",', '"split_sum_streams",'),
    }
    kernel = cutegen.load(write_kernel(tmp_path / "streams", files))
    cutegen.use(Dispatcher(kernels=Kernels(store, build="allow")))
    x = [torch.randn(2000, 4096, device="cuda") for _ in range(2)]
    wanted = [each.double().sum(-1) for each in x]
    config = "split=8"
    for each in x:
        kernel(each, config=config)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    got: list[Any] = [None, None]
    for _ in range(20):
        for at, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[at] = kernel(x[at], config=config)
    torch.cuda.synchronize()
    for one, right in zip(got, wanted, strict=True):
        assert torch.allclose(one.double(), right, atol=1e-2)


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_timed_spans_hold_launches_of_the_kernel_and_nothing_else(tmp_path: Path, store: Store) -> None:
    """Seen in a trace: what puts tensors back runs before the span, as does the load that leads to it."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    assert GPU is not None
    text = ROPE["declaration.py"].replace('"own_rope"', '"own_rope_spans"')
    text = text.replace('repeat="bounded"', 'repeat="restore"')
    family = family_of(write_kernel(tmp_path / "spans", {**ROPE, "declaration.py": text}))
    problem = family.parse("own_rope_spans 2048x8x128x64 bf16")
    space = registry.find_space(family.name, ARCH)
    config = space.default(problem)
    with Builder(store) as builder:
        [(_, result)] = builder.build([render(problem, config, ARCH)])
    assert isinstance(result, Artifact), result
    before = torch.cuda.current_stream()
    with profile(activities=[ProfilerActivity.CUDA]):  # graphs are seen if the tracer was there before them
        torch.cuda.synchronize()
    engine = open_cuda(0)
    try:
        engine.open(problem, 0)
        files = (result.shared_object, result.symbol)
        prepared = engine.prepare(Candidate.of("kernel", *files, space, config, problem, GPU.sm_count))
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            assert engine.measure(prepared, 3) > 0
    finally:
        torch.cuda.set_stream(before)
    events: Any = trace.events()
    device = torch.autograd.DeviceType.CUDA
    names = [e.name for e in sorted(events, key=lambda e: e.time_range.start) if e.device_type == device]
    spans: list[list[str]] = [[]]
    for name in names:
        if "reduce" in name:  # the load that leads to a span; torch clears a counter of its own for it
            spans.append([])
        elif "Memset" not in name:
            spans[-1].append(name)
    assert all(len({*span}) <= 1 for span in spans), spans
    copies = [span for span in spans if span and re.search("memcpy|copy|elementwise", span[0], re.IGNORECASE)]
    launches = [len(span) for span in spans if span and span not in copies]
    assert len(copies) == 3 and launches == [prepared.launches] * 3, spans


def test_ten_thousand_rotations_leave_finite_numbers(tmp_path: Path, store: Store) -> None:
    import torch

    import cutegen

    files = {**ROPE, "declaration.py": ROPE["declaration.py"].replace('"own_rope",', '"own_rope_replays",')}
    kernel = cutegen.load(write_kernel(tmp_path / "replays", files))
    cutegen.use(Dispatcher(kernels=Kernels(store, build="allow")))
    x = torch.randn(64, 4, 128, device="cuda", dtype=torch.bfloat16)
    angle = torch.rand(64, 64, device="cuda") * 6
    cos, sin = angle.cos(), angle.sin()
    assert kernel(x, cos, sin) is None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(100):
            kernel(x, cos, sin)
    for _ in range(100):
        graph.replay()
    torch.cuda.synchronize()
    assert bool(torch.isfinite(x).all())


def test_listed_configs_are_searched_once_and_then_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table has the winner, the cache its kernel; switched off, the default answers."""
    import torch

    import cutegen

    monkeypatch.setenv("CUTEGEN_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir(mode=0o700)
    without_user_families(monkeypatch)
    text = (EXAMPLE / "my_norm_kernel.py").read_text().replace('"my_rmsnorm"', '"searched_rmsnorm"')
    files = {"my_norm.py": (EXAMPLE / "my_norm.py").read_text(), "declaration.py": text}
    norm = cutegen.load(write_kernel(tmp_path / "searched", files))
    cutegen.use(Dispatcher())
    x = torch.randn(2000, 2048, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(2048, device="cuda", dtype=torch.bfloat16)
    configs = [{"threads": 128, "threads_per_row": each} for each in (32, 64)]
    table = tmp_path / "table.json"
    with cutegen.AutoTuner(effort="quick", table=table, busy="warn") as tuner:
        first = cutegen.exhaustive_search(norm, configs, x, w, tuner=tuner)
        tried = {row.config["threads_per_row"] for row in first.rows}
        assert first.measured and tried <= {32, 64, 128} and first.candidates == 3
    with cutegen.AutoTuner(effort="quick", table=table, busy="warn") as tuner:
        again = cutegen.exhaustive_search(norm, configs, x, w, tuner=tuner)
        assert first.contended_by or (again.reused and again.config == first.config)
    cutegen.configure(build="never")  # the kernel is in the cache
    want = torch.nn.functional.rms_norm(x.double(), (2048,), w.double(), 1e-6)
    assert torch.allclose(norm(x, w).double(), want, rtol=2**-7, atol=1e-5)
    monkeypatch.setenv("CUTEGEN_DISABLE_AUTOTUNE", "1")
    with cutegen.AutoTuner(effort="quick", table=table, busy="warn") as tuner:
        off = cutegen.exhaustive_search(norm, configs, x, w, tuner=tuner)
    assert not off.measured and off.config["threads_per_row"] == 128


#: Run by a new interpreter that finds torch and the folder, and nothing of what made it.
CALLS = """
import sys
for name in ("cutegen", "cutlass", "jinja2", "nvidia_cutlass_dsl", "my_norm"):
    sys.modules[name] = None
import torch
sys.path.insert(0, {folder!r})
import pinned

x = torch.randn(4096, 4096, device="cuda").bfloat16()
w = torch.randn(4096, device="cuda").bfloat16()
want = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w.double()
y = pinned.call("my_rmsnorm", x=x, w=w, eps=1e-6)
assert torch.allclose(y.double(), want, rtol=2**-7, atol=1e-5)
compiled = torch.compile(lambda t: pinned.call("my_rmsnorm", x=t, w=w, eps=1e-6) + 1, fullgraph=True)
assert torch.allclose(compiled(x).double(), want + 1, rtol=2**-6, atol=1e-2)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    pinned.call("my_rmsnorm", x=x, w=w, y=y, eps=1e-6)
y.zero_()
graph.replay()
assert torch.allclose(y.double(), want, rtol=2**-7, atol=1e-5)
try:
    pinned.call("my_rmsnorm", x=x.float(), w=w, eps=1e-6)
except Exception as error:
    print("refused:", error)
else:
    raise SystemExit("a wrong dtype was accepted")
"""


def test_the_example_is_tuned_called_and_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second run compiles and measures nothing; the winner is not slower than the author's default."""
    monkeypatch.setenv("CUTEGEN_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir(mode=0o700)
    folder = tmp_path / "mine"
    shutil.copytree(EXAMPLE, folder)
    without_user_families(monkeypatch)
    declaration, table = str(folder / "my_norm_kernel.py"), str(tmp_path / "table.json")
    words = ["tune", "--kernel", declaration, "--shape", "4096x4096", "--table", table, "--quiet", "--json"]
    words += ["--effort", "quick", "--busy", "warn"]
    assert main(words) == 0, capsys.readouterr().err
    (first,) = json.loads(capsys.readouterr().out)["results"]
    assert main(words) == 0, capsys.readouterr().err
    (second,) = json.loads(capsys.readouterr().out)["results"]
    if not first["candidates"][0]["timing"]["contended_by"]:  # by other tests, say: then it is measured again
        assert second["reused"] and second["winner"] == first["winner"]
        assert first["ratio_to_default"][1] >= 0.98
    assert not first["reused"]

    import torch

    import cutegen

    norm = cutegen.load(declaration)
    cutegen.load_table(table)
    cutegen.configure(build="allow")
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
    want = torch.nn.functional.rms_norm(x.double(), (4096,), w.double(), 1e-6)
    y = norm(x, w)
    assert torch.allclose(y.double(), want, rtol=2**-7, atol=1e-5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm(x, w, y=y)
    y.zero_()
    graph.replay()
    assert torch.allclose(y.double(), want, rtol=2**-7, atol=1e-5)
    compiled = torch.compile(lambda t: norm(t, w) + 1, fullgraph=True)
    assert torch.allclose(compiled(x).double(), want + 1, rtol=2**-6, atol=1e-2)

    deploy = tmp_path / "deploy"
    assert main(["pin", "--kernel", declaration, "--table", table, "--out", str(deploy)]) == 0
    program = CALLS.format(folder=str(deploy))
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "refused:" in done.stdout and "x" in done.stdout
