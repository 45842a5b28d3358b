"""Laws of ``import cutegen``: it costs nothing, and names arrive when they are used."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import cutegen

ROOT = Path(__file__).resolve().parent.parent


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_brings_in_no_gpu_library() -> None:
    """Neither the package nor the modules behind its names import torch, cutlass or cuda."""
    names = "Problem, Config, Dispatcher, Kernels, Table, Store, AutoTuner"
    code = (
        "import sys, cutegen; first = set(sys.modules); "
        f"from cutegen import {names}; import cutegen.torch_ops.gemm; "
        "heavy = {'torch', 'cutlass', 'cuda', 'tvm_ffi', 'jinja2', 'pynvml'}; "
        "print(sorted(heavy & first), sorted((heavy - {'jinja2'}) & set(sys.modules)))"
    )
    assert run(code).strip() == "[] []"


def test_every_exported_name_exists() -> None:
    """What ``__all__`` promises is there, is what its module has, and shows in dir()."""
    pytest.importorskip("torch")
    assert sorted(cutegen.__all__) == list(cutegen.__all__)
    for name in cutegen.__all__:
        assert getattr(cutegen, name) is not None
        assert name in dir(cutegen)
    with pytest.raises(AttributeError, match="has no attribute 'gem'"):
        cutegen.gem  # noqa: B018


def test_version_is_the_one_that_is_shipped() -> None:
    """One version, here and in the project file."""
    found = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None and found[1] == cutegen.__version__
