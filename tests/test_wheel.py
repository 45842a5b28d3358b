"""The wheel carries templates and spaces, and works where no source tree is."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
Run = Callable[..., str]

#: Runs before each program below: forgets the checkout, which an editable install puts on the path.
FORGET = f"import sys; sys.path[:] = [p for p in sys.path if p != {str(ROOT)!r}]; "


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = folder.glob("cutegen-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # What pip does with a wheel of plain Python, without its seconds.
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture
def run(installed: Path, tmp_path: Path) -> Run:
    """Return a function that runs Python on the installed wheel, away from the checkout."""

    def call(code: str, *arguments: str) -> str:
        environment = {
            **os.environ,
            "PYTHONPATH": str(installed),
            "CUTEGEN_CACHE_DIR": str(tmp_path / "cache"),
        }
        command = [sys.executable, "-W", "error", "-c", FORGET + code, *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return call


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    wanted = {
        (prefix / path.relative_to(ROOT)).as_posix()
        for top, prefix in (("cutegen", Path()), ("templates", Path("cutegen")), ("spaces", Path("cutegen")))
        for path in (ROOT / top).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert wanted == held


def test_the_installed_package_finds_its_own_templates_and_spaces(run: Run, installed: Path) -> None:
    code = (
        "import cutegen.families.resources as r; "
        "print(r.__file__, r.resource_root('templates'), r.resource_root('spaces'))"
    )
    for place in run(code).split():
        assert Path(place).is_relative_to(installed)


def test_the_installed_package_lists_a_space(run: Run) -> None:
    code = "import runpy; sys.argv[0] = 'space'; runpy.run_module('cutegen.space', run_name='__main__')"
    listed = run(code, "gemm", "--arch", "sm_90a", "--shape", "512x512x512", "--list", "3").splitlines()
    assert listed[0].startswith("gemm 512x512x512 bf16 kk")
    assert sum("tile_shape_mn=" in line for line in listed) == 3


def test_the_installed_package_renders_the_same_text_as_the_checkout(run: Run) -> None:
    code = (
        "from cutegen.arch import find_arch; from cutegen.families.registry import find_space; "
        "from cutegen.families.gemm.problem import Problem; from cutegen.build.render import render; "
        "p = Problem(512, 512, 512); a = find_arch('sm_90a'); s = find_space('gemm', a); "
        "print(render(p, s.default(p), a).digest)"
    )
    here = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert here.stdout == run(code)
