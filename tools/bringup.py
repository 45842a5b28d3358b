"""The first hour on a GPU: try its kernels in tiers, stop at the first broken one, name the knob at fault.

Tiers: one tile; tails (odd sizes, layouts, batches, epilogues); every knob (every value of it); races (many
runs that must give equal bits); full list (random problems and configs, and a file of shapes). Each trial is
compiled and checked like any candidate of a tuning run: in a child process, on poisoned outputs, with a limit
of time. A tier passes if all its trials are ok.

    python tools/bringup.py --out results/bringup.json
    python tools/bringup.py --family gemm_blockscaled             (mxfp8 and nvfp4, for B200 and B300)
    python tools/bringup.py --dry-run --arch sm_100a              (no GPU: list tiers and counts)
    python tools/bringup.py --arch sm_100a --export bringup.tar   (no GPU: compile what the tiers need)
    python tools/bringup.py --import bringup.tar                  (no compiler; cutegen.tune bundles will do)
    python tools/bringup.py --break "own block's arrivals"        (Hopper: rehearse with a broken template)

exit codes: 0 all tiers pass (or: listed, or exported); 1 a tier is broken, and what was found explains all
its failures; 4 a tier is broken, and some failure has no explanation; 2 bad usage; 3 no usable GPU or no
compiler; 130 interrupted
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cutegen.arch import Arch, find_arch
from cutegen.build import Artifact, Builder, Toolchain
from cutegen.build.store import Store
from cutegen.cli.args import add_cache_argument, positive_float, positive_int
from cutegen.cli.exit_codes import run_command
from cutegen.errors import DeviceError, UsageError
from cutegen.families.gemm.problem import Problem as GemmProblem
from cutegen.families.registry import find_space
from cutegen.families.shapes import read_shapes
from cutegen.family import Problem
from cutegen.measure import Bench
from cutegen.measure.device import Device, present_device
from cutegen.space import Config, Space
from cutegen.tuning.transfer import Imported, import_candidates, write_candidates
from tools.benchmark.arguments import add_commit_argument, add_out_argument
from tools.benchmark.environment import ROOT
from tools.benchmark.kernel_store import kernel_store
from tools.benchmark.results import write_json
from tools.bringup_parts.climb import Outcome, document, reporter, run_tiers, size_of
from tools.bringup_parts.lab import Edit, Kernels, Lab
from tools.bringup_parts.tiers import Scope, Tier, kernels_of, plan
from tools.schedule.breaks import BREAKS, Break

EXIT_OK, EXIT_NAMED, EXIT_UNNAMED = 0, 1, 4
SHAPES = ROOT / "tools" / "shapes"
#: The file of shapes of each family, unless another one is named.
SHAPES_OF = {"gemm": SHAPES / "gemm_dev.toml", "gemm_blockscaled": SHAPES / "gemm_blockscaled.toml"}


def find_break(name: str, arch: Arch) -> Break:
    """Return the edit whose name is, or alone contains, ``name``.

    Raises:
        UsageError: There is none, more than one, or the target is another one.
    """
    if arch.name != "sm_90a":
        raise UsageError(f"--break edits kernels for sm_90a, not for {arch}")
    exact = [each for each in BREAKS if each.name == name]
    found = exact or [each for each in BREAKS if name in each.name]
    if len(found) != 1:
        names = "; ".join(each.name for each in found or BREAKS)
        raise UsageError(f"--break {name!r} names {len(found)} edits; valid: {names}")
    return found[0]


def edit_of(each: Break) -> Edit:
    """Return what applies a break to the text of any kernel that has the place."""
    return lambda text: text.replace(each.old, each.new)


def bench_of(timeout_s: float) -> Bench:
    """Return the bench that checks the trials."""
    return Bench(timeout_s=timeout_s)


def scope_of(args: argparse.Namespace) -> Scope:
    """Return how much is to be tried."""
    named = read_shapes(args.shapes or SHAPES_OF[args.family], args.family)
    shapes = tuple(item.problem for item in named if isinstance(item.problem, GemmProblem))
    return Scope(args.repeats, args.races, args.pairs, shapes, args.seed)


def list_tiers(space: Space, tiers: Sequence[Tier]) -> int:
    """Print the tiers and what they need."""
    for number, tier in enumerate(tiers, 1):
        print(f"tier {number}, {tier.name} on {space.arch}: {size_of(tier, space)}")
    points = [point for tier in tiers for point in tier.points]
    print(f"in all {len(points)} trials, {kernels_of(space, points)} kernels")
    return EXIT_OK


def export(path: Path, space: Space, tiers: Sequence[Tier], store: Store) -> int:
    """Compile what the tiers need and write it into a bundle."""
    compiled: dict[Problem, dict[Config, str]] = {}
    with Builder(store) as builder:
        kernels = Kernels(builder, space.arch)
        points = [point for tier in tiers for point in tier.points]
        kernels.provide(points)
        for point in points:
            result = kernels.find(point)
            if isinstance(result, Artifact):
                compiled.setdefault(point.problem, {})[point.config] = result.key
            else:
                print(f"  build_failed: {point} {getattr(result, 'message', '')}")
        count = write_candidates(path, store, space.arch, builder.toolchain, compiled)
    print(f"exported {count} compiled kernels to {path}")
    return EXIT_OK


def bring_up(
    device: Device, store: Store, imported: Imported | None, args: argparse.Namespace, scope: Scope
) -> int:
    """Run the tiers on the present GPU."""
    space = find_space(args.family, device.arch)
    edit = edit_of(find_break(args.breaks, device.arch)) if args.breaks else None
    toolchain = imported.toolchain if imported else Toolchain.current()
    tiers = plan(space, scope, imported.candidates if imported else None)
    print(f"bringing up {args.family} on {device.name} ({device.arch}, {device.sm_count} SMs)")
    with Builder(store, toolchain) as builder, bench_of(args.timeout) as bench:
        kernels = Kernels(builder, device.arch, compiles=imported is None, edit=edit)
        lab = Lab(kernels, bench, space, device.sm_count, reporter(space))
        if imported is not None:
            tiers = kernels.at_hand(tiers)
        outcome = Outcome(tiers, [], [])

        def save(outcome: Outcome) -> None:
            if args.out is not None:
                write_json(args.out, document(args, device, lab.records, outcome))

        try:
            for outcome in run_tiers(lab, tiers, space, args):
                save(outcome)
        finally:
            save(outcome)
    if args.breaks:
        print(f"{sum(r.edited for r in lab.records)} of {len(lab.records)} trials had the broken place")
    if not outcome.ran:
        raise UsageError(f"bundle {args.bundle} has no kernel that any tier can try")
    if not outcome.broken:
        print(f"all {len(outcome.ran)} tiers passed")
        return EXIT_OK
    print(f"tier {outcome.broken} is broken; {len(outcome.verdicts)} findings")
    return EXIT_NAMED if outcome.explained else EXIT_UNNAMED


def _run(args: argparse.Namespace) -> int:
    if args.breaks and args.bundle:
        raise UsageError("--break edits kernels before they are compiled; it does not go with --import")
    scope = scope_of(args)
    with kernel_store(args.cache_dir) as store:
        if args.dry_run or args.export:
            arch = find_arch(args.arch) if args.arch else present_device().arch
            space = find_space(args.family, arch)
            tiers = plan(space, scope)
            return list_tiers(space, tiers) if args.dry_run else export(args.export, space, tiers, store)
        device = present_device()

        def require(arch: Arch) -> None:
            if arch != device.arch:
                raise DeviceError(f"kernels are for {arch}, the GPU is {device.name} ({device.arch})")

        require(find_arch(args.arch) if args.arch else device.arch)
        imported = import_candidates(args.bundle, store, require) if args.bundle else None
        return bring_up(device, store, imported, args, scope)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", choices=sorted(SHAPES_OF), default="gemm", help="whose kernels")
    parser.add_argument("--arch", help="target (default: the present GPU's)")
    parser.add_argument("--dry-run", action="store_true", help="list tiers and counts; no GPU")
    parser.add_argument("--export", type=Path, metavar="FILE.tar", help="compile what the tiers need; no GPU")
    parser.add_argument(
        "--import", type=Path, metavar="FILE.tar", dest="bundle", help="kernels from a bundle"
    )
    parser.add_argument("--break", dest="breaks", default="", metavar="NAME", help="break kernels on purpose")
    parser.add_argument("--repeats", type=positive_int, default=50, help="further runs of the tier of races")
    parser.add_argument("--races", type=positive_int, default=60, help="kernels of that tier")
    parser.add_argument("--pairs", type=positive_int, default=200, help="random pairs of the full list")
    parser.add_argument("--shapes", type=Path, help="shapes of the full list (default: the family's own)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--enough", type=positive_int, default=8, help="failures after which a tier is left")
    parser.add_argument("--findings", type=positive_int, default=3, help="faults to look for in it")
    parser.add_argument("--timeout", type=positive_float, default=10.0, help="seconds for one check")
    add_cache_argument(parser, "compiled kernels", default="a temporary folder")
    add_out_argument(parser)
    add_commit_argument(parser)
    args = parser.parse_args(arguments)
    return run_command(lambda: _run(args))


if __name__ == "__main__":
    raise SystemExit(main())
