"""The kernel of examples/own_kernel: declared, listed, explained and compiled like any family."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deployments import write_table
from own_kernels import ROPE, SPLIT, build_every_config, write_kernel
from own_registry import without_user_families

from cutegen.arch import find_arch
from cutegen.build import Artifact, Builder, Failure
from cutegen.build.render import recipe_of, render
from cutegen.build.store import Store
from cutegen.cli.main import main
from cutegen.deploy import Pinned, pin_table
from cutegen.errors import FamilyError
from cutegen.families import registry
from cutegen.families.user.checking_code import checking_code
from cutegen.families.user.closure import file_identity
from cutegen.families.user.family import UserFamily
from cutegen.runtime.kernel_cache import Kernels
from cutegen.space import Config

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "own_kernel"
ARCH = find_arch("sm_90a")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the example; the family is forgotten afterwards."""
    copy = tmp_path / "mine"
    copy.mkdir(parents=True)
    for name in ("my_norm.py", "my_norm_kernel.py"):
        shutil.copy(EXAMPLE / name, copy / name)
    without_user_families(monkeypatch)
    monkeypatch.setenv("CUTEGEN_CACHE_DIR", str(tmp_path / "cache"))
    return copy


def run(folder: Path, command: str, *words: str) -> int:
    return main([command, "--kernel", str(folder / "my_norm_kernel.py"), "--arch", "sm_90a", *words])


def text(folder: Path, line: str = "my_rmsnorm 64x4096 bf16", **knobs: Any) -> str:
    """The adapter for a problem, by default of the default config, with the files as they are now."""
    registry._registered.pop("my_rmsnorm", None)
    registry._space.cache_clear()
    family = registry.load_kernel(folder / "my_norm_kernel.py")
    problem = family.parse(line)
    space = registry.find_space(family.name, ARCH)
    return render(problem, Config({**space.default(problem), **knobs}), ARCH).text


def edit(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def test_a_declaration_is_short() -> None:
    assert len((EXAMPLE / "my_norm_kernel.py").read_text().splitlines()) <= 45


def test_reading_it_imports_neither_torch_nor_the_compiler(folder: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from cutegen.families.registry import load_kernel, find_space
from cutegen.arch import find_arch
family = load_kernel(Path({str(folder / "my_norm_kernel.py")!r}))
problem = family.parse("my_rmsnorm 64x4096 bf16")
find_space(family.name, find_arch("sm_90a")).default(problem)
assert not {{"torch", "cutlass", "my_norm"}} & set(sys.modules)
"""
    root = str(EXAMPLE.parents[1])
    subprocess.run([sys.executable, "-c", program], check=True, cwd=root, timeout=60)


def test_its_space_is_listed_and_explained(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "space", "--shape", "64x4096") == 0
    assert "8 valid configs of 8" in capsys.readouterr().out
    assert run(folder, "space", "--shape", "64x16384", "--explain", "threads=128", "threads_per_row=32") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "row_fits_registers: A thread holds its part of the row" in said
    assert run(folder, "space", "--lint") == 0
    assert "0 unused" in capsys.readouterr().err
    assert run(folder, "explain", "--shape", "64x4096") == 0


def test_a_value_that_no_valid_config_uses_is_listed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "space", "--lint", "--shape", "64x16384") == 0
    assert "threads_per_row=32: no valid config uses it" in capsys.readouterr().out


def test_another_family_cannot_be_named_beside_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["space", "gemm", "--kernel", str(folder / "my_norm_kernel.py"), "--shape", "1x1x1"]) == 2
    assert "declares my_rmsnorm, not gemm" in capsys.readouterr().err


def test_rows_that_are_not_aligned_are_refused_by_a_rule(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "space", "--shape", "64x4097") == 2
    assert "rows_are_aligned" in capsys.readouterr().err


def test_the_default_may_not_break_a_rule(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(folder / "my_norm_kernel.py", "n <= 128 * threads_per_row", "threads_per_row > 128")
    assert run(folder, "space", "--shape", "64x4096") != 0
    assert "row_fits_registers" in capsys.readouterr().err


def test_a_file_that_changes_within_a_moment_is_another(tmp_path: Path) -> None:
    """Times of files are coarse on some disks."""
    path, names = tmp_path / "module.py", set()
    for value in range(2):
        path.write_text(f"VALUE = {value}\n")
        os.utime(path, ns=(10**18, 10**18))
        names.add(file_identity(path))
    assert len(names) == 2


def test_the_name_of_a_kernel_covers_its_modules(folder: Path) -> None:
    """A comment changes nothing; code does, also two imports away."""
    before = text(folder)
    edit(folder / "my_norm.py", "held = []", "held = []  # values of the row")
    assert text(folder) == before
    edit(folder / "my_norm.py", "import cutlass\n", "import cutlass\nimport helper\n")
    (folder / "helper.py").write_text("from further import VALUE\n")
    (folder / "further.py").write_text("VALUE = 1\n")
    imported = text(folder)
    assert imported != before and "further" in imported
    edit(folder / "further.py", "1", "1  # the same")
    assert text(folder) == imported
    edit(folder / "further.py", "VALUE = 1", "VALUE = 2")
    assert text(folder) != imported


def test_the_name_of_a_kernel_covers_variables(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(
        folder / "my_norm.py",
        "import cutlass\n",
        "import os\nimport cutlass\nX = os.environ.get('MY_SWITCH')\n",
    )
    monkeypatch.delenv("MY_SWITCH", raising=False)
    unset = text(folder)
    monkeypatch.setenv("MY_SWITCH", "secret")
    assert "MY_SWITCH" in text(folder) != unset and "secret" not in text(folder)


def test_two_folders_with_the_same_files_give_the_same_text(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere"
    shutil.copytree(folder, other)
    assert text(folder) == text(other)


def test_a_recipe_covers_what_the_text_does(folder: Path) -> None:
    family = registry.load_kernel(folder / "my_norm_kernel.py")
    problem = family.parse("my_rmsnorm 64x4096 bf16")
    config = registry.find_space(family.name, ARCH).default(problem)
    before = recipe_of(problem, config, ARCH)
    assert render(problem, config, ARCH).recipe == before
    family.__dict__.pop("closure", None)
    edit(folder / "my_norm.py", "held = []", "held = list()")
    assert recipe_of(problem, config, ARCH) != before


BAD = {
    "syntax": ("knobs={", "knobs={{", r"line \d+"),
    "no size": ('("m", "n")),\n        read("w"', '("m", "k")),\n        read("w"', "no size is called 'k'"),
    "unknown in call": (
        "x, w, y, eps, stream",
        "x, w, y, epsilon, stream",
        r"uses epsilon \(did you mean eps\?\)",
    ),
    "argument nobody passes": ("x, w, y, eps, stream", "x, w, y, stream", "argument eps is not passed"),
    "argument nobody takes": (
        '    ),\n    construct="dtype, n, threads, threads_per_row",\n    call="x, w, y, eps, stream",\n',
        '    scalar("mu", "fp32", (1, 2))),\n    construct="dtype, n, threads, threads_per_row",\n',
        "RMSNorm takes x, w, y, eps, stream; .* mu is none of them; say call=",
    ),
    "too few for the entry": (
        "x, w, y, eps, stream",
        "x, w, y, stream=stream if eps else None",
        "eps is not passed",
    ),
    "too many for the entry": ("x, w, y, eps, stream", "x, w, y, eps, n, stream", "1 are too many"),
    "no such entry": ("my_norm:RMSNorm", "my_norm:RMSnorm", r"has no RMSnorm \(did you mean RMSNorm\?\)"),
    "no stream": ("x, w, y, eps, stream", "x, w, y, eps", "passes no stream"),
    "knob nobody uses": (', threads_per_row",', '",', "knob threads_per_row is used neither"),
    "default": ('{"threads": 128, ', '{"threads": 64, ', "default has threads=64"),
    "default lacks": ('{"threads": 128, ', "{", "default lacks knob threads"),
    "module": ("my_norm:RMSNorm", "my_nrom:RMSNorm", "module my_nrom is not there; it is looked for in"),
    "entry": ("my_norm:RMSNorm", "my_norm", "not of the form module:name"),
    "rule": (
        "(n, threads_per_row)",
        "(n, thread_per_row)",
        r"line \d+: row_fits_registers\(\) asks for thread_per_row \(did you mean",
    ),
    "no reason": (
        '    """A thread holds its part of the row: above 128 elements registers run out."""\n',
        "",
        "no docstring",
    ),
    "no reference": ("@kernel.reference\n", "", "there is no reference"),
    "undefined": (
        "+ eps).rsqrt()",
        "+ epsilon).rsqrt()",
        r"line 34: reference\(\) names epsilon .*nothing defines",
    ),
    "no output": (
        'write("y", "dtype", ("m", "n"), may_alias=("x",))',
        'read("y", "dtype", ("m", "n"))',
        "no argument is an output",
    ),
    "object": ("(128, 256)", "(128, 256.0)", "knob threads may not be 256.0, of type float"),
    "no kernel": ("kernel = Kernel(", "other = dict(", "line"),
    "exits": ("kernel = Kernel(", "raise SystemExit(3)\nkernel = Kernel(", "ends the program"),
    "repeat": ('rows="m",', 'rows="m", repeat="bounded",', r"no argument is declared by update\(\)"),
    "unknown repeat": ('rows="m",', 'rows="m", repeat="always",', "it must be idempotent, bounded, restore"),
    "flag": ('("bf16", "fp16")', "True", "option dtype is True"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_declaration_is_named_with_file_and_line(folder: Path, case: str) -> None:
    old, new, said = BAD[case]
    path = folder / "my_norm_kernel.py"
    edit(path, old, new)
    with pytest.raises(FamilyError, match=said) as failure:
        family = registry.load_kernel(path)
        problem = family.parse("my_rmsnorm 64x4096 bf16")
        render(problem, registry.find_space(family.name, ARCH).default(problem), ARCH)
    assert f"{path}, line " in str(failure.value)


def family_of(folder: Path) -> UserFamily:
    return registry.load_kernel(folder / "my_norm_kernel.py")


@pytest.mark.dsl
def test_it_compiles_without_a_gpu(folder: Path, tmp_path: Path) -> None:
    """What its author refuses is refused in the author's words."""
    family = family_of(folder)
    problem = family.parse("my_rmsnorm 64x4096 bf16")
    built = build_every_config(problem, ARCH, tmp_path / "store")
    found = {source.config: result for source, result in built}
    refused = found.pop(Config({"threads": 128, "threads_per_row": 256}))
    assert isinstance(refused, Failure) and refused.outcome == "rejected"
    assert refused.message == "threads (128) must be a multiple of threads_per_row (256), and that one of 32"
    assert len(found) == 7
    for result in found.values():
        assert isinstance(result, Artifact) and result.trace
        assert result.resources.registers > 16 and not result.resources.spill_store_bytes


@pytest.mark.dsl
def test_a_tuning_run_compiles_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "tune", "--shape", "64x4096", "--candidates", "3", "--quiet", "--json") == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["outcomes"]["ok"] >= 2


def test_the_page_shows_the_declaration() -> None:
    page = (EXAMPLE.parents[1] / "docs" / "own_kernel.md").read_text()
    assert (EXAMPLE / "my_norm_kernel.py").read_text() in page


def test_a_record_counts_while_kernel_and_check_are_the_same(folder: Path) -> None:
    """Another rule or baseline leaves it alone; another reference makes it void."""
    declaration = folder / "my_norm_kernel.py"
    before = text(folder)
    for old, new, same in (
        ("128 * threads_per_row", "256 * threads_per_row", True),
        ("import torch\n", "import torch  # here\n", True),
        ("(x.square().mean", "(1.0 * x.square().mean", False),
    ):
        edit(declaration, old, new)
        checking_code.cache_clear()
        assert (text(folder) == before) is same


@pytest.mark.dsl
def test_a_dead_knob_is_compiled_once_and_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(folder / "my_norm.py", "threads, threads_per_row):", "threads, threads_per_row, bits=0):")
    edit(
        folder / "my_norm_kernel.py",
        '"dtype, n, threads, threads_per_row"',
        '"dtype, n, threads, threads_per_row, bits"',
    )
    edit(folder / "my_norm_kernel.py", '"threads": (128, 256),', '"bits": (64, 128), "threads": (128, 256),')
    edit(folder / "my_norm_kernel.py", '{"threads": 128, ', '{"bits": 128, "threads": 128, ')
    assert run(folder, "tune", "--shape", "64x4096", "--candidates", "30", "--quiet", "--json") == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["dead_knobs"] == ["knob bits changes no kernel: 14 configs are 7 kernels"]
    # Two more are refused by the kernel's author.
    assert result["outcomes"] == {"ok": 7, "invalid": 7, "build_failed": 2}
    libraries = [path.stat().st_ino for path in (folder.parent / "cache").rglob("kernel.so")]
    assert len(libraries) == 14


@pytest.mark.dsl
@pytest.mark.parametrize(
    ("files", "line", "kernels"), [(SPLIT, "5x1000 bf16", 1), (ROPE, "7x4x64x32 bf16", 2)]
)
def test_scratch_integers_and_updates_reach_the_kernel(
    folder: Path, tmp_path: Path, files: dict[str, str], line: str, kernels: int
) -> None:
    family = registry.load_kernel(write_kernel(tmp_path / "more", files))
    problem = family.parse(f"{family.name} {line}")
    space = registry.find_space(family.name, ARCH)
    configs = list(space.configs(problem))
    assert space.launch(configs[-1], problem, 132).scalars == ((8,) if files is SPLIT else ())
    assert space.launch(configs[-1], problem, 132).workspace_bytes == (4 * 5 * 8 if files is SPLIT else 0)
    sources = {render(problem, config, ARCH) for config in configs}
    assert len(sources) == kernels  # what only a launch takes is not compiled in
    with Builder(Store(tmp_path / "store"), workers=2) as builder:
        for _, result in builder.build(sources):
            assert isinstance(result, Artifact), result


@pytest.mark.dsl
def test_configs_that_are_one_kernel_are_pinned_as_one(folder: Path, tmp_path: Path) -> None:
    """A folder with both holds one library, and answers both problems."""
    edit(folder / "my_norm.py", "threads, threads_per_row):", "threads, threads_per_row, bits=0):")
    declaration = folder / "my_norm_kernel.py"
    edit(declaration, 'n, threads, threads_per_row"', 'n, threads, threads_per_row, bits"')
    edit(declaration, '"threads": (128, 256),', '"bits": (64, 128), "threads": (128, 256),')
    edit(
        declaration,
        'default={"threads": 128,',
        'default=lambda m: {"bits": 64 if m < 100 else 128, "threads": 128,',
    )
    family_of(folder)
    table = write_table(tmp_path / "table.json", ("my_rmsnorm 64x4096 bf16", "my_rmsnorm 4096x4096 bf16"))
    kernels = Kernels(Store(tmp_path / "store"), build="allow")
    pinned = pin_table(table, tmp_path / "deploy", kernels=kernels)
    artifacts = [each.artifact for each in pinned if isinstance(each, Pinned)]
    assert len({a.key for a in artifacts if a is not None}) == 2
    assert len({a.symbol for a in artifacts if a is not None}) == 1
    assert len(list((tmp_path / "deploy").rglob("*.so"))) == 1


def test_a_declaration_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path / "nope.py", tmp_path):
        assert main(["space", "--kernel", str(path), "--arch", "sm_90a", "--shape", "4x4"]) == 2
        assert "is no file; a declaration of a kernel is wanted" in " ".join(capsys.readouterr().err.split())


@pytest.mark.dsl
def test_a_kernel_that_was_removed_from_the_cache_is_compiled_again(folder: Path, tmp_path: Path) -> None:
    """Also where a note says that another config is the same kernel."""
    edit(folder / "my_norm.py", "threads, threads_per_row):", "threads, threads_per_row, bits=0):")
    declaration = folder / "my_norm_kernel.py"
    edit(declaration, 'n, threads, threads_per_row"', 'n, threads, threads_per_row, bits"')
    edit(declaration, '"threads": (128, 256),', '"bits": (64, 128), "threads": (128, 256),')
    edit(declaration, 'default={"threads": 128,', 'default={"bits": 64, "threads": 128,')
    family = family_of(folder)
    problem = family.parse("my_rmsnorm 64x4096 bf16")
    first = registry.find_space(family.name, ARCH).default(problem)
    results = []
    with Builder(Store(tmp_path / "store"), workers=1) as builder:
        for config in (first, first.replace(bits=128)):
            [(_, result)] = builder.build([render(problem, config, ARCH)])
            assert isinstance(result, Artifact)
            results.append(result)
            shutil.rmtree(result.folder)
    assert results[0].trace == results[1].trace and results[0].symbol != results[1].symbol


def test_programs_without_such_kernels_load_nothing_of_it() -> None:
    program = "import sys, cutegen.build.render; print([m for m in sys.modules if '.families.user' in m])"
    root = str(EXAMPLE.parents[1])
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=root, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
