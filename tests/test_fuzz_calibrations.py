"""Changed calibration files: each is used, or refused with one error, and no call ends in anything else."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_engine import DEVICE
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cutegen.errors import StoreError
from cutegen.families.gemm.perf_model.fitted import FIRST_TREES, fit_of
from cutegen.families.gemm.perf_model.roofline import FEATURES
from cutegen.families.gemm.perf_model.torch_mm import torch_mm_of, torch_mm_us
from cutegen.families.gemm.perf_model.trees import Trees
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.records.calibrations import calibrated_arch, made_on, require_calibration
from cutegen.records.paths import calibration_path
from cutegen.search.defaults import default_config, predictor

PROBLEM = Problem(100, 4096, 4096)
Document = dict[str, Any]


def small_trees(count: int) -> Document:
    """The least that a file may hold, of trees with two questions each."""
    asked, limits = np.zeros((2, count), np.intp), np.ones((2, count), np.float32)
    return Trees(asked, limits, np.full((count, 4), 0.01, np.float32), 2, 0.0).to_json()


GOOD: Document = {
    "arch": "sm_90a",
    "made_on": made_on(DEVICE),
    "provenance": {},
    "features": list(FEATURES),
    "rates": {"clock": 1.0, "memory": 0.9},
    **small_trees(FIRST_TREES),
    "torch_mm": small_trees(1),
}


def changed(path: tuple[str | int, ...], value: Any) -> Document:
    """The good file with one value changed."""
    found = copy.deepcopy(GOOD)
    place: Any = found
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return found


def predicted(cache: Path) -> tuple[float, float]:
    """Microseconds of an untuned call, of the kernel and of torch, as calls ask for them."""
    arch = calibrated_arch(cache, DEVICE)
    space = find_space("gemm", arch)
    predict, torch_us = predictor(space, PROBLEM, DEVICE.sm_count), torch_mm_us(PROBLEM, arch, 132)
    own_us = None if predict is None else predict(default_config(space, PROBLEM, DEVICE.sm_count))
    assert own_us is not None and torch_us is not None
    return own_us, torch_us


def write(cache: Path, text: str) -> None:
    path = calibration_path(cache, DEVICE)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_the_file_that_is_changed_is_good(tmp_path: Path) -> None:
    """It is used, and says something else than the package."""
    shipped = predicted(tmp_path)
    write(tmp_path, json.dumps(GOOD))
    assert calibrated_arch(tmp_path, DEVICE).calibration is not None
    assert predicted(tmp_path) != shipped


@pytest.mark.parametrize(
    "path, value, reason",
    [
        (("torch_mm", "asked", 0, 0), 10**9, "features that there are not; valid: 0 to 26"),
        (("torch_mm", "asked", 0, 0), -1, "features that there are not"),
        (("asked", 1, 0), len(FEATURES), "features that there are not; valid: 0 to 28"),
        (("asked", 0, 0), 10**19, "too large"),
        (("limits", 0, 0), 1e300, "larger than single precision"),
        (("leaves", 0, 0), 1e300, "add up to"),
        (("base",), 1e308, "valid: 60 at most"),
        (("torch_mm", "base"), -1e308, "valid: 60 at most"),
        (("unit",), 1e300, "valid: 60 at most"),
        (("unit",), None, "malformed"),
        (("torch_mm",), [], "malformed"),
        (("rates",), {"clock": 1.0, "memory": 1.0, "power": 1.0}, "malformed"),
    ],
)
def test_numbers_that_no_calibration_writes_are_refused(
    tmp_path: Path, path: tuple[str | int, ...], value: Any, reason: str
) -> None:
    """The look at kernels in C reads what a file's numbers point at; some of these ended the process."""
    write(tmp_path, json.dumps(changed(path, value)))
    with pytest.raises(StoreError, match=reason):
        require_calibration(calibration_path(tmp_path, DEVICE), DEVICE)
    assert calibrated_arch(tmp_path, DEVICE) is DEVICE.arch


def test_fewer_trees_than_a_first_look_takes_are_refused(tmp_path: Path) -> None:
    """It would read beyond them."""
    write(tmp_path, json.dumps({**GOOD, **small_trees(FIRST_TREES - 1)}))
    with pytest.raises(StoreError, match="47 trees; valid: 48 and more"):
        require_calibration(calibration_path(tmp_path, DEVICE), DEVICE)


@pytest.mark.parametrize("becomes", ["deleted", "another"])
def test_a_process_goes_on_with_what_it_read(tmp_path: Path, becomes: str) -> None:
    """A file that is deleted or replaced before the first call that needs a prediction changes nothing."""
    write(tmp_path, json.dumps(GOOD))
    arch = calibrated_arch(tmp_path, DEVICE)
    path = calibration_path(tmp_path, DEVICE)
    if becomes == "deleted":
        path.unlink()
    else:
        write(tmp_path, json.dumps({**GOOD, "rates": {"clock": 0.5, "memory": 0.5}}))
    assert fit_of(arch).rates == (1.0, 0.9)
    assert len(torch_mm_of(arch).trees) == 1


def test_a_link_that_leads_nowhere_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file that is there and cannot be looked at ends no call."""
    path = calibration_path(tmp_path, DEVICE)
    path.parent.mkdir()
    path.symlink_to(path)
    assert calibrated_arch(tmp_path, DEVICE) is DEVICE.arch
    assert "ignoring a calibration" in caplog.text and path.name in caplog.text


# --- at random ---

_scalars = (
    st.none()
    | st.booleans()
    | st.sampled_from([0, -1, 1, 31, 2**31, 2**63, 10**19, 1e-300, 1e38, 1e39, 1e300, -0.0])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "sm_100a", "1e999", "\x1b[31m", "9" * 30])
)
_values = (
    _scalars | st.lists(_scalars, max_size=3) | st.dictionaries(st.text(max_size=3), _scalars, max_size=2)
)


def _places(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Where something stands in the file; of lists the first and the last."""
    keys: list[str | int] = []
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list) and value:
        keys = [0, len(value) - 1]
    found = [path] if path else []
    for key in dict.fromkeys(keys):
        found += _places(value[key], (*path, key))
    return found


def fuzz(examples: int) -> Callable[[Any], Any]:
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )


def check(cache: Path, text: str) -> None:
    """Calls are answered with finite times, whatever the file says."""
    write(cache, text)
    for us in predicted(cache):
        assert math.isfinite(us) and us > 0


@fuzz(40)
@given(place=st.sampled_from(_places(GOOD)), value=_values)
@example(place=("made_on", "gpu"), value="9" * 30)
def test_a_changed_value(tmp_path: Path, place: tuple[str | int, ...], value: Any) -> None:
    check(tmp_path, json.dumps(changed(place, value)))


@fuzz(25)
@given(
    at=st.floats(0, 1),
    cut=st.integers(0, 5),
    piece=st.sampled_from(["", "{", "]", '"', "1e999", "NaN", "\0"]),
)
def test_changed_text(tmp_path: Path, at: float, cut: int, piece: str) -> None:
    text = json.dumps(GOOD)
    start = int(at * len(text))
    check(tmp_path, text[:start] + piece + text[start + cut :])
