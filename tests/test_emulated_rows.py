"""The text of kernels over rows that start anywhere, run as Python on small problems: every index of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="kernels are run on torch tensors")

import emulated  # noqa: E402

from cutegen.arch import find_arch  # noqa: E402
from cutegen.build.render import render  # noqa: E402
from cutegen.dtypes import torch_dtype  # noqa: E402
from cutegen.families.registry import find_space, parse_problem  # noqa: E402

ARCH = find_arch("sm_90a")
SEVERAL_WARPS: Mapping[str, Any] = {"threads_per_row": 64, "rows_per_cta": 1}
SEVERAL_ROWS: Mapping[str, Any] = {"threads_per_row": 32, "rows_per_cta": 2}
CASES: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("softmax 3x519 bf16", SEVERAL_WARPS),
    ("softmax 2x1027 fp16", SEVERAL_ROWS),
    ("softmax 2x301 fp32", SEVERAL_WARPS),
    ("softmax 2x640 bf16 unaligned", SEVERAL_ROWS),
)


@pytest.mark.parametrize("shift", [0, 3], ids=["alike", "apart"])
@pytest.mark.parametrize(("line", "changes"), CASES, ids=[line for line, _ in CASES])
def test_rows_that_start_anywhere(
    line: str, changes: Mapping[str, Any], shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs start as far behind a multiple of 16 bytes as the rows that are read, and otherwise."""
    problem: Any = parse_problem(line)
    space = find_space(problem.family, ARCH)
    monkeypatch.setattr(type(space), "require", lambda *given: None)
    source = render(problem, space.default(problem).replace(**changes), ARCH)
    assert "def before_row(" in source.text
    family = problem.declared
    inputs = family.inputs(problem, torch.Generator().manual_seed(1), awkward=True)
    values: dict[str, Any] = {**{n: spread(t) for n, t in inputs.tensors.items()}, **inputs.scalars}
    arguments = family.arguments(problem)
    for a in arguments:
        if a.kind == "out":
            values[a.name] = moved(torch.full(a.shape, torch.nan, dtype=torch_dtype(a.dtype)), shift)
    emulated.run(source, [values[a.name] for a in arguments])
    reference = family.reference(problem, inputs)
    for a in arguments:
        for chunk in reference.chunks(a.name, values[a.name]) if a.kind == "out" else ():
            wrong = ~((chunk.got - chunk.want).abs() <= chunk.allowed)  # NaN is wrong
            assert not wrong.any(), f"{a.name}{wrong.nonzero()[0].tolist()}"


def moved(tensor: Any, shift: int) -> Any:
    """Return a copy that starts so many elements behind a multiple of 16 bytes."""
    room = tensor.new_empty(tensor.numel() + shift)[shift:]
    return room.view(tensor.shape).copy_(tensor)


def spread(tensor: Any) -> Any:
    """Return a copy with the same strides."""
    return tensor.new_empty(0).set_(tensor.untyped_storage().clone(), 0, tensor.shape, tensor.stride())
