"""Simulate the schedule of random configs of a space: who waits for whom, under many orders of events.

Needs no GPU and no compiler. Configs whose kernels synchronise alike are simulated once. The barriers of each
kernel's rendered text are compared with those that are simulated.

    python tools/simulate_space.py --pairs 500 --seed 1
    python tools/simulate_space.py --arch sm_100a --tiles 5 --shuffles 20 --set use_2cta_instrs=true
    python tools/simulate_space.py --problem "gemm 4096x4096x4096 bf16 kk" --set pingpong=true --pairs 20

exit codes: 0 all clean; 1 some config violates its protocol, or its text differs from what was simulated;
2 bad usage
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cutegen.arch import ARCHES, Arch, find_arch
from cutegen.build.render import render
from cutegen.cli.args import parse_fixed, positive_int
from cutegen.cli.exit_codes import run_command
from cutegen.errors import UsageError
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.space import Config, Value
from tools.bringup_parts.random_problems import BLACKWELL_DTYPES, random_config, random_problem
from tools.schedule import KernelProtocol, lengths, pipelines, protocol_of, simulate_cluster

Pair = tuple[Problem, Config]


@dataclass(frozen=True)
class Amount:
    """How much of each config is simulated."""

    tiles: int
    k_tiles: int | None
    shuffles: int
    seed: int


def draw(
    arch: Arch, count: int, seed: int, problem: Problem | None, fixed: Mapping[str, Sequence[Value]]
) -> Iterator[Pair]:
    """Yield ``count`` valid configs, each of a random problem if none is given.

    Raises:
        UsageError: Ten thousand draws in a row gave none.
    """
    space, generator = find_space("gemm", arch), Random(seed)
    for _ in range(count):
        for _ in range(10_000):
            drawn = problem or random_problem(generator, dtypes=BLACKWELL_DTYPES)
            config = random_config(space, drawn, generator, fixed)
            if config is not None:
                yield drawn, config
                break
        else:
            raise UsageError(f"no config of {arch} is valid with what is given; leave out some of --set")


def by_protocol(pairs: Iterator[Pair], arch: Arch) -> dict[KernelProtocol, Pair]:
    """Return one pair for each protocol.

    Raises:
        ResourceError: The protocol of the family on this architecture is not described.
    """
    found: dict[KernelProtocol, Pair] = {}
    for pair in pairs:
        found.setdefault(protocol_of(*pair, arch), pair)
    return found


def complaints(protocol: KernelProtocol, pair: Pair, arch: Arch, amount: Amount) -> list[str]:
    """Return what is wrong with one config, in words."""
    written = pipelines(render(*pair, arch).text)
    found = []
    if written != protocol.pipelines:
        found.append(f"the kernel creates {written}, simulated were {protocol.pipelines}")
    cluster = protocol.play(lengths(protocol, amount.tiles, amount.k_tiles))
    report = simulate_cluster(cluster, amount.seed, amount.shuffles)
    return found if report.clean else [*found, str(report)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    options = parse(arguments)
    return run_command(lambda: run(options))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", choices=tuple(ARCHES), action="append", help="targets; all by default")
    parser.add_argument("--problem", type=Problem.parse, help="instead of random ones")
    parser.add_argument("--set", action="append", default=[], metavar="KNOB=VALUE,...", dest="fixed")
    parser.add_argument("--pairs", type=positive_int, default=200, help="configs of each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tiles", type=positive_int, default=3, help="units of work of the cluster")
    parser.add_argument("--k-tiles", type=positive_int, help="steps along k of each; default: stages + 1")
    parser.add_argument("--shuffles", type=int, default=4, help="random schedules of each config")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> int:
    """Simulate, print, and return the exit code.

    Raises:
        UsageError: Nothing is valid with what is given, or --set is malformed.
        ConfigError: A knob or a value does not exist.
    """
    amount = Amount(options.tiles, options.k_tiles, options.shuffles, options.seed)
    fixed, bad = parse_fixed(options.fixed), 0
    for name in options.arch or ARCHES:
        arch, start = find_arch(name), time.monotonic()
        pairs = draw(arch, options.pairs, options.seed, options.problem, fixed)
        found = by_protocol(pairs, arch)
        for protocol, pair in found.items():
            wrong = complaints(protocol, pair, arch, amount)
            bad += bool(wrong)
            for words in wrong:
                print(f"{pair[0]} | {pair[1]} | {name}:\n{words}")
        seconds = time.monotonic() - start
        print(f"{name}: {options.pairs} configs, {len(found)} protocols simulated in {seconds:.1f} s")
    print("all clean" if not bad else f"{bad} not clean")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
