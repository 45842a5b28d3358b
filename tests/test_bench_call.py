"""The library's own call in a contest: what a kernel gets as arguments arrives under the right names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cutegen.families.gemm.family import GEMM
from cutegen.families.gemm.problem import Problem
from tools.benchmark import child


def test_the_library_call_is_made_with_the_table_that_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty name leaves the cache's table."""
    import cutegen

    seen: list[Any] = []
    monkeypatch.setattr(cutegen, "load_table", lambda table, fallback: seen.append(table), raising=False)
    monkeypatch.setattr(cutegen, "gemm", lambda a, b, out, **more: seen.append((a, b, out)), raising=False)
    for table in ("t.json", ""):
        order = json.dumps({"table": table, "problem": "gemm 64x64x64 bf16 kk"})
        child.load(Path(child.GEMM_CALL), order)("a", "b", "d")
    assert seen == ["t.json", ("a", "b", "d"), ("a", "b", "d")]


@pytest.mark.parametrize(
    "line",
    [
        "gemm 64x72x80 bf16 kk alpha beta bias=n act=silu",
        "gemm 64x72x80 fp16 kn beta",
        "gemm 64x72x80 bf16 kk bias=m act=relu any_order",
        "gemm 64x72x80 e4m3 kk scale",
        "gemm 64x72x80 e4m3 kk scale promote bias=n",
    ],
)
def test_the_library_call_gets_what_a_kernel_gets(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part of the epilogue arrives under its name, and the result is that of the reference."""
    torch = pytest.importorskip("torch")
    from host_lane import call, filled, new_out

    import cutegen

    problem = Problem.parse(line)
    inputs, out = filled(problem), new_out(problem)
    asked: dict[str, Any] = {}

    def gemm(a: Any, b: Any, *, any_order: bool, **more: Any) -> None:
        asked.update(any_order=any_order)
        finish(a.float() @ b.float(), **more)

    def scaled_gemm(a: Any, b: Any, *, scale_a: Any, scale_b: Any, fast_accum: bool, **more: Any) -> None:
        asked.update(fast_accum=fast_accum)
        finish((a.float() @ b.float()) * scale_a * scale_b, **more)

    def finish(x: Any, *, out: Any, activation: str, **more: Any) -> None:
        x = more.get("alpha", 1) * x
        if "c" in more:
            x += more.get("beta", 1) * more["c"].float()
        if "bias" in more:
            x += more["bias"].float()
        out.copy_({"": x, "relu": x.relu(), "silu": torch.nn.functional.silu(x)}[activation])

    monkeypatch.setattr(cutegen, "gemm", gemm, raising=False)
    monkeypatch.setattr(cutegen, "scaled_gemm", scaled_gemm, raising=False)
    library_call = child.load(Path(child.GEMM_CALL), json.dumps({"table": "", "problem": line}))
    call(library_call, problem, inputs, out)
    chunks = GEMM.reference(problem, inputs).chunks("out", out)
    assert all(bool(((x.got - x.want).abs() <= x.allowed).all()) for x in chunks)
    scaled = problem.epilogue.scale
    assert asked == ({"fast_accum": not problem.promote} if scaled else {"any_order": problem.any_order})
