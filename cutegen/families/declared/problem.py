"""Problems of declared families, and the part of them that is compiled in."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from cutegen.families.declared.arguments import NONE

if TYPE_CHECKING:
    from cutegen.families.declared.family import DeclaredFamily

__all__ = ["UNALIGNED", "DeclaredProblem", "DeclaredSignature"]

#: The word of a problem whose rows start anywhere although their length would let them be aligned.
UNALIGNED = "unaligned"


@dataclass(frozen=True)
class DeclaredSignature:
    """The compiled-in part of a declared problem.

    Templates read fixed sizes and options as attributes: ``sig.n``, ``sig.dtype``.

    Attributes:
        family: Name of the family.
        fixed: The sizes that are compiled in.
        options: Every option; flags are True or False.
        unaligned: Whether rows may start anywhere, not only at the multiples of bytes that arguments declare.
    """

    family: str
    fixed: tuple[tuple[str, int], ...]
    options: tuple[tuple[str, str | bool], ...]
    unaligned: bool

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        for key, value in (*self.fixed, *self.options):
            if key == name:
                return value
        raise AttributeError(f"{self.family} has no fixed size and no option {name!r}")


@dataclass(frozen=True)
class DeclaredProblem:
    """A problem of a declared family. Its sizes and options are attributes too, such as ``problem.n``."""

    declared: DeclaredFamily = field(repr=False)
    size_items: tuple[tuple[str, int], ...]
    options: tuple[tuple[str, str | bool], ...]
    unaligned: bool

    @property
    def family(self) -> str:
        """Name of the family."""
        return self.declared.name

    @property
    def sizes(self) -> dict[str, int]:
        """Every size by name."""
        return dict(self.size_items)

    @cached_property
    def signature(self) -> DeclaredSignature:
        """Sizes that are not free, options, and whether rows are aligned: rules ask for it all the time."""
        free = {size.name for size in self.declared.sizes if size.free}
        fixed = tuple((name, value) for name, value in self.size_items if name not in free)
        return DeclaredSignature(self.family, fixed, self.options, self.unaligned)

    @property
    def flops(self) -> int:
        """Floating-point operations, as the family counts them."""
        return self.declared.count_flops(self)

    @property
    def min_bytes(self) -> int:
        """Bytes of all tensors, of those that are updated in place twice."""
        return self.declared.count_bytes(self)

    def with_sizes(self, **sizes: int) -> DeclaredProblem:
        """Return the same kind of problem with some sizes changed; raises :class:`ProblemError`."""
        words = {
            **{name: NONE if value == "" else value for name, value in self.options},
            UNALIGNED: self.unaligned and not self.declared.is_odd(self),
        }
        return self.declared.problem({**self.sizes, **sizes}, words)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        for key, value in (*self.size_items, *self.options):
            if key == name:
                return value
        raise AttributeError(f"{self.family} has no size and no option {name!r}")

    def __str__(self) -> str:
        words = [self.family, "x".join(str(value) for _, value in self.size_items)]
        for option in self.declared.options:
            value = getattr(self, option.name) if option.name != UNALIGNED else False
            if option.is_flag:
                words += [option.name] if value else []
            elif option.name == "dtype":
                words.append(str(value))
            elif value != option.default:
                words.append(f"{option.name}={value or NONE}")
        if self.unaligned and not self.declared.is_odd(self):
            words.append(UNALIGNED)
        return " ".join(words)
