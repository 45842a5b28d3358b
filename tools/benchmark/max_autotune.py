"""``torch.compile(mode="max-autotune")`` as a contestant: what Inductor makes of a product and its epilogue.

The first call compiles and tunes in the measuring child, as QuACK's does. Inductor makes no CUDA graphs: all
contestants are timed in graphs of ours. Results are tensors of its own, as for its users.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutegen.digest import Json
from cutegen.errors import LaunchError
from cutegen.families.gemm.problem import Problem as GemmProblem
from cutegen.family import Inputs, Problem, Tensors
from cutegen.measure import Candidate
from cutegen.measure.operand_sets import rotating
from cutegen.space import Launch
from tools.benchmark.contest import Arena, Entrant, Finalist, UnsupportedError, require_ok
from tools.benchmark.family_child import operand_sets

if TYPE_CHECKING:
    import torch

__all__ = ["MAX_AUTOTUNE_CALL", "MaxAutotune", "MaxAutotuneCall", "inductor_environment"]

#: Stands for a compiled function; the symbol is the problem.
MAX_AUTOTUNE_CALL = "call-max-autotune"
#: torch's name for "max-autotune" that leaves CUDA graphs to the caller.
_MODE = "max-autotune-no-cudagraphs"
#: How far two results may be apart: some roundings to the 8 bits of bf16.
_CLOSE = 2.0**-6


def inductor_environment(cache: Path) -> dict[str, str]:
    """Return the variables that keep what Inductor compiles and finds in ``cache``."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(cache.absolute())}


class MaxAutotune:
    """What ``torch.compile`` makes of the lines that a torch user would write for a problem."""

    name = "max_autotune"

    @property
    def settings(self) -> dict[str, Json]:
        """What decides its choice, for the conditions of the record."""
        return {"mode": _MODE}

    def prepare(self, problems: Sequence[Problem]) -> None:
        """Do nothing: torch brings it."""

    def enter(self, arena: Arena, problem: Problem) -> Entrant:
        """Let it compile and tune.

        Where it does not fuse product and activation, 16 bits between them cost more than kernels may be off;
        so its own comparison with torch counts, not that with fp64.

        Raises:
            UnsupportedError: As :meth:`require`.
        """
        self.require(problem)
        started = time.monotonic()
        candidate = Candidate(self.name, Path(MAX_AUTOTUNE_CALL), str(problem), Launch((), 0), problem)
        checked = arena.check(candidate)
        if checked.outcome != "wrong_result":
            require_ok(checked)
        finalist = Finalist(candidate, _MODE, {"mode": _MODE})
        return Entrant((finalist,), round(time.monotonic() - started, 2))

    def require(self, problem: Problem) -> None:
        """Refuse a problem that is not compared.

        Raises:
            UnsupportedError: It is no product of two matrices of 16 bits, with a result of their type.
        """
        if not isinstance(problem, GemmProblem) or problem.batch > 1 or problem.epilogue.scale:
            raise UnsupportedError("only products of two matrices are compared")
        if problem.ab_dtype not in ("bf16", "fp16") or problem.out_dtype != problem.ab_dtype:
            raise UnsupportedError(f"{problem.ab_dtype} into {problem.out_dtype} is not compared")


class MaxAutotuneCall:
    """The compiled function as a kernel; the first call compiles, tunes and is compared with torch.

    Args:
        line: The problem.
        arguments: Makes keywords of what follows A, B and D in a kernel's arguments.
    """

    def __init__(self, line: str, arguments: Callable[[GemmProblem, Sequence[Any]], dict[str, Any]]) -> None:
        self._problem = GemmProblem.parse(line)
        self._arguments = arguments
        self._call: Callable[[Inputs, Tensors], Tensors | None] | None = None

    def __call__(self, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, *rest: Any) -> None:
        """Compute; ``d`` stays as it is.

        Raises:
            LaunchError: The result is not torch's.
        """
        inputs = Inputs({"a": a, "b": b}, self._arguments(self._problem, rest))
        if self._call is None:
            self._call = rotating(_compiled(inputs), operand_sets(self._problem) if d.is_cuda else 2)
        self._call(inputs, {})


def _compiled(inputs: Inputs) -> Callable[[Inputs, Tensors], Tensors]:
    """Return the compiled function, which computed ``inputs`` as torch does."""
    import torch

    # Each product compiles the same function, and those that a process compiled before count against a limit.
    torch.compiler.reset()
    compiled: Any = torch.compile(_as_written, mode=_MODE, fullgraph=True, dynamic=False)

    def call(inputs: Inputs, outputs: Tensors) -> Tensors:
        return {"out": compiled(inputs.tensors["a"], inputs.tensors["b"], **inputs.scalars)}

    given: Any = inputs.scalars
    expected = _as_written(inputs.tensors["a"], inputs.tensors["b"], **given)
    slack = _CLOSE * float(expected.abs().max())
    try:
        torch.testing.assert_close(call(inputs, {})["out"], expected, rtol=_CLOSE, atol=slack)
    except AssertionError as error:
        raise LaunchError(f"max-autotune computes something else than torch: {error}") from error
    return call


def _as_written(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    activation: str = "",
) -> torch.Tensor:
    """A product and its epilogue in as few calls of torch as there are: addmm adds a bias along n."""
    import torch

    functional = torch.nn.functional
    extra = c
    if c is None and bias is not None and bias.dim() == 1:
        extra, bias, beta = bias, None, 1.0
    if extra is not None:
        found = torch.addmm(extra, a, b, beta=beta, alpha=alpha)
    else:
        found = a @ b if alpha == 1.0 else alpha * (a @ b)
    if bias is not None:
        found = found + bias
    if activation == "gelu_tanh":
        return functional.gelu(found, approximate="tanh")
    return getattr(functional, activation)(found) if activation else found
