"""Time the default kernels of this checkout beside those of another, in the same rounds.

    git worktree add ../before COMMIT
    python tools/bench_checkouts.py --against ../before --out docs/results/checkouts.json

The other checkout renders the kernels that it would run; they are compiled, checked and timed here. So a
change of a template, of a rule for defaults or of both can be seen alone. Where launches have run-time
arguments, as those of GEMMs do, it renders this checkout's default instead, and says what a launch of it
takes, which must be the same.

exit codes: 0 all was measured; 2 bad usage; 3 no GPU; 4 some problems could not be measured
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutegen.arch import Arch
from cutegen.build.render import Source, render
from cutegen.build.store import Store
from cutegen.cli.exit_codes import EXIT_NO_WINNER, EXIT_OK, run_command
from cutegen.errors import CutegenError, UsageError
from cutegen.families.registry import find_space, parse_problem, space_of
from cutegen.family import Problem
from cutegen.measure import Bench
from cutegen.measure.device import Device, present_device
from cutegen.search.defaults import default_config
from cutegen.space import Config
from tools.benchmark import render_child
from tools.benchmark.arguments import add_out_argument
from tools.benchmark.checkout_process import CheckoutProcess
from tools.benchmark.checkouts_table import AGAINST, CHECKOUTS, OURS
from tools.benchmark.drawn import DrawnRows, add_brief_arguments, add_drawing_arguments, brief_policy
from tools.benchmark.environment import git_commit
from tools.benchmark.family_child import BARE_ENGINE
from tools.benchmark.results import write_json
from tools.benchmark.side_by_side import SideBySide, compiled

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["PROBLEMS", "Pair", "Renderer", "main"]

#: Problems of models, small enough that what a kernel does before its first load counts.
PROBLEMS = (
    *(f"rmsnorm {m}x4096 bf16{more}" for m in (1, 16, 64, 512) for more in ("", " residual")),
    *(f"softmax {m}x4096 bf16" for m in (16, 512)),
    *(f"layernorm {m}x4096 bf16" for m in (16, 512)),
    *(f"rmsnorm_quantized {m}x4096 bf16" for m in (16, 512)),
    "cross_entropy 64x32000 bf16",
    *(f"rope {m}x32x8x128x64x1 bf16" for m in (1, 16, 64, 512)),
    "rope 64x32x8x128x64x4096 bf16 table=positions",
    "rope 64x32x8x128x64x1 bf16 norm",
    *(f"gated {m}x14336 bf16" for m in (1, 16, 64, 256)),
    *(f"gated_backward {m}x14336 bf16" for m in (16, 256)),
    *(f"activation {m}x14336 bf16" for m in (16, 256)),
    *(f"activation_backward {m}x14336 bf16" for m in (16, 256)),
)


class Renderer(CheckoutProcess):
    """A process of a checkout that renders kernels."""

    def __init__(self, root: Path, arch: Arch, sm_count: int) -> None:
        arguments = [render_child.__file__, str(root), arch.name, str(sm_count)]
        super().__init__(root, arguments)

    def rendered(self, problem: Problem, config: Config | None) -> dict[str, Any]:
        """Return what the checkout says of its kernel for a problem, by default of its own config.

        Raises:
            CutegenError: It has none.
        """
        asked = {"problem": str(problem), "config": "" if config is None else str(config)}
        answer: dict[str, Any] = json.loads(self.ask(json.dumps(asked)))
        if "error" in answer:
            raise CutegenError(f"{problem}: the other checkout says: {answer['error']}")
        return answer


@dataclass(frozen=True)
class Pair:
    """The kernels of a problem.

    Attributes:
        config: Of ours, which says what launches of both take.
        sources: Both, by checkout.
    """

    config: Config
    sources: Mapping[str, Source]

    @classmethod
    def of(cls, problem: Problem, device: Device, other: Renderer) -> Self:
        """Return the kernels of a problem.

        Raises:
            CutegenError: One checkout has none, or launches of both take something else.
        """
        default = find_space(problem.family, device.arch)
        config = default_config(default, problem, device.sm_count)
        space = space_of(config, problem.family, device.arch)
        launch = space.launch(config, problem, device.sm_count)
        answer = other.rendered(problem, config if launch.scalars else None)
        theirs = tuple(answer["scalars"]), answer["workspace_bytes"]
        if theirs != (launch.scalars, launch.workspace_bytes):
            raise CutegenError(
                f"{problem}: launches take {theirs} in the other checkout and "
                f"{(launch.scalars, launch.workspace_bytes)} in this one, so its kernel cannot run here"
            )
        ours = render(problem, config, device.arch)
        return cls(config, {OURS: ours, AGAINST: replace(ours, text=str(answer["text"]))})


def _pairs(
    problems: Sequence[Problem], device: Device, checkout: Path, found: DrawnRows
) -> dict[Problem, Pair]:
    """Return the kernels of all problems; why there are none of some is noted in ``found``."""
    pairs = {}
    with Renderer(checkout, device.arch, device.sm_count) as other:
        other.wait()
        for problem in problems:
            try:
                pairs[problem] = Pair.of(problem, device, other)
            except CutegenError as error:
                found.note(error)
    return pairs


def run(args: argparse.Namespace) -> int:
    """Measure, print and write."""
    if not (args.against / "cutegen").is_dir():
        raise UsageError(f"--against {args.against} has no folder cutegen; give the root of a checkout")
    began, device = time.monotonic(), present_device()
    problems = [parse_problem(line) for line in args.problem or PROBLEMS]
    policy = brief_policy(args)
    found = DrawnRows(CHECKOUTS, device, args.commit, policy, {})
    facts = {"against_commit": args.against_commit or git_commit(args.against)}
    pairs = _pairs(problems, device, args.against.resolve(), found)
    kernels = compiled(
        Store.at(args.cache_dir), chain.from_iterable(pair.sources.values() for pair in pairs.values())
    )
    with Bench(engine=BARE_ENGINE) as bench:
        bench.start()
        side_by_side = SideBySide(bench, device, kernels, policy)
        for problem, pair in pairs.items():
            if time.monotonic() - began > args.stop_after:
                break
            if found.take(partial(side_by_side.row, problem, pair.config, pair.sources)):
                print(found.rows[-1]["problem"], found.rows[-1]["times"], flush=True)
            write_json(args.out, {**found.document(), **facts})
    return EXIT_NO_WINNER if found.failures else EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("problem", nargs="*", metavar="PROBLEM", help="such as 'softmax 64x4096 bf16'")
    parser.add_argument(
        "--against", type=Path, required=True, metavar="CHECKOUT", help="whose kernels run, too"
    )
    parser.add_argument("--against-commit", default="", metavar="COMMIT", help="where git cannot tell")
    add_out_argument(parser, required=True)
    add_brief_arguments(parser, round_us=1500)
    add_drawing_arguments(parser, rounds=11)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = _parser().parse_args(argv)
    return run_command(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
