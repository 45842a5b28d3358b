"""The walk over kernels: which dtypes it takes, and how it ends without the right GPU."""

from __future__ import annotations

import pytest
from fake_kernels import H200

from cutegen.arch import find_arch
from cutegen.catalog import find_space
from cutegen.errors import DeviceError
from tools import walk_kernels


def test_a_target_is_walked_with_the_dtypes_that_it_multiplies() -> None:
    """tf32 is for Blackwell, int8 for all but B300."""
    hopper, blackwell = (find_space("gemm", find_arch(arch)) for arch in ("sm_90a", "sm_103a"))
    assert walk_kernels.dtypes_of(hopper) == ["bf16", "fp16", "e4m3", "e5m2", "int8"]
    assert walk_kernels.dtypes_of(blackwell) == ["bf16", "fp16", "e4m3", "e5m2", "tf32"]


def test_a_dtype_of_another_target_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No random problem of it would ever be accepted."""
    monkeypatch.setattr(walk_kernels, "present_device", lambda: H200)
    assert walk_kernels.main(["--dtypes", "bf16,tf32"]) == 2
    assert "--dtypes tf32: not for sm_90a; valid: bf16" in capsys.readouterr().err


def test_without_a_gpu_nothing_is_walked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 3, as of every tool that needs one."""

    def no_device() -> None:
        raise DeviceError("no GPU here")

    monkeypatch.setattr(walk_kernels, "present_device", no_device)
    assert walk_kernels.main([]) == 3
    assert "no GPU here" in capsys.readouterr().err
