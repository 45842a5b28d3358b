"""Inductor as a contestant: what it is asked to compile, where its result goes, what is not compared."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="Inductor is torch's")

from host_lane import FACTS, HostLane  # noqa: E402

from cutegen.errors import LaunchError  # noqa: E402
from cutegen.families.gemm.problem import Problem  # noqa: E402
from cutegen.measure import CheckResult  # noqa: E402
from cutegen.measure.nvml import ClockMeter  # noqa: E402
from tools.benchmark import child  # noqa: E402
from tools.benchmark.contest import UnsupportedError  # noqa: E402
from tools.benchmark.max_autotune import MAX_AUTOTUNE_CALL, MaxAutotune, inductor_environment  # noqa: E402

ENDS = (
    "",
    "alpha",
    "beta",
    "alpha beta bias=n act=silu",
    "bias=n act=gelu",
    "bias=m act=gelu_tanh",
    "alpha bias=n act=relu",
)


class Arena:
    """Answers every check; a contest asks nothing else of it here."""

    def __init__(self, outcome: str = "ok") -> None:
        self.outcome = outcome

    def check(self, candidate: Any) -> CheckResult:
        return CheckResult(self.outcome, "" if self.outcome == "ok" else "nan")


@pytest.mark.parametrize("end", ENDS)
def test_what_is_compiled_computes_the_problem(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part of the epilogue is there; it is timed though the output that is given stays as it was."""
    asked: list[dict[str, Any]] = []

    def compile_nothing(function: Any, **options: Any) -> Any:
        asked.append(options)
        return function

    monkeypatch.setattr(torch, "compile", compile_nothing)
    problem = Problem.parse(f"gemm 24x40x64 bf16 kk {end}".strip())
    arena: Any = Arena()
    (finalist,) = MaxAutotune().enter(arena, problem).finalists
    engine = child.ContestEngine(torch.device("cpu"), FACTS, HostLane(), child.load, ClockMeter("none"))
    engine.open(problem, 0)
    assert not engine.check(finalist.candidate, problem).ok
    assert engine.prepare(finalist.candidate).launches > 0 and not engine.must_write(finalist.candidate)
    assert asked == [{"mode": "max-autotune-no-cudagraphs", "fullgraph": True, "dynamic": False}]


def test_what_computes_something_else_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compared with torch in the first call."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: lambda a, b, activation: 2 * (a @ b))
    call = child.load(Path(MAX_AUTOTUNE_CALL), "gemm 8x8x8 bf16 kk")
    a = torch.ones(8, 8, dtype=torch.bfloat16)
    with pytest.raises(LaunchError, match="something else than torch"):
        call(a, a.t(), torch.empty_like(a))


def test_what_is_compiled_is_the_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every part of the epilogue, as fp64 has it up to roundings to 16 bits."""
    seen: list[Any] = []

    def keep(function: Any, **options: Any) -> Any:
        def run(*operands: Any, **given: Any) -> Any:
            seen.append(function(*operands, **given))
            return seen[-1]

        return run

    monkeypatch.setattr(torch, "compile", keep)
    problem = Problem.parse("gemm 24x40x64 bf16 kk alpha beta bias=m act=gelu_tanh")
    call = child.load(Path(MAX_AUTOTUNE_CALL), str(problem))
    a, b, c, bias = (
        torch.rand(*size, dtype=torch.bfloat16) for size in ((24, 64), (64, 40), (24, 40), (24,))
    )
    call(a, b, torch.empty_like(c), c, bias, 0.25, -2.0)
    wide = [x.double() for x in (a, b, c, bias)]
    total = 0.25 * (wide[0] @ wide[1]) - 2.0 * wide[2] + wide[3][:, None]
    expected = torch.nn.functional.gelu(total, approximate="tanh")
    torch.testing.assert_close(seen[-1].double(), expected, rtol=0.03, atol=0.05)


def test_other_products_are_not_compared_and_wrong_answers_have_failed() -> None:
    """Eight bits, batches, another output; what Inductor keeps lies in a folder of the benchmark's."""
    arena: Any = Arena()
    for line in (
        "gemm 2x64x64x64 bf16 kk",
        "gemm 64x64x64 e4m3 kk out=bf16",
        "gemm 64x64x64 bf16 kk out=fp32",
    ):
        with pytest.raises(UnsupportedError, match="compared"):
            MaxAutotune().enter(arena, Problem.parse(line))
    failed: Any = Arena("launch_failed")
    with pytest.raises(Exception, match="nan"):
        MaxAutotune().enter(failed, Problem(64, 64, 64))
    left_alone: Any = Arena("wrong_result")
    assert MaxAutotune().enter(left_alone, Problem(64, 64, 64)).finalists
    assert MaxAutotune().settings == {"mode": "max-autotune-no-cudagraphs"}
    assert inductor_environment(Path("x")) == {"TORCHINDUCTOR_CACHE_DIR": str(Path("x").absolute())}
    with pytest.raises(UnsupportedError, match="two matrices"):
        problem: Any = SimpleNamespace()
        MaxAutotune().enter(arena, problem)
