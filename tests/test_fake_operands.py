"""Operators under a fake mode, or with fake operands: results have no memory, so no kernel is launched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fake_family import AllFamilies  # noqa: E402
from fake_kernels import operators_ask  # noqa: E402
from torch._dynamo.exc import TorchRuntimeError  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402

import cutegen  # noqa: E402
from cutegen.errors import OperandError  # noqa: E402

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


@pytest.mark.parametrize(
    ("name", "operand", "shape", "message"),
    [
        ("rms_norm", "weight", (1, N), rf"weight has shape \(1, {N}\); it must be \(n,\)"),
        ("rms_norm", "weight", (N + 1,), f"which makes n {N + 1}, but x makes it {N}"),
        ("layer_norm", "bias", (1, N), rf"bias has shape \(1, {N}\); it must be \(n,\)"),
    ],
)
def test_what_cannot_be_an_operand_is_named_under_a_fake_mode(
    gpu: AllFamilies, name: str, operand: str, shape: tuple[int, ...], message: str
) -> None:
    """As without one."""
    call, operands = CALLS[name]
    wrong = {**operands, operand: some(*shape)}
    with pytest.raises(OperandError, match=message):
        call(**wrong)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(OperandError, match=message):
        call(**wrong)


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


def fake(*shape: int, dtype: Any = BF16, device: str = "cuda") -> Any:
    return torch.empty(shape, dtype=dtype, device=device)


#: Calls that no kernel answers, and what eager calls say of them.
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "two dtypes": (
        lambda: cutegen.gemm(fake(16, N), fake(N, 24, dtype=torch.float16)),
        "b has dtype torch.float16 but a has torch.bfloat16; they must agree",
    ),
    "two devices": (
        lambda: cutegen.gemm(fake(16, N), fake(N, 24, device="cpu")),
        "b is on cpu but a is on cuda:0; all operands must be on one device",
    ),
    "a bias": (
        lambda: cutegen.gemm(fake(16, N), fake(N, 24), bias=fake(25)),
        r"bias has shape \(25,\); it must be \(24,\)",
    ),
    "no activation": (
        lambda: cutegen.gemm(fake(16, N), fake(N, 24), activation="tanh"),
        "unknown activation 'tanh'",
    ),
    "a factor": (
        lambda: cutegen.gemm(fake(16, N), fake(N, 24), alpha="a"),  # type: ignore[arg-type]
        "alpha is a str; it must be a number",
    ),
    "out of a GEMM": (
        lambda: cutegen.gemm(fake(16, N), fake(N, 24), out=fake(16, 25)),
        r"out has shape \(16, 25\); it must have the result's, \(16, 24\)",
    ),
    "a layer": (
        lambda: cutegen.linear(fake(2, 16, N), fake(24, N, dtype=torch.float16)),
        "w has dtype torch.float16 but x has torch.bfloat16",
    ),
    "integers": (
        lambda: cutegen.rms_norm(fake(3, N, dtype=torch.int64)),
        "x has dtype torch.int64; valid: torch.bfloat16",
    ),
    "out of a norm": (
        lambda: cutegen.softmax(fake(3, N), out=fake(3, N, dtype=torch.float16)),
        "out has dtype torch.float16; it must be torch.bfloat16",
    ),
    "another shape of out": (
        lambda: cutegen.softmax(fake(3, N), out=fake(1, N)),
        r"out has shape \(1, 64\); it must be \(3, 64\)",
    ),
    "a weight elsewhere": (
        lambda: cutegen.rms_norm(fake(3, N), fake(N, device="cpu")),
        "weight is on cpu but x on cuda:0; use one device",
    ),
    "small targets": (
        lambda: cutegen.cross_entropy(fake(3, N), fake(3, dtype=torch.int8)),
        "target has dtype torch.int8; it must be torch.int64",
    ),
    "groups": (
        lambda: cutegen.grouped_gemm(fake(16, N), fake(3, 32, N), fake(2, dtype=torch.int32)),
        r"offs has shape \(2,\), which makes g 2, but b makes it 3",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_operands_that_cannot_work_are_refused_while_tracing(gpu: AllFamilies, name: str) -> None:
    """What is traced runs much later, and elsewhere."""
    call, said = WRONG[name]
    with FakeTensorMode(), pytest.raises(OperandError, match=said):
        call()


def test_a_compiler_is_told_of_operands_that_cannot_work(gpu: AllFamilies) -> None:
    """Whether sizes are symbols or not; those that can are traced as before."""
    for dynamic in (False, True):
        compiled = torch.compile(
            lambda a, b: cutegen.gemm(a, b, alpha=2), backend="aot_eager", fullgraph=True, dynamic=dynamic
        )
        a, b = some(16, N, dtype=BF16), some(N, 24, dtype=BF16)
        assert torch.equal(compiled(a, b), cutegen.gemm(a, b, alpha=2))
        with pytest.raises(TorchRuntimeError, match=r"b has dtype torch.float16 but a has torch.bfloat16"):
            compiled(a, b.half())
        norm = torch.compile(cutegen.rms_norm, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        with pytest.raises(TorchRuntimeError, match=r"x has dtype torch.int64; valid"):
            norm(torch.ones(3, N, dtype=torch.int64))
