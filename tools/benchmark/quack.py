"""QuACK as a contestant: its own autotuner chooses, in the measuring child; then that config is timed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from cutegen.digest import Json
from cutegen.errors import MeasureError
from cutegen.families.gemm.problem import Epilogue
from cutegen.families.gemm.problem import Problem as GemmProblem
from cutegen.family import Problem
from cutegen.measure import Candidate
from cutegen.space import Launch
from cutegen.system.temporary import TemporaryFolder
from tools.benchmark.child import QUACK_CALL, QuackOrder
from tools.benchmark.contest import Arena, Entrant, Finalist, UnsupportedError, require_ok
from tools.benchmark.results import Entry

__all__ = ["Quack", "quack_environment"]


def quack_environment(cache: Path, workers: int) -> dict[str, str]:
    """Return the variables that make QuACK's tuning cold, with ``workers`` compiling processes.

    Kernels that it compiles are kept in ``cache``; what it measures is always measured anew.
    """
    return {
        "QUACK_CACHE_DIR": str(cache.absolute()),
        "QUACK_FORCE_CACHE_UPDATE": "1",
        "QUACK_COMPILE_WORKERS": str(workers),
    }


class Quack:
    """``quack.gemm(a, b, out=d)``, tuned by its first call.

    Args:
        split_k: ``1`` as its users get it by default, ``0`` lets its autotuner choose the factor too.
        timed_calls: Calls that its autotuner times per config; 0 leaves its own 200.
        known: Entries of an earlier contest, whose configs are run without tuning again.
        known_from: What to call that contest in the record.
    """

    name = "quack"

    def __init__(
        self,
        *,
        split_k: int = 1,
        timed_calls: int = 0,
        known: Mapping[Problem, Entry] | None = None,
        known_from: str = "",
    ) -> None:
        self._split_k = split_k
        self._timed_calls = timed_calls
        self._known = known or {}
        self._known_from = known_from

    @property
    def settings(self) -> dict[str, Json]:
        """What decides its choice, for the conditions of the record."""
        return {"split_k": self._split_k or "tuned", "timed_calls": self._timed_calls or "its own"}

    def prepare(self, problems: Sequence[Problem]) -> None:
        """See that it is installed.

        Raises:
            UnsupportedError: It is not.
        """
        try:
            version("quack-kernels")
        except PackageNotFoundError:
            raise UnsupportedError("quack-kernels is not installed") from None

    def knows(self, problem: Problem) -> bool:
        """Whether an earlier contest says which config to run."""
        return problem in self._known

    def enter(self, arena: Arena, problem: Problem) -> Entrant:
        """Let its autotuner choose, and check what it chose."""
        if not isinstance(problem, GemmProblem) or problem.epilogue != Epilogue():
            raise UnsupportedError("only plain products are compared")
        known = self._known.get(problem)
        if known is not None:
            candidate = self._candidate(problem, QuackOrder(config=known.choice))
            require_ok(arena.check(candidate))
            details = {**known.details, "tuned_in": self._known_from}
            return Entrant((self._finalist(candidate, known.choice),), known.tuning_s, details)
        return self._tune(arena, problem)

    def _tune(self, arena: Arena, problem: Problem) -> Entrant:
        with TemporaryFolder() as folder:
            note = folder.path / "note.json"
            order = QuackOrder(str(note), None, self._split_k, self._timed_calls)
            require_ok(arena.check(self._candidate(problem, order)))
            if not note.exists():
                raise MeasureError("QuACK ran, but its autotuner left no note")
            found = json.loads(note.read_text(encoding="utf-8"))
        choice, seconds = found.pop("config"), found.pop("tuning_s")
        # Timed by its config, so that a child that was replaced meanwhile need not tune again.
        candidate = self._candidate(problem, QuackOrder(config=choice))
        return Entrant((self._finalist(candidate, choice),), round(seconds, 2), found)

    def _candidate(self, problem: Problem, order: QuackOrder) -> Candidate:
        return Candidate(self.name, Path(QUACK_CALL), json.dumps(order.to_json()), Launch((), 0), problem)

    def _finalist(self, candidate: Candidate, choice: Mapping[str, Json]) -> Finalist:
        return Finalist(candidate, _short(choice), choice)


def _short(config: Mapping[str, Json]) -> str:
    words = [
        f"{config.get('tile_m')}x{config.get('tile_n')}",
        f"{config.get('cluster_m')}x{config.get('cluster_n')}",
    ]
    words += [name for name in ("pingpong", "swap_ab") if config.get(name)]
    split = config.get("split_k", 1)
    return " ".join([*words, *([f"split_k={split}"] if split != 1 else [])])
