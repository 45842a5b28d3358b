"""The vendor's product for a problem: the call that a torch user would write, and its name for the record."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cutegen.errors import MeasureError
from cutegen.measure.workload import ALPHA, BETA, Workload

if TYPE_CHECKING:
    import torch

__all__ = ["vendor_call"]

Call = Callable[[Workload, "torch.Tensor"], None]


def vendor_call(workload: Workload, d: torch.Tensor) -> tuple[str, Call]:
    """Return what torch offers for the problem, and how it is called in the record.

    The product is one library call wherever there is one (``mm``, ``addmm``, ``bmm``, ``baddbmm``), with its
    own output dtype where torch can do that; what is left of the epilogue follows as elementwise calls.

    Args:
        workload: Operands to try it on.
        d: An output to try it on.
    """
    name, product = _product(workload, d)
    steps, calls = [name], [product]
    for step, call in _rest_of_epilogue(workload):
        steps.append(step)
        calls.append(call)

    def run(load: Workload, out: torch.Tensor) -> None:
        for call in calls:
            call(load, out)

    return " + ".join(steps), product if len(calls) == 1 else run


def _product(workload: Workload, d: torch.Tensor) -> tuple[str, Call]:
    problem = workload.problem
    if problem.out_dtype == problem.ab_dtype:
        return _same_dtype(workload)
    if problem.out_dtype == "fp32":
        wide = _mixed_dtype(batched=problem.batch > 1)
        if wide is not None and _works(wide[1], workload, d):
            return wide
    return _converted(batched=problem.batch > 1)


def _works(call: Call, workload: Workload, d: torch.Tensor) -> bool:
    """Return whether this torch, on this device, knows the overload."""
    try:
        call(workload, d)
    except (RuntimeError, TypeError):
        return False
    return True


def _same_dtype(workload: Workload) -> tuple[str, Call]:
    """Let one call do alpha, beta * C and a bias along n."""
    import torch

    batched, epilogue = workload.problem.batch > 1, workload.problem.epilogue
    if epilogue.beta or (epilogue.bias == "n" and not batched) or epilogue.alpha:
        fused = torch.baddbmm if batched else torch.addmm
        alpha = ALPHA if epilogue.alpha else 1.0
        beta = BETA if epilogue.beta else float(epilogue.bias == "n" and not batched)

        def add(load: Workload, out: torch.Tensor) -> None:
            extra = load.c if load.c is not None else load.bias if beta else out
            fused(_given(extra), load.a, load.b, beta=beta, alpha=alpha, out=out)

        return f"torch.{fused.__name__}", add
    plain = torch.bmm if batched else torch.mm

    def multiply(load: Workload, out: torch.Tensor) -> None:
        plain(load.a, load.b, out=out)

    return f"torch.{plain.__name__}", multiply


def _mixed_dtype(*, batched: bool) -> tuple[str, Call] | None:
    """Return the product with fp32 output, None for torch before 2.8."""
    import torch

    plain = getattr(torch.ops.aten.bmm if batched else torch.ops.aten.mm, "dtype_out", None)
    if plain is None:
        return None

    def multiply(load: Workload, out: torch.Tensor) -> None:
        plain(load.a, load.b, torch.float32, out=out)

    return f"torch.{'bmm' if batched else 'mm'}(out_dtype)", multiply


def _converted(*, batched: bool) -> tuple[str, Call]:
    import torch

    plain = torch.bmm if batched else torch.mm

    def multiply(load: Workload, out: torch.Tensor) -> None:
        out.copy_(plain(load.a, load.b))

    return f"torch.{plain.__name__} + copy", multiply


def _rest_of_epilogue(workload: Workload) -> list[tuple[str, Call]]:
    """Return the steps that the product has not done, in order."""
    problem, epilogue = workload.problem, workload.problem.epilogue
    fused = problem.out_dtype == problem.ab_dtype
    batched = problem.batch > 1
    steps: list[tuple[str, Call]] = []
    if epilogue.alpha and not fused:
        steps.append(("mul", lambda load, out: _discard(out.mul_(ALPHA))))
    if epilogue.beta and not fused:
        steps.append(("add", lambda load, out: _discard(out.add_(_given(load.c), alpha=BETA))))
    if epilogue.bias == "n" and not (fused and not batched and not epilogue.beta):
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


def _given(tensor: torch.Tensor | None) -> torch.Tensor:
    if tensor is None:
        raise MeasureError("workload lacks an operand that its problem has")
    return tensor


def _discard(result: object) -> None:
    """Make an in-place operation a statement."""
