"""Which kernels calls will need: those that answer problems, all that may answer a kind, those of a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from cutegen.arch import Arch
from cutegen.errors import ProblemError, UsageError
from cutegen.families.options import read_options
from cutegen.families.registry import find_family, find_space, is_legal, space_of
from cutegen.family import Family, Problem, Signature
from cutegen.records.table import Table
from cutegen.runtime.answer_lookup import look_up
from cutegen.search.defaults import default_set
from cutegen.space import Config

__all__ = ["Needs", "Wanted", "each_once", "kinds"]

#: A free size of a problem that stands for its kind: a multiple of whatever a layout asks for.
_ANY_SIZE = 4096


@dataclass(frozen=True)
class Wanted:
    """A kernel to compile: a problem, a config that is valid for it, and where a table says that it is."""

    problem: Problem
    config: Config
    known_key: str = ""


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
            f"--shape {family.example_shape}"
        )
    return {size.name: size.default or _ANY_SIZE for size in family.sizes}


@dataclass(frozen=True)
class Needs:
    """Which kernels calls need on a target; its methods raise what :func:`find_space` does.

    Attributes:
        table: Asked for answers, if there is one.
        arch: The target.
        sm_count: SMs of the GPU.
        fallback: As for :func:`~cutegen.runtime.answer_lookup.look_up`.
    """

    table: Table | None
    arch: Arch
    sm_count: int
    fallback: str = ""

    def of_problems(self, problems: Iterable[Problem]) -> Iterator[Wanted]:
        """Yield the kernels that answer problems."""
        for problem in problems:
            space = find_space(problem.family, self.arch)
            answer = look_up(self.table, problem, space, self.sm_count, self.fallback)
            if answer.config is not None:
                yield Wanted(problem, answer.config, answer.known_key)

    def of_kinds(self, problems: Iterable[Problem]) -> Iterator[Wanted]:
        """Yield whatever may answer problems of the signatures of these: the default set, and the table's.

        Raises:
            ProblemError: No config computes one of them there.
        """
        first: dict[Signature, Problem] = {}
        for problem in problems:
            first.setdefault(problem.signature, problem)
        for problem in first.values():
            space = find_space(problem.family, self.arch)
            space.default(problem)  # raises where the target computes no such problem
            for kin, config in default_set(space, problem, self.sm_count):
                yield Wanted(kin, config)
            yield from self._of_kin(problem)

    def of_table(self) -> Iterator[Wanted]:
        """Yield what the table names and this version can render."""
        if self.table is None:
            return
        for problem, entry in self.table.entries.items():
            if entry.config is not None and is_legal(entry.config, problem, self.arch):
                yield Wanted(problem, entry.config, entry.artifact_key)
        for each in self.table.ranges:
            for piece in each.pieces:
                begins = each.range.at_least(piece.first)
                if begins is None or piece.config is None:
                    continue
                if is_legal(piece.config, begins, self.arch):
                    yield Wanted(begins, piece.config, piece.artifact_key)

    def _of_kin(self, kind: Problem) -> Iterator[Wanted]:
        """Yield what the table may answer to problems of the signature of ``kind``, by any rule of lookup."""
        family = find_family(kind.family)
        kin = family.kin(kind)
        for each in self.of_table():
            if each.problem.signature == kind.signature:
                yield each
            elif each.problem.family == kind.family and family.kin(each.problem) == kin:
                try:
                    problem = kind.with_sizes(**each.problem.sizes)
                except ProblemError:
                    continue
                if problem.signature == kind.signature and is_legal(each.config, problem, self.arch):
                    yield Wanted(problem, each.config)


def each_once(wanted: Iterable[Wanted], arch: Arch) -> tuple[Wanted, ...]:
    """Return each kernel of ``wanted`` once, in the order in which they come first."""
    found: dict[object, Wanted] = {}
    for each in wanted:
        space = space_of(each.config, each.problem.family, arch)
        found.setdefault((each.problem.signature, space.compile_view(each.config)), each)
    return tuple(found.values())
