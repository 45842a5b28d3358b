"""NVIDIA's CUTLASS Operator API as a contestant: the best of the operators it offers for the target.

Which operators there are, their source and their launch are those of cutegen's candidates of
``source=operators``: listed by the API's manifest, compiled by cutegen's compile daemon from the kernel class
that the package ships. A captured launch is the kernel alone, so nothing of the API is lost in that.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cutegen.arch import Arch
from cutegen.build import Artifact, Builder
from cutegen.build.render import Source, render
from cutegen.build.store import Store
from cutegen.digest import Json
from cutegen.errors import BuildError, MeasureError, ResourceError
from cutegen.families.gemm.operator_package import PACKAGE, require_package
from cutegen.families.registry import space_of
from cutegen.family import Problem, Signature
from cutegen.measure import Candidate
from cutegen.measure.policy import Policy
from cutegen.operator_api import Offers, find_offers
from cutegen.space import Config, format_value
from tools.benchmark.contest import Arena, Entrant, Finalist, UnsupportedError, require_ok
from tools.benchmark.results import Entry

__all__ = ["PACKAGE", "Operators", "short_name"]


def short_name(config: Config) -> str:
    """Return what tells an operator from its like: ``128x256 2x1``."""
    fixed = ("source", "operator", "use_tma_store")
    words = {knob: format_value(value) for knob, value in config.items() if knob not in fixed}
    if words.pop("use_2cta_instrs", "false") == "true":
        words["pair"] = "2cta"
    return " ".join(words.values())


class Operators:
    """The fastest of NVIDIA's operators, found by timing all of them on each shape.

    Args:
        store: Where their compiled kernels are kept.
        arch: The target.
        sm_count: SMs of the GPU.
        keep: How many go from the short rounds into the common ones.
        workers: Compilations at a time.
        known: Entries of an earlier contest, whose finalists are run without timing all again.
        known_from: What to call that contest in the record.
    """

    name = "operators"

    def __init__(
        self,
        store: Store,
        arch: Arch,
        sm_count: int,
        *,
        keep: int = 3,
        workers: int | None = None,
        known: Mapping[Problem, Entry] | None = None,
        known_from: str = "",
    ) -> None:
        self._store = store
        self._arch = arch
        self._sm_count = sm_count
        self._keep = keep
        self._workers = workers
        self._known = {p: entry for p, entry in (known or {}).items() if "operator" in entry.choice}
        self._known_from = known_from
        self._offers: dict[Problem, Offers] = {}
        self._artifacts: dict[tuple[Signature, Config], Artifact] = {}
        self._failures: dict[tuple[Signature, Config], str] = {}
        self._compile_s: dict[Signature, float] = {}

    @property
    def settings(self) -> dict[str, Json]:
        """What decides its choice, for the conditions of the record."""
        return {"finalists": self._keep}

    def knows(self, problem: Problem) -> bool:
        """Whether an earlier contest says which kernels to run."""
        return problem in self._known

    def prepare(self, problems: Sequence[Problem]) -> None:
        """List and compile all operators that some problem can use.

        Raises:
            UnsupportedError: The API is not installed.
            BuildError: Its operators cannot be listed, or the compiler does not work at all.
        """
        try:
            require_package()
        except ResourceError as error:
            raise UnsupportedError(str(error)) from error
        unknown = [problem for problem in problems if problem not in self._known]
        self._offers = {problem: find_offers(problem, self._arch, self._store) for problem in unknown}
        for signature, alike in _by_signature(problems).items():
            configs = dict.fromkeys(config for problem in alike for config in self._configs(problem))
            self._compile(signature, [render(alike[0], config, self._arch) for config in configs])

    def _configs(self, problem: Problem) -> tuple[Config, ...]:
        known = self._known.get(problem)
        if known is None:
            return self._offers[problem].configs
        finalists: Any = known.details.get("finalists", [known.choice])
        return tuple(Config.from_json(data) for data in finalists)

    def _compile(self, signature: Signature, sources: Sequence[Source]) -> None:
        started = time.monotonic()
        with Builder(self._store, workers=self._workers) as builder:
            for source, result in builder.build(sources):
                if isinstance(result, Artifact):
                    self._artifacts[signature, source.config] = result
                else:
                    self._failures[signature, source.config] = result.message
        self._compile_s[signature] = time.monotonic() - started

    def enter(self, arena: Arena, problem: Problem) -> Entrant:
        """Time every operator shortly, and check the fastest few."""
        signature, offered = problem.signature, self._configs(problem)
        if not offered:
            raise UnsupportedError("; ".join(map(str, self._offers[problem].refused)))
        configs = [config for config in offered if (signature, config) in self._artifacts]
        if not configs:
            raise BuildError(f"none of the operators compiled: {self._failures[signature, offered[0]]}")
        candidates = {config: self._candidate(problem, config) for config in configs}
        known = self._known.get(problem)
        started = time.monotonic()
        best = configs if known else self._screen(arena, candidates)
        screen_s = time.monotonic() - started
        best = self._right_ones(arena, {config: candidates[config] for config in best})
        finalists = tuple(Finalist(candidates[c], short_name(c), c.to_json()) for c in best)
        details: dict[str, Json] = {"finalists": [config.to_json() for config in best]}
        if known:
            return Entrant(finalists, known.tuning_s, {**known.details, "tuned_in": self._known_from})
        compile_s = self._compile_s[signature]
        details |= {"candidates": len(configs), "compile_s": round(compile_s, 2)}
        details |= {"screen_s": round(screen_s, 2), "failed_to_compile": len(offered) - len(configs)}
        return Entrant(finalists, round(compile_s + screen_s, 2), details)

    def _screen(self, arena: Arena, candidates: Mapping[Config, Candidate]) -> list[Config]:
        run = arena.time(list(candidates.values()), Policy.screen())
        timed = [config for config, candidate in candidates.items() if candidate.name in run]
        if not timed:
            reason = next(iter(run.failures.values())).error
            raise MeasureError(f"none of the operators could be timed: {reason}")
        return sorted(timed, key=lambda config: run[candidates[config].name].paired.mid)[: self._keep]

    def _right_ones(self, arena: Arena, candidates: Mapping[Config, Candidate]) -> list[Config]:
        checks = {config: arena.check(candidate) for config, candidate in candidates.items()}
        right = [config for config, check in checks.items() if check.ok]
        if not right:
            require_ok(next(iter(checks.values())))
        return right

    def _candidate(self, problem: Problem, config: Config) -> Candidate:
        artifact = self._artifacts[problem.signature, config]
        launch = space_of(config, problem.family, self._arch).launch(config, problem, self._sm_count)
        name = f"{self.name} {short_name(config)}"
        return Candidate(name, artifact.shared_object, artifact.symbol, launch, problem)


def _by_signature(problems: Iterable[Problem]) -> dict[Signature, list[Problem]]:
    found: dict[Signature, list[Problem]] = {}
    for problem in problems:
        found.setdefault(problem.signature, []).append(problem)
    return found
