"""The model applied to kernels of one space: each with its most promising run-time arguments."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import log
from typing import Any

from cutegen.families.gemm.perf_model.blackwell import estimator_of
from cutegen.families.gemm.perf_model.wave_order import orders_of
from cutegen.families.gemm.problem import Problem
from cutegen.space import Config, Space, Value, as_integer

__all__ = ["FAMILY_SLACK", "Candidate", "Ranker", "family_of"]

#: A family (swapped, split, pingpong) is tried even if its best is predicted slower by up to this factor.
FAMILY_SLACK = 1.15
#: Run-time variants are worth measuring if predicted within this factor of the kernel's best.
_VARIANT_SLACK = 1.15


@dataclass(frozen=True)
class Candidate:
    """A kernel with its most promising run-time arguments."""

    config: Config
    view: Config
    time_us: float


class Ranker:
    """Predicts kernels of one space for one problem, choosing their run-time knobs."""

    def __init__(
        self, space: Space, problem: Problem, sm_count: int, fixed: Mapping[str, Sequence[Value]] | None
    ) -> None:
        self._space = space
        self._problem = problem
        self._fixed = dict(fixed or {})
        self._domains = {knob: tuple(self._fixed.get(knob, domain)) for knob, domain in space.domains.items()}
        self._estimator = estimator_of(problem, space.arch, sm_count)
        self._orders: dict[Any, list[tuple[float, Value, Value]]] = {}
        self._split_rules = tuple(rule for rule in space.rules if "split_k" in rule.knobs)
        # What the number of tiles follows from:
        shape = {"tile_shape_mn", "mma_tiler_mn", "use_2cta_instrs", "cluster_shape_mn", "swap_ab"}
        looked_at = shape.union(*(rule.knobs for rule in self._split_rules)) - {"split_k"}
        self._split_knobs = tuple(knob for knob in space.domains if knob in looked_at)
        self._splits: dict[Any, list[int]] = {}

    def best(self, count: int) -> list[Candidate]:
        """Return the fastest kernels with their best run-time arguments, and the best of each family."""
        found = [
            (*self._fastest(config, splits), config)
            for fixed, splits in self._kinds()
            for config in self._space.configs(self._problem, {**self._fixed, **fixed})
        ]
        found.sort(key=lambda item: _grade(item[0]))  # equal grades keep the space's order: simpler first
        kept: dict[Config, Candidate] = {}
        families: set[Any] = set()
        for time_us, split, config in found:
            family = family_of(config)
            if len(kept) >= count and (family in families or time_us > found[0][0] * FAMILY_SLACK):
                continue
            families.add(family)
            candidate = self._complete(config, split, time_us)
            kept.setdefault(candidate.view, candidate)
        return list(kept.values())

    def finish(self, config: Config) -> Candidate:
        """Return the kernel of ``config`` with the run-time arguments that the model likes best."""
        view = self._space.compile_view(config)
        splits = [as_integer(s) for s in self._domains.get("split_k", (1,))]
        if "split_k" in config:
            same = [s for s in splits if self._space.compile_view(config.replace(split_k=s)) == view]
            splits = same or [config.integer("split_k")]  # the default competes whatever is fixed
        time_us, split = self._fastest(config, tuple(sorted(splits)))
        return self._complete(config, split, time_us)

    def _complete(self, config: Config, split: int, time_us: float) -> Candidate:
        _, swizzle, along_m = self.orders(config)[0]
        chosen = {"swizzle_size": swizzle, "raster_along_m": along_m, "split_k": split}
        full = config.replace(**{knob: value for knob, value in chosen.items() if knob in config})
        return Candidate(full, self._space.compile_view(full), time_us)

    def _kinds(self) -> Iterator[tuple[dict[str, tuple[Value, ...]], tuple[int, ...]]]:
        """Yield run-time values that stand for all, once for each kind of kernel ``split_k`` compiles."""
        first = {k: self._domains[k][:1] for k in self._space.domains if k in self._space.run_time_knobs}
        # Launches back to back, which the model predicts, gain by it; others have twins tried without it.
        first |= {"use_pdl": (True,)} if True in self._domains.get("use_pdl", ()) else {}
        sample = self._space.default(self._problem)
        kinds: dict[Config, list[int]] = {}
        for split in self._domains.get("split_k", (1,)):
            probe = sample.replace(split_k=split) if "split_k" in self._domains else sample
            kinds.setdefault(self._space.compile_view(probe), []).append(as_integer(split))
        for splits in kinds.values():
            ordered = tuple(sorted(splits))
            yield {**first, **({"split_k": ordered[:1]} if "split_k" in first else {})}, ordered

    def _fastest(self, config: Config, splits: tuple[int, ...]) -> tuple[float, int]:
        """Microseconds and ``split_k`` of a kernel with its best run-time arguments."""
        derived = self._space.derive(config, self._problem, self._space.arch)
        likely = self._likely_splits(config, splits)
        return self._estimator.fastest_split(config, derived, likely, self.orders(config)[0][0])

    def _likely_splits(self, config: Config, splits: tuple[int, ...]) -> Sequence[int]:
        """The valid splits that leave few SMs idle in up to three rounds of work."""
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
        """Return the rasterization orders as (bytes, swizzle, along m).

        First that with which GPCs load least, of those of least traffic; then the others by traffic.
        """
        key = self._estimator.shape_of(config)
        known = self._orders.get(key)
        if known is None:
            orders = orders_of(
                self._domains.get("swizzle_size", (1,)), self._domains.get("raster_along_m", (False,))
            )
            least = self._estimator.least_loads(config, orders)
            traffic = [(self._estimator.traffic(config, *order), *order) for order in orders]
            known = self._orders[key] = sorted(traffic, key=lambda order: (order[1:] != least, order[0]))
        return known

    def predict(self, config: Config) -> float:
        """Return microseconds for a complete config."""
        derived = self._space.derive(config, self._problem, self._space.arch)
        return self._estimator.estimate(config, derived).time_us

    def variants(self, best: Candidate, count: int) -> list[Config]:
        """Return up to ``count`` other run-time arguments for a kernel, unlike its own, promising first."""
        config = best.config
        changes: list[dict[str, Value]] = [{"split_k": s} for s in self._other_splits(config)]
        orders = self.orders(config)
        least, most = min(orders)[0], max(orders)[0]
        taken = {(config.get("swizzle_size"), config.get("raster_along_m"))}
        for traffic, swizzle, along_m in orders:
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
        domain = [as_integer(s) for s in self._domains.get("split_k", ())]
        if not domain or config["split_k"] not in domain:
            return []
        at, view = domain.index(config.integer("split_k")), self._space.compile_view(config)
        near = [domain[i] for i in (at + 1, at - 1) if 0 <= i < len(domain)]
        return [s for s in near if self._space.compile_view(config.replace(split_k=s)) == view]

    def legal(self, config: Config) -> bool:
        """Whether ``config`` breaks no rule and stays within the fixed values."""
        inside = (config[knob] in values for knob, values in self._fixed.items())
        return all(inside) and not self._space.explain(self._problem, config)


def _grade(time_us: float) -> int:
    """Predictions in steps of 0.2 %, below which the simpler config goes first."""
    return round(log(time_us) * 500)


def family_of(config: Config) -> tuple[Value, ...]:
    """Kinds of kernel between which the model is least sure: how k is divided, swapped, pingpong, pairs."""
    divided = config.get("split_k", 1) != 1
    return divided, *(
        config.get(knob, False)
        for knob in ("stream_k", "reduction", "swap_ab", "pingpong", "use_2cta_instrs")
    )
