"""Laws of the check on outputs of any number and type; kernels and references are plain functions."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping

import pytest

torch = pytest.importorskip("torch", reason="the check compares torch tensors")

from cutegen.dtypes import torch_dtype  # noqa: E402
from cutegen.family import Argument, Chunk  # noqa: E402
from cutegen.measure.candidate import CheckResult  # noqa: E402
from cutegen.measure.check import Verdict, judge, verify  # noqa: E402
from cutegen.measure.poisoned_output import PoisonedOutput  # noqa: E402

CPU = torch.device("cpu")
Y, MASK = Argument("y", "out", "bf16", (6, 8)), Argument("mask", "out", "uint8", (6, 8))
WANT = {"y": torch.arange(48.0).view(6, 8), "mask": (torch.arange(48) % 3 + 90).view(6, 8)}


class Table:
    """A reference that is read from a table, ``rows`` at a time."""

    def __init__(self, want: Mapping[str, torch.Tensor], allowed: float = 0.25, rows: int = 2) -> None:
        self.want, self.allowed, self.rows = want, allowed, rows

    def compared(self, output: str) -> float:
        return 1.0

    def chunks(self, output: str, got: torch.Tensor) -> Iterator[Chunk]:
        want = self.want[output].double()
        for low in range(0, len(want), self.rows):
            part = want[low : low + self.rows]
            allowed = torch.full_like(part, self.allowed)
            yield Chunk(
                got[low : low + self.rows].double(),
                part,
                allowed,
                lambda at, low=low: (at[0] + low, *at[1:]),
            )


def run(
    kernel: Callable[[Mapping[str, torch.Tensor]], None],
    *arguments: Argument,
    repeats: int = 0,
    initial: Mapping[str, torch.Tensor] | None = None,
    reference: Table | None = None,
) -> Verdict:
    """Verify a kernel that is given its outputs by name."""
    before = initial or {}
    first, again = (
        {a.name: PoisonedOutput(a, CPU, gaps=True, initial=before.get(a.name)) for a in arguments}
        for _ in range(2)
    )
    return verify(
        lambda outputs: kernel({name: output.tensor for name, output in outputs.items()}),
        (first, again),
        reference or Table(WANT),
        repeats,
    )


def right(out: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in out.items():
        tensor.copy_(WANT[name])


def test_several_right_outputs_pass() -> None:
    verdict = run(right, Y, MASK, repeats=2)
    assert verdict.ok and verdict.deterministic and verdict.reason == ""


@pytest.mark.parametrize(("name", "amount"), [("y", 1.0), ("mask", 1)])
def test_the_output_that_is_wrong_is_named(name: str, amount: float) -> None:
    """With the place, what is there and what should be, whichever of the outputs it is."""

    def wrong(out: Mapping[str, torch.Tensor]) -> None:
        right(out)
        out[name][5, 7] += amount

    verdict = run(wrong, Y, MASK)
    want = float(WANT[name][5, 7])
    assert (verdict.ok, verdict.output, verdict.where, verdict.want) == (False, name, (5, 7), want)
    assert verdict.max_error == amount and verdict.tolerance == 0.25
    assert verdict.reason == f"{name}[5, 7] is {want + amount:g}, should be {want:g} within 0.25"


@pytest.mark.parametrize("name", ["y", "mask"])
def test_a_stray_element_is_laid_to_its_output(name: str) -> None:
    def stray(out: Mapping[str, torch.Tensor]) -> None:
        right(out)
        tensor = out[name]
        tensor.as_strided((1,), (1,), tensor.storage_offset() + 8).fill_(0)  # behind the first row

    verdict = run(stray, Y, MASK)
    assert not verdict.ok and verdict.output == name
    assert verdict.reason == f"{name}: 1 elements outside of the output were written"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("y", "y: 16 of 48 elements are not finite or were never written, first at (4, 0)"),
        ("mask", "mask: elements were never written"),
    ],
)
def test_rows_that_are_left_out_are_found(name: str, reason: str) -> None:
    """Also where every value may be a right one, and where what was left happens to be allowed."""

    def forgetful(out: Mapping[str, torch.Tensor]) -> None:
        for key, tensor in out.items():
            rows = 4 if key == name else 6
            tensor[:rows].copy_(WANT[key][:rows])

    verdict = run(forgetful, Y, MASK, reference=Table(WANT, allowed=200.0))
    assert (verdict.ok, verdict.output, verdict.reason) == (False, name, reason)


def test_runs_that_differ_are_laid_to_the_output_that_does() -> None:
    calls: list[int] = []

    def racy(out: Mapping[str, torch.Tensor]) -> None:
        right(out)
        calls.append(1)
        out["mask"][0, 0] += len(calls) % 2

    verdict = run(racy, Y, MASK, repeats=1, reference=Table(WANT, allowed=1.0))
    assert not verdict.ok and not verdict.deterministic
    assert verdict.reason == "mask: repeated runs on the same operands gave different bits"


def test_what_is_worked_on_in_place_begins_anew_in_every_run() -> None:
    """An output that is read as well holds the input before each run; a kernel that leaves it is found."""
    before = {"y": WANT["y"] - 5}
    verdict = run(lambda out: out["y"].add_(5), Y, initial=before, repeats=3)
    assert verdict.ok, verdict
    left = run(lambda out: None, Y, initial=before)
    assert (left.where, left.max_error, left.ok) == ((0, 0), 5.0, False)


def test_not_a_number_in_place_is_found_before_rows_that_are_right() -> None:
    """Later parts of the comparison do not cover it."""

    def broken(out: Mapping[str, torch.Tensor]) -> None:
        right(out)
        out["y"][1, 2] = math.nan

    verdict = run(broken, Y, initial=WANT)
    assert not verdict.ok and verdict.where == (1, 2) and math.isnan(verdict.got)


def test_nothing_may_be_allowed_where_results_are_exact() -> None:
    exact = Table(WANT, allowed=0.0)
    assert run(right, Y, reference=exact).ok

    def off(out: Mapping[str, torch.Tensor]) -> None:
        right(out)
        out["y"][0, 1] += 2.0**-7

    assert run(off, Y, reference=exact).where == (0, 1)


@pytest.mark.parametrize("dtype", ["fp32", "int32", "uint8"])
def test_one_run_is_judged_by_its_worst_output(dtype: str) -> None:
    """Among outputs that are all right, the one nearest to its limit gives the numbers."""
    near, far = Argument("near", "out", dtype, (4,)), Argument("far", "out", dtype, (4,))
    want = {name: torch.full((4,), 7) for name in ("near", "far")}
    outputs = {a.name: PoisonedOutput(a, CPU) for a in (near, far)}
    for output in outputs.values():
        output.poison()
        output.tensor.fill_(7)
    outputs["far"].tensor[2] = 8
    assert outputs["far"].tensor.dtype == torch_dtype(dtype)
    verdict = judge(outputs, Table(want, allowed=2.0))
    assert (verdict.ok, verdict.output, verdict.where, verdict.max_error) == (True, "far", (2,), 1.0)


def test_verdict_and_result_survive_json() -> None:
    """Not even NaN is lost, and the text is standard JSON."""
    verdict = run(lambda out: None, Y)
    text = json.dumps(CheckResult.judged(verdict, None).to_json(), allow_nan=False)
    again = CheckResult.from_json(json.loads(text))
    assert again.outcome == "wrong_result" and again.verdict is not None
    assert math.isnan(again.verdict.got) and again.verdict.where == (0, 0)
    assert again.verdict.output == "y" and again.error.startswith("y: 48 of 48 elements")
