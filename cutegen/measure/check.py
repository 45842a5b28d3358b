"""Judges what a kernel wrote: against a reference, for unwritten and stray elements, and on repeated runs.

Everything that touches tensors works on any torch device, so the rules are tested without a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from cutegen.digest import Json
from cutegen.family import Reference
from cutegen.measure.poisoned_output import PoisonedOutput, unravel

if TYPE_CHECKING:
    import torch

__all__ = ["Verdict", "judge", "verify"]

#: Outputs by name, each poisoned.
Outputs = Mapping[str, PoisonedOutput]


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison; the numbers are those of the worst element.

    Attributes:
        ok: Whether the kernel computes this problem correctly.
        max_error: |got - want| at the element that is worst relative to what is allowed there.
        tolerance: What was allowed there.
        where: Its index in the output.
        got: What the kernel wrote there.
        want: What the fp64 reference has there.
        deterministic: Whether repeated runs gave the same bits.
        reason: Why not ok, in words; empty when ok.
        problem: The problem that was computed, as one line.
        compared: Fraction of the output that was compared with the reference; NaN is looked for everywhere.
        output: Name of the output that the numbers are of.
    """

    ok: bool
    max_error: float = 0.0
    tolerance: float = 0.0
    where: tuple[int, ...] = ()
    got: float = 0.0
    want: float = 0.0
    deterministic: bool = True
    reason: str = ""
    problem: str = ""
    compared: float = 1.0
    output: str = ""

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON data; numbers that JSON lacks become the words ``nan``, ``inf``."""
        data: dict[str, Json] = {**asdict(self), "where": list(self.where)}
        for name in ("max_error", "tolerance", "got", "want"):
            value = getattr(self, name)
            data[name] = value if math.isfinite(value) else str(value)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Verdict:
        """Return the verdict that :meth:`to_json` described."""
        numbers = {name: float(data[name]) for name in ("max_error", "tolerance", "got", "want")}
        return cls(**{**data, **numbers, "where": tuple(data["where"])})


def judge(outputs: Outputs, reference: Reference) -> Verdict:
    """Compare what one run left in ``outputs`` with the reference; the verdict is on the worst of them.

    Looks for unwritten, infinite and stray elements everywhere, then compares what the reference represents.
    """
    verdicts = [_judge_one(name, output, reference) for name, output in outputs.items()]
    return max(verdicts, key=_badness)


def _badness(verdict: Verdict) -> tuple[bool, float]:
    """Return a key that sorts unwritten and stray elements above wrong numbers, and these by error."""
    within = verdict.max_error <= verdict.tolerance
    ratio = verdict.max_error / verdict.tolerance if verdict.tolerance else math.inf
    return not verdict.ok, math.inf if not verdict.ok and within else ratio


def _judge_one(name: str, output: PoisonedOutput, reference: Reference) -> Verdict:
    compared = reference.compared(name)
    look = output.must_be_written and output.is_certain
    count, first = output.unwritten() if look else (0, ())
    if count:
        total = output.tensor.numel()
        reason = f"{name}: {count} of {total} elements are not finite or were never written, first at {first}"
        return Verdict(
            False,
            max_error=math.nan,
            where=first,
            got=float(output.tensor[first]),
            want=math.nan,
            reason=reason,
            compared=compared,
            output=name,
        )
    worst = _worst(name, output.tensor, reference)
    if stray := output.stray():
        return replace(worst, ok=False, reason=f"{name}: {stray} elements outside of the output were written")
    return worst


def _worst(name: str, tensor: torch.Tensor, reference: Reference) -> Verdict:
    worst = Verdict(True, compared=reference.compared(name), output=name)
    ratio_so_far = -1.0
    for chunk in reference.chunks(name, tensor):
        error = (chunk.got - chunk.want).abs_()
        exact = error == 0  # the allowed error may be 0
        ratios = error.div_(chunk.allowed).masked_fill_(exact, 0).nan_to_num_(nan=math.inf, posinf=math.inf)
        value, flat = ratios.flatten().max(0)
        ratio = float(value)
        if ratio <= ratio_so_far:
            continue
        ratio_so_far = ratio
        here = unravel(int(flat), ratios.shape)
        where = chunk.place(here)
        got, want, allowed = (float(x[here]) for x in (chunk.got, chunk.want, chunk.allowed))
        ok = ratio <= 1
        reason = "" if ok else f"{name}{list(where)} is {got:.6g}, should be {want:.6g} within {allowed:.2g}"
        worst = replace(
            worst,
            ok=ok,
            max_error=abs(got - want),
            tolerance=allowed,
            where=where,
            got=got,
            want=want,
            reason=reason,
        )
    return worst


def verify(
    run: Callable[[Outputs], None],
    outputs: tuple[Outputs, Outputs],
    reference: Reference,
    repeats: int = 1,
    *,
    any_order: bool = False,
) -> Verdict:
    """Run a kernel on poisoned outputs, compare it with the reference, then repeat it for equal bits.

    Args:
        run: Launches the kernel on outputs and waits for it.
        outputs: Two sets of the same outputs.
        reference: What they should hold.
        repeats: Further runs, each compared bit for bit with the first.
        any_order: Whether the problem allows sums in any order: runs that differ are then compared with the
            reference instead.

    Raises:
        LaunchError: As raised by ``run``.
    """
    first, again = outputs
    _run(run, first, 0)
    verdict = judge(first, reference)
    uncertain = [name for name, o in first.items() if o.must_be_written and not o.is_certain]
    for _ in range(max(repeats, 1) if uncertain else repeats):
        if not verdict.ok:
            break
        _run(run, again, 1)
        unwritten = next((name for name in uncertain if first[name].kept_poison_of_both(again[name])), "")
        if unwritten:
            reason = f"{unwritten}: elements were never written"
            return replace(verdict, ok=False, output=unwritten, reason=reason)
        differs = next((name for name in first if not first[name].same_bits(again[name])), "")
        if not differs:
            continue
        if any_order:
            verdict = replace(judge(again, reference), deterministic=False)
        else:
            reason = f"{differs}: repeated runs on the same operands gave different bits"
            verdict = replace(verdict, ok=False, deterministic=False, output=differs, reason=reason)
    return verdict


def _run(run: Callable[[Outputs], None], outputs: Outputs, turn: int) -> None:
    for output in outputs.values():
        output.poison(turn)
    run(outputs)
