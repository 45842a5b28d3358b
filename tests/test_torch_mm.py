"""The expected time of torch.mm: near what was measured, and what follows from the results files."""

from __future__ import annotations

import json

import pytest

from cutegen.families.gemm.perf_model.torch_mm import FILE, fitted
from tools.fit_torch_mm import ARCH, SM_COUNT, error, main, measured


def test_the_fit_is_near_the_measurements() -> None:
    """Nine of ten within 12 %, and the file says by how much it is off."""
    constants, times = fitted(ARCH), measured()
    assert constants is not None and len(times) == 104
    off = sorted(abs(constants.time_us(*size, SM_COUNT) / took - 1) for size, took in times.items())
    assert off[len(off) * 9 // 10] < 0.12 and off[-1] < 0.3
    told = json.loads(FILE.read_text(encoding="utf-8"))
    assert told["error"] == pytest.approx(error(constants, times), abs=0.001)


def test_the_file_follows_from_the_results_files(capsys: pytest.CaptureFixture[str]) -> None:
    """Else: python tools/fit_torch_mm.py --write."""
    assert main(["--check"]) == 0
    assert f'"arch": "{ARCH}"' in capsys.readouterr().out


def test_larger_products_take_longer() -> None:
    """At no step does twice the rows take less."""
    constants = fitted(ARCH)
    assert constants is not None
    for n, k in ((7168, 2048), (4096, 14336)):
        times = [constants.time_us(2**power, n, k, SM_COUNT) for power in range(14)]
        assert times == sorted(times)
