"""Operators under a fake mode, or with fake operands: results have no memory, so no kernel is launched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fake_family import AllFamilies  # noqa: E402
from fake_kernels import operators_ask  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402

import cutegen  # noqa: E402

N = 64
BF16, FP32 = torch.bfloat16, torch.float32
Operands = Mapping[str, Any]


@pytest.fixture(autouse=True)
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AllFamilies]:
    with operators_ask(AllFamilies(tmp_path), monkeypatch) as fake:
        yield fake


def some(*shape: int, dtype: Any = FP32) -> Any:
    return torch.ones(shape, dtype=dtype)


def heads() -> Operands:
    return {"q": some(6, 2, 16), "k": some(6, 1, 16), "cos": some(6, 8), "sin": some(6, 8)}


#: Functions, and the tensors that they take by name.
CALLS: dict[str, tuple[Callable[..., Any], Operands]] = {
    "gemm": (cutegen.gemm, {"a": some(16, N, dtype=BF16), "b": some(N, 24, dtype=BF16)}),
    "gemm and more": (
        cutegen.gemm,
        {
            "a": some(16, N, dtype=BF16),
            "b": some(N, 24, dtype=BF16),
            "c": some(16, 24, dtype=BF16),
            "bias": some(24, dtype=BF16),
        },
    ),
    "linear": (
        cutegen.linear,
        {"x": some(16, N, dtype=BF16), "w": some(24, N, dtype=BF16), "bias": some(24, dtype=BF16)},
    ),
    "rms_norm": (cutegen.rms_norm, {"x": some(3, N), "weight": some(N)}),
    "rms_norm of a sum": (
        cutegen.rms_norm,
        {"x": some(3, N), "weight": some(N), "residual": some(3, N)},
    ),
    "layer_norm": (cutegen.layer_norm, {"x": some(3, N), "weight": some(N), "bias": some(N)}),
    "softmax": (cutegen.softmax, {"x": some(3, N)}),
    "gated": (cutegen.gated, {"x": some(3, N)}),
    "gated of two": (cutegen.gated, {"x": some(3, N), "up": some(3, N)}),
    "activate": (lambda x: cutegen.activate(x, "silu"), {"x": some(3, N)}),
    "rope": (cutegen.rope, heads()),
    "cross_entropy": (
        cutegen.cross_entropy,
        {"x": some(3, N), "target": torch.ones(3, dtype=torch.int64)},
    ),
    "gated_gemm": (
        cutegen.gated_gemm,
        {"x": some(16, N, dtype=BF16), "w": some(32, N, dtype=BF16)},
    ),
    "grouped_gemm": (
        cutegen.grouped_gemm,
        {
            "a": some(16, N, dtype=BF16),
            "b": some(2, 32, N, dtype=BF16),
            "offs": torch.tensor([7, 16], dtype=torch.int32),
        },
    ),
}


def results(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("name", CALLS)
def test_real_operands_under_a_fake_mode_reach_no_kernel(gpu: AllFamilies, name: str) -> None:
    """Neither at first, nor when the kind of call is known; afterwards calls compute again."""
    call, operands = CALLS[name]
    for known in (False, True):
        launched = len(gpu.calls)
        with FakeTensorMode(allow_non_fake_inputs=True):
            faked = results(call(**operands))
        assert len(gpu.calls) == launched, known
        real = results(call(**operands))
        assert len(gpu.calls) > launched
        assert all(type(result) is FakeTensor for result in faked)
        assert [(f.shape, f.dtype) for f in faked] == [(r.shape, r.dtype) for r in real]
        assert all(type(result) is torch.Tensor for result in real)


def names(operands: Operands) -> list[str]:
    """Tensors that are made fake: the ends of groups are read, since the CPU stands for the GPU here."""
    return [name for name in operands if name != "offs"]


@pytest.mark.parametrize("name", CALLS)
def test_a_fake_operand_beside_real_ones_reaches_no_kernel(gpu: AllFamilies, name: str) -> None:
    """Its address is no memory of the GPU's: a kernel that reads it ends the process' CUDA context."""
    call, operands = CALLS[name]
    real = results(call(**operands))
    launched = len(gpu.calls)
    for tensor in names(operands):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            mixed = {**operands, tensor: mode.from_tensor(operands[tensor])}
            faked = results(call(**mixed))
        assert len(gpu.calls) == launched, tensor
        assert all(type(result) is FakeTensor for result in faked), tensor
        assert [(f.shape, f.dtype) for f in faked] == [(r.shape, r.dtype) for r in real]
        if len(operands) > 1:  # most modes refuse to mix
            strict = {**operands, tensor: FakeTensorMode().from_tensor(operands[tensor])}
            with pytest.raises(AssertionError, match="FakeTensors"):
                call(**strict)
            assert len(gpu.calls) == launched, tensor


class Plain(torch.Tensor):
    """A class of tensors without rules for operators."""


@pytest.mark.parametrize("name", CALLS)
def test_a_class_without_rules_is_computed(gpu: AllFamilies, name: str) -> None:
    call, operands = CALLS[name]
    real = results(call(**operands))
    for tensor in names(operands):
        launched = len(gpu.calls)
        found = results(call(**{**operands, tensor: operands[tensor].as_subclass(Plain)}))
        assert len(gpu.calls) == launched + 1, tensor
        for one, other in zip(found, real, strict=True):
            assert torch.equal(one.as_subclass(torch.Tensor), other), tensor
