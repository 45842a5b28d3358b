"""Vectorised Jacobians: gradients that stand for several, of operators whose gradient is a kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fake_family import AllFamilies  # noqa: E402
from fake_kernels import operators_ask  # noqa: E402

import cutegen  # noqa: E402

functional = torch.nn.functional
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AllFamilies]:
    with operators_ask(AllFamilies(tmp_path), monkeypatch) as fake:
        yield fake


def some(*shape: int, dtype: Any = FP32) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def halves(x: Any) -> Any:
    gate, up = x.chunk(2, -1)
    return functional.silu(gate) * up


def alternate(x: Any) -> Any:
    return functional.gelu(x[..., 0::2], approximate="tanh") * x[..., 1::2]


def turn(x: Any, cos: Any, sin: Any, style: str) -> Any:
    """Rotary embedding of (tokens, heads, d), in the dtype of ``x``."""
    pairs = cos.shape[-1]
    cos, sin = cos.to(x.dtype)[:, None], sin.to(x.dtype)[:, None]
    if style == "half":
        one, other = x[..., :pairs], x[..., pairs : 2 * pairs]
    else:
        one, other = x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
    parts = (one * cos - other * sin, other * cos + one * sin)
    found = torch.cat(parts, -1) if style == "half" else torch.stack(parts, -1).flatten(-2)
    return torch.cat((found, x[..., 2 * pairs :]), -1)


COS, SIN = torch.linspace(-1, 1, 40).view(10, 4).cos(), torch.linspace(-1, 1, 40).view(10, 4).sin()
PLACES = torch.tensor([2, 0, 12], dtype=torch.int32)  # the last is beyond the tables
CLAMPED = PLACES.long().clamp(0, 9)
TARGET = torch.tensor([1, -100, 3, 0])


def losses(x: Any) -> Any:
    lse = x.logsumexp(-1)
    found = functional.cross_entropy(x, TARGET, reduction="none", label_smoothing=0.1)
    return found + 0.01 * lse.square() * (TARGET != -100)


#: Ours, the same by torch, and the tensors of which both are functions.
CASES: dict[str, tuple[Function, Function, tuple[Any, ...]]] = {
    "activate": (
        lambda x: cutegen.activate(x, "relu_squared"),
        lambda x: functional.relu(x).square(),
        (some(3, 16),),
    ),
    "silu of bf16": (lambda x: cutegen.activate(x, "silu"), functional.silu, (some(3, 16, dtype=BF16),)),
    "halves": (cutegen.swiglu, halves, (some(3, 16),)),
    "alternate": (
        lambda x: cutegen.geglu(x, approximate="tanh", layout="interleaved"),
        alternate,
        (some(3, 16, dtype=BF16),),
    ),
    "gate and up": (
        lambda gate, up: cutegen.reglu(gate, up),
        lambda gate, up: functional.relu(gate) * up,
        (some(2, 2, 8), some(2, 2, 8) + 1),
    ),
    "gated_gemm": (
        cutegen.gated_gemm,
        lambda x, w: halves(x @ w.T),
        (some(3, 16, dtype=BF16), some(32, 16, dtype=BF16)),
    ),
    "gated_gemm of two": (
        lambda x, w, up: cutegen.gated_gemm(x, w, up=up),
        lambda x, w, up: functional.silu(x @ w.T) * (x @ up.T),
        (some(3, 16, dtype=BF16), some(8, 16, dtype=BF16), some(8, 16, dtype=BF16) + 1),
    ),
    "rope": (
        lambda q, k: cutegen.rope(q, k, COS[:3], SIN[:3]),
        lambda q, k: (turn(q, COS[:3], SIN[:3], "half"), turn(k, COS[:3], SIN[:3], "half")),
        (some(3, 2, 8), some(3, 1, 8)),
    ),
    "rope by position": (
        lambda q, k: cutegen.rope(q, k, COS, SIN, PLACES, style="interleaved")[0],
        lambda q, k: turn(q, COS[CLAMPED], SIN[CLAMPED], "interleaved") + 0 * k.sum(),
        (some(3, 2, 12), some(3, 1, 12)),
    ),
    "cross_entropy": (
        lambda x: cutegen.cross_entropy(x, TARGET, label_smoothing=0.1, z_loss=0.01, reduction="none"),
        losses,
        (some(4, 5),),
    ),
    "mean of cross_entropy": (
        lambda x: cutegen.cross_entropy(x, TARGET, inplace_backward=True),
        lambda x: functional.cross_entropy(x, TARGET),
        (some(4, 5, dtype=BF16),),
    ),
}


def same(found: Any, want: Any) -> None:
    if isinstance(want, tuple):
        for own, other in zip(found, want, strict=True):
            same(own, other)
        return
    tolerance = 1e-5 if found.dtype == FP32 else 2e-2
    torch.testing.assert_close(found.double(), want, rtol=tolerance, atol=tolerance * want.abs().max().item())


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "operator"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")  # that an operator has no batching rule and takes longer
def test_vectorised_jacobians_are_those_of_torch_in_fp64(name: str, traced: bool) -> None:
    """They ended in "Cannot access data pointer", or in a batching rule that there is none of."""
    ours, theirs, tensors = CASES[name]
    if traced:
        torch._dynamo.reset()
        ours = torch.compile(ours, backend="eager")
    jacobian = torch.autograd.functional.jacobian
    found = jacobian(ours, tensors, vectorize=True)
    same(found, jacobian(theirs, tuple(t.double() for t in tensors)))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")
def test_jacobians_of_torch_func_say_what_to_do(name: str) -> None:
    ours, _, tensors = CASES[name]
    with pytest.raises(
        cutegen.CutegenError, match=r"under a transform of torch.func.*take gradients by autograd"
    ):
        torch.func.jacrev(ours)(*tensors)
