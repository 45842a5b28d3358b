"""Blackwell kernels that together hold every choice with every other, and how to read their instructions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from random import Random

from covering import cover

from cutegen.arch import Arch, find_arch
from cutegen.build import Artifact, Builder
from cutegen.build.kernel_resources import KernelResources
from cutegen.build.render import Source
from cutegen.families.gemm.problem import LAYOUTS, Epilogue, Problem
from cutegen.families.registry import find_space
from cutegen.space import Config, Space, Value
from tools.bringup_parts.random_problems import BLACKWELL_DTYPES, random_config, random_pairs, random_problem

__all__ = [
    "B200",
    "B300",
    "LAUNCHED",
    "ODD",
    "RINGS",
    "SPACE",
    "Kernel",
    "barrier_arrivals",
    "chosen",
    "instruction_descriptor",
    "pair",
]

B200, B300 = find_arch("sm_100a"), find_arch("sm_103a")
SPACE = find_space("gemm", B200)
FOR_B300 = 10
"""Kernels of the set that are compiled for sm_103a as well: they differ in the name of the target only."""
STEERS: tuple[Mapping[str, Sequence[Value]], ...] = (
    {"swap_ab": (True,)},
    {"split_k": (2, 3, 4)},
    {"use_clc": (True,), "use_tma_store": (True,)},
)
#: A product with odd edges in every direction, and how it is to be launched.
ODD = Problem(1000, 520, 1032, layout="kn")
LAUNCHED = (
    "mma_tiler_mn=256x64 use_2cta_instrs=true cluster_shape_mn=4x2",
    "cluster_shape_mn=2x8",
    "mma_tiler_mn=256x64 use_2cta_instrs=true cluster_shape_mn=4x2 use_clc=true use_pdl=true",
    "mma_tiler_mn=64x40 cluster_shape_mn=1x2 use_tma_store=false split_k=3",
    "mma_tiler_mn=128x64 cluster_shape_mn=2x1 use_tma_store=false split_k=2 use_clc=true",
)


@dataclass(frozen=True)
class Kernel:
    """One member of the covering set, compiled."""

    problem: Problem
    config: Config
    derived: Mapping[str, Value]
    artifact: Artifact
    arch: Arch

    @property
    def main(self) -> KernelResources:
        """Resources of the kernel that multiplies; split_k has another that adds up."""
        return next(k for k in self.artifact.resources.kernels if "_k0" in k.name)

    @property
    def staged(self) -> bool:
        """Whether its results leave through shared memory."""
        return self.config["use_tma_store"] is True

    @property
    def plain(self) -> bool:
        return self.problem.epilogue == Epilogue()

    @property
    def sharing(self) -> tuple[bool, bool]:
        """Whether other blocks, or pairs of blocks, of the cluster want the same tiles of A, of B."""
        return shared(self.config)

    def __str__(self) -> str:
        return f"{self.problem} | {self.config} | {self.arch}"


def compiled(
    cases: Mapping[Source, tuple[Problem, Config, Arch]], space: Space, compiler: Builder
) -> list[Kernel]:
    """Compile every case; fail with the reasons if some do not."""
    built, failed = [], []
    for source, result in compiler.build(cases):
        problem, config, arch = cases[source]
        if isinstance(result, Artifact):
            built.append(Kernel(problem, config, space.derive(config, problem, arch), result, arch))
        else:
            failed.append(f"{problem} | {config}: {result.outcome} {result.message}\n{result.log[-800:]}")
    assert not failed, "\n".join(failed)
    return built


def pair(value: Value) -> tuple[int, int]:
    assert isinstance(value, tuple)
    return value[0], value[1]


def shared(config: Config) -> tuple[bool, bool]:
    along_m, along_n = pair(config["cluster_shape_mn"])
    return along_n > 1, along_m > (2 if config["use_2cta_instrs"] else 1)


def choices(problem: Problem, config: Config) -> dict[str, object]:
    """What was chosen, in classes: what one class does for the code, its other members do too."""
    epilogue = problem.epilogue
    derived = SPACE.derive(config, problem, B200)
    return {
        "mma": (pair(config["mma_tiler_mn"])[0], config["use_2cta_instrs"]),
        "epi_n": derived["epi_n"],
        "shared": shared(config),
        "swap_ab": config["swap_ab"],
        "store": "tma" if config["use_tma_store"] else derived["vector"],
        "scheduler": "clc" if config["use_clc"] else "static",
        "pdl": config["use_pdl"],
        "split": config["split_k"] != 1,
        "ab": problem.ab_dtype,
        "out": problem.out_dtype,
        "layout": problem.layout,
        "batched": problem.batch > 1,
        "beta": epilogue.beta,
        "bias": epilogue.bias,
    }


def held(problem: Problem, config: Config) -> list[object]:
    """Pairs of choices, and what each kernel has of the values that do not come in pairs."""
    epilogue = problem.epilogue
    tile_n = pair(config["mma_tiler_mn"])[1]
    alone = [("n", tile_n), ("cluster", config["cluster_shape_mn"])]
    alone += [("plain", problem.out_dtype if epilogue == Epilogue() else "")]
    alone += [("act", epilogue.activation), ("alpha", epilogue.alpha), ("scale", epilogue.scale)]
    return [*alone, *combinations(choices(problem, config).items(), 2)]


def seconds(problem: Problem, config: Config) -> float:
    """Return about how long a kernel takes to compile: by what is added up, stored and worked through."""
    epi_n = int(str(SPACE.derive(config, problem, B200)["epi_n"]))
    epilogue = problem.epilogue
    steps = 0.16 * (config["split_k"] != 1) + 0.17 * bool(epilogue.bias) + 0.07 * epilogue.beta
    return 0.6 + 0.005 * epi_n + steps + 0.09 * (config["use_clc"] is True)


def draws() -> Iterator[tuple[Problem, Config]]:
    """Random problems, most of them of sizes at which every choice can be had."""
    yield from random_pairs(SPACE, seed=0, count=600, per_problem=2, dtypes=BLACKWELL_DTYPES)
    generator = Random(0)
    for _ in range(700):
        problem = random_problem(generator, dtypes=BLACKWELL_DTYPES)
        if SPACE.explain(problem, {}):
            continue
        rows = generator.choice((min(problem.m, 512) // 16 * 16 or 16, 512))
        few = problem.resized(rows, 2048, 4096, min(problem.batch, 2))
        for fixed in STEERS:
            config = random_config(SPACE, few, generator, fixed)
            if config is not None:
                yield few, config


def chosen() -> list[tuple[Problem, Config, Arch]]:
    """The covering set for one target, and some of it for the other."""
    found = cover(list(draws()), held, seconds)
    odd = [(ODD, SPACE.default(ODD).replace(**Config.parse(words)), B200) for words in LAUNCHED]
    again = [one for one in found if one[0].ab_dtype != "int8"]  # sm_103a has no MMA for it
    return [(*one, B200) for one in found] + [(*one, B300) for one in again[:FOR_B300]] + odd


# --- instructions ---

#: What goes round between warps, and who gives it back; each is filled by one arrival.
RINGS = (("stages", "empty_arrivals"), ("acc_stages", "acc_arrivals"), ("answers", "answer_arrivals"))


def barrier_arrivals(listing: str) -> Counter[int]:
    """How many mbarriers are initialised with each count of arrivals.

    A count is moved to a register, negated into another and shifted by one into the pair that is stored.
    """
    counts: dict[str, int] = {}
    found: Counter[int] = Counter()
    move = re.compile(r"UMOV (UR\d+), 0x([0-9a-f]+) ")
    negate = re.compile(r"UIADD3 (UR\d+), UPT, UPT, -(UR\d+), 0x100000, URZ")
    shift = re.compile(r"USHF\.L\.U32 (UR\d+), (UR\d+), 0x1, URZ")
    for line in listing.splitlines():
        if match := move.search(line):
            counts[match[1]] = int(match[2], 16)
        elif match := (negate.search(line) or shift.search(line)):
            counts[match[1]] = counts.get(match[2], 0)
        elif match := re.search(r"SYNCS\.EXCH\.64 URZ, \[\S+\], (UR\d+) ", line):
            found[counts[match[1]]] += 1
    return found


#: Codes of element types in an instruction descriptor, by kind of MMA. Source: PTX ISA, tcgen05.mma.
CODES = {"fp16": 0, "bf16": 1, "tf32": 2, "e4m3": 0, "e5m2": 1, "int8": 1}


def instruction_descriptor(kernel: Kernel) -> int:
    """What the MMA has to be told: types, which operands are not contiguous along k, columns and rows.

    Integer sums saturate, as Hopper's do.

    Source: PTX ISA, tcgen05 instruction descriptor of kinds tf32, f16, f8f6f4 and i8.
    """
    tile_m, tile_n = pair(kernel.config["mma_tiler_mn"])
    axes = LAYOUTS[kernel.problem.layout]
    axis_a, axis_b = reversed(axes) if kernel.config["swap_ab"] else axes
    code, integer = CODES[kernel.problem.ab_dtype], kernel.problem.ab_dtype == "int8"
    fields = (
        (integer, 3),
        (2 if integer else 1, 4),
        (code, 7),
        (code, 10),
        (axis_a != "k", 15),
        (axis_b != "k", 16),
    )
    return sum(value << at for value, at in (*fields, (tile_n // 8, 17), (tile_m // 16, 24)))
