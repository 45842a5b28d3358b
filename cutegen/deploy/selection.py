"""What goes into a deployment: for each problem, and each size of a range, the kernel and its integers."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import pairwise

from cutegen.arch import Arch, find_arch
from cutegen.build import Artifact
from cutegen.deploy.manifest import is_symbol
from cutegen.errors import ArchError, ConfigError, CutegenError, PinError, ProblemError, UsageError
from cutegen.families.ranges import MOST_STEP, Range
from cutegen.families.registry import find_family, find_space, is_legal, require_legal, space_of
from cutegen.family import Problem
from cutegen.records.entry import ANY, Fingerprint
from cutegen.records.range_entry import RangeEntry
from cutegen.records.table import Table
from cutegen.runtime.answer_lookup import Answer, look_up
from cutegen.runtime.kernel_cache import Kernels
from cutegen.space import Config, Launch
from cutegen.text import how_many

__all__ = [
    "PINNED_FALLBACKS",
    "Pinned",
    "PinnedRange",
    "Selection",
    "Step",
    "ranges_over",
    "require_countable",
    "widened",
]

#: Where torch computes a plain GEMM although there is a kernel for it: nowhere (beside entries and pieces
#: that it won), or where a measurement says that it was faster.
PINNED_FALLBACKS = ("none", "measured")

#: Sizes that a range may hold: a few tens of microseconds each, and a second for each thousand at worst.
MOST_SIZES = 2**18
#: Where neither an entry nor a range of the table answers, a lookup takes milliseconds. Of so many sizes
#: between two that get the same config all get it, if it is valid for them.
_STRIDE = 128


@dataclass(frozen=True)
class Pinned:
    """One problem of a deployment.

    Attributes:
        answer: What the table answered, and how.
        artifact: The kernel that ships; None where torch computes the problem.
        launch: Its scalars and workspace; None likewise.
    """

    answer: Answer
    artifact: Artifact | None
    launch: Launch | None

    def __str__(self) -> str:
        return str(self.answer)


@dataclass(frozen=True)
class Step:
    """Neighbouring sizes of a range that one kernel answers, launched with the same integers.

    Attributes:
        last: The largest; the step before, or the range, tells the smallest.
        pinned: The kernel and its integers; None where no config is valid.
    """

    last: int
    pinned: Pinned | None


@dataclass(frozen=True)
class PinnedRange:
    """A range of sizes of a deployment.

    Attributes:
        range: Which problems.
        multiple_of: Sizes of the range that are no multiple of it are no problems.
        steps: In order, to the range's last size.
    """

    range: Range
    multiple_of: int
    steps: tuple[Step, ...]

    @cached_property
    def pinned(self) -> tuple[Pinned, ...]:
        """Every kernel of the range, with the integers of one size."""
        return tuple({_symbol(item): item for step in self.steps if (item := step.pinned)}.values())

    def __str__(self) -> str:
        return f"{self.range}: {how_many(len(self.pinned), 'kernel')} in {how_many(len(self.steps), 'step')}"


def _symbol(item: Pinned) -> str:
    return item.artifact.symbol if item.artifact else ""


class Selection:
    """Answers problems from a table as a library call would, with the kernels that are to ship.

    Args:
        table: The table.
        kernels: Where compiled kernels come from, and whether missing ones are compiled.
        fallback: Where torch answers instead of a kernel: one of :data:`PINNED_FALLBACKS`.
        arch: The target, if the table may not say it.

    Raises:
        PinError: Neither says for what the table is, or it is for another target or version of cutegen.
    """

    def __init__(
        self, table: Table, kernels: Kernels, fallback: str = "none", arch: Arch | None = None
    ) -> None:
        self._table, self._kernels, self._fallback = table, kernels, fallback
        self._arch, self._sm_count = _target(table, arch)

    @property
    def arch(self) -> Arch:
        """What the kernels run on."""
        return self._arch

    def problem(self, problem: Problem) -> Pinned:
        """Return what ships for a problem.

        Raises:
            PinError: No kernel is to be had, or the table's winner is not valid.
        """
        answer = self._answer(problem)
        entry = self._table.entries.get(problem)
        if entry is not None and entry.config is not None and answer.entry is not entry:
            # A call would take the next best answer; who pins winners wants to know.
            why = _why(entry.config, problem, self._arch)
            raise PinError(
                f"the winner of {problem}, {entry.config}, is not valid in this version: {why}; tune again"
            )
        return self._pinned(answer)

    def range(self, of: Range) -> PinnedRange:
        """Return what ships for every size of a range.

        Raises:
            PinError: A kernel is not to be had.
        """
        sizes = [size for size in range(of.first, of.last + 1) if of.at(size) is not None]
        multiple_of = reduce(math.gcd, sizes)
        answers = self._answers(of, sizes)
        self._compile({answer.config: answer for answer in answers.values()})
        steps: list[Step] = []
        kernels: dict[Config | None, Pinned] = {}
        for size in range(-(-of.first // multiple_of) * multiple_of, of.last + 1, multiple_of):
            pinned = self._at(of, size, answers.get(size), kernels)
            if steps and _alike(steps[-1].pinned, pinned):
                steps[-1] = Step(size, steps[-1].pinned)
            else:
                steps.append(Step(size, pinned))
        return PinnedRange(of, multiple_of, tuple(steps))

    def _compile(self, answers: Mapping[Config | None, Answer]) -> None:
        """Compile the kernels of several answers side by side; what fails, fails where it is asked for."""
        wanted = [(a.problem, config, a.known_key) for config, a in answers.items() if config is not None]
        with suppress(CutegenError):
            self._kernels.compile_all(wanted, self._arch)

    def _at(
        self, of: Range, size: int, answer: Answer | None, kernels: dict[Config | None, Pinned]
    ) -> Pinned | None:
        """Return what ships for one size; kernels of a config that were found before are in ``kernels``."""
        problem = of.at(size)
        if answer is None or problem is None:
            return None
        if answer.config not in kernels:
            kernels[answer.config] = self._pinned(answer)
        known = kernels[answer.config]
        if answer.config is None:
            return known
        return Pinned(known.answer, known.artifact, self._launch(problem, answer.config))

    def _answers(self, of: Range, sizes: list[int]) -> dict[int, Answer]:
        """Return what answers each of ``sizes``."""
        found: dict[int, Answer] = {}

        def ask(at: int) -> Answer:
            problem = of.at(sizes[at])
            assert problem is not None
            if at not in asked:
                asked[at] = self._answer(problem)
            return asked[at]

        asked: dict[int, Answer] = {}
        held = [each for each in self._table.ranges if _meet(each.range, of)]
        pending = list(pairwise(self._breaks(of, sizes, held)))
        for at in {at for pair in pending for at in pair}:
            ask(at)
        while pending:
            low, high = pending.pop()
            below, above = ask(low), ask(high)
            if high - low > _STRIDE or (below.config != above.config and high - low > 1):
                middle = (low + high) // 2
                pending += [(low, middle), (middle, high)]
                continue
            for at in range(low + 1, high):
                found[sizes[at]] = below if self._serves(of, sizes[at], below, held) else ask(at)
        return found | {sizes[at]: answer for at, answer in asked.items()}

    def _breaks(self, of: Range, sizes: list[int], held: Iterable[RangeEntry]) -> list[int]:
        """Return the places in ``sizes`` at which another rule of lookup or another piece may begin."""
        starts = {of.first, *(2**power + 1 for power in range(of.last.bit_length()))}
        for entry in self._table.entries:
            if entry in of:
                starts |= {entry.sizes[of.size], entry.sizes[of.size] + 1}
        for within in held:
            if within.range.size == of.size:
                starts |= {piece.first for piece in within.pieces} | {within.range.last + 1}
        places = {bisect_left(sizes, start) for start in starts}
        ends = {end for place in places for end in (place - 1, place) if 0 <= end < len(sizes)}
        return sorted(ends | {0, len(sizes) - 1})

    def _serves(self, of: Range, size: int, answer: Answer, held: Iterable[RangeEntry]) -> bool:
        """Whether the answer of a neighbour may be taken: no other range comes first, and it is valid."""
        problem = of.at(size)
        if problem is None or next((e for e in held if problem in e.range), None) is not answer.within:
            return False
        return answer.config is None or is_legal(answer.config, problem, self._arch)

    def _answer(self, problem: Problem) -> Answer:
        """Return what the table answers; what torch computes without a kernel is a plain GEMM."""
        space = find_space(problem.family, self._arch)
        answer = look_up(self._table, problem, space, self._sm_count, self._fallback)
        if answer.config is None and not find_family(problem.family).is_plain(problem):
            answer = look_up(self._table, problem, space, self._sm_count)
            answer = answer if answer.config else look_up(None, problem, space, self._sm_count)
        return answer

    def _launch(self, problem: Problem, config: Config) -> Launch:
        return space_of(config, problem.family, self._arch).launch(config, problem, self._sm_count)

    def _pinned(self, answer: Answer) -> Pinned:
        problem, config = answer.problem, answer.config
        if config is None:
            return Pinned(answer, None, None)
        try:
            artifact = self._kernels.artifact(problem, config, self._arch, known_key=answer.known_key)
        except CutegenError as error:
            raise PinError(f"no kernel to pin for {problem}: {error}") from error
        if not is_symbol(artifact.symbol):
            raise PinError(
                f"no kernel to pin for {problem}: the cache calls its function {artifact.symbol!r}, which is "
                f"no C identifier; remove {artifact.folder} and build it again"
            )
        here, measured = artifact.toolchain.compiler_version, self._table.fingerprint.cutlass_dsl
        if measured not in (ANY, here):
            raise PinError(
                f"the kernel that was measured for {problem} is not in the cache; it was compiled by "
                f"nvidia-cutlass-dsl {measured}, and {here} would make another; tune again"
            )
        return Pinned(answer, artifact, self._launch(problem, config))


def _meet(one: Range, other: Range) -> bool:
    """Return whether some problem is in both: of ranges over two sizes it is the one where they cross."""
    crossing = other.at(one.low.sizes.get(other.size, 0))
    return one.overlaps(other) or (crossing is not None and crossing in one)


def _why(config: Config, problem: Problem, arch: Arch) -> str:
    """Return what is wrong with a config of a table."""
    try:
        require_legal(config, problem, arch)
    except ConfigError as error:
        return error.reason
    return "another answer comes before it"


def require_countable(of: Range) -> None:
    """Refuse a range of more sizes than can be pinned, with a :class:`PinError`."""
    count = of.last - of.first + 1
    if count > MOST_SIZES:
        raise PinError(f"{of} holds {count} sizes; a pinned range has at most {MOST_SIZES}")


def _alike(one: Pinned | None, other: Pinned | None) -> bool:
    """Whether two sizes are answered by one kernel, launched with the same integers."""
    if one is None or other is None:
        return one is other
    return (_symbol(one), one.launch) == (_symbol(other), other.launch)


def _target(table: Table, given: Arch | None) -> tuple[Arch, int]:
    """Return what the table's kernels run on, which must be what is ``given``."""
    fingerprint = table.fingerprint
    arch = given or _arch_of(fingerprint.compute_capability)
    # By what a kernel was compiled its artifact says, which may be of another toolchain than is here.
    present = replace(Fingerprint.of_target(arch), cuda_runtime=ANY, cutlass_dsl=ANY)
    if reasons := table.mismatch(present):
        raise PinError(
            f"no call would use the table: {'; '.join(reasons)}; tune again, or put {ANY!r} into that field "
            "of its _metadata"
        )
    if isinstance(fingerprint.sm_count, int):
        return arch, fingerprint.sm_count
    return arch, arch.nominal_sm_count


def _arch_of(capability: str) -> Arch:
    if capability == ANY:
        raise PinError(
            f"the table is for any compute capability ({ANY!r}), and kernels are for one; name it with "
            "--arch (arch= in Python), such as sm_90a"
        )
    try:
        return find_arch(f"sm_{capability.replace('.', '')}")
    except ArchError as error:
        raise PinError(f"the table is for compute capability {capability}: {error}") from error


def ranges_over(table: Table, size: str, first: int, last: int) -> tuple[Range, ...]:
    """Return, for every kind of problem in a table, those whose ``size`` is ``first`` to ``last``.

    Families that have no such size, or compile it in, are passed over.

    Raises:
        PinError: None of these sizes is one of a problem's kind, or only one of them.
        ProblemError: The ends are no ends of a range.
        UsageError: It is reversed or has one size, or no kind of problem has that size.
    """
    asked = f"range {size}={first}..{last}"
    if first > last:
        raise UsageError(f"{asked} is reversed; write {size}={last}..{first}")
    if first == last:
        raise UsageError(f"{asked} has one size; pin the problems of that size")
    problems = (*table.entries, *(entry.range.low for entry in table.ranges))
    families = [find_family(name) for name in dict.fromkeys(problem.family for problem in problems)]
    free = {known.name: None for family in families for known in family.sizes if known.free}
    if size not in free:
        raise UsageError(
            f"no problem of the table has a size {size!r} that is an argument of its kernels; "
            f"valid: {', '.join(free) or 'none, the table is empty'}"
        )
    found = [each for each in widened(problems, size, first, last) if isinstance(each, Range)]
    if not found:
        raise PinError(f"{asked} holds one size only that the layout allows; pin the problems of that size")
    return tuple(found)


def widened(problems: Iterable[Problem], size: str, first: int, last: int) -> tuple[Problem | Range, ...]:
    """Return the ranges of ``size`` from ``first`` to ``last`` that hold ``problems``, each once.

    A problem of a family that has no such size, or compiles it in, stays as it is.

    Raises:
        PinError: None of these sizes is one of a problem's kind.
        ProblemError: The ends are no ends of a range.
    """
    found: dict[Problem | Range, None] = {}
    for problem in problems:
        declared = {known.name: known for known in find_family(problem.family).sizes}
        if size not in declared or not declared[size].free:
            found[problem] = None
            continue
        low = _nearest(problem, size, range(first, min(first + MOST_STEP, last + 1)))
        high = _nearest(problem, size, range(last, max(last - MOST_STEP, first - 1), -1))
        if low is None or high is None:
            raise PinError(f"{problem} has no problem of its kind with {size} from {first} to {last}")
        found[low if low == high else Range(low, high)] = None
    return tuple(found)


def _nearest(problem: Problem, size: str, values: Iterable[int]) -> Problem | None:
    """Return the problem of the first of some sizes that the kernels of ``problem`` can have."""
    for value in values:
        try:
            found = problem.with_sizes(**{size: value})
        except ProblemError:
            continue
        if found.signature == problem.signature:
            return found
    return None
