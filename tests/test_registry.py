"""Families from a folder of the user's: found, refused with the file's name, named in problem lines."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from cutegen.arch import find_arch
from cutegen.errors import CutegenError, FamilyError, ProblemError, ResourceError
from cutegen.families import registry
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import (
    families,
    find_family,
    find_space,
    find_template,
    load_families,
    loaded_folders,
    parse_problem,
    space_files,
)
from cutegen.space import Config

SM90 = find_arch("sm_90a")
FAMILY = """
from cutegen.families.declared import DeclaredFamily, read, write
from cutegen.family import Size

FAMILY = DeclaredFamily(
    "{name}",
    "twice x",
    sizes=(Size("m", "rows"), Size("n", "columns")),
    options=(),
    arguments=(read("x", "fp32", ("m", "n")), write("y", "fp32", ("m", "n"))),
    reference=lambda x: {{"y": 2 * x}},
    rows="m",
)
"""
SPACE = """
from cutegen.space import Config, Launch, Rule, Space

def row_has_a_thread_each(problem, threads):
    "A block has no more threads than a row has columns."
    return threads <= problem.n

def build_space(arch):
    return Space(
        family="{name}",
        arch=arch,
        domains={{"threads": (32, 64, 128)}},
        rules=(Rule.of(row_has_a_thread_each),),
        derive=lambda config, problem, arch: {{}},
        choose_default=lambda space, problem: Config({{"threads": 32}}),
        launch=lambda config, problem, sm_count: Launch((problem.m,), 0),
        compile_view=lambda config: config,
    )
"""


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is loaded here is forgotten again, and spaces that other tests hold stay those of the registry."""
    monkeypatch.setattr(registry, "_space", cache(registry._space.__wrapped__))
    monkeypatch.setattr(registry, "_registered", dict(registry._all()))
    before = {*sys.modules}
    yield
    for name in {*sys.modules} - before:
        if name.split(".")[0] in ("cutegen_families", "twice"):
            del sys.modules[name]


def write_family(folder: Path, name: str, text: str = FAMILY, **files: str) -> Path:
    """Write the folder of a family, whose text may ask for its name, and return the folder of families."""
    (folder / name).mkdir(parents=True)
    for stem, content in {"family.py": text, **files}.items():
        (folder / name / stem).write_text(content.format(name=name))
    return folder


def test_families_of_a_folder_are_found_by_their_names(tmp_path: Path) -> None:
    """In problem lines too; loading twice does nothing, and the package's families stay."""
    write_family(tmp_path, "twice")
    write_family(tmp_path, "again")
    (tmp_path / "notes").mkdir()
    loaded = load_families(tmp_path)
    assert [family.name for family in loaded] == ["again", "twice"]
    assert load_families(tmp_path) == loaded and find_family("twice") is loaded[1]
    norms = {"layernorm", "rmsnorm", "rmsnorm_quantized", "softmax", "cross_entropy"}
    gemms = {"gemm", "gemm_blocks", "gemm_blockscaled", "gated_gemm", "grouped_gemm_blocks"}
    gemms |= {f"grouped_{kind}{form}" for kind in ("gemm", "gated_gemm") for form in ("", "_masked")}
    pointwise = {"activation", "activation_backward", "gated", "gated_backward"}
    shipped = {"rope", *pointwise, *gemms, *norms}
    assert {"again", "twice", *shipped} == {*families()}
    problem = parse_problem("twice 5x8")
    assert (problem.family, problem.sizes, str(problem)) == ("twice", {"m": 5, "n": 8}, "twice 5x8")
    assert parse_problem("gemm 64x64x64 bf16 kk") == Problem(64, 64, 64)
    assert loaded_folders() == (tmp_path,)


@pytest.mark.parametrize("line", ["twice 5x8", "", "  "])
def test_a_line_of_no_family_is_refused_with_those_there_are(line: str) -> None:
    with pytest.raises(
        ProblemError,
        match=r"names no kernel family; known: .*gemm, .*rmsnorm",
    ):
        parse_problem(line)


def test_a_folder_without_families_is_refused(tmp_path: Path) -> None:
    (tmp_path / "family.py").write_text("FAMILY = None")
    with pytest.raises(ResourceError, match="holds no kernel family; each is a folder with a family"):
        load_families(tmp_path)
    assert loaded_folders() == ()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("gemm", FAMILY, "a family called 'gemm' exists already; rename the folder and the family"),
        ("other", FAMILY.replace("{name}", "twice"), "the family is called 'twice' but its folder 'other'"),
        ("empty", "", "declares no FAMILY, or one that is no cutegen.family.Family"),
        ("words", "FAMILY = 'words'", "declares no FAMILY"),
        ("raises", "1 / 0", "cannot be read: ZeroDivisionError: division by zero"),
        ("broken", "def f(:", "cannot be read: SyntaxError"),
        ("wrong", FAMILY.replace('"fp32"', '"fp31"'), "argument x: dtype 'fp31' is neither an option nor"),
    ],
)
def test_a_family_that_cannot_be_used_is_refused_by_its_file(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    """Nothing of it stays behind; mended, it loads."""
    write_family(tmp_path, name, text)
    before = families()
    with pytest.raises(FamilyError, match=message) as caught:
        load_families(tmp_path)
    assert str(tmp_path / name / "family.py") in str(caught.value)
    assert families() == before
    if name != "gemm":
        (tmp_path / name / "family.py").write_text(FAMILY.format(name=name))
        assert load_families(tmp_path)[0].name == name


def test_one_name_from_two_folders_is_refused(tmp_path: Path) -> None:
    """The first keeps it."""
    load_families(write_family(tmp_path / "one", "twice"))
    first = find_family("twice")
    with pytest.raises(FamilyError, match="a family called 'twice' exists already"):
        load_families(write_family(tmp_path / "two", "twice"))
    assert find_family("twice") is first


def test_spaces_and_templates_lie_beside_the_family(tmp_path: Path) -> None:
    """One for every target, unless there is one for this target alone."""
    files = {"space.py": SPACE, "kernel.py.j2": "", "sm100.py.j2": ""}
    load_families(write_family(tmp_path, "twice", **files))
    folder, problem = tmp_path / "twice", parse_problem("twice 5x96")
    assert find_template("twice", SM90) == folder / "kernel.py.j2"
    assert find_template("twice", find_arch("sm_100a")) == folder / "sm100.py.j2"
    assert {path.name for path in space_files("twice")} == {"family.py", "space.py"}
    parts = [
        "defaults",
        "derived",
        "expected",
        "left_in_l2",
        "registers",
        "ring",
        "rules",
        "shared",
        "sizes",
        "traits",
    ]
    shared = {path.parent.name + "/" + path.name for path in space_files("softmax")}
    assert shared == {"softmax/space.py", *(f"row/{name}.py" for name in parts)}
    space = find_space("twice", SM90)
    assert [str(config) for config in space.configs(problem)] == ["threads=32", "threads=64"]
    assert str(space.default(problem)) == "threads=32"
    assert [v.rule for v in space.explain(problem, Config({"threads": 128}))] == ["row_has_a_thread_each"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"no template of 'twice' for sm_90a; for sm_90a there are those of: activation, (?!.*twice)"),
        ({"sm100.py.j2": ""}, "twice' for sm_90a; it has some for sm100, and for sm_90a .* of: activation"),
        ({"kernel.py.j2": ""}, "sm90.py does not exist"),
        ({"kernel.py.j2": "", "space.py": ""}, "space.py declares no build_space"),
    ],
)
def test_what_a_family_lacks_is_said_when_it_is_needed(
    tmp_path: Path, files: dict[str, str], message: str
) -> None:
    load_families(write_family(tmp_path, "twice", **files))
    with pytest.raises(CutegenError, match=message):
        find_space("twice", SM90)


def test_families_of_installed_packages_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through an entry point that names the module of family.py; one that does not load is named."""
    write_family(tmp_path, "twice")
    monkeypatch.syspath_prepend(str(tmp_path))
    points = [EntryPoint("twice", "twice.family", "cutegen.families")]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points)
    monkeypatch.setattr(registry, "_registered", {})
    assert "twice" in families() and str(parse_problem("twice 5x8")) == "twice 5x8"
    points.append(EntryPoint("gone", "gone.family", "cutegen.families"))
    monkeypatch.setattr(registry, "_registered", {})
    with pytest.raises(FamilyError, match=r"entry point gone = gone\.family .* No module named 'gone'"):
        families()
