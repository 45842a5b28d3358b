"""The activations of rendered kernels in fp32, on every 16-bit number: what the text says, without a GPU.

The functions are taken out of the text and run on torch tensors in fp32. The approximate instructions are
exact to a bit more than PTX promises, off by what it allows, and flush what is denormal, as on the device.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cutegen.arch import find_arch  # noqa: E402
from cutegen.build.render import render  # noqa: E402
from cutegen.families.registry import find_space, parse_problem  # noqa: E402

#: Relative error of ex2.approx.ftz.f32 and rcp.approx.ftz.f32, at most. Source: PTX ISA.
_APPROXIMATE = 2.0**-22
_SMALLEST = 2.0**-126
#: Rounding the argument of an exponential of up to 150 binary places in fp32, twice, and the rest.
_RELATIVE = 2.0**-16
NAMES = ("silu", "gelu", "gelu_tanh", "relu", "relu_squared")
FAMILIES = ("activation", "gemm")
#: Factors by which approximate instructions are off. Formulas that should have none would be NaN.
OFF = (1.0, 1 + _APPROXIMATE, 1 - _APPROXIMATE)
CASES = [(name, off) for name in NAMES for off in ((math.nan,) if name.startswith("relu") else OFF)]


def flushed(x: Any) -> Any:
    return torch.where(x.abs() < _SMALLEST, torch.zeros_like(x), x)


class Registers:
    """A vector in registers, whose elements are all taken at once where a kernel takes one after another."""

    def __init__(self, shape: Any, dtype: Any) -> None:
        self.shape, self.values = shape, torch.empty(shape, dtype=torch.float32)

    def store(self, values: Any) -> None:
        self.values = values.clone()

    def load(self) -> Any:
        return self.values

    def __getitem__(self, at: int) -> Any:
        return self.values

    def __setitem__(self, at: int, value: Any) -> None:
        self.values = value


def functions_of(text: str, off: float) -> dict[str, Any]:
    """Return the functions of a kernel that need no compiler, with approximations ``off`` by a factor."""

    def exp2(x: Any, fastmath: bool = False) -> Any:
        return flushed((torch.exp2(flushed(x).double()) * off).float())

    def rcp(x: Any) -> Any:
        found = flushed(x).double().reciprocal()
        return flushed(torch.where(x == 1, found, found * off).float())  # of 1 it is 1

    cute = SimpleNamespace(
        math=SimpleNamespace(exp2=exp2, erf=torch.erf),
        arch=SimpleNamespace(rcp_approx=rcp),
        where=torch.where,
        full_like=torch.full_like,
        make_rmem_tensor=Registers,
        size=lambda shape: 1,
        jit=lambda function: function,
    )
    cutlass = SimpleNamespace(
        Float32=lambda x: torch.tensor(x, dtype=torch.float32),
        select_=torch.where,
    )
    wanted = ("sigmoid", "inner", "normal", "activate", "slope", "TAIL")
    tree = ast.parse(text)
    kept = [
        node
        for node in tree.body
        if getattr(node, "name", "") in wanted
        or (isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in wanted)
        or (isinstance(node, ast.AugAssign) and getattr(node.target, "id", "") in wanted)
    ]
    space: dict[str, Any] = {"cute": cute, "cutlass": cutlass}
    exec(compile(ast.Module(kept, []), "<kernel>", "exec"), space)
    return space


@cache
def text_of(line: str) -> str:
    problem, arch = parse_problem(line), find_arch("sm_90a")
    return render(problem, find_space(problem.family, arch).default(problem), arch).text


def every_number(dtype: Any) -> Any:
    """Return all 65536 numbers of a 16-bit type in fp32."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()


def distribution(x: Any) -> Any:
    """The normal one; torch.special.ndtr has no small tails."""
    return 0.5 * torch.special.erfc(x * -(0.5**0.5))


def exact(name: str, x: Any) -> Any:
    functional = torch.nn.functional
    formulas: dict[str, Callable[[Any], Any]] = {
        "silu": functional.silu,
        "gelu": lambda x: x * distribution(x),
        "gelu_tanh": lambda x: x * torch.sigmoid(x * (1.5957691216057308 + 0.07135481627260025 * x * x)),
        "relu": functional.relu,
        "relu_squared": lambda x: functional.relu(x).square(),
    }
    return formulas[name](x)


def slope_of(name: str, x: Any) -> Any:
    """The derivative, written so that nothing of it overflows."""
    s = torch.sigmoid(x)
    wide = x.clamp(-50, 50)  # beyond, derivatives are 0 or 1 to all digits
    t = torch.sigmoid(wide * (1.5957691216057308 + 0.07135481627260025 * wide * wide))
    inner = 1.5957691216057308 + 0.21406444881780076 * wide * wide
    density = torch.exp(-x.clamp(-1e5, 1e5).square() / 2) * 0.3989422804014327
    return {
        "silu": s + x.clamp(-1e5, 1e5) * s * (1 - s),
        "gelu": distribution(x) + x.clamp(-1e5, 1e5) * density,
        "gelu_tanh": t + wide * t * (1 - t) * inner,
        "relu": (x > 0).double(),
        "relu_squared": 2 * torch.nn.functional.relu(x),
    }[name]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("family", "name", "off"),
    [(f, *case) for f in FAMILIES for case in CASES if (f, case[0]) != ("gemm", "relu_squared")],
)
def test_activations_are_right_on_every_number(family: str, name: str, off: float, dtype: Any) -> None:
    """To 2**-16 of themselves, which rounding to 16 bits hides, and NaN where torch's are.

    Behind a GEMM the exact gelu is a sum of 1 and erf, as torch's is, whose small tails cancel.
    """
    line = "activation 64x4096 bf16 activation=" if family == "activation" else "gemm 64x64x64 bf16 kk act="
    found = functions_of(text_of(line + name), off)["activate"](every_number(dtype))
    x = every_number(dtype).double()
    want = exact(name, x)
    infinite = x.isinf()
    assert torch.equal(found.isnan(), want.isnan()), x[found.isnan() != want.isnan()]
    assert torch.equal(found[infinite & ~want.isnan()].double(), want[infinite & ~want.isnan()])
    finite = x.isfinite()
    largest = torch.finfo(torch.float32).max
    held = want.abs() <= largest
    assert bool(found[finite & ~held].isinf().all())
    at, want = x[finite & held], want[finite & held]
    error = (found.double()[finite & held] - want).abs()
    cancelled = 2.0**-23 if (family, name) == ("gemm", "gelu") else 4 * _SMALLEST
    limit = _RELATIVE * want.abs() + cancelled * at.abs().clamp_min(1)
    worst = (error - limit).argmax()
    assert bool((error <= limit).all()), (at[worst], error[worst], want[worst])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "off"), CASES)
def test_slopes_are_right_on_every_number(name: str, off: float, dtype: Any) -> None:
    """Within 2**-16 of 1 or of themselves, for all whose square is a number, and for NaN."""
    x = every_number(dtype)
    text = text_of(f"activation_backward 64x4096 bf16 activation={name}")
    value, slope = functions_of(text, off)["slope"](x)
    assert bool(value[x.isnan()].isnan().all())
    kept = x.abs() < 1e19
    wide = x[kept].double()
    want = slope_of(name, wide)
    error, limit = (slope[kept].double() - want).abs(), _RELATIVE * want.abs().clamp_min(1)
    worst = (error - limit).argmax()
    assert bool((error <= limit).all()), (wide[worst], error[worst], want[worst])
    want = exact(name, wide)
    limit = _RELATIVE * want.abs() + 4 * _SMALLEST * wide.abs().clamp_min(1)
    assert bool(((value[kept].double() - want).abs() <= limit).all())
