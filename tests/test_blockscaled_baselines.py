"""torch's block-scaled GEMM: its calls pass torch's own checks, and what it is given is what we mean.

cuBLAS is played by the tests' decoder; whether the library itself agrees only a B200 can tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="operands are torch tensors")

from blockscaled_numbers import problem_of, product  # noqa: E402
from host_lane import filled, poisoned  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from cutegen.families.gemm.family import BLOCK_SCALED_GEMM  # noqa: E402
from cutegen.measure.check import judge  # noqa: E402


class Library(TorchDispatchMode):
    """Plays cuBLAS: asks torch's own checks of the call, then computes it with the other decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten, kwargs = torch.ops.aten, dict(kwargs or {})
        if func not in (aten._scaled_mm.out, aten._scaled_mm_v2.out):
            return func(*args, **kwargs)
        self.calls.append(str(func))
        out = kwargs.pop("out")
        seen = func.overloadpacket.default(*without_device(args), **kwargs)
        assert (seen.shape, seen.dtype) == (out.shape, out.dtype)
        two_level = func is aten._scaled_mm_v2.out
        a, b = args[:2]
        scale_a, scale_b = (args[2], args[5]) if two_level else ([args[2]], [args[3]])
        # Of blocks of 16 in tiles, and one of all. Source: torch's ScalingType, SwizzleType.
        assert not two_level or [*args[3:5], *args[6:8]] == [[2, 0], [1, 0]] * 2
        fp4 = a.dtype == torch.float4_e2m1fn_x2
        if a.dtype == b.dtype == torch.float8_e5m2:
            raise ValueError("Multiplication of two Float8_e5m2 matrices is not supported")
        stored = (a.view(torch.uint8), b.view(torch.uint8)) if fp4 else (a, b)
        value = product(*stored, (scale_a[0], scale_b[0]), "nvfp4" if fp4 else "mxfp8_e4m3")
        for level in (*scale_a[1:], *scale_b[1:]):
            value = value * level.double()
        return out.copy_(value)


def without_device(args: Any) -> Iterator[Any]:
    for arg in args:
        if isinstance(arg, list) and arg and isinstance(arg[0], torch.Tensor):
            yield [x.to("meta") for x in arg]
        else:
            yield arg.to("meta") if isinstance(arg, torch.Tensor) else arg


SCALED_MM, SCALED_MM_V2 = "torch._scaled_mm", "torch.nn.functional.scaled_mm"
VENDOR = {
    "150x144x224 nvfp4 kk": SCALED_MM,
    "150x144x224 nvfp4 kk alpha": SCALED_MM_V2,
    "2x40x48x96 nvfp4 kk alpha": f"{SCALED_MM_V2} for each batch",
    "150x144x224 mxfp8_e4m3 kk out=fp32": SCALED_MM,
    "150x144x224 mxfp8_e4m3 kk alpha": f"{SCALED_MM} + alpha",
    "2x40x48x96 mxfp8_e4m3 kk": f"{SCALED_MM} for each batch",
    "150x144x224 mxfp8_e5m2 kk": "torch.mm of decoded bf16 + copy",
    "150x137x224 nvfp4 kk out=fp32": "torch.mm of decoded bf16 + copy",
    "2x40x48x96 mxfp8_e5m2 kk alpha": "torch.bmm of decoded bf16 + copy + alpha",
}


@pytest.mark.parametrize("library", [True, False], ids=["with cuBLAS", "without"])
@pytest.mark.parametrize("line", VENDOR)
def test_the_vendor_multiplies_the_same_operands(line: str, library: bool) -> None:
    """Its call is one that torch's own checks let pass where torch has one, and its result right."""
    problem = problem_of(line)
    inputs, output = filled(problem), poisoned(problem)
    outputs = {"out": output.tensor}
    mode = Library()
    with mode if library else nullcontext():
        [(name, baseline)] = BLOCK_SCALED_GEMM.baselines(problem, inputs, outputs).items()
        baseline(inputs, outputs)
    assert name == VENDOR[line] if library else "decoded bf16 + copy" in name
    assert bool(mode.calls) == library
    verdict = judge({"out": output}, BLOCK_SCALED_GEMM.reference(problem, inputs))
    slack = 4 if "decoded" in name or "+" in name else 1  # torch rounds more than once
    assert verdict.max_error <= slack * verdict.tolerance, verdict
