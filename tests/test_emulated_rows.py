"""The text of kernels over rows, run as Python on small problems: rows that start anywhere, their order."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="kernels are run on torch tensors")

import emulated  # noqa: E402
from emulated import spread  # noqa: E402

from cutegen.arch import find_arch  # noqa: E402
from cutegen.build.render import Source, render  # noqa: E402
from cutegen.dtypes import torch_dtype  # noqa: E402
from cutegen.families.registry import find_space, parse_problem  # noqa: E402
from cutegen.space import Space  # noqa: E402

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
    monkeypatch.setattr(Space, "require", lambda *given: None)
    source = render(problem, find_space(problem.family, ARCH).default(problem).replace(**changes), ARCH)
    assert "def before_row(" in source.text
    inputs, values = fresh_values(problem, shift)
    emulated.run(source, [values[a.name] for a in problem.declared.arguments(problem)])
    emulated.require_right(problem, inputs, values)


#: Kernels of several CTAs, and the tensor of results that has a row for each row.
ORDERED: tuple[tuple[str, Mapping[str, Any], str], ...] = (
    ("softmax 5x264 bf16", SEVERAL_WARPS, "out"),
    ("softmax 5x1027 fp16", SEVERAL_ROWS, "out"),
    ("layernorm 5x264 bf16", {**SEVERAL_WARPS, "rows_per_thread": 1}, "out"),
    ("layernorm 6x72 fp32", SEVERAL_ROWS, "out"),
    ("rmsnorm 5x264 fp16 residual", SEVERAL_WARPS, "out"),
    ("gated 5x64 bf16", {"threads": 32}, "out"),
    ("gated 5x517 bf16", {"threads": 32}, "out"),
    ("gated_backward 5x64 bf16", {"threads": 32, "ctas_per_sm": 2}, "dx"),
    ("activation 5x64 fp32 activation=gelu", {"threads": 32}, "out"),
    ("rope 5x4x2x32x16x1 bf16", {"threads": 32}, "q_out"),
)


@pytest.mark.parametrize("held", [True, False], ids=["held", "not held"])
@pytest.mark.parametrize(("line", "changes", "out"), ORDERED, ids=[line for line, _, _ in ORDERED])
def test_the_last_rows_come_first_unless_l2_holds_all(
    line: str, changes: Mapping[str, Any], out: str, held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first CTA writes the first rows or the last ones, and all CTAs write all rows."""
    problem: Any = parse_problem(line)
    monkeypatch.setattr(Space, "require", lambda *given: None)
    source = render(problem, find_space(problem.family, ARCH).default(problem).replace(**changes), ARCH)
    if not held:
        source = with_constant(source, "ROWS_HELD", 0)
    for most_blocks in (1, None):
        inputs, values = fresh_values(problem)
        arguments = problem.declared.arguments(problem)
        emulated.run(source, [values[a.name] for a in arguments], most_blocks)
        if most_blocks:
            written = [not row.isnan().all() for row in values[out].flatten(1)]
            assert (written[0], written[-1]) == (held, not held)
        else:
            emulated.require_right(problem, inputs, values)


@pytest.mark.parametrize("held", [9, 8], ids=["held", "not held"])
@pytest.mark.parametrize(
    "line", ["softmax 9x32768 bf16", "rmsnorm 9x131072 bf16", "cross_entropy 9x128256 bf16"]
)
@pytest.mark.parametrize("row_in", ["registers", "smem"])
def test_each_cluster_takes_a_row_of_its_own(
    row_in: str, line: str, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All CTAs of a cluster take the same row, in either order: the lines that say so, run as Python."""
    problem: Any = parse_problem(line)
    monkeypatch.setattr(Space, "require", lambda *given: None)
    cluster_n, knobs = 8, {"threads_per_row": 256, "row_in": row_in, "turn": 2 if row_in == "smem" else 1}
    config = find_space(problem.family, ARCH).default(problem).replace(cluster_n=cluster_n, **knobs)
    text = with_constant(render(problem, config, ARCH), "ROWS_HELD", held).text
    begin, end = text.index("    rank = block % CLUSTER\n"), text.index("    row = cutlass.Int64(block)\n")
    lines = textwrap.dedent(text[begin:end]).split("policy = ")[0]
    begin, end = text.index("    order = cutlass.Int32(0)\n"), text.index("    kernel(\n")
    of_host = {"cutlass": SimpleNamespace(Int32=int), "rows": 9, "blocks": 9, **constants(text)}
    exec(textwrap.dedent(text[begin:end]), of_host)
    rows = []
    for block in range(9 * cluster_n):
        scope = {"order": of_host["order"], "block": block, "CLUSTER": cluster_n, "PART": 1}
        exec(lines, scope)
        rows.append((scope["block"], scope["rank"]))
    order = range(9) if held == 9 else reversed(range(9))
    assert rows == [(row, rank) for row in order for rank in range(cluster_n)]


@pytest.mark.parametrize(
    ("passing", "policy"), [("4, 5", 0x12F0 << 48), ("4, 4", 1 << 60), ("5, 9", 1 << 60)]
)
def test_rows_leave_l2_first_where_it_holds_a_part(
    passing: str, policy: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All five rows that are read, and those that are written, above the first number up to the second."""
    monkeypatch.setattr(Space, "require", lambda *given: None)
    problem: Any = parse_problem("rmsnorm 5x264 bf16 residual")
    source = render(problem, find_space("rmsnorm", ARCH).default(problem).replace(**SEVERAL_WARPS), ARCH)
    source = with_constant(source, "PASSING_FROM, PASSING_TO", passing)
    inputs, values = fresh_values(problem)
    assert emulated.run(source, [values[a.name] for a in problem.declared.arguments(problem)]) == {policy}
    emulated.require_right(problem, inputs, values)


def constants(text: str) -> dict[str, Any]:
    """Return what a kernel's text says of L2."""
    found: dict[str, Any] = {}
    for line in re.findall(r"^(?:ROWS_HELD|PASSING_FROM, PASSING_TO) = .*", text, flags=re.MULTILINE):
        exec(line, found)
    return found


def with_constant(source: Source, name: str, value: object) -> Source:
    """Return a kernel with another value of a constant."""
    text, count = re.subn(rf"^{name} = [^#]*", f"{name} = {value}  ", source.text, flags=re.MULTILINE)
    assert count == 1
    return replace(source, text=text)


def fresh_values(problem: Any, shift: int = 0) -> tuple[Any, dict[str, Any]]:
    """Return inputs and the arguments of a kernel: outputs are NaN, ``shift`` elements behind 16 bytes."""
    family = problem.declared
    inputs = family.inputs(problem, torch.Generator().manual_seed(1), awkward=True)
    values: dict[str, Any] = {**{n: spread(t) for n, t in inputs.tensors.items()}, **inputs.scalars}
    for a in family.arguments(problem):
        if a.kind == "out":
            values[a.name] = moved(torch.full(a.shape, torch.nan, dtype=torch_dtype(a.dtype)), shift)
    return inputs, values


def moved(tensor: Any, shift: int) -> Any:
    """Return a copy that starts so many elements behind a multiple of 16 bytes."""
    room = tensor.new_empty(tensor.numel() + shift)[shift:]
    return room.view(tensor.shape).copy_(tensor)
