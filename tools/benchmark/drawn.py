"""Measuring what was drawn at random: arguments that the tools share, and what their files say."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cutegen.cli.args import add_cache_argument, positive_float, positive_int
from cutegen.digest import Json
from cutegen.errors import CutegenError
from cutegen.measure.context import CONTEXTS, DEFAULT_CONTEXT
from cutegen.measure.device import Device
from cutegen.measure.policy import Policy
from tools.benchmark.arguments import add_commit_argument
from tools.benchmark.environment import check_facts, conditions

__all__ = ["DrawnRows", "add_brief_arguments", "add_drawing_arguments", "brief_policy", "ran_behind"]


def add_drawing_arguments(parser: argparse.ArgumentParser, *, rounds: int) -> None:
    """Add the options that all such tools have.

    Args:
        parser: Of the tool.
        rounds: Its usual number of samples of each kernel.
    """
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=positive_int, default=rounds)
    parser.add_argument("--stop-after", type=positive_float, default=3600.0, metavar="SECONDS")
    add_cache_argument(parser, "compiled kernels")
    add_commit_argument(parser)


def add_brief_arguments(parser: argparse.ArgumentParser, *, round_us: float) -> None:
    """Add the options that :func:`brief_policy` reads and :func:`add_drawing_arguments` lacks.

    Args:
        parser: Of the tool.
        round_us: Its usual microseconds of each entry in a round.
    """
    parser.add_argument(
        "--context", choices=CONTEXTS, default=DEFAULT_CONTEXT, help="what runs before a launch"
    )
    parser.add_argument(
        "--round-us", type=positive_float, default=round_us, help=f"of each entry ({round_us:g})"
    )


def brief_policy(args: argparse.Namespace) -> Policy:
    """Return how kernels of many problems are timed: all rounds, each brief, at full clock."""
    return Policy(
        rounds=args.rounds,
        min_rounds=args.rounds,
        round_us=args.round_us,
        clock="burst",
        settle_s=0.02,
        precision=0.0,
        context=args.context,
    )


def ran_behind(document: Mapping[str, Any]) -> bool:
    """Return whether launches of a results file were behind another kernel, not back to back."""
    return bool(document["conditions"]["policy"].get("context") == "behind")


@dataclass
class DrawnRows:
    """What was measured so far, and what could not be.

    Attributes:
        kind: Of the results file.
        device: Where it is measured.
        commit: Of the checkout, where git cannot tell.
        policy: How kernels are timed.
        drawing: What was drawn: the seed and how much.
        rows: What was measured.
        failures: What could not be, in words.
    """

    kind: str
    device: Device
    commit: str
    policy: Policy
    drawing: Mapping[str, Json]
    rows: list[dict[str, Json]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def take(self, measure: Callable[[], dict[str, Json]], what: str = "") -> bool:
        """Take the row that ``measure`` returns, or note and print why there is none; return which.

        Args:
            measure: May raise :class:`CutegenError`.
            what: Is measured, where the error would not say.
        """
        try:
            self.rows.append(measure())
        except CutegenError as error:
            self.note(error, what)
            return False
        return True

    def note(self, error: CutegenError, what: str = "") -> None:
        """Note and print what could not be measured, and why."""
        self.failures.append(f"{what}: {error}" if what else str(error))
        print(self.failures[-1], file=sys.stderr, flush=True)

    def document(self) -> dict[str, Json]:
        """Return the file's content."""
        return {
            **check_facts(self.kind, self.device, self.commit),
            "conditions": conditions(self.device, self.policy, drawing=dict(self.drawing)),
            "rows": [dict(row) for row in self.rows],
            "failures": list(self.failures),
        }
