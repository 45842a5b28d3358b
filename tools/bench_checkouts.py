"""Time the default kernels of this checkout beside those of another, in the same rounds.

    git worktree add ../before COMMIT
    python tools/bench_checkouts.py --against ../before --out docs/results/checkouts.json

The other checkout renders the kernels that it would run; they are compiled, checked and timed here. So a
change of a template, of a rule for defaults or of both can be seen alone. For families whose launches have
no run-time arguments: kernels over rows, gates, activations and rotary embeddings.

exit codes: 0 all was measured; 2 bad usage; 3 no GPU; 4 some problems could not be measured
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutegen.arch import Arch
from cutegen.build import Artifact, Builder
from cutegen.build.render import Source, render
from cutegen.build.store import Store
from cutegen.cli.exit_codes import EXIT_NO_WINNER, EXIT_OK, run_command
from cutegen.digest import Json
from cutegen.errors import CutegenError, UsageError
from cutegen.families.registry import find_space, parse_problem
from cutegen.family import Problem
from cutegen.measure import Bench, Candidate
from cutegen.measure.device import Device, present_device
from cutegen.measure.policy import Policy
from cutegen.search.defaults import default_config
from tools.benchmark import render_child
from tools.benchmark.arguments import add_out_argument
from tools.benchmark.checkout_process import CheckoutProcess
from tools.benchmark.checkouts_table import AGAINST, CHECKOUTS, OURS
from tools.benchmark.drawn import DrawnRows, add_brief_arguments, add_drawing_arguments, brief_policy
from tools.benchmark.environment import git_commit
from tools.benchmark.family_child import BARE_ENGINE
from tools.benchmark.results import write_json

__all__ = ["PROBLEMS", "main", "rendered"]

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
    """A process of a checkout that renders its default kernels."""

    def __init__(self, root: Path, arch: Arch, sm_count: int) -> None:
        arguments = [render_child.__file__, str(root), arch.name, str(sm_count)]
        super().__init__(root, arguments)

    def source(self, problem: Problem, ours: Source) -> Source:
        """Return the kernel of the checkout for a problem, where this one has ``ours``.

        Raises:
            CutegenError: It has none, or launches of it have run-time arguments.
        """
        answer: dict[str, Json] = json.loads(self.ask(str(problem)))
        if "error" in answer:
            raise CutegenError(f"{problem}: the other checkout says: {answer['error']}")
        if answer["scalars"]:
            raise CutegenError(f"{problem}: its launches have run-time arguments; give families without")
        return replace(ours, text=str(answer["text"]))


def rendered(problem: Problem, device: Device, other: Renderer) -> dict[str, Source]:
    """Return the default kernels of a problem, by checkout.

    Raises:
        CutegenError: One of them has none that can be launched alike.
    """
    space = find_space(problem.family, device.arch)
    ours = render(problem, default_config(space, problem, device.sm_count), device.arch)
    return {OURS: ours, AGAINST: other.source(problem, ours)}


class _Runner:
    """Measures kernels on one GPU: ``kernels`` that are compiled, by their text, as ``policy`` says."""

    def __init__(
        self, bench: Bench, device: Device, kernels: Mapping[Source, Artifact], policy: Policy
    ) -> None:
        self._bench, self._device, self._kernels, self._policy = bench, device, kernels, policy

    def row(self, problem: Problem, sources: Mapping[str, Source]) -> dict[str, Json]:
        """Return the times of a problem by checkout, once each kernel was seen to be right.

        Raises:
            CutegenError: It cannot be measured, or a kernel is wrong.
        """
        self._bench.open(problem)
        entries = [self._entry(name, problem, source) for name, source in sources.items()]
        run = self._bench.time(entries, self._policy)
        if run.failures:
            raise CutegenError(f"{problem}: {next(iter(run.failures.values())).error}")
        return {
            "problem": str(problem),
            "bytes": problem.min_bytes,
            "times": {name: round(t.steady_us or t.median_us, 4) for name, t in run.timings.items()},
        }

    def _entry(self, name: str, problem: Problem, source: Source) -> Candidate:
        if source not in self._kernels:
            raise CutegenError(f"{problem}: the kernel of {name} could not be compiled")
        built, space = self._kernels[source], find_space(problem.family, self._device.arch)
        config = default_config(space, problem, self._device.sm_count)
        entry = Candidate.of(
            name, built.shared_object, built.symbol, space, config, problem, self._device.sm_count
        )
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
        sources = {problem: rendered(problem, device, other) for problem in problems}
    with Builder(Store.at(args.cache_dir)) as builder:
        built = builder.build({source for both in sources.values() for source in both.values()})
        kernels = {source: artifact for source, artifact in built if isinstance(artifact, Artifact)}
    with Bench(engine=BARE_ENGINE) as bench:
        bench.start()
        runner = _Runner(bench, device, kernels, policy)
        for problem, both in sources.items():
            if time.monotonic() - began > args.stop_after:
                break
            if found.take(partial(runner.row, problem, both)):
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
