"""The repository keeps its own promises: documents, layers, sizes, exports, imports."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

import cutegen
from cutegen.arch import find_arch
from cutegen.tuning.request import deciding_files

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "cutegen"
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = [
    path for top in ("cutegen", "spaces", "tools", "tests", "examples") for path in (ROOT / top).rglob("*.py")
]
TOP_LEVEL = {
    *(".ci", "cutegen", "docs", "examples", "spaces", "templates", "tests", "tools"),
    *(".gitignore", "CHANGELOG.md", "LICENSE", "README.md", "constraints.txt", "pyproject.toml"),
}
GPU_LIBRARIES = {"torch", "cutlass", "cuda", "tvm_ffi", "pynvml", "quack"}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def contract(name: str) -> dict[str, Any]:
    contracts = pyproject()["tool"]["importlinter"]["contracts"]
    return next(c for c in contracts if c["id"] == name)


def layers_of_the_linter() -> list[set[str]]:
    return [set(re.findall(r"\w+", layer)) for layer in contract("layers")["layers"]]


def rows_of_the_design() -> list[str]:
    """The first column of the table of layers, top first."""
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    table = text.split("## Layers", 1)[1].split("\n## ", 1)[0]
    return [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| `")]


def gpu_modules() -> set[str]:
    """The modules that the design marks as free to import GPU libraries."""
    return {name for row in rows_of_the_design() for name in re.findall(r"`(\w+)` \(GPU\)", row)}


def top_module(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@lru_cache(maxsize=1)  # what is asked about a module is asked in a row
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports_of(path: Path) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports of a module that ever run: those for type checkers do not."""
    tree = tree_of(path)
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
    idle = [block for block in blocks if "TYPE_CHECKING" in ast.unparse(block.test)]
    skipped = {id(node) for block in idle for node in ast.walk(block)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in skipped:
            yield node


def needs_gpu_library(path: Path) -> bool:
    names = {name.split(".")[0] for node in imports_of(path) for name in imported_names(node)}
    return bool(GPU_LIBRARIES & names)


# --- documents ---


def words_of(document: Path) -> Iterator[str]:
    yield from re.findall(r"[\w./*<>{}-]+", document.read_text(encoding="utf-8"))


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_every_path_that_a_document_names_exists(document: Path) -> None:
    roots = {path.name for path in ROOT.iterdir() if path.is_dir()} & TOP_LEVEL
    named = {word.rstrip(".,") for word in words_of(document) if word.split("/")[0] in roots and "/" in word}
    missing = [word for word in sorted(named) if not any(ROOT.glob(re.sub(r"<\w+>", "*", word).rstrip("/")))]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_every_link_of_a_document_that_stays_here_leads_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)", document.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (document.parent / target).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_every_dotted_name_that_a_document_uses_exists(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    names = sorted(set(re.findall(r"(?<![\w/.-])cutegen(?:\.[A-Za-z_]\w*)+", text)))
    assert [name for name in names if not name_exists(name.split(".")[1:])] == []


def name_exists(parts: list[str]) -> bool:
    """Whether ``cutegen.<parts>`` is a module, a name of a module, or a method of a public class."""
    if parts[0] in cutegen.__all__:
        return True
    path = PACKAGE
    for i, part in enumerate(parts):
        if (path / part).is_dir():
            path /= part
        elif (path / f"{part}.py").is_file():
            rest = parts[i + 1 :]
            return not rest or rest[0] in top_names(path / f"{part}.py")
        else:
            return part in exported(path / "__init__.py")
    return True


def test_the_readme_names_exactly_the_environment_variables_that_the_code_reads() -> None:
    documented = set(re.findall(r"CUTEGEN_[A-Z_]+", (ROOT / "README.md").read_text(encoding="utf-8")))
    read = {
        name
        for path in MODULES
        for name in re.findall(r"[\"'](CUTEGEN_[A-Z_]+)[\"']", path.read_text(encoding="utf-8"))
    }
    assert read == documented


def test_ci_installs_exactly_as_the_readme_says() -> None:
    installs = re.findall(
        r"pip install .*?-c constraints\.txt.*", (ROOT / ".ci/run").read_text(encoding="utf-8")
    )
    assert installs
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    # What is printed and where bytecode is compiled changes nothing of what is installed.
    plain = [re.sub(r"--(quiet|no-compile) ", "", line) for line in installs]
    assert [line for line in plain if line not in readme] == []


def test_the_changelog_describes_the_version_of_the_package() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert pyproject()["project"]["version"] == cutegen.__version__
    assert f"## [{cutegen.__version__}]" in changelog


def test_the_documents_show_what_the_results_files_say() -> None:
    text = "".join(document.read_text(encoding="utf-8") for document in DOCUMENTS)
    shown = dict.fromkeys(re.findall(r"<!-- results: (\w+)", text))
    files = [path for name in shown if (path := ROOT / "docs" / "results" / f"{name}.json").exists()]
    assert any(path.stem == "gemm_dev" for path in files)
    assert "gemm_dev_spread" in shown
    assert "gpu_tests_latest" in shown
    runs = sorted((ROOT / "docs" / "results").glob("gemm_dev*.json"))
    tests = sorted((ROOT / "docs" / "results").glob("gpu_tests*.json"))
    for quoted in (files, [*runs, "--spread"], [*tests, "--latest"]):
        command = ["tools/results_table.py", *quoted, "--into", *map(relative, DOCUMENTS), "--check"]
        done = subprocess.run(
            [sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


# --- layers ---


def test_the_design_shows_the_layers_that_the_linter_enforces() -> None:
    shown = [set(re.findall(r"`(\w+)`", row)) for row in rows_of_the_design()]
    assert layers_of_the_linter() == shown


def test_the_design_marks_the_packages_that_import_gpu_libraries() -> None:
    assert gpu_modules() == {top_module(path) for path in MODULES if needs_gpu_library(path)}


def test_the_linter_watches_every_package_without_gpu_libraries() -> None:
    """And modules of the others, all of which exist."""
    watched = [name.split(".")[1:] for name in contract("gpu")["source_modules"]]
    everything = set().union(*layers_of_the_linter())
    assert {parts[0] for parts in watched if len(parts) == 1} == everything - gpu_modules()
    assert [parts for parts in watched if not name_exists(parts)] == []
    assert set(contract("gpu")["forbidden_modules"]) == GPU_LIBRARIES


@pytest.mark.parametrize("family", ["gemm", "gemm_blockscaled"])
def test_a_run_is_named_after_all_files_that_propose_candidates(family: str) -> None:
    """Else a better search would be answered from the records of the one before it."""
    found = {relative(path) for path in deciding_files(family, find_arch("sm_100a"), ("cutegen",))}
    folders = ["cutegen/search", "cutegen/space", "cutegen/families/gemm/perf_model", "spaces/gemm"]
    folders += [f"spaces/{family}"]
    wanted = {relative(path) for folder in folders for path in (ROOT / folder).rglob("*.py")}
    wanted |= {f"templates/{family}/sm100.py.j2", "cutegen/arch.py"}
    assert wanted <= found


def test_gpu_libraries_are_imported_only_inside_functions() -> None:
    found = [
        f"{relative(path)}:{node.lineno}"
        for path in MODULES
        for node in top_imports(tree_of(path).body)
        if GPU_LIBRARIES & {name.split(".")[0] for name in imported_names(node)}
    ]
    assert found == []


def top_imports(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports that run when a module is imported; those for type checkers do not."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from top_imports([*node.body, *node.orelse])
        elif isinstance(node, ast.Try | ast.With | ast.ClassDef):
            yield from top_imports(node.body)


def imported_names(node: ast.Import | ast.ImportFrom) -> list[str]:
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]


def test_importing_every_module_imports_no_gpu_library() -> None:
    names = sorted(
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in MODULES
        if path.name != "__main__.py"
    )
    code = f"""
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
    bad = {GPU_LIBRARIES!r} & sys.modules.keys()
    assert not bad, f"{{name}} imports {{bad}}"
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_cutegen_imports_nothing_else_of_it() -> None:
    code = "import sys; before = {*sys.modules}; import cutegen; print(*{*sys.modules} - before)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {name for name in done.stdout.split() if name.split(".")[0] not in sys.stdlib_module_names}
    assert loaded == {"cutegen"}


# --- sizes and names ---


def test_functions_and_examples_are_short_enough_to_be_read_at_once() -> None:
    functions = [
        (path, node)
        for path in SOURCES
        for node in statements_in(tree_of(path))
        if isinstance(node, ast.FunctionDef)
    ]
    assert [f"{relative(path)}:{node.lineno}" for path, node in functions if body_lines(node) > 65] == []
    examples = [path for path in SOURCES if path.parent.name == "examples"]
    assert [path.name for path in examples if path.read_text(encoding="utf-8").count("\n") >= 60] == []


def statements_in(block: ast.AST) -> Iterator[ast.AST]:
    """All statements within, at any depth; walking their expressions too would take three times as long."""
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        for node in getattr(block, name, ()):
            yield node
            yield from statements_in(node)


def body_lines(function: ast.FunctionDef) -> int:
    """Lines behind the docstring."""
    first = function.body[1 if ast.get_docstring(function) and len(function.body) > 1 else 0]
    return (function.end_lineno or 0) - first.lineno + 1


def top_names(path: Path) -> set[str]:
    """What a module defines or imports by name."""
    names: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {
                part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)
            }
    return names


def exported(path: Path) -> list[str]:
    for node in tree_of(path).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


@pytest.mark.parametrize("path", [p for p in MODULES if p.name != "__main__.py"], ids=relative)
def test_a_module_exports_what_it_has_and_has_what_it_exports(path: Path) -> None:
    body = tree_of(path).body
    public = {
        node.name
        for node in body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    }
    assert set() == public - set(exported(path))
    assert set() == set(exported(path)) - top_names(path)


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_a_module_says_in_its_first_line_what_it_is_for(path: Path) -> None:
    summary = (ast.get_docstring(tree_of(path)) or "").split("\n\n")[0]
    assert summary.endswith((".", "?", "::")) or ":" in summary


def test_nothing_is_pickled() -> None:
    banned = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
    found = [
        relative(path)
        for path in MODULES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Import | ast.ImportFrom) and banned & set(imported_names(node))
    ]
    assert found == []


def test_the_top_level_holds_what_it_should_and_nothing_more() -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {line.split("/")[0] for line in listed.stdout.splitlines()} == TOP_LEVEL
