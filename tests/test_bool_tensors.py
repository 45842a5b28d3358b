"""Tensors of truth values in declared kernels: compiled, checked, called and pinned as any others."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from own_kernels import write_kernel
from own_registry import without_user_families

torch = pytest.importorskip("torch", reason="checks run on torch tensors")

from fake_kernels import calls_go_to  # noqa: E402
from host_lane import candidate, new_engine  # noqa: E402
from test_user_kernels import FakeUserGpu  # noqa: E402

import cutegen  # noqa: E402
from cutegen.arch import find_arch  # noqa: E402
from cutegen.build import Artifact, Builder  # noqa: E402
from cutegen.build.render import render  # noqa: E402
from cutegen.build.store import Store  # noqa: E402
from cutegen.deploy import family_calls  # noqa: E402
from cutegen.errors import FamilyError, OperandError  # noqa: E402
from cutegen.families import registry  # noqa: E402

ARCH = find_arch("sm_90a")

#: What a mask keeps, and which elements are zero.
MASKED = {
    "masked.py": """
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute


@cute.kernel
def kernel(
    x: cute.Tensor, keep: cute.Tensor, y: cute.Tensor, zero: cute.Tensor, threads: cutlass.Constexpr
):
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    for at in range(thread, x.shape[1], threads):
        value = cutlass.Float32(0.0)
        if keep[row, at]:
            value = x[row, at].to(cutlass.Float32)
        y[row, at] = value.to(y.element_type)
        zero[row, at] = value == 0.0


@cute.jit
def launch(
    x: cute.Tensor,
    keep: cute.Tensor,
    y: cute.Tensor,
    zero: cute.Tensor,
    threads: cutlass.Constexpr,
    stream: cuda.CUstream,
):
    kernel(x, keep, y, zero, threads).launch(grid=[x.shape[0], 1, 1], block=[threads, 1, 1], stream=stream)
""",
    "declaration.py": '''
"""What a mask keeps."""

from cutegen.kernel import Kernel, fixed, free, read, write

kernel = Kernel(
    "masked",
    "x where keep is true, else 0",
    entry="masked:launch",
    sizes={"m": free, "n": fixed},
    options={"dtype": ("bf16", "fp32")},
    arguments=(
        read("x", "dtype", ("m", "n")),
        read("keep", "bool", ("m", "n")),
        write("y", "dtype", ("m", "n")),
        write("zero", "bool", ("m", "n")),
    ),
    call="x, keep, y, zero, threads, stream",
    knobs={"threads": (128, 256)},
    rows="m",
)


@kernel.reference
def reference(x, keep):
    import torch

    y = torch.where(keep, x, 0)
    return {"y": y, "zero": y == 0}
''',
}


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is loaded here is not known to other tests."""
    without_user_families(monkeypatch)


def masked(mistake: str) -> Callable[..., None]:
    """Return what computes MASKED as its kernel does, but for a mistake."""

    def kernel(x: Any, keep: Any, y: Any, zero: Any) -> None:
        y.copy_(torch.where(keep, x, 0))
        if mistake == "nothing":
            return
        zero.copy_(y == 0)
        if mistake == "one":
            zero[1, 2] = ~zero[1, 2]
        if mistake == "a part":
            zero.view(torch.uint8)[2, 3] = 0x5B  # as it was before

    return kernel


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("", ""),
        ("one", r"zero\[1, 2\] is [01], should be [01] within"),
        ("nothing", r"zero: 320 of 320 elements .*never written"),
        ("a part", r"zero: 1 of 320 elements .*never written"),
    ],
)
def test_outputs_are_compared_exactly_and_must_be_written(mistake: str, said: str, tmp_path: Path) -> None:
    """Neither 0 nor 1 is left in a buffer before a run: what is not written shows in one run."""
    family = registry.load_kernel(write_kernel(tmp_path / "own", MASKED))
    problem = family.parse("masked 5x64 fp32")
    engine = new_engine(load=lambda library, symbol: masked(mistake))
    engine.open(problem, 0)
    verdict = engine.check(candidate(problem, scalars=()), problem)
    assert verdict.ok == (not mistake), verdict
    assert re.search(said, verdict.reason), verdict


def test_masks_that_are_drawn_have_both_values(tmp_path: Path) -> None:
    family = registry.load_kernel(write_kernel(tmp_path / "own", MASKED))
    problem = family.parse("masked 5x64 bf16")
    for awkward in (False, True):
        keep = family.inputs(problem, torch.Generator().manual_seed(0), awkward=awkward).tensors["keep"]
        assert keep.dtype == torch.bool and 100 < int(keep.sum()) < 220


@pytest.mark.dsl
def test_they_compile(tmp_path: Path) -> None:
    family = registry.load_kernel(write_kernel(tmp_path / "own", MASKED))
    problem = family.parse("masked 5x64 bf16")
    config = registry.find_space(family.name, ARCH).default(problem)
    with Builder(Store(tmp_path / "store"), workers=1) as builder:
        [(source, result)] = builder.build([render(problem, config, ARCH)])
    assert isinstance(result, Artifact), result
    assert "make_fake_tensor(cutlass.Boolean, " in source.text


def test_calls_take_and_return_them(tmp_path: Path) -> None:
    with calls_go_to(FakeUserGpu(tmp_path / "cache")):
        kernel = cutegen.load(write_kernel(tmp_path / "own", MASKED))
        x = torch.arange(-160.0, 160.0).view(5, 64)
        y, zero = kernel(x, x > 0)
        assert zero.dtype == torch.bool
        assert torch.equal(y, x.relu()) and torch.equal(zero, x <= 0)
        with pytest.raises(OperandError, match=r"keep has dtype torch\.uint8; it must be torch\.bool"):
            kernel(x, (x > 0).to(torch.uint8))


def test_a_truth_value_is_no_scalar(tmp_path: Path) -> None:
    text = MASKED["declaration.py"].replace(
        'read("keep", "bool", ("m", "n"))', 'scalar("keep", "bool", (1, 0))'
    )
    text = text.replace("free, read, write", "free, read, scalar, write")
    with pytest.raises(FamilyError, match="argument keep: a scalar is a number; a flag is an option"):
        registry.load_kernel(write_kernel(tmp_path / "own", {**MASKED, "declaration.py": text}))


def test_pinned_kernels_are_passed_what_torch_says_of_them() -> None:
    """DLPack's code of a truth value, which compiled kernels compare."""
    ffi = pytest.importorskip("tvm_ffi")
    assert "bool" in family_calls._TORCH_NAMES
    for short, (name, bits) in family_calls._TORCH_NAMES.items():
        if "int" in short or short == "bool":
            said = ffi.from_dlpack(torch.ones(4, dtype=getattr(torch, name))).dtype
            _, code, _ = family_calls._DTYPES[f"torch.{name}"]
            assert (said.type_code, said.bits, said.lanes) == (code, bits, 1), name
