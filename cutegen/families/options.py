"""Options of a problem as people write them: words such as ``bias=n activation=relu any_order``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from cutegen.errors import UsageError
from cutegen.family import Family

__all__ = ["read_options"]


def read_options(family: Family, words: str, given: Mapping[str, str] | None = None) -> dict[str, str | bool]:
    """Return what ``words`` say, by the names of the options.

    Args:
        family: Whose options they are.
        words: ``name=value`` or the name of a flag, apart by blanks.
        given: Options that are given elsewhere.

    Raises:
        UsageError: The family has no such option, or it is given twice.
    """
    found: dict[str, str | bool] = dict(given or {})
    for word in words.split():
        name, equals, value = word.partition("=")
        option = family.option(name)
        if option is None or option.is_flag == bool(equals) or option.name in found:
            repeated = option is not None and option.name in found
            raise UsageError(f"--options: {_why_not(word, name, family, repeated)}")
        found[option.name] = True if option.is_flag else value
    for name in found:
        if family.option(name) is None:
            known = ", ".join(option.name for option in family.options)
            raise UsageError(f"{family.name} has no {name}; its options: {known}")
    return found


def _why_not(word: str, name: str, family: Family, repeated: bool) -> str:
    if repeated:
        return f"{name} is given twice"
    meant = next((f"{o.name}={word}" for o in family.options if word in o.values), "")
    names = [name for o in family.options for name in (o.name, *o.aliases)]
    meant = meant or next(iter(difflib.get_close_matches(name, names, n=1)), "")
    words = ", ".join(o.name if o.is_flag else f"{o.name}=..." for o in family.options)
    return f"unknown word {word!r}; " + (f"did you mean {meant}?" if meant else f"valid: {words}")
