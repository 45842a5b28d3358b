"""Laws of warming: every kernel that calls may need, each once, resumed where it ended; none after it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
from bundles import publish
from fake_kernels import H200, FakeGpu

from cutegen.arch import find_arch
from cutegen.build import Artifact, Failure, Result, Toolchain
from cutegen.build.render import Source, render
from cutegen.build.store import Store
from cutegen.cli.main import main
from cutegen.errors import DeviceError, ProblemError, StoreError, UsageError
from cutegen.families.gemm.family import GEMM
from cutegen.families.gemm.problem import Epilogue, Problem
from cutegen.families.ranges import parse_range
from cutegen.families.registry import find_space, parse_problem
from cutegen.families.rmsnorm.family import RMSNORM
from cutegen.measure.device import Device
from cutegen.records.entry import Entry, Fingerprint
from cutegen.records.range_entry import Piece, RangeEntry
from cutegen.records.table import Table
from cutegen.runtime import answer_lookup, dispatch, warming
from cutegen.runtime.answer_lookup import look_up
from cutegen.runtime.needs import Needs, Wanted, each_once, kinds
from cutegen.runtime.warming import Warming, compile_wanted
from cutegen.search.defaults import default_config, default_set
from cutegen.space import Config

ARCH = find_arch("sm_90a")
SPACE = find_space("gemm", ARCH)
KIND = parse_problem("gemm 4096x4096x4096 bf16 kk")
PROBLEM = Problem(1024, 1024, 1024)


@pytest.fixture(autouse=True)
def _kernels_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not torch, where that is expected to be faster: which sizes these are is not what is tested here."""
    monkeypatch.setattr(answer_lookup, "DEFAULT_FALLBACK", "measured")


class Compiler:
    """A builder that publishes one kernel at each poll.

    Attributes:
        compiled: What was asked for, in order.
        before: Called before each; what it raises ends the poll.
        fails: Whether a source does not compile.
    """

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.compiled: list[Source] = []
        self.opened = self.closed = 0
        self.before: Callable[[], None] = lambda: None
        self.fails: Callable[[Source], bool] = lambda source: False
        self._waiting: list[Source] = []

    def __call__(self, store: Store, workers: int | None = None) -> Compiler:
        self.opened += 1
        self._waiting = []
        return self

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *error: object) -> None:
        self.closed += 1

    def submit(self, sources: Iterable[Source]) -> None:
        self._waiting += sources

    def poll(self, timeout_s: float | None = None) -> list[tuple[Source, Result]]:
        self.before()
        source = self._waiting.pop(0)
        self.compiled.append(source)
        tools = self.gpu.toolchain
        if self.fails(source):
            failed = {"outcome": "error", "message": "it is too large"}
            artifact: Artifact = publish(self.gpu.store, source, made_with=tools, **failed)
            return [(source, Failure(artifact.key, "error", "it is too large", ""))]
        self.gpu.compile(source, self.gpu.store)
        return [(source, publish(self.gpu.store, source, made_with=tools))]


@pytest.fixture
def gpu(tmp_path: Path) -> FakeGpu:
    return FakeGpu(tmp_path / "cache")


@pytest.fixture
def compiler(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    found = Compiler(gpu)
    monkeypatch.setattr(warming, "Builder", found)
    return found


def of_kinds(kinds: Iterable[Problem], table: Table | None = None) -> tuple[Wanted, ...]:
    return each_once(Needs(table, ARCH, 132).of_kinds(kinds), ARCH)


def of_problem(problem: Problem, table: Table | None) -> tuple[Wanted, ...]:
    """What answers a problem, and may answer its kind."""
    needs = Needs(table, ARCH, 132)
    return each_once((*needs.of_problems([problem]), *needs.of_kinds([problem])), ARCH)


def wanted_of(*lines: str) -> tuple[Wanted, ...]:
    return of_kinds([parse_problem(line) for line in lines])


# --- what is wanted ---


def test_kinds_are_all_combinations() -> None:
    """Dtypes, layouts and options in turn; what is left out is the family's default."""
    assert kinds(GEMM) == (KIND,)
    found = kinds(GEMM, ("bf16", "fp16"), ("kk", "kn"), ("", "bias=n activation=silu"))
    assert len(found) == 8
    assert str(found[-1]) == "gemm 4096x4096x4096 fp16 kn bias=n act=silu"
    assert [str(p) for p in kinds(RMSNORM, shapes=("1x4096", "1x7168"))] == [
        "rmsnorm 1x4096 bf16",
        "rmsnorm 1x7168 bf16",
    ]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: kinds(RMSNORM),
            UsageError,
            "compiled for one n; give the shapes, such as --shape 4096x4096",
        ),
        (lambda: kinds(RMSNORM, layouts=("kk",), shapes=("1x64",)), UsageError, "rmsnorm has no layout"),
        (lambda: kinds(GEMM, options=("bais=n",)), UsageError, "did you mean bias?"),
        (lambda: kinds(GEMM, ("bf61",)), ProblemError, "unsupported input dtype 'bf61'"),
        (lambda: kinds(GEMM, ("e4m3",), ("kn",)), ProblemError, "layout 'kn' of e4m3 is not supported"),
        (lambda: kinds(GEMM, shapes=("4096",)), UsageError, "shape: '4096' is not MxNxK"),
    ],
)
def test_malformed_kinds_are_refused(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    """The message names the value and what would be valid."""
    with pytest.raises(error, match=message.replace("?", r"\?")):
        call()


def test_a_kind_means_its_default_set() -> None:
    """Two problems of one signature are one kind."""
    found = of_kinds([KIND, PROBLEM])
    assert [(each.problem, each.config) for each in found] == list(default_set(SPACE, KIND))


def test_a_problem_means_what_answers_it_and_its_kind() -> None:
    """From the table if it has an answer; each kernel comes once."""
    other = next(c for c in SPACE.configs(PROBLEM, {"use_pdl": [False]}) if not SPACE.explain(PROBLEM, c))
    table = Table(Fingerprint.of(H200, Toolchain.current()), [Entry(PROBLEM, other)])
    found = of_problem(PROBLEM, table)
    assert (found[0].problem, found[0].config) == (PROBLEM, other)
    assert [each.config for each in found[1:]] == [config for _, config in default_set(SPACE, PROBLEM)]
    plain = of_problem(PROBLEM, None)
    assert plain[0].config == default_config(SPACE, PROBLEM, 132)
    assert len(plain) == len(default_set(SPACE, PROBLEM))


def test_a_table_means_all_its_kernels() -> None:
    """Those that this version can render: not what torch won, not what another version wrote."""
    config, foreign = SPACE.default(PROBLEM), Config({"tile_k": 3})
    entries = [
        Entry(PROBLEM, config, artifact_key="0" * 32),
        Entry(Problem(64, 1024, 1024), foreign),
        Entry(Problem(128, 1024, 1024), None, source="torch"),
    ]
    table = Table(Fingerprint.of(H200, Toolchain.current()), entries)
    found = each_once(Needs(table, ARCH, 132).of_table(), ARCH)
    assert [(each.problem, each.config, each.known_key) for each in found] == [(PROBLEM, config, "0" * 32)]
    assert not of_kinds([], table)


@pytest.mark.parametrize(
    ("line", "middle", "sizes"),
    [
        ("gemm 8..64x64x64 bf16 mn", 24, ["8x64x64", "32x64x64"]),
        ("gemm 64x9..63x64 bf16 kk", 23, ["64x9x64", "64x25x64"]),
    ],
)
def test_a_piece_is_compiled_for_a_problem_of_its_range(line: str, middle: int, sizes: list[str]) -> None:
    """Where the size that it begins at is none that the range has."""
    of = parse_range(line)
    first, second = list(islice(SPACE.configs(of.low), 2))
    pieces = (Piece(of.first, middle, first), Piece(middle + 1, of.last, second))
    table = Table(Fingerprint.of(H200, Toolchain.current()), ranges=[RangeEntry(of, pieces)])
    found = [*Needs(table, ARCH, 132).of_table()]
    assert [str(each.problem).split(" ")[1] for each in found] == sizes
    assert {each.problem.signature for each in found} == {of.low.signature}


def test_a_kind_means_what_a_table_answers_to_it() -> None:
    """Whatever rule of lookup finds an entry or a range: no call of that kind wants another kernel."""
    kernels = [config for _, config in default_set(SPACE, PROBLEM)]
    entries = [
        Entry(Problem(m, n, k), kernels[at]) for at, (m, n, k) in enumerate(((64, 512, 512), (900, 512, 512)))
    ]
    biased = Problem(200, 512, 512, epilogue=Epilogue(bias="n"))
    other = next(c for c in SPACE.configs(biased, {"use_pdl": [False]}) if not SPACE.explain(biased, c))
    within = parse_range("gemm 1000..4000x512x512 bf16 kk")
    ranges = [RangeEntry(within, (Piece(1000, 1999, kernels[5]), Piece(2000, 4000, other)))]
    table = Table(Fingerprint.of(H200, Toolchain.current()), [*entries, Entry(biased, other)], ranges)
    wanted = {SPACE.compile_view(each.config) for each in of_kinds([KIND], table)}
    without = {SPACE.compile_view(each.config) for each in of_kinds([KIND])}
    assert wanted == without | {SPACE.compile_view(other)}
    assert not of_kinds([], table)
    generator, ways = Random(3), set()
    for _ in range(60):
        m, n = int(2 ** (2 + 11 * generator.random())), generator.choice([512, 640, 4096])
        answer = look_up(table, Problem(m, n, 512), SPACE, 132, "none")
        ways.add(answer.how)
        assert answer.config is not None
        assert answer.config.algorithm or SPACE.compile_view(answer.config) in wanted
    assert {"range", "default"} <= ways


def test_what_a_target_cannot_compute_is_refused() -> None:
    """Before anything is compiled."""
    with pytest.raises(ProblemError, match="cannot be computed on sm_90a: tf32_is_for_blackwell"):
        wanted_of("gemm 64x64x64 tf32 kk")


# --- compiling ---


def test_everything_is_compiled_once(gpu: FakeGpu, compiler: Compiler) -> None:
    """The second time nothing is, and no compiler is started."""
    wanted, seen = wanted_of(str(KIND)), []
    done = compile_wanted(wanted, gpu.store, ARCH, observe=seen.append)
    assert (done.compiled, done.present, done.failed, done.missing) == (wanted, (), (), 0)
    assert [len(each.compiled) for each in seen] == list(range(len(wanted) + 1))
    assert compiler.compiled == [render(each.problem, each.config, ARCH) for each in wanted]
    again = compile_wanted(wanted, gpu.store, ARCH)
    assert (again.compiled, again.present, again.missing) == ((), wanted, 0)
    assert (compiler.opened, compiler.closed) == (1, 1)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), StoreError("No space left on device")])
def test_it_continues_where_it_was(gpu: FakeGpu, compiler: Compiler, error: BaseException) -> None:
    """Interrupted, or stopped by a full cache folder: what was compiled is kept, the rest comes next time."""
    wanted = wanted_of(str(KIND))

    def before() -> None:
        if len(compiler.compiled) == 3:
            raise error

    compiler.before = before
    with pytest.raises(type(error)):
        compile_wanted(wanted, gpu.store, ARCH)
    assert compiler.closed == 1
    compiler.before = lambda: None
    done = compile_wanted(wanted, gpu.store, ARCH)
    assert (len(done.present), len(done.compiled)) == (3, len(wanted) - 3)
    assert len(compiler.compiled) == len({source.text for source in compiler.compiled}) == len(wanted)


def test_a_budget_leaves_the_rest(gpu: FakeGpu, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done by then counts, and the same call continues."""
    clock = [0.0]
    monkeypatch.setattr(warming.time, "monotonic", lambda: clock[0])
    compiler.before = lambda: clock.__setitem__(0, clock[0] + 1.0)
    wanted = wanted_of(str(KIND))
    done = compile_wanted(wanted, gpu.store, ARCH, budget_s=4.0)
    assert (len(done.compiled), done.missing, done.left_s) == (4, len(wanted) - 4, 0.0)
    rest = compile_wanted(wanted, gpu.store, ARCH, budget_s=1000.0)
    assert (len(rest.present), rest.missing) == (4, 0)
    assert compiler.closed == 2


def test_failures_have_reasons_and_stay(gpu: FakeGpu, compiler: Compiler) -> None:
    """The others are compiled all the same; the next run knows, and compiles nothing."""
    compiler.fails = lambda source: source.config.get("tile_shape_mn") == (64, 8)
    wanted = wanted_of(str(KIND))
    for _ in range(2):
        done = compile_wanted(wanted, gpu.store, ARCH)
        assert {each.config["tile_shape_mn"] for each, _ in done.failed} == {(64, 8)}
        assert all("it is too large" in reason for _, reason in done.failed)
        assert len(done.ready) + len(done.failed) == len(wanted) and not done.missing
    assert compiler.opened == 1


# --- from Python ---


@pytest.fixture
def used(gpu: FakeGpu, compiler: Compiler) -> Iterator[FakeGpu]:
    """Calls go to kernels on the CPU."""
    torch = pytest.importorskip("torch")
    import cutegen
    from cutegen.runtime.workspace import Workspaces
    from cutegen.torch_ops import gemm as ops
    from cutegen.torch_ops import warmup

    cutegen.gemm  # noqa: B018  prepares the operators
    before, workspaces = ops.default_dispatcher(), ops._workspaces
    cutegen.use(gpu.dispatcher(build="background"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warmup, "new_workspace", lambda device, n, zeroed=False: torch.zeros(n))
        ops._workspaces = Workspaces(lambda _, n, zeroed: torch.zeros(n), lambda _: 0, lambda _: False)
        yield gpu
    ops._workspaces = workspaces
    cutegen.use(before)


def test_after_a_warm_up_200_random_shapes_compile_and_load_nothing(
    used: FakeGpu, compiler: Compiler
) -> None:
    """Each kernel was loaded and launched by the warm-up; calls start no thread either."""
    import torch

    import cutegen

    seen: list[Warming] = []
    warmed = cutegen.warmup(options=("", "bias=n act=silu"), observe=seen.append)
    assert warmed.launched == len(warmed.wanted) == len(used.calls) == len(set(used.loaded))
    assert seen[-1] == warmed and not warmed.failed and not warmed.missing
    compiled, loaded = list(used.compiled), list(used.loaded)
    generator = Random(11)
    for count in range(200):
        m, n, k = (8 * int(2 ** generator.uniform(0, 5)) for _ in range(3))
        x = torch.ones(max(1, m - generator.randrange(8)), k, dtype=torch.bfloat16)
        w = torch.ones(n, k, dtype=torch.bfloat16)
        y = (
            cutegen.linear(x, w, torch.ones(n, dtype=torch.bfloat16), "silu")
            if count % 2
            else cutegen.linear(x, w)
        )
        want = torch.nn.functional.silu(torch.tensor(k + 1.0)) if count % 2 else torch.tensor(float(k))
        torch.testing.assert_close(y.float(), want.expand(y.shape), rtol=1e-2, atol=1e-2)
    assert (used.compiled, used.loaded) == (compiled, loaded) and not used.builders
    assert len(used.calls) == warmed.launched + 200
    again = cutegen.warmup(options=("", "bias=n act=silu"))
    assert again.compiled == () and again.launched == warmed.launched and used.loaded == loaded


def test_warm_up_takes_problems_and_other_targets(used: FakeGpu, tmp_path: Path) -> None:
    """Problems alone are all that is wanted; for another target nothing is loaded."""
    import cutegen

    warmed = cutegen.warmup(problems=["gemm 64x64x64 fp16 kn"], launch=False)
    assert {each.problem.signature.ab_dtype for each in warmed.wanted} == {"fp16"}
    other = cutegen.warmup(problems=["rmsnorm 64x4096 bf16"], arch="sm_100a")
    assert other.compiled and {source.arch for source in used.compiled} == {"sm_90a", "sm_100a"}
    assert not used.loaded and not used.calls
    table = tmp_path / "table.json"
    config = default_config(SPACE, PROBLEM)
    Table(Fingerprint.of(H200, Toolchain.current()), [Entry(PROBLEM, config)]).save(table)
    found = cutegen.warmup(table=table, problems=[PROBLEM])
    assert found.wanted[0].config == config


def test_without_a_gpu_a_warm_up_says_what_works_without() -> None:
    from cutegen.torch_ops import warmup

    def missing(index: int) -> Device:
        raise DeviceError("no NVIDIA driver on this machine")

    with pytest.raises(DeviceError, match=r"no NVIDIA driver .*name a target: arch='sm_90a'"):
        warmup._target(dispatch.Dispatcher(device=missing), None, 0)


# --- from the command line ---


def run(gpu: FakeGpu, *words: str) -> int:
    return main(["warm", *words, "--cache-dir", str(gpu.store.root), "--quiet"])


def test_the_command_says_what_it_did(
    gpu: FakeGpu, compiler: Compiler, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line; the second time everything was there; as JSON too."""
    count = len(wanted_of(str(KIND)))
    assert run(gpu, "gemm", "--arch", "sm_90a") == 0
    assert f"{count} kernels for sm_90a: {count} compiled in " in capsys.readouterr().out
    assert run(gpu, "gemm", "--arch", "sm_90a") == 0
    again = capsys.readouterr().out
    assert f"{count} kernels for sm_90a: 0 compiled" in again
    assert f"{count} were there; in {gpu.store.root}" in again
    words = ("gemm", "--arch", "sm_90a", "--dtype", "bf16,fp16", "--options", "", "--options", "act=relu")
    assert run(gpu, *words, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["kernels"], document["present"], document["missing"]) == (4 * count, count, 0)


def test_the_command_ends_with_1_if_kernels_fail(
    gpu: FakeGpu, compiler: Compiler, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is named with its reason."""
    compiler.fails = lambda source: source.config.get("tile_shape_mn") == (64, 8)
    assert run(gpu, "gemm", "--arch", "sm_90a") == 1
    out = capsys.readouterr().out
    assert "failed: gemm" in out and "it is too large" in out and " failed; in" in out


def test_a_full_cache_folder_ends_with_3(
    gpu: FakeGpu, compiler: Compiler, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message says what to free; the kernels so far are kept."""

    def full() -> None:
        if len(compiler.compiled) == 2:
            raise StoreError(f"cannot write to {gpu.store.root}: No space left on device; free the space")

    compiler.before = full
    assert run(gpu, "gemm", "--arch", "sm_90a") == 3
    assert "No space left on device" in capsys.readouterr().err
    assert len(gpu.store.keys("sm_90a")) == 2


def test_shapes_tables_and_families_of_fixed_sizes(
    gpu: FakeGpu, compiler: Compiler, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table alone means its kernels; shapes mean their kinds; a table of another GPU is refused."""
    table = tmp_path / "table.json"
    entries = [Entry(PROBLEM, SPACE.default(PROBLEM))]
    Table(Fingerprint.of(H200, Toolchain.current()), entries).save(table)
    assert run(gpu, "gemm", "--arch", "sm_90a", "--table", str(table)) == 0
    assert "1 kernel for sm_90a: 1 compiled" in capsys.readouterr().out
    shapes = tmp_path / "shapes.toml"
    shapes.write_text("[[shape]]\nm = 64\nn = 64\nk = 64\ndtype = 'fp16'\n")
    assert run(gpu, "gemm", "--arch", "sm_90a", "--shapes", str(shapes)) == 0
    assert {source.signature.ab_dtype for source in compiler.compiled[1:]} == {"fp16"}
    assert run(gpu, "rmsnorm", "--arch", "sm_100a", "--shape", "1x4096") == 0
    assert run(gpu, "gemm", "--arch", "sm_100a", "--table", str(table)) == 3
    assert "would not be used on sm_100a: compute_capability is '9.0a'" in capsys.readouterr().err


def test_ranges_mean_their_kinds(
    gpu: FakeGpu, compiler: Compiler, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As arguments and in the shapes file that a range was tuned from: any size of them compiles nothing."""
    shapes, one = tmp_path / "shapes.toml", tmp_path / "one.toml"
    shapes.write_text("[[shape]]\nm = '1..8192'\nn = 256\nk = 64\ndtype = 'fp16'\n")
    count = len(wanted_of("rmsnorm 1x256 bf16"))
    one.write_text("[[shape]]\nm = '1..64'\nn = 256\n")
    for words in (["--shape", "1..64x256"], ["--shapes", str(one)]):
        assert run(gpu, "rmsnorm", "--arch", "sm_90a", *words) == 0
        assert f"{count} kernels for sm_90a" in capsys.readouterr().out
    asked = ["gemm", "--arch", "sm_90a", "--budget", "0.001", "--shapes", str(shapes)]
    assert run(gpu, *asked) == 1
    assert f"{len(default_set(SPACE, PROBLEM))} kernels for sm_90a" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gemm", "--arch", "sm_90a", "--shape", "8..1x64x64"], "range 8..1 of m is reversed; write 1..8"),
        (["rmsnorm", "--arch", "sm_90a", "--shape", "4x1..64"], "n of rmsnorm is compiled in"),
        (["rmsnorm", "--arch", "sm_90a"], "kernels of rmsnorm are compiled for one n; give the shapes"),
        (["gemm", "--arch", "sm_90a", "--launch"], "--launch is for the present GPU"),
        (["gemm", "--arch", "sm_80"], "sm_80"),
        (["gemm", "--arch", "sm_90a", "--dtype", "tf32"], "tf32_is_for_blackwell"),
        (["gmm"], "did you mean gemm?"),
    ],
)
def test_wrong_usage_ends_with_2(
    gpu: FakeGpu, compiler: Compiler, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert run(gpu, *words) == 2
    assert message in capsys.readouterr().err
    assert not compiler.opened


@pytest.mark.dsl
def test_with_the_real_compiler(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The default set of a norm is compiled, and found by the next run."""
    words = [
        "warm",
        "rmsnorm",
        "--arch",
        "sm_90a",
        "--shape",
        "1x256",
        "--cache-dir",
        str(tmp_path),
        "--quiet",
    ]
    count = len(wanted_of("rmsnorm 1x256 bf16"))
    for expected in ((count, 0), (0, count)):
        assert main([*words, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert (document["compiled"], document["present"]) == expected
