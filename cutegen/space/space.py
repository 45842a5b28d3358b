"""A space: a table of domains and a list of named rules, bound to one architecture.

A rule is a function whose parameters name what it looks at: knobs, and ``problem`` or ``arch``. It
returns whether the config is fine, and its docstring is the reason that users read. Because a rule
says which knobs it needs, enumeration drops a partial config as soon as a rule over it breaks, and asks it
once for the same values: a rule depends on its arguments alone.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any

from cutegen.arch import Arch
from cutegen.errors import ConfigError, ProblemError, SpaceError
from cutegen.family import Problem
from cutegen.space.config import Config, Value, format_value
from cutegen.text import did_you_mean

__all__ = ["Launch", "Rule", "Space", "Violation", "reason_of"]

_CONTEXT = ("problem", "arch")
#: Domains of at most so many values are listed in messages; of longer ones, so many values.
_FEW_VALUES, _SHOWN_VALUES = 40, 6
Derived = Mapping[str, Value]
#: What a rule looks at of a config, what it said of such values before, and the rule itself.
_Check = tuple[Callable[[Mapping[str, Value]], Any], dict[Any, bool], Callable[[Mapping[str, Value]], bool]]
#: A knob, the values that it may take, and what must hold once it has one.
_Level = tuple[str, tuple[Value, ...], Sequence[_Check]]


def reason_of(function: Callable[..., Any]) -> str:
    """Return the docstring of a rule on one line, empty if there is none.

    ``python -OO`` strips docstrings; the name of the rule says it then.
    """
    if sys.flags.optimize >= 2:
        return function.__name__.replace("_", " ")
    return " ".join((function.__doc__ or "").split())


@dataclass(frozen=True)
class Violation:
    """A broken rule and the reason that its author gave."""

    rule: str
    reason: str


@dataclass(frozen=True)
class Launch:
    """What one launch of a kernel needs beside its tensors.

    Attributes:
        scalars: Run-time integers, in the order of the kernel's parameters.
        workspace_bytes: Scratch memory that the kernel needs, 0 for none.
        zeroed: The scratch memory must hold zeros before the launch, and does again after it.
    """

    scalars: tuple[int, ...]
    workspace_bytes: int
    zeroed: bool = False


@dataclass(frozen=True)
class Rule:
    """A named condition with a reason; build one with ``Rule.of(function)``."""

    name: str
    reason: str
    knobs: tuple[str, ...]
    context: tuple[str, ...]
    holds: Callable[..., bool]

    @classmethod
    def of(cls, function: Callable[..., bool], **given: object) -> Rule:
        """Make a rule of ``function``: its name, its docstring and its parameter names.

        Args:
            function: Returns whether a config is valid. Its parameters are knobs, ``problem``, ``arch``, and
                those in ``given``.
            given: Arguments that are the same for all configs of a space: in what one space differs from
                others that share the rule.

        Raises:
            SpaceError: The function has no docstring, or looks at nothing.
        """
        reason = reason_of(function)
        if not reason:
            raise SpaceError(f"rule {function.__name__} has no docstring, so no reason to show")
        names = tuple(name for name in inspect.signature(function).parameters if name not in given)
        if not names:
            raise SpaceError(
                f"rule {function.__name__} looks at nothing; its parameters name what it looks at"
            )
        knobs = tuple(name for name in names if name not in _CONTEXT)
        context = tuple(name for name in names if name in _CONTEXT)
        holds = partial(function, **given) if given else function
        return cls(function.__name__, reason, knobs, context, holds)


@dataclass(frozen=True, eq=False)
class Space:
    """Every config of one kernel family on one architecture. A space equals itself only.

    Attributes:
        family: Name of the kernel family, such as ``gemm``.
        arch: The architecture it is bound to.
        domains: The values each knob may take, in order of preference: earlier is simpler.
        rules: What makes a config valid.
        derive: Quantities that follow from a config: stages, shared memory in bytes, threads.
        choose_default: A valid config for any problem that the family accepts, without measuring.
        launch: Run-time scalars and workspace for a config on a GPU of so many SMs.
        run_time_knobs: Knobs that the compiled kernel takes as arguments; changing them builds nothing.
        compile_view: The part of a config that is compiled in, run-time knobs reduced to what they bake.
        default_candidates: Knobs of a few kernels of which one does well on almost any problem, as far as is
            known without measuring; the other knobs are the default's. Not all are valid for each problem.
    """

    family: str
    arch: Arch
    domains: Mapping[str, tuple[Value, ...]]
    rules: tuple[Rule, ...]
    derive: Callable[[Config, Any, Arch], Derived]
    choose_default: Callable[[Space, Any], Config]
    launch: Callable[[Config, Any, int], Launch]
    compile_view: Callable[[Config], Config]
    run_time_knobs: frozenset[str] = frozenset()
    default_candidates: Callable[[Any], Iterable[Mapping[str, Value]]] = lambda problem: ()
    _by_last_knob: Mapping[str, tuple[Rule, ...]] = field(init=False, repr=False, compare=False)
    _free_rules: tuple[Rule, ...] = field(init=False, repr=False, compare=False)
    #: Knobs with their values, each with its type: True is no 1.
    _known: frozenset[tuple[str, type, Value]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        order = {knob: i for i, knob in enumerate(self.domains)}
        for knob, domain in self.domains.items():
            if not domain or len(set(domain)) != len(domain):
                raise SpaceError(f"domain of {knob} is empty or repeats a value")
        by_last: dict[str, list[Rule]] = {knob: [] for knob in self.domains}
        for rule in self.rules:
            unknown = [knob for knob in rule.knobs if knob not in order]
            if unknown:
                raise SpaceError(f"rule {rule.name} looks at unknown knobs {', '.join(unknown)}")
            if rule.knobs:
                by_last[max(rule.knobs, key=order.__getitem__)].append(rule)
        object.__setattr__(self, "_by_last_knob", {knob: tuple(rules) for knob, rules in by_last.items()})
        known = frozenset(
            (knob, type(value), value) for knob, domain in self.domains.items() for value in domain
        )
        object.__setattr__(self, "_known", known)
        object.__setattr__(self, "_free_rules", tuple(rule for rule in self.rules if not rule.knobs))

    @property
    def source(self) -> str:
        """Whose kernels its configs are: ``cutegen``, unless its knob ``source`` names another."""
        return str(self.domains.get("source", ("cutegen",))[0])

    @property
    def algorithm(self) -> str:
        """Which algorithm of the family its configs are of; ``""`` for the general one."""
        return str(self.domains.get("algorithm", ("",))[0])

    def configs(
        self, problem: Problem, fixed: Mapping[str, Sequence[Value]] | None = None
    ) -> Iterator[Config]:
        """Yield every valid config for ``problem``, lazily, always in the same order.

        Args:
            problem: What is to be computed.
            fixed: Knobs restricted to some values, as given by ``--set knob=v1,v2``.

        Raises:
            ConfigError: ``fixed`` names a knob or a value that does not exist.
        """
        domains = self._restricted(fixed or {})
        if all(self._holds(rule, {}, problem) for rule in self._free_rules):
            levels = [
                (knob, domain, [self._remembered(rule, problem) for rule in self._by_last_knob[knob]])
                for knob, domain in domains.items()
            ]
            yield from map(Config, _complete(levels))

    def _remembered(self, rule: Rule, problem: Problem) -> _Check:
        """Return ``rule`` for ``problem``; asked once for the same values, which come again and again."""
        ask, knobs, context = rule.holds, rule.knobs, self._context(rule, problem)
        return itemgetter(*knobs), {}, lambda chosen: ask(**{knob: chosen[knob] for knob in knobs}, **context)

    def _holds(self, rule: Rule, values: Mapping[str, Value], problem: Problem) -> bool:
        return rule.holds(**{knob: values[knob] for knob in rule.knobs}, **self._context(rule, problem))

    def _context(self, rule: Rule, problem: Problem) -> dict[str, Any]:
        """Return what ``rule`` looks at beside knobs."""
        return {name: problem if name == "problem" else self.arch for name in rule.context}

    def _restricted(self, fixed: Mapping[str, Sequence[Value]]) -> dict[str, tuple[Value, ...]]:
        for knob, values in fixed.items():
            for value in values:
                self._require_value(knob, value)
            if knob not in self.domains:  # no value of it was looked at
                self._require_known(knob, values)
        return {knob: tuple(fixed.get(knob, domain)) for knob, domain in self.domains.items()}

    def _require_values(self, config: Mapping[str, Value]) -> None:
        for knob, value in config.items():
            self._require_value(knob, value)

    def _require_value(self, knob: str, value: Value) -> None:
        try:
            known = (knob, type(value), value) in self._known
        except TypeError:  # a list, which nobody's value is
            known = False
        if not known:  # looked for along the domain, which takes long, for the sake of the message alone
            self._require_known(knob, [value])

    def _require_known(self, knob: str, values: Iterable[Value]) -> None:
        if knob not in self.domains:
            raise ConfigError(
                f"unknown knob {knob!r}{did_you_mean(knob, self.domains)}; {self.family} on {self.arch} has "
                f"{', '.join(self.domains)}"
            )
        domain = self.domains[knob]
        for value in values:
            if not any(value == known and type(value) is type(known) for known in domain):
                near = domain if len(domain) <= _FEW_VALUES else _nearest(value, domain)
                word = "valid" if near is domain else "the nearest that are"
                raise ConfigError(
                    f"{knob}={format_value(value)} is not in its domain; {word}: "
                    f"{', '.join(map(format_value, near))}"
                )

    def explain(self, problem: Problem, config: Mapping[str, Value]) -> tuple[Violation, ...]:
        """Return every rule that ``config`` breaks for ``problem``; empty means valid.

        A partial config is judged by the rules whose knobs it names.

        Raises:
            ConfigError: A knob or a value does not exist.
        """
        self._require_values(config)
        values = dict(config.items())
        complete = len(values) == len(self.domains)
        return tuple(
            Violation(rule.name, rule.reason)
            for rule in self.rules
            if (complete or all(knob in values for knob in rule.knobs))
            and not self._holds(rule, values, problem)
        )

    def prepare(self, config: Mapping[str, Value]) -> Callable[[Problem], bool]:
        """Return ``valid(problem)``, which says whether :meth:`explain` has nothing to say.

        Rules that do not look at the problem are asked now: this is for configs that many problems are asked
        about. :class:`~cutegen.space.checks.Checks` is for those of one signature.

        Args:
            config: A config, partial or not.

        Raises:
            ConfigError: A knob or a value does not exist.
        """
        self._require_values(config)
        bound = {**config, "arch": self.arch}
        left: list[Callable[..., bool]] = []
        broken = False
        for rule in self.rules:
            if all(knob in config for knob in rule.knobs):
                looks = "problem" in rule.context
                names = [name for name in (*rule.knobs, *rule.context) if name != "problem"]
                holds = partial(rule.holds, **{name: bound[name] for name in names})
                left += [holds] if looks else []
                broken |= not looks and not holds()

        if broken:
            return lambda problem: False

        def valid(problem: Problem) -> bool:
            for holds in left:  # noqa: SIM110 - a generator takes as long as what it asks
                if not holds(problem=problem):
                    return False
            return True

        return valid

    def is_valid(self, problem: Problem, config: Config) -> bool:
        """Return whether :meth:`explain` has nothing to say, quickly: for configs that are asked about often.

        Raises:
            ConfigError: A knob or a value does not exist.
        """
        return _prepared(self, config)(problem)

    def require(self, problem: Problem, config: Config) -> None:
        """Do nothing if ``config`` is complete and valid for ``problem``.

        Raises:
            ConfigError: It is not; the message and ``violations`` say why.
        """
        missing = [knob for knob in self.domains if knob not in config]
        if missing:
            self._require_values(config)  # a knob by a wrong name says more than that the right one lacks
            raise ConfigError(f"config lacks {', '.join(missing)}")
        violations = self.explain(problem, config)
        if violations:
            raise ConfigError(f"config {config} is not valid for {problem} on {self.arch}:", violations)

    def default(self, problem: Problem) -> Config:
        """Return the config to use when nothing was measured: always valid.

        Raises:
            ProblemError: No config computes this problem; the message gives the reason.
            SpaceError: The family's default breaks a rule, which is its author's mistake.
        """
        impossible = self.explain(problem, {})
        config = Config({}) if impossible else self.choose_default(self, problem)
        violations = impossible or self.explain(problem, config)
        if not violations:
            return config
        if next(self.configs(problem), None) is None:
            rules = impossible or self._in_the_way(problem) or violations[:1]
            why = "; ".join(f"{rule.rule}: {rule.reason}" for rule in rules)
            several = "" if impossible or len(rules) == 1 else "no config keeps all of "
            raise ProblemError(f"{problem} cannot be computed on {self.arch}: {several}{why}")
        broken = ", ".join(v.rule for v in violations)
        raise SpaceError(f"default {config} for {problem} breaks {broken}")

    def _in_the_way(self, problem: Problem) -> tuple[Violation, ...]:
        """Return each rule without which a config would be valid, where none is."""
        found = []
        for rule in self.rules:
            others = tuple(other for other in self.rules if other is not rule)
            looks = "problem" in rule.context  # another problem would not mend a rule over knobs alone
            if looks and next(replace(self, rules=others).configs(problem), None) is not None:
                found.append(Violation(rule.name, rule.reason))
        return tuple(found)

    def neighbours(self, problem: Problem, config: Config) -> Iterator[Config]:
        """Yield the valid configs that differ from ``config`` in one knob, by one step of its domain.

        Knobs without an order (booleans and tuples of the same size) count every other value as a step.
        """
        for knob, domain in self.domains.items():
            at = domain.index(config[knob])
            ordered = all(type(value) is int for value in domain)
            steps = [i for i in (at - 1, at + 1) if 0 <= i < len(domain)] if ordered else range(len(domain))
            for i in steps:
                candidate = config.replace(**{knob: domain[i]})
                if i != at and not self.explain(problem, candidate):
                    yield candidate

    def simplicity(self, config: Config) -> tuple[int, ...]:
        """Return a sort key by which a tie is broken: earlier domain values are simpler, hence smaller."""
        return tuple(domain.index(config[knob]) for knob, domain in self.domains.items())

    def short(self, config: Config, *, names: bool = False) -> str:
        """Return the knobs in which ``config`` is not the simplest, such as ``128x112 2x1 pingpong``.

        Shapes, such as tile and cluster, are always there. Without any, the first knob is.

        Args:
            config: A complete config of this space.
            names: Write every knob with its name: ``pingpong=true``.
        """
        shapes = {knob for knob, domain in self.domains.items() if isinstance(domain[0], tuple)}
        always = shapes or {next((knob for knob, domain in self.domains.items() if len(domain) > 1), "")}
        words = []
        for knob, value in sorted(config.items(), key=lambda item: not names and item[0] not in shapes):
            if knob not in always and value == self.domains[knob][0]:
                continue
            plain = not names and (knob in shapes or value is True)
            shown = knob if value is True else format_value(value)
            words.append(shown if plain else f"{knob}={format_value(value)}")
        return " ".join(words)

    def unreachable(self, problems: Iterable[Problem]) -> tuple[tuple[str, Value], ...]:
        """Return the knob values that no valid config uses for any of ``problems``: a lint for authors."""
        unseen = {(knob, value) for knob, domain in self.domains.items() for value in domain}
        for problem in problems:
            for knob, value in sorted(unseen, key=repr):
                if next(self.configs(problem, {knob: [value]}), None) is not None:
                    unseen.discard((knob, value))
        return tuple(sorted(unseen, key=repr))


@lru_cache(maxsize=1024)
def _prepared(space: Space, config: Config) -> Callable[[Problem], bool]:
    return space.prepare(config)


def _nearest(value: Value, domain: Sequence[Value]) -> Sequence[Value]:
    """Return the few values of ``domain`` that are closest to ``value``; its first ones if none compare."""

    def numbers(value: Value) -> tuple[int, ...]:
        return value if isinstance(value, tuple) else (value,) if type(value) is int else ()

    wanted = numbers(value)
    alike = [known for known in domain if wanted and len(numbers(known)) == len(wanted)]

    def distance(known: Value) -> int:
        return sum(abs(a - b) for a, b in zip(numbers(known), wanted, strict=True))

    return sorted(alike, key=distance)[:_SHOWN_VALUES] or domain[:_SHOWN_VALUES]


def _complete(levels: Sequence[_Level]) -> Iterator[dict[str, Value]]:
    """Yield every choice of a value for each knob that all checks let pass: always the same dictionary.

    Most of the time of listing a space passes here: one loop takes two thirds of what a generator for each
    knob takes.
    """
    chosen: dict[str, Value] = {}
    if not levels:
        yield chosen
        return
    left = [iter(domain) for _, domain, _ in levels]
    at, last = 0, len(levels) - 1
    while at >= 0:
        knob, _, checks = levels[at]
        for value in left[at]:
            chosen[knob] = value
            for pick, verdicts, holds in checks:
                values = pick(chosen)
                verdict = verdicts.get(values)
                if verdict is None:
                    verdict = verdicts[values] = holds(chosen)
                if not verdict:
                    break
            else:
                if at < last:
                    at += 1
                    left[at] = iter(levels[at][1])
                    break
                yield chosen
        else:
            at -= 1
