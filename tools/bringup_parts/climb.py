"""Tier after tier until one is broken, and the results file that tells of it."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cutegen.digest import Json
from cutegen.measure.device import Device
from cutegen.space import Config, Space
from tools.benchmark.environment import check_facts
from tools.bringup_parts.inquiry import Inquiry, Verdict, inquire
from tools.bringup_parts.lab import Lab, Record, outcomes
from tools.bringup_parts.tiers import Tier, kernels_of

__all__ = ["Outcome", "document", "reporter", "run_tiers", "size_of"]


@dataclass
class Outcome:
    """What came of the tiers so far.

    Attributes:
        planned: The tiers, each with the points whose kernels can be had.
        ran: How each tier that was run ended.
        verdicts: Why the last of them is broken.
        explained: Whether those findings explain every failure of it.
    """

    planned: Sequence[Tier]
    ran: list[dict[str, Json]]
    verdicts: list[Verdict]
    explained: bool = True

    @property
    def broken(self) -> str:
        """The name of the broken tier, empty if there is none."""
        return str(self.ran[-1]["name"]) if self.ran and not self.ran[-1]["passed"] else ""


def size_of(tier: Tier, space: Space) -> str:
    """Return how much there is to do in a tier."""
    runs = f", {tier.repeats} further runs each" if tier.repeats else ""
    return f"{len(tier.points)} trials, {kernels_of(space, tier.points)} kernels{runs}"


def reporter(space: Space) -> Callable[[Record], None]:
    """Return what prints a trial that failed, or that belongs to a bisection, and counts the others."""

    def show(record: Record) -> None:
        if record.ok and not record.tier.startswith("bisection"):
            print(".", end="", file=sys.stderr, flush=True)
            return
        config = record.point.config
        chosen = {knob: value for knob, value in config.items() if value != space.domains[knob][0]}
        words = f"{record.outcome}: {record.point.problem} | {Config(chosen) if chosen else 'simplest'}"
        print(f"  {words} {record.error[:120]}".rstrip(), flush=True)

    return show


def run_tiers(lab: Lab, tiers: Sequence[Tier], space: Space, args: argparse.Namespace) -> Iterator[Outcome]:
    """Run tier after tier until one is broken, and yield what is known after each, and after each finding."""
    outcome = Outcome(tiers, [], [])
    for number, tier in enumerate(tiers, 1):
        if not tier.points:
            print(f"tier {number}, {tier.name}: skipped, the bundle has none of its kernels")
            continue
        print(f"tier {number}, {tier.name}: {size_of(tier, space)}", flush=True)
        started = time.monotonic()
        records = lab.run(tier, args.enough)
        counts = outcomes(records)
        passed = set(counts) <= {"ok"}
        seconds = round(time.monotonic() - started, 1)
        outcome.ran.append(
            {
                "name": tier.name,
                "planned": len(tier.points),
                "outcomes": {**counts},
                "passed": passed,
                "seconds": seconds,
            }
        )
        words = ", ".join(f"{count} {name}" for name, count in counts.items())
        print(f"\ntier {number}, {tier.name}: {'passed' if passed else 'BROKEN'}: {words} in {seconds} s")
        yield outcome
        if not passed:
            outcome.verdicts = _ask(lab, tier, space, records, args.findings)
            failed = sum(not record.ok for record in records)
            named = [verdict for verdict in outcome.verdicts if verdict.finding.pinned]
            outcome.explained = sum(verdict.explained for verdict in named) == failed
            yield outcome
            return


def _ask(lab: Lab, tier: Tier, space: Space, records: Sequence[Record], most: int) -> list[Verdict]:
    known = [record.point for record in lab.records if record.ok]

    def note(verdict: Verdict) -> None:
        print(f"==> {verdict}", flush=True)

    return inquire(Inquiry(lab, tier, space), records, known, most, note)


def document(
    args: argparse.Namespace, device: Device, records: Sequence[Record], outcome: Outcome
) -> dict[str, Json]:
    """Return the results file."""
    return {
        **check_facts("bring-up", device, args.commit),
        "arch": device.arch.name,
        "family": args.family,
        "bundle": args.bundle.name if args.bundle else "",
        "break": args.breaks,
        "seed": args.seed,
        "timeout_s": args.timeout,
        "tiers": list(outcome.ran),
        "broken": outcome.broken,
        "findings": [verdict.to_json() for verdict in outcome.verdicts],
        "explained": outcome.explained,
        "edited_kernels": sum(record.edited for record in records),
        "trials": [record.to_json() for record in records],
    }
