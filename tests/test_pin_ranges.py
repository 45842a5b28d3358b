"""Ranges of sizes in a pinned folder: each size gets the kernel and the integers of a library call."""

from __future__ import annotations

import re
import shutil
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deployments import Workshop, load, operands, write_table
from fake_kernels import H200
from fake_torch import Torch
from pinned_families import values_of, write_family

from cutegen.build import Toolchain
from cutegen.cli.pin import main
from cutegen.deploy import Pinned, PinnedRange, pin_table
from cutegen.deploy.selection import Selection
from cutegen.errors import PinError, UsageError
from cutegen.families import registry
from cutegen.families.gemm.problem import Epilogue, Problem
from cutegen.families.ranges import parse_range
from cutegen.families.registry import find_space, is_legal, space_of
from cutegen.records.entry import Entry, Fingerprint
from cutegen.records.range_entry import Piece, RangeEntry
from cutegen.records.table import Table
from cutegen.runtime.answer_lookup import Answer, look_up
from cutegen.space import Config

pytest.importorskip("torch")
ARCH = H200.arch
GEMM = "gemm 1..700x512x4096 bf16 kk"
STEPPED = "gemm 8..256x128x512 fp16 mn"
NORM = "rmsnorm 1..300x4096 bf16"
MIXED = "mixed 2..40x64x3 bf16"


def table() -> Table:
    """Pieces of one size, of few, of many; parts along k, whose workspace follows m; an entry in between."""
    of = parse_range(GEMM)
    few, many = (find_space("gemm", ARCH).default(Problem(m, 512, 4096)) for m in (4, 700))
    split = many.replace(split_k=4, use_tma_store=False, swap_ab=False)
    torch = Piece(401, 420, None, "torch")
    edges = ((1, 1, many), (2, 63, few), (64, 64, many), (65, 400, split))
    pieces = (*(Piece(*edge) for edge in edges), torch, Piece(421, 700, many))
    exact = Entry(Problem(77, 512, 4096), few)
    return Table(Fingerprint.of(H200, Toolchain.current()), [exact], [RangeEntry(of, pieces)])


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One deployment of all ranges above, made once and never changed."""
    root = tmp_path_factory.mktemp("pin")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_registered", dict(registry._all()))
        registry.load_families(write_family(root))
        table().save(root / "table.json")
        asked = [parse_range(line) for line in (STEPPED, NORM, MIXED)]
        kernels = Workshop(root / "cache").kernels()
        pin_table(root / "table.json", root / "deploy", kernels=kernels, problems=asked)
        yield root / "deploy"


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "calls.txt"
    monkeypatch.setenv("KERNEL_LOG", str(path))
    return path


def found(deployment: Any, problem: Problem) -> dict[str, Any] | None:
    """What the loader finds for a GEMM of a range."""
    torch = Torch()
    a, b, options = operands(problem, torch)
    names = deployment.gemm.__func__.__globals__
    options = (False, False, False, "", False, False)
    out = torch.tensor(problem.m, problem.n, dtype=str(a.dtype).partition(".")[2])
    key = names["call_key"](names["GemmOperands"](a, b, out, None, None, ()), options)
    record: dict[str, Any] | None = deployment._records.get(key) or deployment._lookup().of_key(key)
    return record


def answer_of(problem: Problem) -> Answer:
    return look_up(table(), problem, find_space("gemm", ARCH), H200.sm_count)


def test_every_size_gets_what_a_library_call_gives_it(deployed: Path, tmp_path: Path) -> None:
    """Kernel, integers and workspace, at all 700 sizes; the loader works them out from its manifest."""
    deployment, _ = load(deployed)
    kernels = Workshop(tmp_path / "cache").kernels()
    symbols = {}
    for m in range(1, 701):
        problem = Problem(m, 512, 4096)
        config, record = answer_of(problem).config, found(deployment, problem)
        assert record is not None
        if config is None:
            assert record["symbol"] == "" and 401 <= m <= 420
            continue
        if config not in symbols:
            symbols[config] = kernels.artifact(problem, config, ARCH).symbol
        launch = space_of(config, "gemm", ARCH).launch(config, problem, H200.sm_count)
        assert record["symbol"] == symbols[config], m
        assert tuple(record["scalars"]) == launch.scalars, m
        assert (record["workspace_bytes"], record["zeroed"]) == (launch.workspace_bytes, launch.zeroed), m
    for m in (701, 8192):
        assert found(deployment, Problem(m, 512, 4096)) is None


def test_calls_of_a_range_reach_its_kernels(deployed: Path, log: Path) -> None:
    """With the integers of their size, and scratch memory as large as it needs."""
    deployment, torch = load(deployed)
    for m in (3, 65, 300):
        problem = Problem(m, 512, 4096)
        a, b, options = operands(problem, torch)
        deployment.gemm(a, b, **options)
        config = answer_of(problem).config
        assert config is not None
        launch = space_of(config, "gemm", ARCH).launch(config, problem, H200.sm_count)
        lines = log.read_text().splitlines()
        log.unlink()
        assert [line for line in lines if line.startswith("int")] == [f"int {n}" for n in launch.scalars]
        assert sum(line.startswith("tensor") for line in lines) == 3 + (launch.workspace_bytes > 0)
        if launch.workspace_bytes:
            assert torch.allocated[-1].numel() * 4 >= launch.workspace_bytes
    called: list[Any] = []
    torch.mm = lambda a, b, out: called.append(out)
    a, b, options = operands(Problem(410, 512, 4096), torch)
    assert deployment.gemm(a, b, **options) is called[0]


@pytest.mark.parametrize("line", [STEPPED, NORM, MIXED])
def test_a_range_that_was_not_tuned_gets_valid_configs(deployed: Path, line: str) -> None:
    """Each size a config that is valid for it, with the integers that follow; sizes between get none."""
    of = parse_range(line)
    name = of.low.family
    deployment, _ = load(deployed)
    manifest = deployment._manifest
    part = manifest if name == "gemm" else manifest["families"][name]
    (record,) = [record for record in part["ranges"] if record["problem"] == line]
    for size in range(of.first, of.last + 1):
        problem, got = of.at(size), deployment._lookup().of_size(record, size)
        assert (got is None) == (problem is None), size
        if got is None or problem is None:
            continue
        config = Config.parse(got["config"])
        assert is_legal(config, problem, ARCH)
        launch = space_of(config, name, ARCH).launch(config, problem, H200.sm_count)
        assert (tuple(got["scalars"]), got["workspace_bytes"]) == (launch.scalars, launch.workspace_bytes)


def test_families_are_served_in_ranges(deployed: Path, log: Path) -> None:
    deployment, torch = load(deployed)
    for m in (1, 17, 300):
        deployment.rms_norm(torch.tensor(m, 4096), torch.tensor(4096))
    with pytest.raises(RuntimeError, match=rf"no kernel of rmsnorm is pinned for m=301 .*; pinned: {NORM}"):
        deployment.rms_norm(torch.tensor(301, 4096), torch.tensor(4096))
    with pytest.raises(RuntimeError, match="no kernel of rmsnorm is pinned for m=5 n=4096 x=fp16"):
        deployment.rms_norm(torch.tensor(5, 4096, dtype="float16"))
    log.unlink()
    for m in (2, 40):
        deployment.call("mixed", **values_of(f"mixed {m}x64x3 bf16", torch))
        assert log.read_text().splitlines()[1:3] == [f"int {m}", "int 3"]
        log.unlink()
    assert NORM in deployment.problems and GEMM in deployment.problems


def test_sizes_outside_are_refused_or_torchs(tmp_path: Path, log: Path) -> None:
    """torch computes what is not pinned if that was asked for, and then only a plain product."""
    line = "gemm 1..64x128x256 bf16 kk"
    path = write_table(tmp_path / "t.json", (line,))
    kernels = Workshop(tmp_path / "cache").kernels()
    called: list[Any] = []
    for outside in ("none", "torch"):
        pin_table(path, tmp_path / outside, kernels=kernels, outside=outside)
        deployment, torch = load(tmp_path / outside)
        torch.mm = lambda a, b, out: called.append(out)
        for other in ("gemm 65x128x256 bf16 kk", "gemm 64x256x256 bf16 kk"):
            a, b, options = operands(Problem.parse(other), torch)
            if outside == "torch":
                assert deployment.gemm(a, b, **options) is called.pop()
                assert deployment.gemm(a, b, **options) is called.pop()
                continue
            with pytest.raises(RuntimeError, match=rf"no kernel is pinned for m=.*; pinned: {line}"):
                deployment.gemm(a, b, **options)
        a, b, options = operands(Problem.parse("gemm 65x128x256 bf16 kk"), torch)
        for more in ({"activation": "relu"}, {"alpha": 2.0}, {"out_dtype": torch.float32, "out": None}):
            with pytest.raises(RuntimeError, match="no kernel is pinned for m=65"):
                deployment.gemm(a, b, **{**options, **more})
    assert not called and not log.exists()
    with pytest.raises(UsageError, match="outside is 'numpy'; valid: none, torch"):
        pin_table(path, tmp_path / "other", kernels=kernels, outside="numpy")


@pytest.mark.parametrize("line", [GEMM, NORM])
def test_a_kernel_that_is_missing_is_said_by_the_first_call(
    deployed: Path, tmp_path: Path, line: str
) -> None:
    """Whichever size it has, so that nobody learns of it in the middle of the night."""
    folder = Path(shutil.copytree(deployed, tmp_path / "deploy"))
    deployment, torch = load(folder)
    part = deployment._manifest if line == GEMM else deployment._manifest["families"]["rmsnorm"]
    kernels = next(record for record in part["ranges"] if record["problem"] == line)["kernels"]
    lost = [kernel["library"] for kernel in kernels if kernel["library"]][-1]
    (folder / lost).unlink()
    with pytest.raises(
        RuntimeError, match=f"{line} needs {lost}, which is missing in {folder}; copy it again"
    ):
        if line == GEMM:
            a, b, options = operands(Problem(2, 512, 4096), torch)
            deployment.gemm(a, b, **options)
        else:
            deployment.rms_norm(torch.tensor(5, 4096), torch.tensor(4096))


def test_kinds_of_call_are_forgotten_before_they_fill_the_memory(deployed: Path, log: Path) -> None:
    """Every size is a kind of its own, with an argument block."""
    deployment, torch = load(deployed)
    deployment.gemm.__func__.__globals__["_MOST_CALLS"] = 10
    deployment.call("mixed", **values_of("mixed 2x64x3 bf16", torch))
    deployment._parts["FamilyCalls"]._plan.__globals__["_MOST_PLANS"] = 10
    for m in range(2, 40):
        a, b, options = operands(Problem(m, 512, 4096), torch)
        deployment.gemm(a, b, **options)
        deployment.call("mixed", **values_of(f"mixed {m}x64x3 bf16", torch))
    assert len(deployment._threads.calls) <= 10
    assert len(deployment._families["mixed"]._threads.plans) <= 10
    assert log.read_text().count("call") == 1 + 2 * 38


# --- pinning them ---


def pinned_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> list[str]:
    workshop = Workshop(tmp_path / "cache")
    monkeypatch.setattr("cutegen.cli.pin.Kernels", lambda store, build: workshop.kernels(build=build))
    out = tmp_path / "deploy"
    assert main(["--table", str(tmp_path / "t.json"), "--out", str(out), *words]) == 0
    problems: list[str] = load(out)[0].problems
    return problems


def test_kernels_of_a_range_are_compiled_side_by_side(tmp_path: Path) -> None:
    """By one compiler for all; a folder that may build nothing still says which is missing."""
    table = write_table(tmp_path / "t.json", ("gemm 64x512x1024 bf16 kk",))
    workshop, rows = Workshop(tmp_path / "cache"), parse_range("gemm 1..256x512x1024 bf16 kk")
    with pytest.raises(PinError, match="no kernel to pin"):
        pin_table(table, tmp_path / "none", kernels=workshop.kernels(build="never"), problems=[rows])
    assert not workshop.builders
    pin_table(table, tmp_path / "deploy", kernels=workshop.kernels(), problems=[rows])
    [builder] = workshop.builders
    assert builder.closed and len(builder.asked) >= 2


def test_the_command_takes_ranges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A problem with a range, or a size of every kind in the table; families that lack the size have none."""
    lines = ("gemm 64x128x256 bf16 kk", "gemm 99x128x256 bf16 kk", "rmsnorm 64x4096 bf16")
    write_table(tmp_path / "t.json", lines)
    problems = pinned_lines(tmp_path, monkeypatch, "--problem", "gemm 1..96x128x256 bf16 kk")
    assert sorted(problems) == sorted([*lines, "gemm 1..96x128x256 bf16 kk"])
    assert re.search(r"gemm 1\.\.96x128x256 bf16 kk: \d kernels in \d+ steps", capsys.readouterr().out)
    problems = pinned_lines(tmp_path, monkeypatch, "--range", "m=1..128", "--outside", "torch")
    more = ["gemm 1..128x128x256 bf16 kk", "rmsnorm 1..128x4096 bf16"]
    assert sorted(problems) == sorted([*lines, *more])
    problems = pinned_lines(tmp_path, monkeypatch, "--range", "k=128..192")
    assert sorted(problems) == sorted(
        [*lines, "gemm 64x128x128..192 bf16 kk", "gemm 99x128x128..192 bf16 kk"]
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--range", "m=1:64"),
            "range 'm=1:64' is not of the form SIZE=FIRST..LAST; write for example m=1..8192",
        ),
        (
            ("--range", "rows=1..64"),
            "has a size 'rows' that is an argument of its kernels; valid: ",
        ),
        (("--range", "m=64..1"), "range m=64..1 is reversed; write m=1..64"),
        (("--range", "m=64..64"), "range m=64..64 has one size; pin the problems of that size"),
        (("--range", "k=9..17"), "range k=9..17 holds one size only that the layout allows"),
        (("--range", "k=9..15"), "has no problem of its kind with k from 9 to 15"),
        (("--problem", "gemm 9..1x128x256 bf16 kk"), "reversed"),
        (("--problem", "rmsnorm 9x1..7 bf16"), "compiled in"),
        (
            ("--problem", "gemm 1..999999x128x256 bf16 kk"),
            "holds 999999 sizes; a pinned range has at most 262144",
        ),
    ],
)
def test_ranges_that_cannot_be_pinned_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    write_table(tmp_path / "t.json", ("gemm 64x128x256 bf16 kk",))
    code = main(
        ["--table", str(tmp_path / "t.json"), "--out", str(tmp_path / "deploy"), "--no-build", *words]
    )
    assert code in (2, 3) and message in capsys.readouterr().err


def test_a_range_of_the_table_gives_way_to_one_that_holds_it(tmp_path: Path) -> None:
    """Both would say the same; what no call poses is left out and told."""
    lines = ("gemm 8..64x128x256 bf16 kk", "gemm 8..64x128x256 tf32 kk")
    path = write_table(tmp_path / "t.json", lines[:1])
    tf32 = RangeEntry(parse_range(lines[1]), (Piece(8, 64, None, "torch"),))
    Table.load(path).with_entries(ranges=[tf32]).save(path)
    left: dict[str, str] = {}
    pinned = pin_table(
        path,
        tmp_path / "deploy",
        kernels=Workshop(tmp_path / "cache").kernels(),
        problems=[parse_range("gemm 1..64x128x256 bf16 kk")],
        leave_out=lambda item, why: left.update({str(item): why}),
    )
    (only,) = pinned
    assert isinstance(only, PinnedRange) and str(only.range) == "gemm 1..64x128x256 bf16 kk"
    assert left == {lines[1]: "torch has no dtype tf32, so no call poses it"}


@pytest.mark.parametrize(
    ("asked", "held"),
    [
        ("gemm 1..128x64x32 bf16 kk", "gemm 100x64x8..64 bf16 kk"),
        ("gemm 64x16..32x64 bf16 kk unaligned", "gemm 64x9..25x64 bf16 kk"),
        ("gemm 64x16..48x64 bf16 kk unaligned", "gemm 64x9..49x64 bf16 kk"),
    ],
)
def test_every_size_that_a_range_of_the_table_holds_is_its(tmp_path: Path, asked: str, held: str) -> None:
    """The one size at which a range over another size crosses; those between multiples of 8."""
    of, other = parse_range(asked), parse_range(held)
    space = find_space("gemm", ARCH)
    taken = {space.default(problem) for n in range(of.first, of.last + 1) if (problem := of.at(n))}
    odd = next(config for config in space.configs(other.low) if config not in taken)
    pieces = (Piece(other.first, other.last, odd),)
    known = Table(Fingerprint.of(H200, Toolchain.current()), ranges=[RangeEntry(other, pieces)])
    chosen = Selection(known, Workshop(tmp_path / "cache").kernels()).range(of)
    ends = [step.last for step in chosen.steps]
    for size in range(of.first, of.last + 1):
        pinned, problem = chosen.steps[bisect_left(ends, size)].pinned, of.at(size)
        assert pinned is not None and problem is not None
        called = look_up(known, problem, space, H200.sm_count)
        assert (called.config == odd) == (problem in other), size
        assert (pinned.answer.config == odd) == (problem in other), size


@pytest.mark.parametrize("fallback", ["none", "measured"])
def test_pieces_that_were_measured_slower_are_left_to_torch_if_asked(tmp_path: Path, fallback: str) -> None:
    """As calls with a table leave them; by default a deployment runs its own kernels."""
    config = find_space("gemm", ARCH).default(Problem(64, 512, 4096))
    ratios = ((1, 31, 1.1), (32, 63, 0.84), (64, 80, 0.995))
    pieces = tuple(Piece(first, last, config, ratio_to_baseline=ratio) for first, last, ratio in ratios)
    held = RangeEntry(parse_range("gemm 1..80x512x4096 bf16 kk"), pieces, baseline="torch.mm")
    path, out = tmp_path / "t.json", tmp_path / "deploy"
    Table(Fingerprint.of(H200, Toolchain.current()), ranges=[held]).save(path)
    pin_table(path, out, kernels=Workshop(tmp_path / "cache").kernels(), fallback=fallback)
    deployment, _ = load(out)
    records = [found(deployment, Problem(m, 512, 4096)) for m in range(1, 81)]
    left = [m for m, record in enumerate(records, 1) if record is not None and record["symbol"] == ""]
    assert left == ([*range(32, 64)] if fallback == "measured" else [])


def test_torch_computes_plain_products_only(tmp_path: Path) -> None:
    """A bias that torch.addmm would add, and won with, would be lost: our default kernel adds it."""
    problem = Problem(64, 128, 256, epilogue=Epilogue(bias="n"))
    slow = Entry(replace(problem, m=32), find_space("gemm", ARCH).default(problem), ratio_to_baseline=0.8)
    path = tmp_path / "t.json"
    Table(Fingerprint.of(H200, Toolchain.current()), [Entry(problem, None, "torch"), slow]).save(path)
    kernels = Workshop(tmp_path / "cache").kernels()
    pinned = pin_table(path, tmp_path / "deploy", kernels=kernels, fallback="measured")
    assert len(pinned) == 2 and all(isinstance(item, Pinned) and item.artifact for item in pinned)


def test_an_unknown_fallback_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="fallback is 'torch'; valid: none, measured"):
        pin_table(tmp_path / "t.json", tmp_path / "deploy", fallback="torch")


def test_a_lost_kernel_is_said_while_pinning(tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.json", ("gemm 8..64x128x256 bf16 kk",))
    with pytest.raises(PinError, match=r"no kernel to pin for gemm 8x128x256 bf16 kk: no compiled kernel"):
        pin_table(path, tmp_path / "deploy", kernels=Workshop(tmp_path / "cache").kernels(build="never"))
