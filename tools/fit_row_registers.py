"""Fit the registers that kernels over rows take to what the compiler gives them.

    python tools/fit_row_registers.py softmax --cache-dir DIR

Compiles the kernels whose times tools/fit_rows.py knows, of those whose rows are in registers and for which
launch bounds set no limit. What is printed belongs into ``spaces/FAMILY/space.py``. Needs no GPU; about three
kernels are compiled in a second.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutegen.build import Artifact
from cutegen.build.builder import Builder
from cutegen.build.render import Source, render
from cutegen.build.store import Store
from cutegen.cli.args import add_cache_argument, add_workers_argument
from cutegen.cli.exit_codes import EXIT_OK, run_command
from cutegen.families.registry import find_space
from cutegen.space import as_integer
from spaces.row.defaults import loaded
from spaces.row.registers import RegistersTaken, ctas_with
from spaces.row.sizes import sums_of_lane
from tools.benchmark.kernel_store import kernel_store
from tools.benchmark.random_walk import Doubles, RandomWalk
from tools.fit_rows import ARCH, FAMILIES, measured, registers_of

_WALK = RandomWalk(steps=6000, moved=0.4, width=0.2, narrower=0.05)
_LEVEL = 0.002
"""Weight of a register that is off, beside the logarithm of how far the CTAs that find room are."""


class Kernel(NamedTuple):
    """What a kernel's registers follow from."""

    values: int
    weights: int
    sums: int
    is_shared: bool
    threads: int


def kernels(family: str) -> dict[Source, Kernel]:
    """Return the kernels to compile."""
    space = find_space(family, ARCH)
    found = {}
    for timed in measured(family):
        for config in (kernel.config for kernel in timed.kernels):
            derived = space.derive(config, timed.problem, ARCH)
            if config["row_in"] != "registers" or derived["min_blocks"] != 1:
                continue
            values, _, weights = loaded(timed.problem, config)
            threads, cluster_n = config.integer("threads_per_row"), config.integer("cluster_n")
            sums = sums_of_lane(threads, cluster_n)
            found[render(timed.problem, config, ARCH)] = Kernel(
                values, weights, sums, cluster_n > 1, as_integer(derived["threads"])
            )
    return found


def compiled(sources: Sequence[Source], store: Store, workers: int | None) -> Mapping[Source, int]:
    """Return the registers of each kernel that compiles."""
    with Builder(store, workers=workers) as builder:
        return {
            source: result.resources.registers
            for source, result in builder.build(sources)
            if isinstance(result, Artifact)
        }


def _ctas(kernels: Sequence[Kernel], registers: Sequence[float]) -> Doubles:
    found = [ctas_with(each, one.threads, ARCH) for one, each in zip(kernels, registers, strict=True)]
    return np.array(found, float)


def _taken(kernels: Sequence[Kernel], by: RegistersTaken) -> list[float]:
    return [by.of(one.values, one.weights, one.sums, one.is_shared) for one in kernels]


def fitted(kernels: Sequence[Kernel], registers: Sequence[int], start: RegistersTaken) -> RegistersTaken:
    """Return where a random walk ends on which the CTAs that find room come near those that do."""
    room = _ctas(kernels, registers)

    def error(numbers: Doubles) -> float:
        taken = _taken(kernels, RegistersTaken(*numbers))
        apart = np.abs(np.log(_ctas(kernels, taken) / room)).mean()
        return float(apart + _LEVEL * np.abs(np.subtract(taken, registers)).mean())

    return RegistersTaken(*_WALK.end(astuple(start), error))


def _says(kernels: Sequence[Kernel], registers: Sequence[int], by: RegistersTaken) -> str:
    room = _ctas(kernels, _taken(kernels, by)) / _ctas(kernels, registers)
    return f"{np.mean(room == 1):.3f} of {len(kernels)} kernels have the CTAs that are expected"


def run(args: argparse.Namespace) -> int:
    """Compile, fit and print."""
    known = kernels(args.family)
    with kernel_store(args.cache_dir) as store:
        registers = compiled([*known], store, args.workers)
    found, taken = [known[source] for source in registers], [*registers.values()]
    shipped = registers_of(args.family)
    print(f"now {args.family}: {_says(found, taken, shipped)}")
    best = fitted(found, taken, shipped)
    print(", ".join(f"{field.name}={getattr(best, field.name):.3g}" for field in fields(RegistersTaken)))
    print(f"{args.family}: {_says(found, taken, best)}")
    return EXIT_OK


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("family", choices=FAMILIES)
    add_cache_argument(parser, "compiled kernels", "a temporary one")
    add_workers_argument(parser)
    args = parser.parse_args(argv)
    return run_command(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
