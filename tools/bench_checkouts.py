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
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutegen.arch import Arch
from cutegen.build import Artifact, Builder
from cutegen.build.render import Source, render
from cutegen.build.store import Store
from cutegen.cli.exit_codes import EXIT_NO_WINNER, EXIT_OK, run_command
from cutegen.digest import Json
from cutegen.errors import CutegenError, UsageError
from cutegen.families.registry import find_space, parse_problem, space_of
from cutegen.family import Problem
from cutegen.measure import Bench, Candidate
from cutegen.measure.device import Device, present_device
from cutegen.measure.policy import Policy
from cutegen.search.defaults import default_config
from cutegen.space import Config, Launch
from tools.benchmark import render_child
from tools.benchmark.arguments import add_out_argument
from tools.benchmark.checkout_process import CheckoutProcess
from tools.benchmark.checkouts_table import AGAINST, CHECKOUTS, OURS
from tools.benchmark.drawn import DrawnRows, add_brief_arguments, add_drawing_arguments, brief_policy
from tools.benchmark.environment import git_commit
from tools.benchmark.family_child import BARE_ENGINE
from tools.benchmark.results import write_json

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
        launch: That.
        sources: Both, by checkout.
    """

    config: Config
    launch: Launch
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
        return cls(config, launch, {OURS: ours, AGAINST: replace(ours, text=str(answer["text"]))})


class _Runner:
    """Measures kernels on one GPU: ``kernels`` that are compiled, by their text, as ``policy`` says."""

    def __init__(
        self, bench: Bench, device: Device, kernels: Mapping[Source, Artifact], policy: Policy
    ) -> None:
        self._bench, self._device, self._kernels, self._policy = bench, device, kernels, policy

    def row(self, problem: Problem, pair: Pair) -> dict[str, Json]:
        """Return the times of a problem by checkout, once each kernel was seen to be right.

        Raises:
            CutegenError: It cannot be measured, or a kernel is wrong.
        """
        self._bench.open(problem)
        entries = [self._entry(name, problem, pair) for name in pair.sources]
        run = self._bench.time(entries, self._policy)
        if run.failures:
            raise CutegenError(f"{problem}: {next(iter(run.failures.values())).error}")
        return {
            "problem": str(problem),
            "bytes": problem.min_bytes,
            "times": {name: round(t.steady_us or t.median_us, 4) for name, t in run.timings.items()},
        }

    def _entry(self, name: str, problem: Problem, pair: Pair) -> Candidate:
        source = pair.sources[name]
        if source not in self._kernels:
            raise CutegenError(f"{problem}: the kernel of {name} could not be compiled")
        built = self._kernels[source]
        entry = Candidate(name, built.shared_object, built.symbol, pair.launch, problem)
        found = self._bench.check(entry, repeats=0)
        if not found.ok:
            raise CutegenError(f"{problem}: {name}: {found.error}")
        return entry


def run(args: argparse.Namespace) -> int:
    """Measure, print and write."""
    if args.out is None:
        raise UsageError("--out is missing: give the results file")
    if not (args.against / "cutegen").is_dir():
        raise UsageError(f"--against {args.against} has no folder cutegen; give the root of a checkout")
    began, device = time.monotonic(), present_device()
    problems = [parse_problem(line) for line in args.problem or PROBLEMS]
    policy = brief_policy(args)
    found = DrawnRows(CHECKOUTS, device, args.commit, policy, {})
    facts = {"against_commit": args.against_commit or git_commit(args.against)}
    with Renderer(args.against.resolve(), device.arch, device.sm_count) as other:
        other.wait()
        pairs = {problem: Pair.of(problem, device, other) for problem in problems}
    with Builder(Store.at(args.cache_dir)) as builder:
        built = builder.build({source for pair in pairs.values() for source in pair.sources.values()})
        kernels = {source: artifact for source, artifact in built if isinstance(artifact, Artifact)}
    with Bench(engine=BARE_ENGINE) as bench:
        bench.start()
        runner = _Runner(bench, device, kernels, policy)
        for problem, pair in pairs.items():
            if time.monotonic() - began > args.stop_after:
                break
            if found.take(partial(runner.row, problem, pair)):
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
    add_out_argument(parser)
    add_brief_arguments(parser, round_us=1500)
    add_drawing_arguments(parser, rounds=11)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = _parser().parse_args(argv)
    return run_command(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
