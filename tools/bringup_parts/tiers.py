"""What is tried on a new GPU, in tiers: each adds one thing that can go wrong to those before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice
from random import Random

from cutegen import family
from cutegen.errors import ProblemError
from cutegen.families.gemm.problem import BLOCK_SCALED_FAMILY, Problem, aligned_step, operand_bits
from cutegen.families.gemm.tail_shapes import tail_problems
from cutegen.space import Config, Space, Value
from tools.benchmark.variations import TILES, coarse_values
from tools.bringup_parts.points import Point, nearest
from tools.bringup_parts.random_problems import random_config, random_pairs
from tools.walk_kernels import dtypes_of

__all__ = ["TIERS", "Scope", "Tier", "kernels_of", "plan"]

TIERS = ("one tile", "tails", "every knob", "races", "full list")
#: k tiles, of 128 bytes, in the tier of one tile: one, a few, and more than any kernel has stages.
DEPTHS = (1, 3, 40)
ROW_BYTES = 128
#: Sizes, dtype and options behind the dtype's own; ``{k}`` is filled with what the dtype allows.
TAILS = (
    "333x392x{k} {dtype} kk",
    "333x391x{k} {dtype} kk",
    "3x333x392x{k} {dtype} kk",
    "1x4096x{deep} {dtype} kk",
    "4096x8x{deep} {dtype} kk",
    "1000x1000x{deep} {dtype} kk",
    "333x392x{k} {dtype} kn",
    "336x392x{k} {dtype} mn",
    "336x391x{k} {dtype} mk",
    "2x336x392x{k} {dtype} mn",
    "333x392x{k} {dtype} kk alpha beta bias=n act=relu",
    "333x391x{k} {dtype} kk scale bias=m act=gelu",
    "333x392x{k} {dtype} kk out=fp32 beta act=silu",
    "333x392x{k} {dtype} kk out=fp16 act=gelu_tanh",
    "333x392x{k} {dtype} kk promote",
)
#: Where every value of every knob can be had: many tiles; few rows; few tiles and a deep k; bytes.
KNOBS = (
    "gemm 4096x4096x1024 bf16 kk",
    "gemm 300x4096x4096 bf16 kk any_order",
    "gemm 512x512x36864 bf16 kk any_order",
    "gemm 2048x3072x4096 {byte} kk",
)
#: Where barriers go round many times, and partial sums meet.
RACES = (
    "gemm 4096x4096x2048 bf16 kk",
    "gemm 2048x3072x4096 {byte} kk",
    "gemm 300x4096x4096 bf16 kk any_order",
    "gemm 512x512x16384 bf16 kk",
)
#: The same for block-scaled operands: alpha is all that is fused.
SCALED_TAILS = (
    *TAILS[:6],
    "333x392x{k} {dtype} kk alpha",
    "333x391x{k} {dtype} kk out=fp32 alpha",
    "3x333x391x{deep} {dtype} kk alpha",
    "333x392x{k} {dtype} kk out=fp32",
    "333x392x{k} {dtype} kk out=fp16",
)
SCALED_KNOBS = (
    "gemm_blockscaled 4096x4096x1024 mxfp8_e4m3 kk",
    "gemm_blockscaled 300x4096x4096 nvfp4 kk",
    "gemm_blockscaled 2048x3072x4096 nvfp4 kk alpha",
)
SCALED_RACES = (
    "gemm_blockscaled 4096x4096x2048 nvfp4 kk",
    "gemm_blockscaled 2048x3072x4096 mxfp8_e4m3 kk",
    "gemm_blockscaled 300x4096x4096 nvfp4 kk",
    "gemm_blockscaled 512x512x16384 mxfp8_e5m2 kk",
)
DRAWS = 60
"""Random configs for each of those problems; the tier takes those that bring most new pairs of values."""


@dataclass(frozen=True)
class Scope:
    """How much is tried.

    Attributes:
        repeats: Further runs, in the tier of races, that must give the same bits.
        races: Most kernels in that tier.
        pairs: Random problems with random configs in the full list.
        shapes: Problems whose default config is in the full list.
        seed: Of what is random.
    """

    repeats: int = 50
    races: int = 60
    pairs: int = 200
    shapes: Sequence[Problem] = ()
    seed: int = 1


@dataclass(frozen=True)
class Tier:
    """One step of bringing up a GPU.

    Attributes:
        name: One of :data:`TIERS`.
        points: What is tried, those of one problem next to each other.
        tail: Whether each is also run on a small problem with odd sizes.
        repeats: Further runs that must give the same bits; None leaves their number to the engine.
    """

    name: str
    points: tuple[Point, ...]
    tail: bool = True
    repeats: int | None = None


def plan(
    space: Space, scope: Scope, bundle: Mapping[family.Problem, Sequence[Config]] | None = None
) -> tuple[Tier, ...]:
    """Return the tiers, in order.

    Args:
        space: Says what is valid.
        scope: How much is tried.
        bundle: Configs that were compiled elsewhere, by problem: those of our own kernels that no tier tries
            anyway are tried in all of them.
    """
    tiers = _plan(space, scope, ())
    planned = {point for tier in tiers for point in tier.points}
    brought = (
        Point(problem, config)
        for problem, configs in (bundle or {}).items()
        for config in configs
        if isinstance(problem, Problem) and problem.family == space.family
    )
    own = [point for point in brought if point not in planned and point.config.source == "cutegen"]
    return _plan(space, scope, own) if own else tiers


def _plan(space: Space, scope: Scope, own: Sequence[Point]) -> tuple[Tier, ...]:
    return (
        Tier(
            TIERS[0],
            _ordered([*one_tile(space), *_adapted(space, own, _tile_problems, len(DEPTHS))]),
            tail=False,
        ),
        Tier(
            TIERS[1],
            _ordered([*tails(space), *_adapted(space, own, lambda problem, _: tail_problems(problem))]),
        ),
        Tier(TIERS[2], _ordered([*every_knob(space), *own])),
        Tier(TIERS[3], _ordered([*races(space, scope), *own]), repeats=scope.repeats),
        Tier(TIERS[4], _ordered([*full_list(space, scope), *own])),
    )


def kernels_of(space: Space, points: Iterable[Point]) -> int:
    """Return how many kernels these points need: run-time knobs and sizes make none."""
    return len({(point.problem.signature, space.compile_view(point.config)) for point in points})


def _ordered(points: Iterable[Point]) -> tuple[Point, ...]:
    """Each point once, problems in the order in which they first come up."""
    groups: dict[Problem, dict[Point, None]] = {}
    for point in points:
        groups.setdefault(point.problem, {})[point] = None
    return tuple(point for group in groups.values() for point in group)


def _problems(space: Space, lines: Sequence[str], scaled: Sequence[str]) -> list[Problem]:
    """Return the problems of the lines for the family, on bytes that the target multiplies."""
    if space.family == BLOCK_SCALED_FAMILY:
        return [Problem.parse(line) for line in scaled]
    byte = next(dtype for dtype in dtypes_of(space) if operand_bits(dtype) == 8)
    return [Problem.parse(line.format(byte=byte)) for line in lines]


def one_tile(space: Space) -> Iterator[Point]:
    """Yield, for every dtype, the default on a single tile of D, of one k tile and more."""
    for dtype in dtypes_of(space):
        problem = Problem(128, 128, 256, ab_dtype=dtype, family=space.family)
        for tile in _tile_problems(problem, space.default(problem)):
            yield Point(tile, space.default(tile))


def _tile_problems(problem: Problem, config: Config) -> tuple[Problem, ...]:
    shape = next(config.pair(knob) for knob in TILES if knob in config)
    m, n = reversed(shape) if config.flag("swap_ab") else shape
    step = 8 * ROW_BYTES // operand_bits(problem.ab_dtype)
    plain = replace(problem, batch=1)
    return tuple(plain.resized(m, n, step * depth) for depth in DEPTHS)


def tails(space: Space) -> Iterator[Point]:
    """Yield, for every dtype, layout, output and epilogue, the default on sizes that fit no tile."""
    for dtype in dtypes_of(space):
        step = aligned_step(dtype)
        for words in SCALED_TAILS if space.family == BLOCK_SCALED_FAMILY else TAILS:
            line = words.format(dtype=dtype, k=192 + step, deep=1024 + step)
            try:
                problem = Problem.parse(f"{space.family} {line}")
            except ProblemError:
                continue  # a layout or an output that the dtype does not have
            if not space.explain(problem, {}):
                yield Point(problem, space.default(problem))


def every_knob(space: Space) -> Iterator[Point]:
    """Yield every value of every knob, with as little else changed from the default as is valid."""
    defaults = [(problem, space.default(problem)) for problem in _problems(space, KNOBS, SCALED_KNOBS)]
    for problem, default in defaults:
        yield Point(problem, default)
    for knob, domain in space.domains.items():
        for value in domain:
            for problem, default in defaults:
                config = nearest(space, problem, default, knob, value)
                if config is not None:
                    yield Point(problem, config)
                    break


def races(space: Space, scope: Scope) -> list[Point]:
    """Return random kernels, on problems of many waves, in which many pairs of knob values meet."""
    generator = Random(scope.seed)
    coarse = {knob: coarse_values(space, knob) for knob in space.domains}
    draws = []
    for problem in _problems(space, RACES, SCALED_RACES):
        found = (random_config(space, problem, generator, coarse) for _ in range(DRAWS))
        draws += [Point(problem, config) for config in found if config is not None]
    return _varied(space, draws, scope.races)


def _varied(space: Space, draws: Sequence[Point], most: int) -> list[Point]:
    """Return up to ``most`` of the draws; each is the one that brings most pairs of values not yet held."""
    held: set[object] = set()
    pairs = {point: set(combinations(_values(space, point), 2)) for point in draws}
    chosen: list[Point] = []
    while pairs and len(chosen) < most:
        best = max(pairs, key=lambda point: len(pairs[point] - held))
        held |= pairs.pop(best)
        chosen.append(best)
    return chosen


def _values(space: Space, point: Point) -> list[tuple[str, Value]]:
    return [("ab_dtype", point.problem.ab_dtype), *space.compile_view(point.config).items()]


def full_list(space: Space, scope: Scope) -> Iterator[Point]:
    """Yield random problems of every dtype with random configs, then the default on every shape given."""
    dtypes = dtypes_of(space)
    for i, dtype in enumerate(dtypes):
        share = scope.pairs // len(dtypes) + (i < scope.pairs % len(dtypes))
        for problem, config in random_pairs(space, scope.seed, share, dtypes=(dtype,)):
            yield Point(problem, config)
    for problem in scope.shapes:
        if not space.explain(problem, {}):
            yield Point(problem, space.default(problem))


def _adapted(
    space: Space,
    points: Iterable[Point],
    problems: Callable[[Problem, Config], Sequence[Problem]],
    most: int = 1,
) -> Iterator[Point]:
    """Yield each config on up to ``most`` of the problems made for it on which its own artifact is valid."""
    for point in points:
        same = (p for p in problems(point.problem, point.config) if p.signature == point.problem.signature)
        legal = (p for p in same if not space.explain(p, point.config))
        yield from (Point(problem, point.config) for problem in islice(legal, most))
