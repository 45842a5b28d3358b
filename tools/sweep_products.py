"""Time the kernels that the model puts first on products drawn at random, beside the library's call.

What tools/bench_untuned.py judges, the fit may learn from: each product is timed with the first few default
kernels by the model and with some from further behind, all in the same rounds. More products have many rows
than few, since there the choice is harder. The first kernels run with their tiles in the other order as well,
where that makes a difference: what the order is worth is a rule beside the fit.

    python tools/sweep_products.py --seed 5 --stop-after 110 --out docs/results/gemm_products_h200.json.xz
    python tools/sweep_products.py --least-rows 600 --every-order --out RESULTS.json.xz

Each kernel is checked against fp64 the first time that it is timed. tools/fit_gemm.py reads the file.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutegen.arch import Arch, find_arch
from cutegen.build.store import Store
from cutegen.cli.args import file_path, positive_float, positive_int
from cutegen.cli.exit_codes import EXIT_NO_WINNER, EXIT_OK, run_command
from cutegen.digest import Json
from cutegen.families.gemm.perf_model.gpu_params import find_machine
from cutegen.families.gemm.perf_model.kernel_set import kernel_set
from cutegen.families.gemm.perf_model.traffic import Tiling
from cutegen.families.gemm.perf_model.wave_order import orders_of
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space, parse_problem
from cutegen.measure import Bench
from cutegen.measure.context import BACK_TO_BACK, CONTEXTS
from cutegen.measure.device import Device, present_device
from cutegen.measure.policy import Policy
from cutegen.records.calibrations import packaged_arch
from cutegen.runtime.kernel_cache import Kernels
from cutegen.space import Config, Space, as_flag
from tools.benchmark.compiled import compiled_candidate
from tools.benchmark.drawn import DrawnRows, add_drawing_arguments
from tools.benchmark.few_candidates import Compilation
from tools.benchmark.model_products import draw
from tools.benchmark.orders_table import SWEEP_OF_PRODUCTS

#: Products of each kind in a hundred of the first, and the rows of most of them.
_OTHERS = {
    "bf16 kn": 9,
    "bf16 mn": 16,
    "bf16 mk": 16,
    "bf16 kk bias": 5,
    "bf16 kk bias silu": 5,
    "bf16 kk beta": 4,
    "fp16 kk": 2,
}
_FEW, _MANY, _OF_MANY = (1, 32), (33, 8192), 0.8
#: Products that take longer are left out: they teach no more than smaller ones.
_MOST_FLOPS = 4e12
#: Of the kernels of a product so many are drawn from those that follow the first ones.
_DRAWN, _DRAWN_OF = 2, 16
#: Of the first kernels so many run in the other order too, where both axes have several tiles.
_REORDERED = 2


@dataclass
class Plan:
    """What is timed: products in order, each with its configs."""

    asked: list[tuple[str, Problem, list[Config]]] = field(default_factory=list)

    @classmethod
    def asked_for(cls, args: argparse.Namespace, arch: Arch, sm_count: int) -> Plan:
        """Return what the command line names, or draws."""
        return cls.of(args, arch, sm_count) if args.plan is None else cls.read(args.plan)

    @classmethod
    def of(cls, args: argparse.Namespace, arch: Arch, sm_count: int) -> Plan:
        """Return products of all kinds, the first kind's first: while they are timed the others compile."""
        plan, space = cls(), find_space("gemm", arch)
        rng = random.Random(args.seed)
        for kind, share in {"bf16 kk": 100, **_OTHERS}.items():
            count = max(1, args.count * share // 100)
            many = round(_OF_MANY * count)
            many_rows = (max(_MANY[0], args.least_rows), _MANY[1])
            drawn = draw(kind, many, args.seed, many_rows)
            drawn += [] if args.least_rows > _FEW[1] else draw(kind, count - many, args.seed, _FEW)
            rng.shuffle(drawn)
            for problem in drawn:
                if problem.flops <= _MOST_FLOPS:
                    best = kernel_set(space, problem, sm_count).by_time(problem, rest=False)
                    likely = [config for _, config in islice(best, args.kernels + _DRAWN_OF)]
                    rest = likely[args.kernels :]
                    configs = likely[: args.kernels] + rng.sample(rest, min(_DRAWN, len(rest)))
                    order = every_order if args.every_order else reordered
                    configs += order(space, problem, sm_count, configs[:_REORDERED])
                    plan.asked.append((kind, problem, configs))
        return plan

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Return what a file names: a JSON list of products, each with a list of configs."""
        asked = [
            (parse_problem(words), [Config.parse(text) for text in configs])
            for words, configs in json.loads(path.read_text(encoding="utf-8"))
        ]
        return cls(
            [(" ".join(str(p).split()[2:]), p, configs) for p, configs in asked if isinstance(p, Problem)]
        )

    def wanted(self, first: bool) -> list[tuple[Problem, Config]]:
        """Return problems with configs to be compiled: those of the first kind, or of the others."""
        return [
            (problem, config)
            for kind, problem, configs in self.asked
            if (kind == self.asked[0][0]) == first
            for config in configs
        ]


def reordered(space: Space, problem: Problem, sm_count: int, configs: Sequence[Config]) -> list[Config]:
    """Return those of ``configs`` whose order of tiles matters, with the other order."""
    tiling, found = Tiling(problem, sm_count, find_machine(space.arch)), []
    for config in configs:
        if tiling.geometry(config).has_orders:
            found.append(config.replace(raster_along_m=not as_flag(config["raster_along_m"])))
    return found


def every_order(space: Space, problem: Problem, sm_count: int, configs: Sequence[Config]) -> list[Config]:
    """Return ``configs`` in all other orders, where both axes have several clusters of tiles."""
    tiling, found = Tiling(problem, sm_count, find_machine(space.arch)), []
    orders = orders_of(space.domains["swizzle_size"], space.domains["raster_along_m"])
    for config in configs:
        if tiling.geometry(config).has_orders:
            others = (config.replace(swizzle_size=size, raster_along_m=along) for size, along in orders)
            found += [other for other in others if other != config]
    return found


class Runner:
    """Measures products on one GPU; keeps which kernels were found wrong.

    Args:
        bench: The measuring process.
        device: The GPU.
        kernels: Where compiled kernels are.
        policy: How they are timed.
    """

    def __init__(self, bench: Bench, device: Device, kernels: Kernels, policy: Policy) -> None:
        self._bench, self._device, self._kernels, self._policy = bench, device, kernels, policy
        self._checked: dict[Path, bool] = {}

    def row(self, kind: str, problem: Problem, configs: Sequence[Config]) -> dict[str, Json]:
        """Return the record of one product; raises :class:`CutegenError`."""
        self._bench.open(problem)
        candidates, named = [], {}
        for at, config in enumerate(configs):
            candidate = compiled_candidate(self._kernels, self._device, f"c{at}", problem, config)
            if candidate.shared_object not in self._checked:
                result = self._bench.check(candidate, repeats=0)
                self._checked[candidate.shared_object] = result.ok
                if not result.ok:
                    print(f"{problem}: {config}: {result.error}", file=sys.stderr)
            if self._checked[candidate.shared_object]:
                candidates.append(candidate)
                named[candidate.name] = config
        run = self._bench.time(candidates, self._policy)
        reference_us = run.reference.median_us
        points: list[Json] = []
        for name, timing in run.items():
            if name in named and timing.ratio is not None:
                points.append({"config": str(named[name]), "us": round(reference_us / timing.ratio, 3)})
        return {
            "kind": kind,
            "problem": str(problem),
            "reference": run.reference.reference,
            "reference_us": round(reference_us, 3),
            "points": points,
        }


def run(args: argparse.Namespace) -> int:
    """Measure, print and write."""
    begun = time.monotonic()
    if args.dry_run:
        plan = Plan.asked_for(args, find_arch("sm_90a"), find_arch("sm_90a").nominal_sm_count)
        _describe(plan)
        return EXIT_OK
    device = present_device()
    store = Store.at(args.cache_dir)
    plan = Plan.asked_for(args, packaged_arch(device), device.sm_count)
    _describe(plan)
    policy = Policy(
        rounds=args.rounds,
        min_rounds=args.rounds,
        round_us=1500.0,
        settle_s=args.settle,
        context=args.context,
    )
    first, others = (Compilation(store, device.arch, plan.wanted(is_first)) for is_first in (True, False))
    first.begin()
    if args.compile_only:
        others.begin()
        print(f"compiled {first.finish()}, {others.finish()} at {time.monotonic() - begun:.1f} s", flush=True)
        return EXIT_OK
    drawing: dict[str, Json] = {"seed": args.seed, "drawn": args.count}
    found = DrawnRows(SWEEP_OF_PRODUCTS, device, args.commit, policy, drawing)
    with Bench() as bench:
        bench.start()
        first.finish()
        print(f"compiled the first kind's at {time.monotonic() - begun:.1f} s", flush=True)
        others.begin()
        runner, waiting = Runner(bench, device, Kernels(store, build="allow"), policy), True
        for kind, problem, configs in _by_turns(plan, begun, args.stop_after):
            if waiting and kind != plan.asked[0][0]:
                others.finish()
                waiting = False
                print(f"compiled all at {time.monotonic() - begun:.1f} s", flush=True)
            found.take(partial(runner.row, kind, problem, configs), str(problem))
            if len(found.rows) % 40 == 0:
                print(f"{time.monotonic() - begun:6.1f} s, {len(found.rows)} products, {problem}", flush=True)
                _write(args.out, found)
        if waiting:
            others.finish()
    _write(args.out, found)
    return EXIT_NO_WINNER if found.failures else EXIT_OK


def _by_turns(plan: Plan, begun: float, stop_after: float) -> Any:
    """Yield the first kind's products for its share of the time, then the others, while there is time."""
    first = plan.asked[0][0]
    shares = [sum((kind == first) == is_first for kind, _, _ in plan.asked) for is_first in (True, False)]
    end_of_first = stop_after * shares[0] / sum(shares)
    order = random.Random(0).sample([a for a in plan.asked if a[0] != first], shares[1])
    for kind, problem, configs in [*(a for a in plan.asked if a[0] == first), *order]:
        now = time.monotonic() - begun
        if now < (end_of_first if kind == first else stop_after):
            yield kind, problem, configs


def _describe(plan: Plan) -> None:
    space = find_space("gemm", find_arch("sm_90a"))
    kernels = {
        is_first: {(p.signature, space.compile_view(c)) for p, c in plan.wanted(is_first)}
        for is_first in (True, False)
    }
    points = sum(len(configs) for _, _, configs in plan.asked)
    counts = [len(kernels[is_first]) for is_first in (True, False)]
    print(f"{len(plan.asked)} products, {points} points, {counts[0]} and {counts[1]} kernels", flush=True)


def _write(path: Path, found: DrawnRows) -> None:
    text = json.dumps(found.document(), separators=(",", ":")).encode()
    path.write_bytes(lzma.compress(text) if path.suffix == ".xz" else text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=file_path, required=True, metavar="FILE.json[.xz]")
    parser.add_argument("--count", type=positive_int, default=600, help="products of the first kind (600)")
    parser.add_argument("--kernels", type=positive_int, default=5, help="of each, beside two by chance (5)")
    parser.add_argument("--plan", type=Path, metavar="FILE.json", help="products and configs to time instead")
    parser.add_argument("--least-rows", type=positive_int, default=1, metavar="M", help="of a product (1)")
    parser.add_argument("--every-order", action="store_true", help="first kernels run in all orders of tiles")
    parser.add_argument("--context", choices=CONTEXTS, default=BACK_TO_BACK, help="what runs before a launch")
    parser.add_argument("--settle", type=positive_float, default=0.03, help="longest burn-in, seconds (0.03)")
    parser.add_argument("--compile-only", action="store_true", help="leave kernels in the cache")
    parser.add_argument("--dry-run", action="store_true", help="say what would be measured")
    add_drawing_arguments(parser, rounds=3)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = _parser().parse_args(argv)
    return run_command(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
