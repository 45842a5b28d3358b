"""Random problems and random legal configs, the same for the same seed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from cutegen.families.declared import DeclaredFamily, multiple
from cutegen.families.gemm.family import GemmFamily
from cutegen.families.gemm.problem import (
    ACTIVATIONS,
    BIASES,
    BLOCK_SCALED,
    BLOCK_SCALED_FAMILY,
    BLOCKS_FAMILY,
    FP8_DTYPES,
    LAYOUTS,
    Epilogue,
    Problem,
    aligned_step,
    output_dtypes,
)
from cutegen.families.registry import find_family
from cutegen.space import Config, Space, Value

__all__ = [
    "BLACKWELL_DTYPES",
    "DTYPES",
    "FAR",
    "NEAR",
    "Reach",
    "dtypes_of",
    "random_config",
    "random_of",
    "random_pairs",
    "random_problem",
]

#: Largest sizes along m, n, k and of the batch.
Reach = tuple[int, int, int, int]
NEAR: Reach = (3000, 4000, 4500, 4)
FAR: Reach = (200_000, 300_000, 200_000, 300)


def _size(generator: Random, most: int) -> int:
    """Small, large and round sizes all come up."""
    value = int(2 ** generator.uniform(0, most.bit_length()))
    if generator.random() < 0.5:
        value = -(-value // 64) * 64
    return min(max(value, 1), most)


def _epilogue(generator: Random, scaled: bool = False) -> Epilogue:
    if generator.random() < 0.3:
        return Epilogue()
    if scaled and generator.random() < 0.9:  # most others are refused
        return Epilogue(alpha=True)
    return Epilogue(
        alpha=generator.random() < 0.4,
        beta=generator.random() < 0.4,
        bias=generator.choice(BIASES),
        activation=generator.choice(ACTIVATIONS),
        scale=generator.random() < 0.3,
    )


#: 16-bit types come up more often: they have more layouts.
DTYPES = ("bf16", "bf16", "fp16", "fp16", "e4m3", "e5m2", "int8")
BLACKWELL_DTYPES = ("bf16", "bf16", "fp16", "fp16", "tf32", "e4m3", "e5m2", "int8")


def dtypes_of(space: Space) -> Sequence[str]:
    """Return the operands' dtypes of problems that may be posed to ``space``."""
    return tuple(BLOCK_SCALED) if space.family == BLOCK_SCALED_FAMILY else DTYPES


def random_problem(generator: Random, reach: Reach = NEAR, dtypes: Sequence[str] = DTYPES) -> Problem:
    """Return a problem of any of ``dtypes``, any layout, epilogue, batch and alignment."""
    ab_dtype = generator.choice(dtypes)
    scaled = ab_dtype in BLOCK_SCALED
    layout = generator.choice(tuple(LAYOUTS)) if aligned_step(ab_dtype) < 16 else "kk"
    out_dtype = generator.choice(output_dtypes(ab_dtype))
    sizes = {axis: _size(generator, most) for axis, most in zip("mnk", reach, strict=False)}
    step = aligned_step(ab_dtype)
    for axis in LAYOUTS[layout]:
        sizes[axis] = -(-sizes[axis] // step) * step
    return Problem(
        sizes["m"],
        sizes["n"],
        sizes["k"],
        batch=generator.randint(2, reach[3]) if generator.random() < 0.3 else 1,
        ab_dtype=ab_dtype,
        out_dtype=out_dtype,
        layout=layout,
        unaligned_out=generator.random() < 0.2,
        epilogue=Epilogue() if out_dtype == "int32" else _epilogue(generator, scaled),
        promote=ab_dtype in FP8_DTYPES and generator.random() < 0.4,
        any_order=generator.random() < 0.3,
        family=BLOCK_SCALED_FAMILY if scaled else "gemm",
    )


def random_of(space: Space, generator: Random, reach: Reach = NEAR) -> Any:
    """Return a problem of the family of ``space``, with any sizes and options."""
    family = find_family(space.family)
    if space.family == BLOCKS_FAMILY:
        found = random_problem(generator, reach, ("e4m3",))
        return replace(found, batch=1, epilogue=replace(found.epilogue, scale=False), family=BLOCKS_FAMILY)
    if isinstance(family, GemmFamily):
        return random_problem(generator, reach, dtypes_of(space))
    several = (reach[0], *[64] * len(family.sizes)) if len(family.sizes) > len(reach) else reach
    sizes = {size.name: _size(generator, most) for size, most in zip(family.sizes, several, strict=False)}
    if "pairs" in sizes:  # of the elements of a head
        sizes["pairs"] = 1 + sizes["pairs"] % max(1, sizes["d"] // 2)
    if "k" in sizes:  # along which operands of an MMA are contiguous
        sizes["k"] = -(-sizes["k"] // 8) * 8
    declared = family.declared_arguments if isinstance(family, DeclaredFamily) else ()
    for parts, size in (multiple(dim) for a in declared for dim in a.dims):
        sizes[size] = -(-sizes[size] // parts.denominator) * parts.denominator
    options = {
        option.name: generator.random() < 0.4 if option.is_flag else generator.choice(option.values)
        for option in family.options
    }
    return family.problem(sizes, options)


def random_config(
    space: Space, problem: Problem, generator: Random, fixed: Mapping[str, Sequence[Value]] | None = None
) -> Config | None:
    """Return some legal config, or None if ``fixed`` leaves none; a knob's rare values are not rare here."""
    domains = {**space.domains, **(fixed or {})}
    shuffled = {knob: generator.sample(list(domain), len(domain)) for knob, domain in domains.items()}
    return next(space.configs(problem, shuffled), None)


def random_pairs(
    space: Space,
    seed: int,
    count: int,
    reach: Reach = NEAR,
    per_problem: int = 1,
    dtypes: Sequence[str] | None = None,
) -> Iterator[tuple[Any, Config]]:
    """Yield ``count`` problems that the space accepts, each with ``per_problem`` legal configs."""
    generator = Random(seed)

    def draw() -> Any:
        return random_problem(generator, reach, dtypes) if dtypes else random_of(space, generator, reach)

    for _ in range(count):
        problem = draw()
        while space.explain(problem, {}):  # refused whatever the config
            problem = draw()
        for _ in range(per_problem):
            config = random_config(space, problem, generator)
            assert config is not None
            yield problem, config
