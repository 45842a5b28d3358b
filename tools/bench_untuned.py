"""Measure cutegen's answers to products that nobody tuned, beside the library's call, in the same rounds.

Sizes are drawn at random: weights of language models and shards of them, tokens even over the doublings. Each
kernel is compiled beforehand and checked against fp64 the first time that it answers.

    python tools/bench_untuned.py --seed 7 --out docs/results/untuned.json

The kernel runs even where the dispatcher would leave the call to PyTorch, and the row says whether it would:
one file shows all settings of fallback. Render it with tools/results_table.py.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutegen.arch import Arch
from cutegen.build.store import Store
from cutegen.cli.args import positive_float, positive_int
from cutegen.cli.exit_codes import EXIT_NO_WINNER, EXIT_OK, run_command
from cutegen.digest import Json
from cutegen.errors import CutegenError
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.measure import Bench
from cutegen.measure.context import CONTEXTS, DEFAULT_CONTEXT
from cutegen.measure.device import Device, present_device
from cutegen.measure.policy import Policy
from cutegen.records.calibrations import packaged_arch
from cutegen.runtime.answer_lookup import look_up
from cutegen.runtime.kernel_cache import Kernels
from cutegen.space import Config
from tools.benchmark.arguments import add_out_argument
from tools.benchmark.compiled import compiled_candidate
from tools.benchmark.drawn import DrawnRows, add_drawing_arguments
from tools.benchmark.few_candidates import Compilation
from tools.benchmark.model_products import KINDS, draw
from tools.benchmark.results import write_json
from tools.benchmark.untuned_table import UNTUNED

#: Settings of the dispatcher that may leave a call to PyTorch.
FALLBACKS = ("expected", "torch")


@dataclass(frozen=True)
class Asked:
    """One product and its answer.

    Attributes:
        kind: Its dtype, layout and epilogue, as :data:`tools.benchmark.model_products.KINDS` names them.
        problem: The product.
        config: The kernel's config.
        left_to_torch: Settings of fallback under which PyTorch answers.
    """

    kind: str
    problem: Problem
    config: Config
    left_to_torch: tuple[str, ...]


def asked(args: argparse.Namespace, arch: Arch, sm_count: int) -> list[Asked]:
    """Return what to measure, in random order: whoever stops early has some of everything.

    Args:
        args: The command line.
        arch: The target, with what the package knows of the GPU.
        sm_count: SMs of the GPU.
    """
    space = find_space("gemm", arch)
    found = []
    for kind in KINDS:
        for problem in draw(kind, args.count if kind == next(iter(KINDS)) else args.others, args.seed):
            config = look_up(None, problem, space, sm_count, "none").config
            assert config is not None
            left = [look_up(None, problem, space, sm_count, f).config is None for f in FALLBACKS]
            named = tuple(name for name, is_left in zip(FALLBACKS, left, strict=True) if is_left)
            found.append(Asked(kind, problem, config, named))
    random.Random(args.seed).shuffle(found)
    return found


class Runner:
    """Measures answers on one GPU.

    Args:
        bench: The measuring process.
        device: The GPU.
        kernels: Where compiled kernels are.
        policy: How they are timed.
    """

    def __init__(self, bench: Bench, device: Device, kernels: Kernels, policy: Policy) -> None:
        self._bench = bench
        self._device = device
        self._kernels = kernels
        self._policy = policy
        self._checked: set[Path] = set()

    def row(self, one: Asked) -> dict[str, Json]:
        """Return the record of one product.

        Raises:
            CutegenError: It cannot be measured, or the kernel is wrong.
        """
        candidate = compiled_candidate(self._kernels, self._device, "cutegen", one.problem, one.config)
        self._bench.open(one.problem)
        if candidate.shared_object not in self._checked:
            result = self._bench.check(candidate, repeats=0)
            if not result.ok:
                raise CutegenError(f"{one.problem}: {one.config}: {result.error}")
            self._checked.add(candidate.shared_object)
        run = self._bench.time([candidate], self._policy)
        if failure := run.failures.get(candidate.name):
            raise CutegenError(f"{one.problem}: {one.config}: {failure.error}")
        timing = run[candidate.name]
        assert timing.ratio is not None
        return {
            "kind": one.kind,
            "problem": str(one.problem),
            "m": one.problem.m,
            "config": str(one.config),
            "kernel_us": round(timing.median_us, 3),
            "reference": run.reference.reference,
            "reference_us": round(run.reference.median_us, 3),
            "ratio": round(timing.ratio, 4),
            "left_to_torch": list(one.left_to_torch),
        }


def run(args: argparse.Namespace) -> int:
    """Measure, print and write."""
    begun, device = time.monotonic(), present_device()
    store = Store.at(args.cache_dir)
    everything = asked(args, packaged_arch(device), device.sm_count)
    compilation = Compilation(store, device.arch, [(one.problem, one.config) for one in everything])
    compilation.begin()
    if args.compile_only:
        print(f"compiled {compilation.finish()}", flush=True)
        return EXIT_OK
    policy = Policy(
        rounds=args.rounds,
        min_rounds=args.rounds,
        round_us=2000.0,
        settle_s=args.settle,
        context=args.context,
    )
    drawing: dict[str, Json] = {"seed": args.seed, "drawn": len(everything)}
    found = DrawnRows(UNTUNED, device, args.commit, policy, drawing)
    with Bench() as bench:
        bench.start()
        compilation.finish()
        runner = Runner(bench, device, Kernels(store, build="allow"), policy)
        for one in everything:
            if time.monotonic() - begun > args.stop_after:
                break
            if not found.take(partial(runner.row, one)):
                continue
            print(_line(found.rows[-1]), flush=True)
            if len(found.rows) % 20 == 0:
                write_json(args.out, found.document())
    write_json(args.out, found.document())
    return EXIT_NO_WINNER if found.failures else EXIT_OK


def _line(row: Mapping[str, Json]) -> str:
    left = ",".join(map(str, row["left_to_torch"])) if isinstance(row["left_to_torch"], list) else ""
    return f"{row['ratio']:.3f} {row['kernel_us']:9.2f} us  {row['problem']}  {row['config']}  {left}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_out_argument(parser, required=True)
    parser.add_argument("--count", type=positive_int, default=300, help="products of the first kind (300)")
    parser.add_argument("--others", type=positive_int, default=20, help="of each other kind (20)")
    parser.add_argument("--context", choices=CONTEXTS, default=DEFAULT_CONTEXT)
    parser.add_argument("--settle", type=positive_float, default=0.1, help="longest burn-in in seconds (0.1)")
    parser.add_argument("--compile-only", action="store_true", help="leave kernels in the cache")
    add_drawing_arguments(parser, rounds=9)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = _parser().parse_args(argv)
    return run_command(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
