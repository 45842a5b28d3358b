"""Kernels compiled before they are called, and how far that has come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from cutegen.arch import Arch
from cutegen.build import Builder, Failure
from cutegen.build.artifact import require_written
from cutegen.build.host_library import build_library
from cutegen.build.render import Source
from cutegen.build.store import Store
from cutegen.errors import BuildError, ResourceError, UsageError
from cutegen.families.registry import find_space
from cutegen.runtime.kernel_cache import Kernels
from cutegen.runtime.needs import Wanted
from cutegen.search.defaults import prepare_defaults
from cutegen.text import shown

__all__ = ["Warming", "compile_wanted", "prepare_choices", "require_observer"]

#: Seconds between looks at the clock where there is a budget.
_POLL_S = 0.5
_Observer = TypeVar("_Observer", bound=Callable[[Any], None])


def require_observer(observe: _Observer) -> _Observer:
    """Return what is to be told of progress.

    Raises:
        UsageError: It is no function: it would be missed when work is under way.
    """
    if not callable(observe):
        raise UsageError(f"observe is {shown(observe)}; it must be a function of the progress")
    return observe


@dataclass(frozen=True)
class Warming:
    """How far a warm-up has come.

    Attributes:
        wanted: The kernels, in the order in which they are compiled.
        present: Those that were compiled before.
        compiled: Those that have been compiled now.
        failed: Those that could not be, with reasons.
        elapsed_s: Seconds so far.
        left_s: Seconds of the budget that remain; None without a budget.
        launched: So many have been loaded and launched.
    """

    wanted: tuple[Wanted, ...]
    present: tuple[Wanted, ...] = ()
    compiled: tuple[Wanted, ...] = ()
    failed: tuple[tuple[Wanted, str], ...] = ()
    elapsed_s: float = 0.0
    left_s: float | None = None
    launched: int = 0

    @property
    def ready(self) -> tuple[Wanted, ...]:
        """Those that a call finds compiled."""
        return (*self.present, *self.compiled)

    @property
    def missing(self) -> int:
        """How many are neither compiled nor known to fail: the budget was over."""
        return len(self.wanted) - len(self.ready) - len(self.failed)


def compile_wanted(
    wanted: Sequence[Wanted],
    store: Store,
    arch: Arch,
    *,
    workers: int | None = None,
    budget_s: float | None = None,
    observe: Callable[[Warming], None] = lambda warming: None,
) -> Warming:
    """Compile what ``store`` lacks of ``wanted``, several at a time, and return what came of it.

    What is compiled is kept, however this ends, so the same call continues. Known failures stay failures.

    Args:
        wanted: The kernels.
        store: Where they go.
        arch: The target.
        workers: Most compilations at a time; by default one per core, fewer where memory is short.
        budget_s: Seconds after which nothing more is compiled; None for no limit.
        observe: Called whenever something has changed.

    Raises:
        BuildError: There is no compiler.
        StoreError: The store cannot be read or written.
    """
    began = time.monotonic()

    def moment(state: Warming) -> Warming:
        elapsed = time.monotonic() - began
        left = None if budget_s is None else max(0.0, budget_s - elapsed)
        state = replace(state, elapsed_s=elapsed, left_s=left)
        observe(state)
        return state

    state, sources = _look(tuple(wanted), store, arch)
    state = moment(state)
    if not sources:
        return state
    with Builder(store, workers=workers) as builder:
        builder.submit(sources)
        while sources and state.left_s != 0.0:
            wait_s = None if budget_s is None else min(_POLL_S, state.left_s or 0)
            for source, result in require_written(builder.poll(wait_s)):
                each = sources.pop(source)
                if isinstance(result, Failure):
                    state = replace(state, failed=(*state.failed, (each, result.message)))
                else:
                    state = replace(state, compiled=(*state.compiled, each))
            state = moment(state)
    return state


def prepare_choices(wanted: Iterable[Wanted], store: Store, arch: Arch, sm_count: int) -> None:
    """Make choices among default kernels fast, for the signatures of ``wanted``: compile their loops in C.

    Without a C compiler choices are the same, and take longer.

    Raises:
        StoreError: Another user may have written what is in the store.
    """
    for problem in {each.problem.signature: each.problem for each in wanted}.values():
        space = find_space(problem.family, arch)
        prepare_defaults(space, problem, sm_count, lambda source: build_library(source, store))


def _look(wanted: tuple[Wanted, ...], store: Store, arch: Arch) -> tuple[Warming, dict[Source, Wanted]]:
    """Return what the store has, and the sources of what it lacks."""
    kernels = Kernels(store, build="never")
    present, failed, sources = [], [], {}
    for each in wanted:
        try:
            found = kernels.find(each.problem, each.config, arch, each.known_key)
        except (BuildError, ResourceError) as error:
            failed.append((each, str(error)))
            continue
        if isinstance(found, Source):
            sources[found] = each
        else:
            present.append(each)
    return Warming(wanted, present=tuple(present), failed=tuple(failed)), sources
