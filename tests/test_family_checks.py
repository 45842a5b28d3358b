"""Families through the measuring engine on the CPU: inputs, checks apart and in place, baselines, times."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine runs on torch tensors")

from fake_family import reference_kernel  # noqa: E402
from host_lane import candidate, new_engine  # noqa: E402

from cutegen.families.registry import find_family, parse_problem  # noqa: E402
from cutegen.measure.candidate import Candidate  # noqa: E402
from cutegen.space import Launch  # noqa: E402

LINES = (
    "rmsnorm 8x64 bf16 residual residual_out rstd",
    "activation 8x64 bf16 activation=relu_squared",
    "activation_backward 8x33 fp32",
    "gated 8x64 bf16",
    "gated 8x33 fp32 layout=interleaved activation=gelu",
    "gated 8x64 bf16 layout=split activation=gelu_tanh",
    "gated_backward 8x64 bf16 activation=relu",
    "gated_backward 8x64 fp16 layout=interleaved",
    "gated_backward 8x64 fp32 layout=split activation=gelu",
    "gated_gemm 8x64x64 bf16 pre",
    "gated_gemm 8x33x64 fp16 layout=interleaved activation=gelu",
    "rope 8x4x2x32x16x1 bf16",
    "rope 8x4x2x32x8x7 fp32 table=positions style=interleaved index=int32",
    "rope 8x4x2x32x8x300 bf16 table=positions table_dtype=same norm",
    "rope 8x4x1x18x9x1 fp16 inverse norm",
)


@pytest.mark.parametrize("line", LINES)
def test_the_reference_rounded_once_passes_as_a_kernel_and_a_wrong_one_fails(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the problem and on few rows with gaps, with outputs apart and in the places of inputs."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    problem: Any = parse_problem(line)
    right = reference_kernel(problem.signature)
    kinds = [argument.kind for argument in problem.declared.arguments(problem)]
    last = max(at for at, kind in enumerate(kinds) if kind == "out")

    def wrong(*arguments: Any) -> None:
        right(*arguments)
        arguments[last][-1] *= 1.25

    kernels: dict[str, Callable[..., None]] = {"right": right, "wrong": wrong}
    engine = new_engine(None, lambda library, symbol: kernels[symbol])
    facts = engine.open(problem, 0)
    assert facts["reference"]
    tail = problem.with_sizes(m=37)
    for which in (problem, tail):
        assert engine.check(candidate(problem, tail=tail), which).ok, which
        assert not engine.check(candidate(problem, "wrong", tail=tail), which).ok


@pytest.mark.parametrize("line", LINES)
def test_baselines_can_be_entered_beside_kernels(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their names are none of those that the engine uses itself, and they give every output."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    problem: Any = parse_problem(line)
    family: Any = find_family(problem.family)
    inputs = family.inputs(problem, torch.Generator().manual_seed(0))
    found = family.baselines(problem, inputs, {})
    assert len(found) == 2
    outputs = {a.name: a for a in family.arguments(problem) if a.kind == "out"}
    for name, call in found.items():
        Candidate(name, Path("x"), "y", Launch((), 0), problem)
        given = call(inputs, {})
        assert {key: tuple(value.shape) for key, value in given.items()} == {
            key: a.shape for key, a in outputs.items()
        }
        want = family.wanted(problem, inputs, 0, problem.m)
        for key, value in given.items():
            assert torch.allclose(value.double(), want[key], rtol=0.05, atol=0.1), (name, key)
