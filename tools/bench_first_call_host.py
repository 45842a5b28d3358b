"""Measure the host's part of first calls on a machine without a GPU: everything but the launches.

The kernels that untuned products may need are there and do nothing, nor does torch's own product where it is
to answer. A round calls every shape of a random list for the first time, once, asks for the choice of each
alone, and calls one shape again and again. Of each shape the shortest of all rounds counts: what other
programs on the machine take is no time of ours, and caches are as warm as they get, so first calls of a real
program take longer (tools/bench_first_call.py measures them where there is a GPU). Times of two checkouts
compare, since with --against they take turns round by round.

    python tools/bench_first_call_host.py --against ../before --out docs/results/first_call_host.json

exit codes: 0 measured; 2 bad usage; 3 environment
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutegen.cli.args import Parser, integer, positive_int
from cutegen.cli.exit_codes import EXIT_OK, run_command
from cutegen.digest import Json
from cutegen.system.temporary import TemporaryFolder
from tools.benchmark import host_child
from tools.benchmark.arguments import add_commit_argument, add_out_argument
from tools.benchmark.checkout_process import CheckoutProcess
from tools.benchmark.environment import ROOT, git_commit, session_facts, software
from tools.benchmark.first_call_table import HOST_ONLY
from tools.benchmark.results import write_json

#: Calls of one shape in a round.
_CALLS = 1000


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = parse(argv)
    return run_command(lambda: run(args))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments."""
    description = (__doc__ or "").splitlines()[0]
    parser = Parser(prog="python tools/bench_first_call_host.py", description=description)
    parser.add_argument("--shapes", type=positive_int, default=200, metavar="N", help="how many (200)")
    parser.add_argument("--seed", type=integer, default=0, help="of the shapes (0)")
    parser.add_argument("--rounds", type=positive_int, default=50, metavar="N", help="of each checkout (50)")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="whose calls take turns with ours")
    parser.add_argument("--against-commit", default="", metavar="COMMIT", help="where git cannot tell")
    add_out_argument(parser)
    add_commit_argument(parser)
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> int:
    """Time, print and write."""
    checkouts = {"ours": ROOT} if args.against is None else {"ours": ROOT, "against": args.against.resolve()}
    rounds = measure(checkouts, args.shapes, args.seed, args.rounds)
    results = report(args, checkouts, rounds)
    print(summary(results))
    if args.out is not None:
        write_json(args.out, results)
    return EXIT_OK


Rounds = dict[str, list[dict[str, Any]]]


def measure(checkouts: Mapping[str, Path], shapes: int, seed: int, rounds: int) -> Rounds:
    """Return what every round of each checkout took; they take turns.

    Raises:
        ResourceError: A process ended early, or imported another cutegen.
    """
    found: Rounds = {name: [] for name in checkouts}
    with TemporaryFolder() as scratch, ExitStack() as stack:
        children = {
            name: stack.enter_context(_Child(root, scratch.path / name, shapes, seed))
            for name, root in checkouts.items()
        }
        for child in children.values():
            child.wait()
        for number in range(rounds + 1):
            for name in children if number % 2 else reversed(children):
                found[name].append(children[name].round())
    return {name: each[1:] for name, each in found.items()}


class _Child(CheckoutProcess):
    """A process that makes calls in a checkout."""

    def __init__(self, root: Path, folder: Path, shapes: int, seed: int) -> None:
        folder.mkdir(mode=0o700)
        super().__init__(root, [host_child.__file__, *map(str, (root, folder, shapes, seed))])

    def round(self) -> dict[str, Any]:
        """Return what one round took."""
        found: dict[str, Any] = json.loads(self.ask(str(_CALLS)))
        return found


def report(args: argparse.Namespace, checkouts: Mapping[str, Path], rounds: Rounds) -> dict[str, Json]:
    """Return what the file holds."""
    found: dict[str, Json] = {
        "schema": 1,
        "kind": HOST_ONLY,
        "where": "host only, no GPU: kernels and torch.mm do nothing",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commit": args.commit or git_commit(),
        "software": software(),
        "session": session_facts(None),
        "shapes": args.shapes,
        "seed": args.seed,
        "rounds": args.rounds,
        "kernels": rounds["ours"][0]["kernels"],
        **_shortest(rounds["ours"]),
    }
    if "against" in rounds:
        commit = args.against_commit or git_commit(checkouts["against"])
        found["against"] = {"commit": commit, **_shortest(rounds["against"])}
    return found


def _shortest(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Json]:
    """Return the spread over shapes of the shortest round of each, and the shortest of later calls."""
    found: dict[str, Json] = {}
    for name in ("first_us", "choice_us"):
        times = sorted(min(column) for column in zip(*(each[name] for each in rounds), strict=True))
        at = round(0.95 * (len(times) - 1))
        found[name] = {
            "median": round(median(times), 1),
            "p95": round(times[at], 1),
            "most": round(times[-1], 1),
        }
    found["later_us"] = round(min(each["later_us"] for each in rounds), 3)
    return found


def summary(results: Mapping[str, Any]) -> str:
    """Return the results in a line for each checkout."""
    sides = [results, results["against"]] if "against" in results else [results]
    lines = [
        f"{side['commit'][:12]}: first calls {side['first_us']['median']} us, the choice "
        f"{side['choice_us']['median']} us (medians of {results['shapes']} shapes), later calls "
        f"{side['later_us']} us"
        for side in sides
    ]
    return "\n".join([*lines, results["where"]])


if __name__ == "__main__":
    sys.exit(main())
