"""What a warm-up may be told to prepare for: a model, a recording or a table, and the rows of its calls."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutegen.dtypes import short_dtype
from cutegen.errors import ProblemError, ResourceError, UsageError
from cutegen.families.registry import find_family, parse_problem
from cutegen.family import Problem, Signature
from cutegen.records.recorded_calls import read_recordings
from cutegen.records.table import Table
from cutegen.text import shown
from cutegen.torch_ops.gated_modules import GatedCall, gated_call, gated_problems
from cutegen.torch_ops.linear_modules import unfit
from cutegen.torch_ops.norm_modules import NormCall, norm_call, norm_problem
from cutegen.torch_ops.recording import Recording

if TYPE_CHECKING:
    import torch

__all__ = ["CAPTURE_SIZES", "ExpectedCalls", "Rows", "read_source"]

_log = logging.getLogger("cutegen")

#: Batch sizes for which servers capture CUDA graphs of decoding, by the server's name. Source: the defaults
#: of vLLM 0.33 and SGLang 0.5.23 for GPUs of this class.
CAPTURE_SIZES = {
    "vllm": (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)),
    "sglang": (1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 513, 16)),
}
#: Rows: one number, several, ``vllm``, ``sglang``, or a range, ``1..8192``; ``1:8192`` is the same.
Rows = int | str | Iterable[int]


@dataclass(frozen=True)
class ExpectedCalls:
    """What calls are expected.

    Attributes:
        problems: Those that are called.
        kinds: Problems that are called with any number of rows: of each, all that may answer such calls.
        table: All of whose kernels are wanted, if one was given.
        family: Whose kinds are wanted, if neither.
    """

    problems: tuple[Problem, ...] = ()
    kinds: tuple[Problem, ...] = ()
    table: Table | None = None
    family: str = ""


def read_source(source: Any, m: Rows | None, answering: Table | None) -> ExpectedCalls:
    """Return what ``source`` stands for.

    Args:
        source: A family's name, a module, a recording or its file (``.jsonl``), a table or its file.
        m: The rows that its problems are called with.
        answering: The table that will answer, whose sizes a range of rows visits.

    Raises:
        UsageError: It is nothing of these, a model without ``m``, or ``m`` says no rows.
        CutegenError: A file cannot be read.
    """
    m = None if m is None else _require_rows(m)
    if isinstance(source, str) and not (_is_family(source) or Path(source).suffix):
        raise UsageError(
            f"{shown(source)} is no family, and no file of a table (.json) or recording (.jsonl)"
        )
    if isinstance(source, str) and _is_family(source):
        if m is not None:
            raise UsageError("m says with how many rows a model, a recording or a table is called; name one")
        return ExpectedCalls(family=source)
    if isinstance(source, (str, Path)) and Path(source).suffix != ".jsonl":
        source = Table.load(source)
    if isinstance(source, Table):
        named = (*source.entries, *(each.range.low for each in source.ranges))
        return _widened(named, m, source, source) if m is not None else ExpectedCalls(table=source)
    if isinstance(source, (str, Path)):
        calls: Iterable[Any] = read_recordings([Path(source)]).calls
    elif isinstance(source, Recording):
        calls = source.calls
    elif hasattr(source, "named_modules"):
        if m is None:
            raise UsageError("a model does not say how many rows its layers get; pass m, such as [1, 8]")
        found = tuple(_of_layers(source))
        if not found:
            _log.warning("no layer of the model calls a kernel, so none is prepared%s", _why_none(source))
        return _widened(found, m, answering)
    else:
        raise UsageError(f"source is a {type(source).__name__}; it must be a model, a recording or a table")
    called = dict.fromkeys(call.problem for call in calls if call.how != "given")
    return ExpectedCalls(tuple(called)) if m is None else _widened(called, m, answering)


def _require_rows(m: Rows) -> int | str | tuple[int, ...]:
    """Return ``m`` if it says numbers of rows; raises UsageError."""
    names = ", ".join(CAPTURE_SIZES)
    if isinstance(m, str):
        ends = _ends(m)
        if m not in CAPTURE_SIZES and (ends is None or not 0 < ends[0] <= ends[1]):
            raise UsageError(f"m is {shown(m)}; valid: numbers, FIRST..LAST such as '1..8192', {names}")
        return m
    rows = (m,) if isinstance(m, int) else tuple(m)
    for number in rows:
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise UsageError(
                f"m has {shown(number)}; valid: numbers of rows from 1 on, or FIRST..LAST, {names}"
            )
    return rows


def _why_none(model: torch.nn.Module) -> str:
    """Return why the first linear layer of a model calls no kernel, as the end of a sentence."""
    import torch

    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            reason = unfit(layer.weight, layer.weight, layer.bias).replace("the input", "its weight", 1)
            return f": of the first linear layer, {reason}" if reason else ""
    return ": it has no linear layer"


def _is_family(name: str) -> bool:
    try:
        find_family(name)
    except ResourceError:
        return False
    return True


def _of_layers(model: torch.nn.Module) -> Iterator[Problem]:
    """Yield what each layer that :func:`cutegen.optimize` knows, and kernels take, poses for one row."""
    import torch

    for layer in model.modules():
        call = getattr(layer, "cutegen_call", None) or norm_call(layer) or gated_call(layer)
        if isinstance(call, NormCall):
            line = norm_problem(layer)
            yield from () if line is None else (parse_problem(line),)
        elif isinstance(call, GatedCall):
            yield from map(parse_problem, gated_problems(layer, call))
        elif isinstance(layer, torch.nn.Linear) and not unfit(layer.weight, layer.weight, layer.bias):
            n, k = layer.weight.shape
            bias = "" if layer.bias is None else " bias=n"
            yield parse_problem(f"gemm 1x{n}x{k} {short_dtype(str(layer.weight.dtype))} kk{bias}")


def _widened(
    problems: Iterable[Problem], m: Rows, answering: Table | None, table: Table | None = None
) -> ExpectedCalls:
    """Return ``problems`` with each number of rows; those that have none as they are.

    Of a range of rows the sizes at which the table names another kernel, and as kinds what else may answer: a
    model changes its choice at more sizes than can be visited.
    """
    found: dict[Problem, None] = {}
    kinds: dict[Signature, Problem] = {}
    for problem in problems:
        if "m" not in problem.sizes:
            found[problem] = None
            continue
        for rows in _rows(m, problem, answering):
            try:
                called = problem.with_sizes(m=rows)
            except ProblemError:
                continue  # such as int8 with an odd number
            found[called] = None
            if _ends(m) is not None:
                kinds.setdefault(called.signature, called)
    return ExpectedCalls(tuple(found), tuple(kinds.values()), table)


def _rows(m: Rows, problem: Problem, table: Table | None) -> Iterable[int]:
    """Return numbers of rows; of a range those at which a table may name another kernel."""
    if isinstance(m, int):
        return (m,)
    if not isinstance(m, str):
        return m
    if m in CAPTURE_SIZES:
        return CAPTURE_SIZES[m]
    ends = _ends(m)
    assert ends is not None  # what m may be was looked at first
    first, last = ends
    visited = {first, last}
    for power in range(last.bit_length()):
        visited |= {2**power, 2**power + 1, 3 * 2**power // 2}
    for entry in table.entries if table is not None else ():
        if entry.family == problem.family and "m" in entry.sizes:
            visited.add(entry.sizes["m"])
    for each in table.ranges if table is not None else ():
        if each.range.size == "m":
            visited |= {piece.first for piece in each.pieces}
    return sorted(size for size in visited if first <= size <= last)


def _ends(m: Rows) -> tuple[int, int] | None:
    """Return the first and the last of a range of rows; None if it is none."""
    found = re.fullmatch(r"([0-9]{1,18})(?::|\.\.)([0-9]{1,18})", m) if isinstance(m, str) else None
    return None if found is None else (int(found[1]), int(found[2]))
