"""What to try next: the model's ranking of a space, spread over unlike kernels, and steps from what won.

Compiling costs more than measuring, so ``limit`` counts kernels. What a kernel takes as arguments
(``split_k``, the walk over tiles) the model chooses for each; further values cost no compilation.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from math import log, log2
from typing import Any

from cutegen.errors import UsageError
from cutegen.model import Estimator
from cutegen.problem import Problem
from cutegen.space import Config, Space, Value

__all__ = ["rank", "refine"]

#: A config that looks like a chosen one must be predicted faster by this share to be chosen as well, since
#: the model mistakes 128x192 for 128x208 more easily than by this much.
_LIKENESS = 0.03
#: A family (swapped, split, pingpong) is tried even if its best is predicted slower by up to this factor.
_FAMILY_SLACK = 1.15
#: Run-time variants are worth measuring if predicted within this factor of the kernel's best.
_VARIANT_SLACK = 1.15
#: So many places are for breadth; those beyond go to the fastest predictions, however alike, since clusters
#: and schedules of a good tile differ by more than the model thinks. Source: sweeps of 30 shapes, H200.
_BREADTH = 16
_POOL = 500
_TELLING = ("pingpong", "mma_warpgroups", "tile_k")
#: Refinement starts from so many of the fastest, none slower than the best by more than this factor.
_PARENTS = 3
_PARENT_SLACK = 1.25


@dataclass(frozen=True)
class _Candidate:
    """A kernel with its most promising run-time arguments."""

    config: Config
    view: Config
    time_us: float


class _Ranker:
    """Predicts kernels of one space for one problem, choosing their run-time knobs."""

    def __init__(
        self, space: Space, problem: Problem, sm_count: int, fixed: Mapping[str, Sequence[Value]] | None
    ) -> None:
        self._space = space
        self._problem = problem
        self._fixed = dict(fixed or {})
        self._domains = {knob: tuple(self._fixed.get(knob, domain)) for knob, domain in space.domains.items()}
        self._estimator = Estimator(problem, space.arch, sm_count)
        self._orders: dict[Any, list[tuple[float, Value, Value]]] = {}
        self._split_rules = tuple(rule for rule in space.rules if "split_k" in rule.knobs)
        shape = {"tile_shape_mn", "cluster_shape_mn", "swap_ab"}  # what the number of tiles follows from
        looked_at = shape.union(*(rule.knobs for rule in self._split_rules)) - {"split_k"}
        self._split_knobs = tuple(knob for knob in space.domains if knob in looked_at)
        self._splits: dict[Any, list[int]] = {}

    def best(self, count: int) -> list[_Candidate]:
        """Return the fastest kernels with their best run-time arguments, and the best of each family."""
        found = [
            (*self._fastest(config, splits), config)
            for fixed, splits in self._kinds()
            for config in self._space.configs(self._problem, {**self._fixed, **fixed})
        ]
        found.sort(key=lambda item: _grade(item[0]))  # equal grades keep the space's order: simpler first
        kept: dict[Config, _Candidate] = {}
        families: set[Any] = set()
        for time_us, split, config in found:
            family = _family(config)
            if len(kept) >= count and (family in families or time_us > found[0][0] * _FAMILY_SLACK):
                continue
            families.add(family)
            candidate = self._complete(config, split, time_us)
            kept.setdefault(candidate.view, candidate)
        return list(kept.values())

    def _complete(self, config: Config, split: int, time_us: float) -> _Candidate:
        _, swizzle, along_m = self.orders(config)[0]
        chosen = {"swizzle_size": swizzle, "raster_along_m": along_m, "split_k": split}
        full = config.replace(**{knob: value for knob, value in chosen.items() if knob in config})
        return _Candidate(full, self._space.compile_view(full), time_us)

    def _kinds(self) -> Iterator[tuple[dict[str, tuple[Value, ...]], tuple[int, ...]]]:
        """Yield run-time values that stand for all, once for each kind of kernel ``split_k`` compiles."""
        first = {k: self._domains[k][:1] for k in self._space.domains if k in self._space.run_time_knobs}
        sample = self._space.default(self._problem)
        kinds: dict[Config, list[int]] = {}
        for split in self._domains.get("split_k", (1,)):
            probe = sample.replace(split_k=split) if "split_k" in self._domains else sample
            kinds.setdefault(self._space.compile_view(probe), []).append(int(str(split)))
        for splits in kinds.values():
            ordered = tuple(sorted(splits))
            yield {**first, **({"split_k": ordered[:1]} if "split_k" in first else {})}, ordered

    def _fastest(self, config: Config, splits: tuple[int, ...]) -> tuple[float, int]:
        """Microseconds and ``split_k`` of a kernel with its best run-time arguments."""
        derived = self._space.derive(config, self._problem, self._space.arch)
        likely = self._likely_splits(config, splits)
        return self._estimator.fastest_split(config, derived, likely, self.orders(config)[0][0])

    def _likely_splits(self, config: Config, splits: tuple[int, ...]) -> Sequence[int]:
        """The legal splits that leave few multiprocessors idle in up to three rounds of work."""
        if len(splits) == 1:
            return splits
        key = tuple(config[knob] for knob in self._split_knobs)
        known = self._splits.get(key)
        if known is None:
            once = self._estimator.parts_per_round(config)
            known = []
            for rounds in (1, 2, 3):
                downward = reversed(splits[: bisect_right(splits, rounds * once)])
                legal = (s for s in downward if self._allows({**config, "split_k": s}))
                known += [s for s in islice(legal, 2) if s not in known]
            known = self._splits[key] = known or [splits[0]]
        return known

    def _allows(self, values: Mapping[str, Value]) -> bool:
        """Whether the rules that look at ``split_k`` hold; the others were asked already."""
        context: dict[str, Any] = {"problem": self._problem, "arch": self._space.arch}
        return all(
            rule.holds(**{k: values[k] for k in rule.knobs}, **{k: context[k] for k in rule.context})
            for rule in self._split_rules
        )

    def orders(self, config: Config) -> list[tuple[float, Value, Value]]:
        """Return the walks over the tiles, least traffic first, then simplest: (bytes, swizzle, along m)."""
        key = (config["tile_shape_mn"], config["cluster_shape_mn"], config.get("swap_ab", False))
        known = self._orders.get(key)
        if known is None:
            walks = product(
                self._domains.get("swizzle_size", (1,)), self._domains.get("raster_along_m", (False,))
            )
            traffic = [(self._estimator.traffic(config, int(str(s)), bool(a)), s, a) for s, a in walks]
            known = self._orders[key] = sorted(traffic, key=lambda walk: walk[0])
        return known

    def predict(self, config: Config) -> float:
        """Return microseconds for a complete config."""
        derived = self._space.derive(config, self._problem, self._space.arch)
        return self._estimator.estimate(config, derived).time_us

    def variants(self, best: _Candidate, count: int) -> list[Config]:
        """Return up to ``count`` other run-time arguments for a kernel, unlike its own, promising first."""
        config = best.config
        changes: list[dict[str, Value]] = [{"split_k": s} for s in self._other_splits(config)]
        walks = self.orders(config)
        least, most = walks[0][0], walks[-1][0]
        taken = {(config.get("swizzle_size"), config.get("raster_along_m"))}
        for traffic, swizzle, along_m in walks:
            unlike = all(swizzle != s or along_m != a for s, a in taken)
            if unlike and least < most and traffic <= 2 * least:
                taken.add((swizzle, along_m))
                changes.append({"swizzle_size": swizzle, "raster_along_m": along_m})
        configs = [config.replace(**{k: v for k, v in change.items() if k in config}) for change in changes]
        timed = [(self.predict(c), i) for i, c in enumerate(configs) if c != config and self.legal(c)]
        worst = best.time_us * _VARIANT_SLACK
        return list(dict.fromkeys(configs[i] for t, i in sorted(timed) if t <= worst))[:count]

    def _other_splits(self, config: Config) -> list[int]:
        """The neighbours of a split in its domain, if they are the same kernel."""
        domain = [int(str(s)) for s in self._domains.get("split_k", ())]
        if not domain or config["split_k"] not in domain:
            return []
        at, view = domain.index(int(str(config["split_k"]))), self._space.compile_view(config)
        near = [domain[i] for i in (at + 1, at - 1) if 0 <= i < len(domain)]
        return [s for s in near if self._space.compile_view(config.replace(split_k=s)) == view]

    def legal(self, config: Config) -> bool:
        """Whether ``config`` breaks no rule and stays within the fixed values."""
        inside = (config[knob] in values for knob, values in self._fixed.items())
        return all(inside) and not self._space.explain(self._problem, config)


def rank(
    space: Space,
    problem: Problem,
    sm_count: int,
    limit: int,
    fixed: Mapping[str, Sequence[Value]] | None = None,
    *,
    variants: int = 2,
) -> list[Config]:
    """Return the configs to try first: the default, then the model's best of many kinds.

    Each kernel's most promising run-time arguments come first, in predicted order; their variants follow.

    Args:
        space: Where configs come from.
        problem: What is to be computed.
        sm_count: Multiprocessors of the GPU.
        limit: Most kernels to compile.
        fixed: Knobs restricted to some values. The default leads the list only if it keeps to them.
        variants: Most further run-time arguments for each kernel.

    Raises:
        ArchError: The model knows nothing of the space's architecture.
        ConfigError: ``fixed`` names a knob or a value that does not exist.
        UsageError: ``limit`` is not positive.
    """
    if limit < 1:
        raise UsageError(f"limit={limit} kernels must be at least 1")
    ranker = _Ranker(space, problem, sm_count, fixed)
    pool = ranker.best(_POOL)
    best = {candidate.view: candidate for candidate in pool}
    default = space.default(problem)
    chosen: list[_Candidate] = []
    if ranker.legal(default):
        view = space.compile_view(default)
        chosen.append(_Candidate(default, view, ranker.predict(default)))
    chosen = _spread(chosen, pool, limit)
    lead = [c.config for c in chosen]
    for candidate in chosen:
        if candidate.config == default and candidate.view in best:
            lead.append(best[candidate.view].config)
        lead += ranker.variants(best.get(candidate.view, candidate), variants)
    return list(dict.fromkeys(lead))


def _spread(start: Sequence[_Candidate], pool: Sequence[_Candidate], limit: int) -> list[_Candidate]:
    """Return ``start`` and the best of ``pool``, preferring those unlike what is already chosen."""
    chosen = list(start)
    views = {c.view for c in chosen}
    rest = [c for c in pool if c.view not in views]
    if rest and limit - len(chosen) >= 6:
        families: dict[Any, _Candidate] = {}
        for candidate in rest:
            families.setdefault(_family(candidate.config), candidate)
        within = rest[0].time_us * _FAMILY_SLACK
        chosen += [c for c in families.values() if c.time_us <= within]
    picked = {c.view for c in chosen}
    rest = [c for c in rest if c.view not in picked]
    trusted = min(max(0, limit - _BREADTH), limit - len(chosen))
    chosen, rest = chosen + rest[:trusted], rest[trusted:]
    penalty = [1.0 + _LIKENESS * sum(_likeness(c.config, d.config) for d in chosen) for c in rest]
    while rest and len(chosen) < limit:
        at = min(range(len(rest)), key=lambda i: (rest[i].time_us * penalty[i], i))
        winner = rest.pop(at)
        penalty.pop(at)
        chosen.append(winner)
        penalty = [
            p + _LIKENESS * _likeness(c.config, winner.config) for p, c in zip(penalty, rest, strict=True)
        ]
    return [*start, *sorted(chosen[len(start) : limit], key=lambda c: c.time_us)]


def _grade(time_us: float) -> int:
    """Predictions in steps of 0.2 %, below which the simpler config goes first."""
    return round(log(time_us) * 500)


def _family(config: Config) -> tuple[Value, ...]:
    """Kinds of kernel between which the model is least sure: how k is divided, swapped, pingpong."""
    divided = config.get("split_k", 1) != 1
    return divided, *(config.get(knob, False) for knob in ("stream_k", "reduction", "swap_ab", "pingpong"))


def _likeness(a: Config, b: Config) -> float:
    """How little news one config brings after another: 0 for unlike kernels, 1.9 for near twins.

    Swapped kernels are compared by the part of the output that their tiles cover.
    """
    (am, an), (bm, bn) = _footprint(a), _footprint(b)
    distance = abs(log2(am / bm)) + abs(log2(an / bn))
    like = max(0.0, 1.0 - distance)
    if like == 1.0:
        like += 0.3 * sum(a.get(knob) == b.get(knob) for knob in _TELLING)
    return like if _family(a)[:3] == _family(b)[:3] else 0.3 * like


def _footprint(config: Config) -> tuple[int, int]:
    m, n = _tile(config)
    return (n, m) if config.get("swap_ab") else (m, n)


def _tile(config: Config) -> tuple[int, int]:
    tile = config["tile_shape_mn"]
    assert isinstance(tile, tuple)
    return tile[0], tile[1]


def refine(
    space: Space,
    problem: Problem,
    results: Mapping[Config, float | None],
    limit: int,
    *,
    sm_count: int | None = None,
    fixed: Mapping[str, Sequence[Value]] | None = None,
) -> list[Config]:
    """Return untried neighbours of the fastest measured configs, the most promising first.

    A neighbour differs in one knob by one step (tile width, cluster, pingpong, split, walk, ...), plus
    whatever else the rules then ask for. It is judged by its parent's measured time scaled by the ratio of
    their predictions, so errors that the model makes on both cancel.

    Args:
        space: Where configs come from.
        problem: What is computed.
        results: Microseconds of every config tried so far; None for one that failed.
        limit: Most kernels to compile. As many configs that need no compilation may be added.
        sm_count: Multiprocessors of the GPU; the architecture's main product's by default.
        fixed: Knobs restricted to some values.

    Raises:
        ArchError: The model knows nothing of the space's architecture.
    """
    ranker = _Ranker(space, problem, sm_count or space.arch.nominal_sm_count, fixed)
    timed = sorted((t, space.simplicity(c), c) for c, t in results.items() if t is not None)
    parents = [(time, config) for time, _, config in timed[:_PARENTS] if time <= timed[0][0] * _PARENT_SLACK]
    failed = {space.compile_view(c) for c, t in results.items() if t is None}
    built = {space.compile_view(c) for c, t in results.items() if t is not None}
    scored: dict[Config, float] = {}
    for time, parent in parents:
        base = ranker.predict(parent)
        for neighbour in _neighbours(space, problem, parent):
            if neighbour in results or not ranker.legal(neighbour):
                continue
            score = time * ranker.predict(neighbour) / base
            scored[neighbour] = min(score, scored.get(neighbour, score))
    ordered = sorted(scored, key=lambda c: (scored[c], space.simplicity(c)))
    return _within_limit(
        space, [c for c in ordered if space.compile_view(c) not in failed - built], built, limit
    )


def _within_limit(space: Space, configs: Sequence[Config], built: set[Config], limit: int) -> list[Config]:
    """Keep the first ``limit`` unbuilt kernels and at most as many configs that need no further one."""
    views = set(built)
    new = free = limit
    kept = []
    for config in configs:
        view = space.compile_view(config)
        if view in views and free > 0:
            free -= 1
            kept.append(config)
        elif view not in views and new > 0:
            new -= 1
            views.add(view)
            kept.append(config)
    return kept


def _neighbours(space: Space, problem: Problem, config: Config) -> Iterator[Config]:
    """Yield legal configs one step away, mending other knobs where a step breaks a rule."""
    for knob, value in _steps(space, config):
        moved = config.replace(**{knob: value})
        violations = space.explain(problem, moved)
        if not violations:
            yield moved
            continue
        broken = {v.rule for v in violations}
        knobs = {k for rule in space.rules if rule.name in broken for k in rule.knobs} - {knob}
        for other in (
            k for k in space.domains if k in knobs and k not in ("tile_shape_mn", "cluster_shape_mn")
        ):
            mended = (moved.replace(**{other: v}) for v in space.domains[other] if v != config[other])
            fine = next((c for c in mended if not space.explain(problem, c)), None)
            if fine is not None:
                yield fine
                break


def _steps(space: Space, config: Config) -> Iterator[tuple[str, Value]]:
    """Yield single changes: neighbouring tiles, the next values of ordered knobs, all values of others."""
    for knob, domain in space.domains.items():
        if knob == "tile_shape_mn":
            yield from ((knob, tile) for tile in _near_tiles(domain, _tile(config)))
        elif all(type(value) is int for value in domain):
            at = domain.index(config[knob])
            yield from ((knob, domain[i]) for i in (at - 1, at + 1) if 0 <= i < len(domain))
        else:
            yield from ((knob, value) for value in domain if value != config[knob])


def _near_tiles(domain: Sequence[Value], tile: tuple[int, int]) -> list[tuple[int, int]]:
    """Tiles next to ``tile``: one step along n, one along m, or the two exchanged."""
    shapes = [(v[0], v[1]) for v in domain if isinstance(v, tuple)]
    widths = sorted({n for m, n in shapes if m == tile[0]})
    heights = sorted({m for m, n in shapes if n == tile[1]})
    near = []
    for line, at, make in (
        (widths, tile[1], lambda n: (tile[0], n)),
        (heights, tile[0], lambda m: (m, tile[1])),
    ):
        i = line.index(at)
        near += [make(line[j]) for j in (i - 1, i + 1) if 0 <= j < len(line)]
    exchanged = (tile[1], tile[0])
    return near + ([exchanged] if exchanged != tile and exchanged in shapes else [])
