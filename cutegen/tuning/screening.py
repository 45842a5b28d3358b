"""Sets of candidates timed on many problems that share kernels: each kernel is rendered and checked once."""

from __future__ import annotations

from dataclasses import replace

from cutegen.arch import Arch
from cutegen.build.render import Source, recipe_of, render
from cutegen.families.registry import find_space
from cutegen.family import Problem, Signature
from cutegen.search.defaults import default_config
from cutegen.space import Config
from cutegen.tuning.candidate_runner import CandidateRunner
from cutegen.tuning.progress import ignore_progress
from cutegen.tuning.request import Request
from cutegen.tuning.session import Session

__all__ = ["Screening", "SourceCache"]


class SourceCache:
    """Renders like :func:`~cutegen.build.render.render`, each kernel once: sizes of a problem share it."""

    def __init__(self) -> None:
        self._sources: dict[str, Source] = {}

    def __call__(self, problem: Problem, config: Config, arch: Arch) -> Source:
        """Return the source of ``config``; raises as :func:`~cutegen.build.render.render`."""
        recipe = recipe_of(problem, config, arch)
        if recipe not in self._sources:
            self._sources[recipe] = render(problem, config, arch)
        return self._sources[recipe]


class Screening:
    """Makes a :class:`CandidateRunner` for one problem after another.

    A config that passed the check on one problem is not checked on the next one of the same signature.

    Args:
        session: What all problems share; ``again`` if what earlier runs recorded does not count.
        run: Name of the run, written into every trial.
        render: Rendered kernels.
    """

    def __init__(self, session: Session, run: str, render: SourceCache) -> None:
        self._session = replace(session, observe=ignore_progress)
        self._run = run
        self._render = render
        self._checked: dict[Signature, set[Config]] = {}

    def start(self, request: Request) -> CandidateRunner:
        """Return the runner of one problem; the caller chooses what it screens."""
        space = find_space(request.problem.family, request.arch)
        return CandidateRunner(
            request,
            self._session,
            self._session.ledger(request, self._run),
            default=default_config(space, request.problem, request.sm_count),
            render=self._render,
            checked=self._checked.setdefault(request.problem.signature, set()),
        )
