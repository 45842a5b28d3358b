"""Kernels compiled before they are called: those of untuned problems of a kind, those that a table names."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from cutegen.arch import Arch
from cutegen.build import Builder, Failure
from cutegen.build.host_library import build_library
from cutegen.build.render import Source
from cutegen.build.store import Store
from cutegen.errors import BuildError, ProblemError, ResourceError, UsageError
from cutegen.families.options import read_options
from cutegen.families.registry import find_family, find_space, is_legal, space_of
from cutegen.family import Family, Problem, Signature
from cutegen.records.table import Table
from cutegen.runtime.answer_lookup import look_up
from cutegen.runtime.kernel_cache import Kernels
from cutegen.search.defaults import default_set, prepare_defaults
from cutegen.space import Config

__all__ = ["Wanted", "Warming", "compile_wanted", "kinds", "prepare_choices", "wanted_kernels"]

#: A free size of a problem that stands for its kind: a multiple of whatever a layout asks for.
_ANY_SIZE = 4096
#: Seconds between looks at the clock where there is a budget.
_POLL_S = 0.5


@dataclass(frozen=True)
class Wanted:
    """A kernel to compile: a problem, a config that is valid for it, and where a table says that it is."""

    problem: Problem
    config: Config
    known_key: str = ""


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


def kinds(
    family: Family,
    dtypes: Sequence[str] = (),
    layouts: Sequence[str] = (),
    options: Sequence[str] = (),
    shapes: Sequence[str] = (),
) -> tuple[Problem, ...]:
    """Return a problem for each combination of dtype, layout, words of options, and shape.

    What is not given is the family's default; without shapes the sizes are any.

    Raises:
        UsageError: There is no such option, a shape is malformed, or the family compiles a size in and no
            shape says what it is.
        ProblemError: The family does not compute a combination.
    """
    found = []
    for sizes in [family.parse_shape(shape) for shape in shapes] or [_any_sizes(family)]:
        for dtype, layout, words in product(dtypes or ("",), layouts or ("",), options or ("",)):
            given = {name: value for name, value in (("dtype", dtype), ("layout", layout)) if value}
            found.append(family.problem(sizes, read_options(family, words, given)))
    return tuple(dict.fromkeys(found))


def _any_sizes(family: Family) -> dict[str, int]:
    fixed = [size.name for size in family.sizes if not size.free and size.default is None]
    if fixed:
        raise UsageError(
            f"kernels of {family.name} are compiled for one {', '.join(fixed)}; give the shapes, such as "
            f"--shape {'x'.join([str(_ANY_SIZE)] * len(family.sizes))}"
        )
    return {size.name: size.default or _ANY_SIZE for size in family.sizes}


def wanted_kernels(
    of_kinds: Iterable[Problem],
    problems: Iterable[Problem],
    table: Table | None,
    arch: Arch,
    sm_count: int,
    *,
    whole_table: bool = False,
    only_answers: bool = False,
    fallback: str = "",
) -> tuple[Wanted, ...]:
    """Return the kernels that calls may need, each once.

    Args:
        of_kinds: Of each, whatever answers a problem of its signature: the default set, and what the table
            names for such problems.
        problems: Of each, the same, and the kernel that answers it.
        table: Asked for answers.
        arch: The target.
        sm_count: SMs of the GPU.
        whole_table: Also every kernel that the table names.
        only_answers: Of ``problems`` the kernels that answer them alone.
        fallback: As for :func:`~cutegen.runtime.answer_lookup.look_up`.

    Raises:
        ProblemError: No config computes one of them there.
        ResourceError: There is no space for a family and the target.
    """
    given = tuple(problems)
    found: dict[object, Wanted] = {}

    def add(wanted: Wanted) -> None:
        space = space_of(wanted.config, wanted.problem.family, arch)
        found.setdefault((wanted.problem.signature, space.compile_view(wanted.config)), wanted)

    for problem in given:
        answer = look_up(table, problem, find_space(problem.family, arch), sm_count, fallback)
        if answer.config is not None:
            add(Wanted(problem, answer.config, answer.known_key))
    for wanted in _of_table(table, arch) if whole_table and table is not None else ():
        add(wanted)
    first: dict[Signature, Problem] = {}
    for problem in (*of_kinds, *(() if only_answers else given)):
        first.setdefault(problem.signature, problem)
    for problem in first.values():
        space = find_space(problem.family, arch)
        space.default(problem)  # raises where the target computes no such problem
        for kin, config in default_set(space, problem, sm_count):
            add(Wanted(kin, config))
        for wanted in _of_kind(problem, table, arch) if table is not None else ():
            add(wanted)
    return tuple(found.values())


def _of_kind(kind: Problem, table: Table, arch: Arch) -> Iterator[Wanted]:
    """Yield what a table may answer to problems of the signature of ``kind``, by any rule of lookup."""
    family = find_family(kind.family)
    kin = family.kin(kind)
    for each in _of_table(table, arch):
        if each.problem.signature == kind.signature:
            yield each
        elif each.problem.family == kind.family and family.kin(each.problem) == kin:
            try:
                problem = kind.with_sizes(**each.problem.sizes)
            except ProblemError:
                continue
            if problem.signature == kind.signature and is_legal(each.config, problem, arch):
                yield Wanted(problem, each.config)


def _of_table(table: Table, arch: Arch) -> Iterator[Wanted]:
    """Yield what a table names and this version can render."""
    for problem, entry in table.entries.items():
        if entry.config is not None and is_legal(entry.config, problem, arch):
            yield Wanted(problem, entry.config, entry.artifact_key)
    for each in table.ranges:
        for piece in each.pieces:
            problem = each.range.low.with_sizes(**{each.range.size: piece.first})
            if piece.config is not None and is_legal(piece.config, problem, arch):
                yield Wanted(problem, piece.config, piece.artifact_key)


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
            for source, result in builder.poll(None if budget_s is None else min(_POLL_S, state.left_s or 0)):
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
