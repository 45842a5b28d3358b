"""The best of cuBLASLt as a contestant: all algorithms that it offers are tried, not only ``torch.mm``'s."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

from cutegen.digest import Json
from cutegen.errors import MeasureError
from cutegen.families.gemm.problem import Epilogue
from cutegen.families.gemm.problem import Problem as GemmProblem
from cutegen.family import Problem
from cutegen.measure import Candidate
from cutegen.measure.policy import Policy
from cutegen.space import Launch
from cutegen.system.temporary import TemporaryFolder
from tools.benchmark.contest import Arena, Entrant, Finalist, UnsupportedError, require_ok
from tools.benchmark.cublaslt import LT_CALL, Algorithm, LtOrder

__all__ = ["Vendor"]

#: Algorithms that go from the short rounds into the common ones.
_KEEP = 3


class Vendor:
    """cuBLASLt with the fastest of the algorithms that its heuristics offer.

    Args:
        context: Launch context of the short rounds.
    """

    name = "cublaslt"

    def __init__(self, context: str) -> None:
        self._context = context

    @property
    def settings(self) -> dict[str, Json]:
        """What decides its choice, for the conditions of the record."""
        return {"finalists": _KEEP}

    def prepare(self, problems: Sequence[Problem]) -> None:
        """Do nothing: torch brings it."""

    def enter(self, arena: Arena, problem: Problem) -> Entrant:
        """List the algorithms, time all shortly and keep the fastest few that are right."""
        self.require(problem)
        started = time.monotonic()
        offered = self._offered(arena, problem)
        candidates = {at: self._candidate(problem, at, found) for at, found in enumerate(offered, 1)}
        ordered = self._ordered(arena, candidates)
        best = list(islice((at for at in ordered if arena.check(candidates[at]).ok), _KEEP))
        if not best:
            require_ok(arena.check(candidates[ordered[0]]))
        choices: dict[int, dict[str, Json]] = {
            at: {"algorithm": offered[at - 1].words, "place": at} for at in best
        }
        finalists = (Finalist(candidates[at], f"{at} of {len(offered)}", choices[at]) for at in best)
        details: dict[str, Json] = {"algorithms": len(offered), "timed": len(ordered)}
        return Entrant(tuple(finalists), round(time.monotonic() - started, 2), details)

    def require(self, problem: Problem) -> None:
        """Refuse a problem that is not compared.

        Raises:
            UnsupportedError: It is no plain product of two matrices of 16 bits.
        """
        if not isinstance(problem, GemmProblem) or problem.epilogue != Epilogue() or problem.batch > 1:
            raise UnsupportedError("only plain products of two matrices are compared")
        if problem.ab_dtype not in ("bf16", "fp16"):
            raise UnsupportedError(f"products of {problem.ab_dtype} are not compared")

    def _offered(self, arena: Arena, problem: Problem) -> list[Algorithm]:
        with TemporaryFolder() as folder:
            note = folder.path / "note.json"
            checked = arena.check(self._of(problem, "list", LtOrder(note=str(note))))
            if not note.exists():
                require_ok(checked)
                raise MeasureError("cuBLASLt ran, but left no note of its algorithms")
            return [Algorithm(**found) for found in json.loads(note.read_text(encoding="utf-8"))]

    def _ordered(self, arena: Arena, candidates: Mapping[int, Candidate]) -> list[int]:
        """Return the places of those that run, the fastest first."""
        run = arena.time(list(candidates.values()), Policy.screen(context=self._context))
        timed = [at for at, candidate in candidates.items() if candidate.name in run]
        if not timed:
            raise MeasureError(f"no algorithm could be timed: {next(iter(run.failures.values())).error}")
        return sorted(timed, key=lambda at: run[candidates[at].name].paired.mid)

    def _candidate(self, problem: Problem, at: int, algorithm: Algorithm) -> Candidate:
        return self._of(problem, str(at), LtOrder(algorithm=algorithm))

    def _of(self, problem: Problem, word: str, order: LtOrder) -> Candidate:
        symbol = json.dumps(order.to_json())
        return Candidate(f"{self.name} {word}", Path(LT_CALL), symbol, Launch((), 0), problem)
