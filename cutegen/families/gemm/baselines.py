"""The vendor's GEMM for a problem: the call that a torch user would write, and its name for the record."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from cutegen.dtypes import DTYPE_BYTES
from cutegen.errors import MeasureError
from cutegen.families.gemm.inputs import ALPHA, BETA, SCALE_A, SCALE_B, Workload
from cutegen.families.gemm.problem import BLOCK_SCALED, Problem
from cutegen.families.gemm.stand_in import factored_product
from cutegen.family import Baseline, Inputs, Tensors

if TYPE_CHECKING:
    import torch

__all__ = ["make_baselines", "vendor_call"]

Call = Callable[[Workload, "torch.Tensor"], None]
_Operand = TypeVar("_Operand")


@dataclass(frozen=True)
class _Product:
    """One way to multiply, and the parts of the epilogue that it covers."""

    name: str
    call: Call
    covers: frozenset[str] = frozenset()


def make_baselines(problem: Problem, inputs: Inputs, outputs: Tensors) -> dict[str, Baseline]:
    """Return torch's GEMM with its name; see :meth:`cutegen.family.Family.baselines`.

    Without inputs nothing is tried, and the first of what torch may offer is named.
    """
    tried = (Workload.of(problem, inputs), outputs["out"]) if inputs.tensors else None
    name, call = vendor_call(problem, tried)

    def run(inputs: Inputs, outputs: Tensors) -> None:
        call(Workload.of(problem, inputs), outputs["out"])

    return {name: run}


def vendor_call(problem: Problem, tried: tuple[Workload, torch.Tensor] | None) -> tuple[str, Call]:
    """Return what torch offers for the problem, and how it is called in the record.

    The GEMM is one library call wherever there is one that this torch and device know, with its own output
    dtype if possible; what is left of the epilogue follows as elementwise calls.

    Args:
        problem: What is to be computed.
        tried: Operands and an output to try it on; None to take the first that may work.
    """
    options = [option for option in _options(problem) if option is not None]
    works = (option for option in options if tried is None or _works(option.call, *tried))
    product = next(works, options[-1])
    rest = _rest_of_epilogue(problem, product.covers)
    if not rest:
        return product.name, product.call

    def run(load: Workload, out: torch.Tensor) -> None:
        product.call(load, out)
        for _, call in rest:
            call(load, out)

    return " + ".join([product.name, *(name for name, _ in rest)]), run


def _options(problem: Problem) -> list[_Product | None]:
    """Return ways to multiply, best first; the last one always works."""
    batched = problem.batch > 1
    if problem.ab_dtype in BLOCK_SCALED:
        return [_two_level(problem), _block_scaled(problem), _decoded(batched=batched)]
    if problem.has_factors:
        return [_factored(), _block_by_block()]
    if problem.ab_dtype == "tf32":
        exact = problem.out_dtype == "fp32"
        return [_in_tf32(_same_dtype(problem) if exact else _converted(batched=batched, cast=False))]
    if problem.out_dtype == problem.ab_dtype:
        return [_same_dtype(problem)]
    if DTYPE_BYTES[problem.ab_dtype] == 1:
        special = _integer(problem.out_dtype) if problem.ab_dtype == "int8" else _scaled(problem)
        return [None if batched else special, _converted(batched=batched, cast=True)]
    wide = _mixed_dtype(batched=batched) if problem.out_dtype == "fp32" else None
    return [wide, _converted(batched=batched, cast=False)]


def _works(call: Call, workload: Workload, d: torch.Tensor) -> bool:
    """Return whether this torch, on this device, can do it."""
    try:
        call(workload, d)
    except (RuntimeError, TypeError, ValueError):
        return False
    return True


def _same_dtype(problem: Problem) -> _Product:
    """Let one call do alpha, beta * C and a bias along n."""
    import torch

    batched, epilogue = problem.batch > 1, problem.epilogue
    adds_bias = epilogue.bias == "n" and not batched and not epilogue.beta
    if not (epilogue.alpha or epilogue.beta or adds_bias):
        plain = torch.bmm if batched else torch.mm
        return _Product(f"torch.{plain.__name__}", lambda load, out: _discard(plain(load.a, load.b, out=out)))
    fused: Any = torch.baddbmm if batched else torch.addmm
    alpha = ALPHA if epilogue.alpha else 1.0
    beta = BETA if epilogue.beta else float(adds_bias)

    def add(load: Workload, out: torch.Tensor) -> None:
        extra = load.c if epilogue.beta else load.bias if adds_bias else out
        fused(_given(extra), load.a, load.b, beta=beta, alpha=alpha, out=out)

    covers = {"alpha", "beta", *(["bias"] if adds_bias else [])}
    return _Product(f"torch.{fused.__name__}", add, frozenset(covers))


def _in_tf32(product: _Product) -> _Product:
    """Return the GEMM with torch allowed, for as long as the call lasts, to round its operands."""
    import torch

    def multiply(load: Workload, out: torch.Tensor) -> None:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            product.call(load, out)
        finally:
            torch.set_float32_matmul_precision(before)

    return replace(product, name=f"{product.name} in tf32", call=multiply)


def _mixed_dtype(*, batched: bool) -> _Product | None:
    """Return the GEMM with fp32 output, None for torch before 2.8."""
    import torch

    plain = getattr(torch.ops.aten.bmm if batched else torch.ops.aten.mm, "dtype_out", None)
    if plain is None:
        return None
    name = f"torch.{'bmm' if batched else 'mm'}(out_dtype)"
    return _Product(name, lambda load, out: _discard(plain(load.a, load.b, torch.float32, out=out)))


def _scaled(problem: Problem) -> _Product:
    """Return the fp8 GEMM; it always takes scales, so a problem without them gets ones."""
    import torch

    plain: Any = torch.ops.aten._scaled_mm.out
    fast = not problem.promote
    one: list[torch.Tensor] = []

    def multiply(load: Workload, out: torch.Tensor) -> None:
        if not one:
            one.append(torch.ones(1, device=out.device))
        scale_a, scale_b = load.scales or (one[0], one[0])
        plain(load.a, load.b, scale_a, scale_b, out_dtype=out.dtype, use_fast_accum=fast, out=out)

    return _Product("torch._scaled_mm", multiply, frozenset({"scale"}))


def _factored() -> _Product:
    """Return cuBLAS's fp8 GEMM with factors of blocks, whose output is in bf16."""
    import torch

    plain: Any = torch.ops.aten._scaled_mm.out

    def multiply(load: Workload, out: torch.Tensor) -> None:
        plain(load.a, load.b, *_given(load.scales), out_dtype=out.dtype, out=out)

    return _Product("torch._scaled_mm", multiply)


def _block_by_block() -> _Product:
    """Return one GEMM for every block of k, added up in fp32."""

    def multiply(load: Workload, out: torch.Tensor) -> None:
        out.copy_(factored_product(load.a, load.b, *_given(load.scales)))

    return _Product("torch.mm for each block + copy", multiply)


def _block_scaled(problem: Problem) -> _Product:
    """Return cuBLAS's block-scaled GEMM: one call for each batch, since torch has none for batches.

    torch refuses two operands of e5m2, and any n that is no multiple of 16.
    """
    import torch

    plain: Any = torch.ops.aten._scaled_mm.out

    def multiply(load: Workload, out: torch.Tensor) -> None:
        for a, b, scale_a, scale_b, d in _each_batch(load, out):
            plain(a, b, scale_a, scale_b, out_dtype=d.dtype, out=d)

    many = " for each batch" if problem.batch > 1 else ""
    return _Product(f"torch._scaled_mm{many}", multiply)


def _two_level(problem: Problem) -> _Product | None:
    """Return the GEMM that takes alpha as nvfp4's second level of scale factors; None if it does not."""
    import torch

    functional: Any = torch.nn.functional
    plain: Any = getattr(torch.ops.aten, "_scaled_mm_v2", None)
    kinds = getattr(functional, "ScalingType", None), getattr(functional, "SwizzleType", None)
    if not problem.epilogue.alpha or problem.ab_dtype != "nvfp4" or plain is None or None in kinds:
        return None
    scaling: Any = kinds[0]
    swizzle: Any = kinds[1]
    recipe = [scaling.BlockWise1x16.value, scaling.TensorWise.value]
    order = [swizzle.SWIZZLE_32_4_4.value, swizzle.NO_SWIZZLE.value]
    given: list[torch.Tensor] = []

    def multiply(load: Workload, out: torch.Tensor) -> None:
        if not given:
            given.extend(torch.tensor([value], device=out.device) for value in (ALPHA, 1.0))
        for a, b, scale_a, scale_b, d in _each_batch(load, out):
            of_a, of_b = [scale_a, given[0]], [scale_b, given[1]]
            plain.out(a, b, of_a, recipe, order, of_b, recipe, order, None, d.dtype, out=d)

    many = " for each batch" if problem.batch > 1 else ""
    return _Product(f"torch.nn.functional.scaled_mm{many}", multiply, frozenset({"alpha"}))


def _each_batch(load: Workload, out: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield A, B, their scale factors and D of each batch, as torch wants block-scaled operands."""
    import torch

    a, b = load.a, load.b
    scale_a, scale_b = (_given(scale) for scale in load.scales or (None, None))
    if a.dtype == torch.uint8:
        a, b = a.view(torch.float4_e2m1fn_x2), b.view(torch.float4_e2m1fn_x2)
    if a.dim() == 2:
        yield a, b, scale_a, scale_b, out
        return
    count = a.shape[0]
    yield from zip(a, b, scale_a.view(count, -1), scale_b.view(count, -1), out, strict=True)


def _decoded(*, batched: bool) -> _Product:
    """Return the GEMM of what block-scaled operands stand for, in bf16, which holds it exactly."""
    import torch

    plain = torch.bmm if batched else torch.mm

    def multiply(load: Workload, out: torch.Tensor) -> None:
        a, b = load.numbers()
        out.copy_(plain(a.bfloat16(), b.bfloat16()))

    return _Product(f"torch.{plain.__name__} of decoded bf16 + copy", multiply)


def _integer(out_dtype: str) -> _Product:
    import torch

    plain: Any = torch.ops.aten._int_mm
    if out_dtype == "int32":
        return _Product("torch._int_mm", lambda load, out: _discard(plain.out(load.a, load.b, out=out)))
    return _Product("torch._int_mm + copy", lambda load, out: _discard(out.copy_(plain(load.a, load.b))))


def _converted(*, batched: bool, cast: bool) -> _Product:
    """Return the GEMM in the inputs' dtype (bf16 for inputs that torch cannot multiply), converted."""
    import torch

    plain = torch.bmm if batched else torch.mm

    def multiply(load: Workload, out: torch.Tensor) -> None:
        a, b = (load.a.bfloat16(), load.b.bfloat16()) if cast else (load.a, load.b)
        out.copy_(plain(a, b))

    return _Product(f"torch.{plain.__name__}{' of bf16 casts' if cast else ''} + copy", multiply)


def _rest_of_epilogue(problem: Problem, covered: frozenset[str]) -> list[tuple[str, Call]]:
    """Return the steps that the GEMM has not done, in order."""
    epilogue = problem.epilogue
    steps: list[tuple[str, Call]] = []
    if epilogue.scale and "scale" not in covered:
        steps.append(("scale", lambda load, out: _discard(out.mul_(SCALE_A * SCALE_B))))
    if epilogue.alpha and "alpha" not in covered:
        steps.append(("alpha", lambda load, out: _discard(out.mul_(ALPHA))))
    if epilogue.beta and "beta" not in covered:
        steps.append(("beta", lambda load, out: _discard(out.add_(_given(load.c), alpha=BETA))))
    if epilogue.bias == "n" and "bias" not in covered:
        steps.append(("bias", lambda load, out: _discard(out.add_(_given(load.bias)))))
    if epilogue.bias == "m":
        steps.append(("bias", lambda load, out: _discard(out.add_(_given(load.bias)[:, None]))))
    if epilogue.activation:
        steps.append((epilogue.activation, _activation(epilogue.activation)))
    return steps


def _activation(name: str) -> Call:
    import torch

    if name == "relu":
        return lambda load, out: _discard(out.relu_())
    if name == "silu":
        return lambda load, out: _discard(torch.nn.functional.silu(out, inplace=True))
    approximate = "tanh" if name == "gelu_tanh" else "none"
    return lambda load, out: _discard(out.copy_(torch.nn.functional.gelu(out, approximate=approximate)))


def _given(operand: _Operand | None) -> _Operand:
    if operand is None:
        raise MeasureError("workload lacks an operand that its problem has")
    return operand


def _discard(result: object) -> None:
    """Make an in-place operation a statement."""
