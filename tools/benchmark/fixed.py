"""Given configs as contestants: they are compiled and checked, and tune nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cutegen.build import Artifact, Builder
from cutegen.build.render import Source
from cutegen.build.store import Store
from cutegen.digest import Json
from cutegen.errors import CutegenError
from cutegen.family import Problem
from cutegen.measure import Candidate
from cutegen.space import Config, Space
from tools.benchmark.contest import Arena, Entrant, Finalist, require_ok
from tools.benchmark.ours import short_config

__all__ = ["Absent", "Fixed", "build", "fixed"]


class Fixed:
    """One config as a contestant."""

    def __init__(self, name: str, space: Space, config: Config, artifact: Artifact, sm_count: int) -> None:
        self.name = name
        self._space = space
        self._config = config
        self._artifact = artifact
        self._sm_count = sm_count

    def prepare(self, problems: Sequence[Problem]) -> None:
        """Do nothing: it is compiled."""

    def enter(self, arena: Arena, problem: Problem) -> Entrant:
        """Check the kernel."""
        space, artifact, config = self._space, self._artifact, self._config
        candidate = Candidate.of(
            self.name, artifact.shared_object, artifact.symbol, space, config, problem, self._sm_count
        )
        require_ok(arena.check(candidate))
        resources: dict[str, Json] = {
            "source": config.source,
            "artifact_key": artifact.key,
            "registers": artifact.resources.registers,
            "smem_bytes": artifact.resources.smem_bytes,
        }
        return Entrant((Finalist(candidate, short_config(space, config), config.to_json()),), None, resources)


class Absent:
    """A config whose kernel does not compile."""

    def __init__(self, name: str, error: CutegenError) -> None:
        self.name = name
        self.error = error

    def prepare(self, problems: Sequence[Problem]) -> None:
        """Do nothing."""

    def enter(self, arena: Arena, problem: Problem) -> Entrant:
        """Say why not."""
        raise self.error


def fixed(
    name: str, space: Space, config: Config, built: Artifact | CutegenError, sm_count: int
) -> Fixed | Absent:
    """Return the contestant for a config and what compiling it came to."""
    if isinstance(built, Artifact):
        return Fixed(name, space, config, built, sm_count)
    return Absent(name, built)


def build(
    store: Store, sources: Sequence[Source], workers: int | None
) -> Mapping[str, Artifact | CutegenError]:
    """Compile every kernel once, in parallel; return it, or why there is none, by the digest of its text."""
    wanted = {source.digest: source for source in sources}
    built: dict[str, Artifact | CutegenError] = {}
    with Builder(store, workers=workers) as builder:
        for source, result in builder.build(list(wanted.values())):
            built[source.digest] = result if isinstance(result, Artifact) else result.error()
    return built
