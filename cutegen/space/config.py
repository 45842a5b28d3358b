"""A config: one value per knob, immutable, printed on one line and parsed back."""

from __future__ import annotations

import re
from collections.abc import ItemsView, Iterator, Mapping
from typing import TypeAlias, TypeVar, overload

from cutegen.digest import Json, digest
from cutegen.errors import ConfigError
from cutegen.text import shown

__all__ = [
    "Config",
    "Value",
    "as_flag",
    "as_integer",
    "as_pair",
    "format_value",
    "parse_value",
    "require_mapping",
]

#: What a knob may hold. Tuples hold integers, as in ``cluster_shape_mn = (2, 1)``.
Value: TypeAlias = "bool | int | str | tuple[int, ...]"
_T = TypeVar("_T")
#: Most digits of a number that is parsed; longer ones are refused by their length.
_DIGITS = 20


def format_value(value: Value) -> str:
    """Return ``value`` as users write it: ``2x1``, ``true``, ``8``."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return str(value)


def parse_value(text: str) -> Value:
    """Return the value that ``text`` (as printed by :func:`format_value`) stands for.

    Raises:
        ConfigError: A number has more digits than any knob's.
    """
    if text in {"true", "false"}:
        return text == "true"
    if not re.fullmatch(r"-?[0-9]+|[0-9]+(x[0-9]+)+", text):
        return text
    longest = max(map(len, text.split("x")))
    if longest > _DIGITS:
        raise ConfigError(
            f"{shown(text)} holds a number of {longest} digits; no knob has more than {_DIGITS}"
        )
    return tuple(map(int, text.split("x"))) if "x" in text else int(text)


def require_mapping(config: object) -> None:
    """Do nothing if ``config`` maps knobs to values; raises :class:`ConfigError` if not."""
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"config is a {type(config).__name__}; it must be a Config, a mapping from knobs to values, or "
            "text of the form 'knob=value ...'"
        )


def as_integer(value: Value, name: str = "value") -> int:
    """Return ``value``, which must be an integer; raises :class:`ConfigError` with its ``name``."""
    if type(value) is not int:
        raise ConfigError(f"{name}={value!r} is not an integer")
    return value


def as_pair(value: Value, name: str = "value") -> tuple[int, int]:
    """Return ``value``, which must be two integers such as ``2x1``; raises as :func:`as_integer`."""
    if not isinstance(value, tuple) or len(value) != 2:
        raise ConfigError(f"{name}={value!r} is not a pair of integers such as 2x1")
    return value[0], value[1]


def as_flag(value: Value, name: str = "value") -> bool:
    """Return ``value``, which must be ``true`` or ``false``; raises as :func:`as_integer`."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} is neither true nor false")
    return value


class Config(Mapping[str, Value]):
    """One value per knob, in the order the space declares them.

    Equal configs hash alike whatever the order; ``str`` gives ``knob=value`` words separated by spaces.
    """

    __slots__ = ("_hash", "_values")

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._values = dict(values)
        self._hash = hash(frozenset(self._values.items()))

    def __getitem__(self, knob: str) -> Value:
        return self._values[knob]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, knob: object) -> bool:  # that of a Mapping asks and catches an error
        return knob in self._values

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Config) and self._values == other._values)

    @overload
    def get(self, knob: str) -> Value | None: ...
    @overload
    def get(self, knob: str, default: Value | _T) -> Value | _T: ...
    def get(self, knob: str, default: object = None) -> object:
        """Return the value of a knob, or ``default``; that of a Mapping asks and catches an error."""
        return self._values.get(knob, default)

    def items(self) -> ItemsView[str, Value]:
        """Return knobs with their values; those of a Mapping ask for each value again."""
        return self._values.items()

    def __str__(self) -> str:
        return " ".join(f"{knob}={format_value(value)}" for knob, value in self._values.items())

    def __repr__(self) -> str:
        return f"Config({self})"

    def integer(self, knob: str) -> int:
        """Return the value of an integer knob; raises :class:`ConfigError` if it is of another type."""
        value = self._values[knob]
        return value if type(value) is int else as_integer(value, knob)  # a call less: models ask millions

    def pair(self, knob: str) -> tuple[int, int]:
        """Return the value of a knob of two integers; raises as :meth:`integer`."""
        return as_pair(self._values[knob], knob)

    def flag(self, knob: str) -> bool:
        """Return the value of a boolean knob; raises as :meth:`integer`."""
        value = self._values[knob]
        return value if isinstance(value, bool) else as_flag(value, knob)

    def replace(self, **changes: Value) -> Config:
        """Return a copy with some knobs changed."""
        return Config({**self._values, **changes})

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON data; tuples become lists."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in self._values.items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> Config:
        """Return the config that :meth:`to_json` described.

        Raises:
            ConfigError: A value is of no type that a knob may hold.
        """
        values: dict[str, Value] = {}
        for knob, value in data.items():
            if isinstance(value, list) and all(type(x) is int for x in value):
                values[knob] = tuple(value)
            elif isinstance(value, (bool, int, str)):
                values[knob] = value
            else:
                raise ConfigError(f"knob {knob} holds {shown(value)}, which no knob may")
        return cls(values)

    @classmethod
    def of(cls, given: Config | Mapping[str, Value] | str) -> Config:
        """Return the config that an object, a mapping or its text stands for.

        Raises:
            ConfigError: It is nothing of the three, the text is not of the form ``knob=value ...``, or a
                value is of no type that a knob may hold.
        """
        if isinstance(given, Config):
            return given
        if isinstance(given, str):
            return cls.parse(given)
        require_mapping(given)
        try:
            return cls(given)
        except TypeError:  # a value that does not hash
            raise ConfigError(f"config {shown(dict(given))} holds what no knob may") from None

    @classmethod
    def parse(cls, text: str) -> Config:
        """Return the config written as ``knob=value`` words, separated by spaces or commas.

        Raises:
            ConfigError: A word is not of that form or a knob is named twice.
        """
        values: dict[str, Value] = {}
        for word in text.replace(",", " ").split():
            knob, equals, value = word.partition("=")
            if not equals or not knob or not value:
                raise ConfigError(f"{shown(word)} is not of the form knob=value")
            if knob in values:
                raise ConfigError(f"knob {knob} is named twice")
            values[knob] = parse_value(value)
        return cls(values)

    @property
    def source(self) -> str:
        """Whose kernel it is: ``cutegen``, unless its knob ``source`` names another."""
        return str(self._values.get("source", "cutegen"))

    @property
    def algorithm(self) -> str:
        """By which algorithm of its family: ``""``, the general one, unless its knob names another."""
        return str(self._values.get("algorithm", ""))

    @property
    def digest(self) -> str:
        """A short stable name, the same in every process."""
        return digest(self.to_json(), length=12)
