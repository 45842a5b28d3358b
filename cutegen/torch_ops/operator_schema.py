"""How torch sees the operator of a declared family: its schema, and the arguments of its calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from cutegen.dtypes import INTEGER_RANGES
from cutegen.families.declared import Declared, DeclaredFamily
from cutegen.space import Config
from cutegen.torch_ops.operator_values import MAKE

__all__ = ["Asked", "OperatorSchema", "Value", "Word"]

#: Of a word: None where a tensor tells it.
Value = str | bool | int | None

#: Values, scalars, config and options, as the operators of families take them.
Asked = tuple[list[Any], Sequence[float], "Config | None", tuple[Value, ...]]


@dataclass(frozen=True)
class Word:
    """What a call says by name, since no input tells it: an option, or a size.

    Attributes:
        name: Its name.
        kind: Its type in the schema.
        default: What a call has that does not say it.
    """

    name: str
    kind: str
    default: Value


def _words(family: DeclaredFamily) -> tuple[Word, ...]:
    """Options that no tensor tells, then options and sizes that only outputs of the caller's may tell."""
    options = [
        Word(o.name, "bool", False) if o.is_flag else Word(o.name, "str", o.default)
        for o in family.named_options
    ]
    options += [Word(option.name, "str?", None) for option in family.dtypes_of_outputs]
    return (*options, *(Word(size.name, "SymInt?", size.default) for size in family.named_sizes))


class OperatorSchema:
    """The registered operator: inputs, scalars, options, the names of the outputs wanted; returns these.

    If the kernel updates arguments in place they are marked as mutated, as are the outputs then, which are
    tensors: an operator that mutates something can return nothing whose number varies.

    Args:
        family: Whose.

    Attributes:
        tensors: The declared ones, in the order in which calls pass them.
        scalars: The declared ones.
        words: What a call says by name.
        outputs: Positions of the outputs among the tensors.
        in_place: Whether the kernel updates arguments.
    """

    def __init__(self, family: DeclaredFamily) -> None:
        declared = family.declared_arguments
        self.name = family.name
        self.tensors: tuple[Declared, ...] = tuple(a for a in declared if a.kind in ("in", "out", "inout"))
        self.scalars: tuple[Declared, ...] = tuple(a for a in declared if a.kind == "scalar")
        self.words = _words(family)
        self.outputs = tuple(at for at, a in enumerate(self.tensors) if a.kind == "out")
        self.in_place = any(a.kind == "inout" for a in self.tensors)

    def __str__(self) -> str:
        """The schema as torch reads it."""
        words = []
        for at, a in enumerate(self.tensors):
            if a.kind != "out":
                mark = f"(a{at}!)" if a.kind == "inout" else ""
                words.append(f"Tensor{mark}{'?' if a.when else ''} {a.name}")
        words += [f"{'SymInt' if s.dtype in INTEGER_RANGES else 'float'} {s.name}" for s in self.scalars]
        for word in self.words:
            # Torch passes arguments of mutating operators by name to a function with a parameter called mode.
            words.append(f"{word.kind} {'mode_' if word.name == 'mode' else word.name}")
        if self.in_place:
            words += [f"Tensor(b{at}!)? {self.tensors[at].name}" for at in self.outputs]
            return f"{self.name}({', '.join(words)}, str? config) -> ()"
        return f"{self.name}({', '.join(words)}, str[] outputs, str? config) -> Tensor[]"

    def pack(
        self,
        values: Sequence[Any],
        scalars: Sequence[float],
        config: Config | None,
        options: tuple[Value, ...],
    ) -> tuple[Any, ...]:
        """Return the arguments of a call of the registered operator; in place, all outputs are there."""
        inputs = [v for v, a in zip(values, self.tensors, strict=True) if a.kind != "out"]
        text = None if config is None else str(config)
        if self.in_place:
            return (*inputs, *scalars, *options, *(values[at] for at in self.outputs), text)
        names = [self.tensors[at].name for at in self.outputs if values[at] is MAKE]
        return (*inputs, *scalars, *options, names, text)

    def unpack(self, arguments: Sequence[Any]) -> Asked:
        """Return what a call of the registered operator asks for."""
        if self.in_place:
            *rest, text = arguments
            outputs = iter(rest[len(rest) - len(self.outputs) :])
            inputs = iter(rest[: len(rest) - len(self.outputs)])
            values = [next(outputs) if a.kind == "out" else next(inputs) for a in self.tensors]
        else:
            *rest, names, text = arguments
            inputs = iter(rest)
            values = [
                (MAKE if a.name in names else None) if a.kind == "out" else next(inputs) for a in self.tensors
            ]
        scalars = list(islice(inputs, len(self.scalars)))
        return values, scalars, None if text is None else Config.parse(text), tuple(inputs)
