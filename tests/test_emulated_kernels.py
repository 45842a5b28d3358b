"""The text of element-wise kernels, run as Python on small problems: every index of every variant."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="kernels are run on torch tensors")

import emulated  # noqa: E402
from emulated import spread  # noqa: E402

from cutegen.arch import find_arch  # noqa: E402
from cutegen.build.render import Source, render  # noqa: E402
from cutegen.dtypes import torch_dtype  # noqa: E402
from cutegen.families.registry import find_space, parse_problem  # noqa: E402

ARCH = find_arch("sm_90a")
CASES: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("gated 3x64 bf16", {}),
    ("gated 5x72 fp16 layout=interleaved activation=gelu", {}),
    ("gated 3x20 fp32 layout=split activation=gelu_tanh", {"pdl": "off"}),
    ("gated 5x1001 bf16 layout=interleaved activation=relu", {}),
    ("gated 3x512 bf16", {}),
    ("gated 3x1024 fp16 layout=interleaved", {"access_bytes": 16}),
    ("gated 2x33 fp32", {}),
    ("gated 2x640 bf16 layout=split unaligned", {}),
    ("gated_backward 2x517 bf16", {}),
    ("gated_backward 2x517 fp16 layout=interleaved activation=relu", {}),
    ("gated_backward 3x64 bf16", {}),
    ("gated_backward 3x72 bf16 layout=interleaved activation=gelu", {"access_bytes": 16}),
    ("gated_backward 3x512 bf16 layout=interleaved", {}),
    ("gated_backward 3x256 fp32 layout=split", {}),
    ("gated_backward 5x20 fp32 layout=split activation=gelu_tanh", {}),
    ("gated_backward 3x33 fp16 layout=interleaved activation=relu", {}),
    ("activation 3x64 bf16", {}),
    ("activation 5x72 fp16 activation=gelu_tanh", {}),
    ("activation 5x1001 bf16 activation=relu_squared", {"pdl": "off"}),
    ("activation 3x20 fp32 activation=silu", {}),
    ("activation 2x33 fp32 activation=relu", {}),
    ("activation_backward 3x64 bf16", {}),
    ("activation_backward 5x72 fp16 activation=gelu_tanh", {}),
    ("activation_backward 5x1001 bf16 activation=relu_squared", {}),
    ("activation_backward 3x20 fp32 activation=silu", {}),
    ("activation_backward 2x33 fp32 activation=relu", {}),
    ("rope 3x4x2x32x16x1 bf16", {}),
    ("rope 3x5x3x32x8x1 bf16 style=interleaved", {}),
    ("rope 3x4x2x48x16x9 fp32 table=positions index=int32 inverse", {}),
    ("rope 5x4x1x18x5x1 fp16 style=interleaved", {}),
    ("rope 3x4x2x64x32x9 bf16 table=positions table_dtype=same norm", {}),
    ("rope 2x3x2x48x8x1 bf16 norm", {}),
    ("rope 2x3x2x48x8x1 fp32 norm style=interleaved", {}),
    ("rope 2x3x1x18x9x1 fp16 norm style=interleaved", {}),
)


def free(line: str, changes: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Return a problem and a kernel for it, though it is too small for some knobs."""
    problem: Any = parse_problem(line)
    space = find_space(problem.family, ARCH)
    monkeypatch.setattr(type(space), "require", lambda *given: None)
    return problem, render(problem, space.default(problem).replace(threads=32, **changes), ARCH)


def run_and_check(problem: Any, source: Source, *, seed: int, together: bool = False) -> None:
    """Run a kernel on inputs with gaps of NaN between rows, outputs in the place of inputs if asked for."""
    family = problem.declared
    inputs = family.inputs(problem, torch.Generator().manual_seed(seed), awkward=True)
    values = {**{name: spread(tensor) for name, tensor in inputs.tensors.items()}, **inputs.scalars}
    arguments = family.arguments(problem)
    free_inputs = set(inputs.tensors)
    for a in arguments:
        if a.kind == "out":
            place = next((name for name in a.may_alias if name in free_inputs and together), "")
            free_inputs.discard(place)
            empty = torch.full(a.shape, torch.nan, dtype=torch_dtype(a.dtype))
            values[a.name] = values[place] if place else empty
    emulated.run(source, [values[a.name] for a in arguments])
    emulated.require_right(problem, inputs, values)


@pytest.mark.parametrize("together", [False, True], ids=["apart", "in place"])
@pytest.mark.parametrize(("line", "changes"), CASES, ids=[line for line, _ in CASES])
def test_a_kernel_computes_its_family(
    line: str, changes: Mapping[str, Any], together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gaps of NaN between rows; one and several vectors or heads to a thread."""
    several = "heads_per_thread" if line.startswith("rope") else "vectors_per_thread"
    for count in (1, 4):
        more = {"ctas_per_sm": 2} if count == 4 and "rope" not in line else {}
        problem, source = free(line, {**changes, **more, several: count}, monkeypatch)
        run_and_check(problem, source, seed=count, together=together)


LAST_FIRST = (
    "gated 4x72 bf16 layout=interleaved",
    "gated 4x512 bf16",
    "gated_backward 4x517 bf16",
    "gated_backward 3x33 fp16 layout=split",
    "activation 4x512 fp32",
    "activation_backward 5x72 bf16",
)


@pytest.mark.parametrize("line", LAST_FIRST)
def test_rows_that_l2_cannot_hold_come_last_first(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is computed once all the same: here L2 holds a single row."""
    for changes in ({}, {"vectors_per_thread": 4}, {"ctas_per_sm": 2}):
        problem, source = free(line, changes, monkeypatch)
        text, count = re.subn(r"^ROWS_HELD = \d+", "ROWS_HELD = 1", source.text, flags=re.MULTILINE)
        assert count == 1
        run_and_check(problem, replace(source, text=text), seed=3)


#: Gated products of few rows: a problem, and columns of a warp, warps along k, loads of a thread.
FEW_ROWS = (
    ("1x3x264 bf16", (2, 2, 1)),
    ("1x5x264 fp16 activation=gelu layout=split", (4, 1, 2)),
    ("2x3x520 bf16 layout=interleaved pre", (2, 2, 1)),
    ("3x3x64 bf16 pre activation=relu", (4, 1, 1)),
    ("4x5x72 fp16 layout=interleaved activation=gelu_tanh", (8, 1, 1)),
)


@pytest.mark.parametrize(("line", "knobs"), FEW_ROWS, ids=[line for line, _ in FEW_ROWS])
def test_few_rows_are_multiplied_and_gated(
    line: str, knobs: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gaps of NaN between rows, columns beyond the last, and a remainder of k."""
    problem: Any = parse_problem(f"gated_gemm {line}")
    space = find_space("gated_gemm", ARCH, algorithm="few_rows")
    names = ("columns_per_warp", "warps_along_k", "unroll")
    config = space.default(problem).replace(threads_per_cta=64, **dict(zip(names, knobs, strict=True)))
    monkeypatch.setattr(type(space), "require", lambda *given: None)
    source, family = render(problem, config, ARCH), problem.declared
    inputs = family.inputs(problem, torch.Generator().manual_seed(1), awkward=True)
    values = {name: spread(tensor) for name, tensor in inputs.tensors.items()}
    outputs = [a for a in family.arguments(problem) if a.kind == "out"]
    for a in outputs:
        values[a.name] = spread(torch.full(a.shape, torch.nan, dtype=torch_dtype(a.dtype)))
    emulated.run(source, [values[name] for name in ("x", "w", "gate", "up", "out", "pre") if name in values])
    emulated.require_right(problem, inputs, values)


def test_a_wrong_index_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading beyond a tensor's memory, and a vector that starts anywhere."""
    _, source = free("gated 3x64 bf16", {}, monkeypatch)
    x, out = torch.ones(3, 128, dtype=torch.bfloat16), torch.zeros(3, 64, dtype=torch.bfloat16)
    for old, new, message in (
        ("total - 1)", "total)", "outside of its tensor's memory"),
        ("vector(start + N * X.width // 8)", "vector(start + (N - 1) * X.width // 8)", "not aligned"),
    ):
        assert source.text.count(old) == 1
        with pytest.raises(AssertionError, match=message):
            emulated.run(replace(source, text=source.text.replace(old, new)), [x, out])
