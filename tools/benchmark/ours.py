"""cutegen as a contestant: the dispatch table's choice, compiled kernels from the artifact store."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from cutegen.arch import Arch
from cutegen.build import Artifact
from cutegen.digest import Json
from cutegen.errors import LaunchError, UsageError
from cutegen.families.registry import find_space, parse_problem, space_of
from cutegen.family import Problem
from cutegen.measure import Candidate
from cutegen.runtime.answer_lookup import Answer
from cutegen.runtime.dispatch import Dispatcher
from cutegen.search.defaults import default_config
from cutegen.space import Config, Launch, Space
from tools.benchmark.child import GEMM_CALL
from tools.benchmark.contest import Arena, Entrant, Finalist, require_ok
from tools.benchmark.results import OWN

__all__ = ["Ours", "read_tuning_seconds", "short_config"]


def short_config(space: Space, config: Config) -> str:
    """Return the provider unless it is our own, then the config in its short form."""
    return " ".join([*([] if config.source == OWN else [config.source]), space.short(config)])


def read_tuning_seconds(path: Path) -> dict[Problem, float]:
    """Return the seconds that tuning each problem took, from what ``cutegen.tune --json`` printed.

    Problems that were answered from records took no tuning and are left out.

    Raises:
        UsageError: The file is missing or is not such a document.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        rows = [row for row in document["results"] if not row.get("reused", False)]
        return {parse_problem(row["problem"]): float(row["seconds"]) for row in rows}
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is not what python -m cutegen.tune --json prints: {error!r}") from error


class Ours:
    """The kernel that cutegen's dispatch table names for each problem; it never tunes here.

    Where the table gives a problem to torch, the best of cutegen's own kernels is measured all the same.

    Args:
        dispatcher: Table and artifact store.
        table: The table's file, which the library's own call in the child loads; None for the cache's.
        device: Index of the GPU.
        tuning_s: Seconds that tuning took, by problem.
        call_too: Also check ``cutegen.gemm`` itself, in the child.

    Attributes:
        table: The table's file.
    """

    name = OWN

    def __init__(
        self,
        dispatcher: Dispatcher,
        *,
        table: Path | None = None,
        device: int = 0,
        tuning_s: Mapping[Problem, float] | None = None,
        call_too: bool = True,
    ) -> None:
        self._dispatcher = dispatcher
        self.table = table
        self._device = device
        self._tuning_s = tuning_s or {}
        self._call_too = call_too

    def prepare(self, problems: Sequence[Problem]) -> None:
        """Do nothing: what a table names, the store has."""

    def answer(self, problem: Problem) -> tuple[Answer, Config]:
        """Return what the dispatcher says, and the config of ours that is measured for it."""
        answer = self._dispatcher.explain(problem, self._device)
        if answer.config is not None:
            return answer, answer.config
        own = answer.entry.config if answer.entry is not None else None
        device = self._dispatcher.device(self._device)
        space = find_space(problem.family, self._arch)
        return answer, own or default_config(space, problem, device.sm_count)

    def plan(self, problem: Problem) -> str:
        """Return what would be measured, in words; the dispatcher must not be allowed to build."""
        answer, config = self.answer(problem)
        try:
            self.artifact(problem)
            state = "compiled"
        except LaunchError:
            state = "not compiled yet"
        return f"{answer.how}: {short_config(space_of(config, problem.family, self._arch), config)} ({state})"

    def artifact(self, problem: Problem) -> Artifact:
        """Return the compiled kernel, compiling it if need be."""
        answer, config = self.answer(problem)
        entry = answer.entry
        same = entry is not None and entry.problem.signature == problem.signature
        return self._dispatcher.kernels.artifact(
            problem,
            config,
            self._arch,
            known_key=entry.artifact_key if entry is not None and same else "",
        )

    def enter(self, arena: Arena, problem: Problem) -> Entrant:
        """Check the table's choice, and the library's own call."""
        answer, config = self.answer(problem)
        space, artifact = space_of(config, problem.family, self._arch), self.artifact(problem)
        sm_count = self._dispatcher.device(self._device).sm_count
        candidate = Candidate.of(
            self.name, artifact.shared_object, artifact.symbol, space, config, problem, sm_count
        )
        require_ok(arena.check(candidate))
        details = {**_evidence(answer), **_resources(artifact)}
        if self._call_too:
            details["called_through_gemm"] = self._call(arena, problem)
        finalist = Finalist(candidate, short_config(space, config), config.to_json())
        return Entrant((finalist,), self._tuning_s.get(problem), details)

    def _call(self, arena: Arena, problem: Problem) -> str:
        """Return ``ok`` if the library's own call gives the right answer, else why not."""
        table = "" if self.table is None else str(self.table.absolute())
        order = json.dumps({"table": table, "problem": str(problem)})
        candidate = Candidate("cutegen.gemm", Path(GEMM_CALL), order, Launch((), 0), problem)
        result = arena.check(candidate)
        return "ok" if result.ok else f"{result.outcome}: {result.error}"

    @property
    def _arch(self) -> Arch:
        return self._dispatcher.device(self._device).arch


def _evidence(answer: Answer) -> dict[str, Json]:
    entry = answer.entry
    return {
        "lookup": answer.how,
        "table_gives_it_to": "torch" if answer.config is None else answer.config.source,
        "measured_for": "" if entry is None else str(entry.problem),
        "table_us": None if entry is None else entry.time_us,
    }


def _resources(artifact: Artifact) -> dict[str, Json]:
    taken = artifact.resources
    return {
        "artifact_key": artifact.key,
        "registers": taken.registers,
        "smem_bytes": taken.smem_bytes,
        "spill_bytes": taken.spill_store_bytes + taken.spill_load_bytes,
    }
