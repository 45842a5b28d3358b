"""Options of a problem as people write them: words such as ``bias=n activation=relu any_order``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from cutegen.errors import UsageError
from cutegen.family import Family, Option

__all__ = ["read_options", "refusal"]


def read_options(family: Family, words: str, given: Mapping[str, str] | None = None) -> dict[str, str | bool]:
    """Return what ``words`` say, by the names of the options.

    Args:
        family: Whose options they are.
        words: ``name=value`` or the name of a flag, apart by blanks.
        given: Options that are given elsewhere.

    Raises:
        UsageError: The family has no such option, it is given twice, or it lacks its value.
    """
    found: dict[str, str | bool] = dict(given or {})
    for word in words.split():
        name, equals, value = word.partition("=")
        option = family.option(name)
        repeated = option is not None and option.name in found
        if option is None or repeated or (equals if option.is_flag else not value):
            raise UsageError(f"--options: {refusal(word, family.options, repeated=repeated)}")
        found[option.name] = True if option.is_flag else value
    for name in found:
        if family.option(name) is None:
            known = ", ".join(option.name for option in family.options)
            raise UsageError(f"{family.name} has no {name}; its options: {known}")
    return found


def refusal(word: str, options: Sequence[Option], *, repeated: bool) -> str:
    """Return why ``word`` is none of the words of ``options``, or no further one, and what would be."""
    name = word.partition("=")[0]
    if repeated:
        return f"{name} is given twice"
    known = next((o for o in options if name in (o.name, *o.aliases)), None)
    if known is not None:
        ways = "no value" if known.is_flag else f"a value: {name}={f', {name}='.join(known.values)}"
        return f"{name} takes {ways}"
    meant = next((f"{o.name}={word}" for o in options if word in o.values), "")
    names = [name for o in options for name in (o.name, *o.aliases)]
    meant = meant or next(iter(difflib.get_close_matches(name, names, n=1)), "")
    words = ", ".join(o.name if o.is_flag else f"{o.name}=..." for o in options)
    return f"unknown word {word!r}; " + (f"did you mean {meant}?" if meant else f"valid: {words}")
