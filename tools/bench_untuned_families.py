"""Measure what families answer to sizes that nobody tuned, beside their best configs.

    python tools/bench_untuned_families.py --seed 3 --out docs/results/untuned_families.json

For each family, widths (or heads) and numbers of rows are drawn at random; options are the family's own. The
default config is timed beside the others that a search would try, in the same rounds and in the launch
context for which winners are chosen. Each kernel is checked against fp64 first, on few rows. How launches
overlap is left as the default has it, unless ``--set`` names that knob, too.

    python tools/bench_untuned_families.py gated_gemm --candidates 12 --cache-dir DIR --compile-for sm_90a

only compiles, where there need be no GPU.

    python tools/bench_untuned_families.py gemm --most-rows 4 --widths 40 --sizes 40 --out FILE.json

has GEMMs of few rows, and as many kernels without tensor cores as with them.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import zip_longest
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutegen.arch import Arch, find_arch
from cutegen.build.store import Store
from cutegen.cli.args import parse_fixed, positive_int
from cutegen.cli.exit_codes import EXIT_NO_WINNER, EXIT_OK, run_command
from cutegen.digest import Json
from cutegen.errors import CutegenError, UsageError
from cutegen.families.registry import find_family, find_space, parse_problem, space_of
from cutegen.family import Problem
from cutegen.measure import Bench
from cutegen.measure.device import Device, present_device
from cutegen.measure.policy import Policy
from cutegen.measure.statistics import geometric_mean
from cutegen.records.calibrations import packaged_arch
from cutegen.runtime.kernel_cache import Kernels
from cutegen.search.defaults import default_config, strategy_of
from cutegen.search.strategies import rank
from cutegen.space import Config, Space, Value
from tools.benchmark.arguments import add_out_argument
from tools.benchmark.compiled import compiled_candidate
from tools.benchmark.drawn import DrawnRows, add_brief_arguments, add_drawing_arguments, brief_policy
from tools.benchmark.family_child import BARE_ENGINE
from tools.benchmark.few_candidates import Compilation, few_candidates
from tools.benchmark.results import write_json
from tools.benchmark.untuned_table import UNTUNED_FAMILIES

#: Rows of the problems on which kernels are checked, of each group: the fewest of these for which a config is
#: valid.
_FEW = (64, 640)
#: Most bytes of problems that are timed, and most operations of products, whose weights weigh most.
_MOST_BYTES, _MOST_FLOPS = 2**29, 10**12
#: Most elements of all weights of a product.
_MOST_WEIGHTS = 2**29
#: Most rows that are drawn. Source: judgement, a long prompt of a large batch.
_MOST_ROWS = 65_536


def _width(low: int, high: int) -> Callable[[random.Random], str]:
    """Return what draws a width between ``low`` and ``high``, even over the doublings; one in six is odd."""

    def draw(chance: random.Random) -> str:
        n = 8 * round(math.exp(chance.uniform(math.log(low / 8), math.log(high / 8))))
        return str(n - 1 if chance.random() < 1 / 6 else n)

    return draw


def _heads(chance: random.Random) -> str:
    keys = chance.choice((1, 2, 4, 8))
    extent = chance.choice((64, 80, 96, 128, 256))
    return f"{keys * chance.choice((1, 4, 5, 8))}x{keys}x{extent}x{extent // chance.choice((2, 4))}x1"


def _even(chance: random.Random, low: int, high: int, step: int) -> int:
    """Return a multiple of ``step``, even over the doublings between two numbers."""
    return step * round(math.exp(chance.uniform(math.log(low / step), math.log(high / step))))


def _product(chance: random.Random) -> str:
    """Return columns and depth of a product; the columns are odd once in six."""
    return f"{_width(512, 32_768)(chance)}x{_even(chance, 512, 16_384, 64)}"


def _grouped(chance: random.Random, weights: int = 1) -> str:
    """Return columns, depth and groups of a product, all weights together no larger than those of models."""
    n, k = int(_width(512, 8_192)(chance)), _even(chance, 512, 8_192, 64)
    return f"{n}x{k}x{_even(chance, 2, min(256, _MOST_WEIGHTS // (weights * n * k)), 1)}"


#: What draws the sizes behind the first, by family.
DRAWS: Mapping[str, Callable[[random.Random], str]] = {
    "rmsnorm": _width(128, 131_072),
    "rmsnorm_quantized": _width(512, 65_536),
    "layernorm": _width(128, 131_072),
    "softmax": _width(64, 262_144),
    "cross_entropy": _width(1000, 262_144),
    "gated": _width(512, 32_768),
    "gated_backward": _width(512, 32_768),
    "activation": _width(512, 32_768),
    "activation_backward": _width(512, 32_768),
    "rope": _heads,
    "gemm": _product,
    "gated_gemm": _product,
    "grouped_gemm": _grouped,
    "grouped_gated_gemm": partial(_grouped, weights=2),
}
#: Options that say more than a family's defaults do, of which one is drawn for each width.
_OPTIONS = {
    "gemm": (" kk",),
    "cross_entropy": (" gradient",),
    "grouped_gemm": ("", " tokens=zipf"),
    "grouped_gated_gemm": ("", " tokens=zipf"),
}


def drawn(family: str, widths: int, sizes: int, seed: int, most_rows: int = _MOST_ROWS) -> list[Problem]:
    """Return problems of so many widths and sizes, a width's together, of at most ``most_rows``."""
    chance = random.Random(f"{family} {seed}")
    found = []
    for at in range(widths):
        width, known = DRAWS[family](chance), _OPTIONS.get(family, ("",))
        options = chance.choice(known) if len(known) > 1 else known[0]
        one = parse_problem(f"{family} 1x{width} bf16{options}")
        most = math.log(max(1, min(most_rows, _most_rows(one))))
        count = sizes // widths + (at < sizes % widths)
        found += [one.with_sizes(m=round(math.exp(chance.uniform(0, most)))) for _ in range(count)]
    return found


def _most_rows(one: Problem) -> int:
    """Return how many rows a problem like ``one``, of one row, may have."""
    products = find_family(one.family).metric == "TFLOP/s"
    return _MOST_FLOPS // one.flops if products else _MOST_BYTES // one.min_bytes


def asked(
    problem: Problem,
    arch: Arch,
    sm_count: int,
    most: int,
    fixed: Mapping[str, Sequence[Value]] | None = None,
    vary: str = "",
) -> list[Config]:
    """Return the default config and the others that are tried, at most ``most``.

    Of knobs in ``fixed`` that the family has, only these values. With ``vary``, all that differ from the
    default in that knob alone.
    """
    space = find_space(problem.family, arch)
    default = default_config(space, problem, sm_count)
    if vary:
        return _varied(space, problem, default, vary)
    overlap = next(knob for knob in ("pdl", "use_pdl") if knob in default)
    kept = {knob: values for knob, values in (fixed or {}).items() if knob in space.domains}
    kept = {overlap: [default[overlap]], **kept}
    if strategy_of(space) is not None:
        return few_candidates(space, problem, sm_count, most, kept)
    found = rank(space, problem, sm_count, most, kept, default=default)
    return list(dict.fromkeys([default, *found]))[:most]


def _varied(space: Space, problem: Problem, default: Config, knob: str) -> list[Config]:
    values = space.domains[knob] if knob in default else ()
    found = [default, *(default.replace(**{knob: value}) for value in values)]
    return [config for config in dict.fromkeys(found) if not space.explain(problem, config)]


def _plan(args: argparse.Namespace, arch: Arch, sm_count: int) -> dict[str, dict[Problem, list[Config]]]:
    """Return what is tried of each problem, by family; models take some tenths of a second for each."""
    families = args.families or list(DRAWS)
    if unknown := [family for family in families if family not in DRAWS]:
        raise UsageError(f"sizes of {unknown[0]} cannot be drawn; valid: {', '.join(DRAWS)}")
    problems = {
        family: drawn(family, args.widths, args.sizes, args.seed, args.most_rows) for family in families
    }
    ask = partial(
        _asked_words,
        arch=arch,
        sm_count=sm_count,
        most=args.candidates,
        fixed=parse_fixed(args.set),
        vary=args.vary,
    )
    lines = [str(problem) for each in problems.values() for problem in each]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        known = dict(zip(lines, pool.map(ask, lines), strict=True))
    return {f: {p: [*map(Config.parse, known[str(p)])] for p in each} for f, each in problems.items()}


def _asked_words(
    line: str, arch: Arch, sm_count: int, most: int, fixed: Mapping[str, Sequence[Value]], vary: str
) -> list[str]:
    """Return the configs of :func:`asked` as text, which processes can hand to one another."""
    return [str(config) for config in asked(parse_problem(line), arch, sm_count, most, fixed, vary)]


def _compilation(args: argparse.Namespace, arch: Arch, plan: Mapping[str, Any]) -> Compilation:
    store = Store.at(args.cache_dir)
    pairs = [(p, c) for each in plan.values() for p, configs in each.items() for c in configs]
    return Compilation(store, arch, pairs)


def compile_only(args: argparse.Namespace) -> int:
    """Compile what :func:`run` times of the same arguments, and print how many kernels there are."""
    arch = find_arch(args.compile_for)
    compilation = _compilation(args, arch, _plan(args, arch, arch.nominal_sm_count))
    compilation.begin()
    good, bad = compilation.finish()
    print(f"{good} kernels for {arch}, {bad} could not be compiled")
    return EXIT_NO_WINNER if bad else EXIT_OK


class Runner:
    """Measures answers on one GPU.

    Args:
        bench: The measuring process.
        device: The GPU.
        kernels: Where compiled kernels are.
        policy: How they are timed.
    """

    def __init__(self, bench: Bench, device: Device, kernels: Kernels, policy: Policy) -> None:
        self._bench, self._device, self._kernels, self._policy = bench, device, kernels, policy
        self._checked: set[tuple[Problem, Config]] = set()

    def row(self, problem: Problem, configs: Sequence[Config]) -> dict[str, Json]:
        """Return the record of one problem, whose default leads ``configs``.

        Raises:
            CutegenError: It cannot be measured, or a kernel is wrong.
        """
        self._check(problem, configs)
        self._bench.open(problem)
        named = {config.digest: config for config in configs}
        entries = [
            compiled_candidate(self._kernels, self._device, name, problem, config)
            for name, config in named.items()
        ]
        run = self._bench.time(entries, self._policy)
        if run.failures:
            raise CutegenError(f"{problem}: {next(iter(run.failures.values())).error}")
        times = {named[name]: timing.steady_us or timing.median_us for name, timing in run.timings.items()}
        best = min(times, key=lambda config: times[config])
        return {
            "problem": str(problem),
            "default": str(configs[0]),
            "default_us": round(times[configs[0]], 3),
            "best": str(best),
            "best_us": round(times[best], 3),
            "tried": len(configs),
            "times": {str(config): round(us, 3) for config, us in times.items()},
            "ratio": round(times[best] / times[configs[0]], 4),
        }

    def _check(self, problem: Problem, configs: Sequence[Config]) -> None:
        """See that kernels are right on few rows, each once for its signature."""
        arch, signature = self._device.arch, problem.with_sizes(m=1)
        few = (m * problem.sizes.get("g", 1) for m in _FEW)
        some = [*(problem.with_sizes(m=min(m, problem.sizes["m"])) for m in few), problem]
        opened = None
        for config in (config for config in configs if (signature, config) not in self._checked):
            space = space_of(config, problem.family, arch)
            one = next(each for each in some if not space.explain(each, config))
            if one != opened:
                self._bench.open(one)
                opened = one
            found = self._bench.check(
                compiled_candidate(self._kernels, self._device, "kernel", one, config), repeats=0
            )
            if not found.ok:
                raise CutegenError(f"{one}: {config}: {found.error}")
            self._checked.add((signature, config))


def run(args: argparse.Namespace) -> int:
    """Measure, print and write."""
    if args.out is None:
        raise UsageError("--out is missing: give the results file, or --compile-for to compile only")
    begun, device = time.monotonic(), present_device()
    store = Store.at(args.cache_dir)
    plan = _plan(args, packaged_arch(device), device.sm_count)
    compilation = _compilation(args, device.arch, plan)
    compilation.begin()
    policy = brief_policy(args)
    found = DrawnRows(UNTUNED_FAMILIES, device, args.commit, policy, _drawing(args))
    with Bench(engine=BARE_ENGINE) as bench:
        bench.start()
        compilation.finish()
        runner = Runner(bench, device, Kernels(store, build="allow"), policy)
        for some in zip_longest(*plan.values()):  # whoever stops early has some of every family
            for problem in some:
                if problem is None or time.monotonic() - begun > args.stop_after:
                    continue
                found.take(partial(runner.row, problem, plan[problem.family][problem]))
            write_json(args.out, found.document())
    for family in plan:
        ratios = [
            float(str(row["ratio"])) for row in found.rows if str(row["problem"]).startswith(f"{family} ")
        ]
        if ratios:
            print(f"{family}: {len(ratios)} sizes, {geometric_mean(ratios):.3f}, smallest {min(ratios):.3f}")
    return EXIT_NO_WINNER if found.failures else EXIT_OK


def _drawing(args: argparse.Namespace) -> dict[str, Json]:
    sizes: dict[str, Json] = {"seed": args.seed, "sizes": args.sizes, "widths": args.widths}
    more: dict[str, Json] = {"most_rows": args.most_rows} if args.most_rows != _MOST_ROWS else {}
    return {**sizes, **more, **({"set": args.set} if args.set else {})}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(DRAWS)} (all)")
    add_out_argument(parser)
    parser.add_argument("--sizes", type=positive_int, default=50, help="of each family (50)")
    parser.add_argument("--widths", type=positive_int, default=8, help="signatures of each family (8)")
    parser.add_argument("--most-rows", type=positive_int, default=_MOST_ROWS, help="of a size (%(default)s)")
    parser.add_argument("--candidates", type=positive_int, default=16, help="configs of each size (16)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KNOB=V1,V2",
        help="try only these values, in families that have the knob, beside the default; repeatable",
    )
    parser.add_argument(
        "--vary",
        default="",
        metavar="KNOB",
        help="try the default with each value of this knob, and no others",
    )
    add_brief_arguments(parser, round_us=1000)
    parser.add_argument(
        "--compile-for", metavar="ARCH", help="only compile what is timed, for a target such as sm_90a"
    )
    add_drawing_arguments(parser, rounds=7)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = _parser().parse_args(argv)
    return run_command(lambda: run(args) if args.compile_for is None else compile_only(args))


if __name__ == "__main__":
    sys.exit(main())
