"""The code of a call, written for the arguments of one kernel, so that no call loops over arguments.

A call of known shapes makes a tuple of shapes and strides, probes a dict and launches. What is not known, or
is not plain, is handed on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from cutegen.dtypes import INTEGER_RANGES
from cutegen.families.declared import Declared
from cutegen.torch_ops import gemm as state
from cutegen.torch_ops.family_operator import DeclaredOperator
from cutegen.torch_ops.operator_values import MAKE, count_modes
from cutegen.torch_ops.written_tensors import write_counter

__all__ = ["FastPlan", "one_or_all", "written_call"]


class FastPlan:
    """What a call of known shapes needs; attributes end in the position of a tensor.

    Attributes:
        plan: Its ``launch`` takes the tensors and scalars that there are.
        call: Calls that with the present ones of all arguments.
        device: Where outputs are made.
        shape0: Shape of the first tensor.
        dtype0: Its dtype.
        bytes0: Bytes that it spans.
    """

    def __init__(self, operator: DeclaredOperator, plan: Any, found: Sequence[Any]) -> None:
        self.plan = plan
        self.device = next(tensor.device for tensor in found if tensor is not None)
        for at, tensor in enumerate(found):
            if tensor is not None:
                pairs = zip(tensor.shape, tensor.stride(), strict=True)
                span = 1 + sum((size - 1) * stride for size, stride in pairs)
                vars(self)[f"shape{at}"] = tuple(tensor.shape)
                vars(self)[f"dtype{at}"] = tensor.dtype
                vars(self)[f"bytes{at}"] = span * tensor.element_size()
        absent = {a.name for a, t in zip(operator.tensors, found, strict=True) if t is None}
        every = [a.name for a in _passed(operator)]
        present = [name for name in every if name not in absent]
        text = f"lambda __plan, {', '.join(every)}: __plan.launch({', '.join(present)})"
        self.call: Callable[..., Any] = eval(text)


def _passed(operator: DeclaredOperator) -> tuple[Declared, ...]:
    """Return tensors and scalars in the order in which plans take them."""
    return (*operator.tensors, *operator.scalars)


def written_call(
    operator: DeclaredOperator, signature: inspect.Signature, slow: Callable[..., Any]
) -> Callable[..., Any]:
    """Return the function of a kernel.

    Args:
        operator: Of the kernel.
        signature: Of the function.
        slow: Answers what is not known, ``(key, tensors, scalars, options, config)``.
    """
    text = _Writer(operator).text(signature)
    scope: dict[str, Any] = {
        "__slow": slow,
        "__plans": operator.fast,
        "__make": MAKE,
        "__one_or_all": one_or_all,
        "__Tensor": state._Tensor,
        "__Parameter": state._Parameter,
        "__compiling": state._is_compiling,
        "__modes": count_modes(),
        "__grad": state._is_grad_enabled,
        "__empty": state._empty,
        "__count_writes": write_counter(),
    }
    # Names of arguments are identifiers, which the family checks; others here begin with two underscores.
    exec(compile(text, f"<call of {operator.family.name}>", "exec"), scope)
    call: Callable[..., Any] = scope["__call"]
    return call


class _Writer:
    """Writes the function of a kernel.

    Args:
        operator: Of the kernel.
    """

    def __init__(self, operator: DeclaredOperator) -> None:
        self._operator = operator
        self._tensors = operator.tensors
        self._given = [a for a in operator.tensors if a.kind != "out"]
        self._outputs = [(at, a) for at, a in enumerate(operator.tensors) if a.kind == "out"]
        self._updated = [(at, a) for at, a in enumerate(operator.tensors) if a.kind == "inout"]

    def text(self, signature: inspect.Signature) -> str:
        """Return the text of ``__call``."""
        scalars = "".join(f"{a.name}, " for a in self._operator.scalars)
        options = "".join(f"{word.name}, " for word in self._operator.words)
        asked = f"({''.join(f'{self._asked(a)}, ' for a in self._tensors)}), ({scalars}), ({options})"
        if all(a.when for a in self._given):
            return f"def __call{signature}:\n    return __slow(None, {asked}, config)\n"
        names = [a.name for a in _passed(self._operator)]
        call = (
            f"call(__plan.plan, {', '.join(names)})" if self._varies else f"plan.launch({', '.join(names)})"
        )
        plain = " and ".join([*map(self._plain, self._tensors), *self._whole])
        keys = "".join(f"{self._key(a)}, " for a in self._tensors)
        lines = [
            f"def __call{signature}:",
            f"    if config is not None or not ({plain}) or __compiling() or __modes():",
            f"        return __slow(None, {asked}, config)",
            f"    __key = ({keys}{options}{self._first}.get_device())",
            "    __plan = __plans.get(__key)",
            f"    if __plan is None or (({' or '.join(map(self._grad, self._tensors))}) and __grad()):",
            f"        return __slow(__key, {asked}, None)",
            *(line for at, a in self._updated for line in self._update(at, a, asked)),
            *(line for at, a in self._outputs for line in self._output(at, a, asked)),
            *(line for _, a in self._updated for line in self._noted(a)),
            "    try:",
            f"        __plan.{call}",
            "    except (AttributeError, RuntimeError, TypeError, ValueError):",
            f"        return __slow(None, {asked}, None)",
            f"    return {self._result()}",
        ]
        return "\n".join(lines) + "\n"

    @property
    def _varies(self) -> bool:
        return any(a.when for a in self._operator.family.declared_arguments)

    @property
    def _whole(self) -> list[str]:
        """That each integer is one, of as many bits as its argument has: launches do not look."""
        return [
            f"(type({a.name}) is int and {low} <= {a.name} <= {high})"
            for a in self._operator.scalars
            if a.dtype in INTEGER_RANGES
            for low, high in [INTEGER_RANGES[a.dtype]]
        ]

    @property
    def _first(self) -> str:
        return next(a.name for a in self._given if not a.when)

    def _asked(self, a: Declared) -> str:
        """The value of a tensor as the operator takes it."""
        if a.kind != "out":
            return a.name
        if not a.when:
            return f"__make if {a.name} is None else {a.name}"
        return f"None if {a.name} is None or {a.name} is False else __make if {a.name} is True else {a.name}"

    def _plain(self, a: Declared) -> str:
        kinds = f"type({a.name}) is __Tensor or type({a.name}) is __Parameter"
        if a.kind != "out":
            return f"({a.name} is None or {kinds})" if a.when else f"({kinds})"
        more = f" or {a.name} is True or {a.name} is False" if a.when else ""
        return f"({a.name} is None{more} or {kinds})"

    def _key(self, a: Declared) -> str:
        plain = f"{a.name}.shape, {a.name}.stride(), {a.name}.dtype"
        if a.kind != "out" and not a.when:
            return plain
        at = f", {a.name}.data_ptr() & 15" if a.kind == "out" else ""
        more = f" or {a.name} is True or {a.name} is False" if a.kind == "out" and a.when else ""
        return f"({a.name} if {a.name} is None{more} else ({plain}{at}))"

    def _grad(self, a: Declared) -> str:
        if a.kind == "out":
            absent = ("None", "True", "False") if a.when else ("None",)
            there = " and ".join(f"{a.name} is not {value}" for value in absent)
            return f"({there} and {a.name}.requires_grad)"
        return f"({a.name} is not None and {a.name}.requires_grad)" if a.when else f"{a.name}.requires_grad"

    def _update(self, at: int, a: Declared, asked: str) -> list[str]:
        """See that what is updated in place shares no memory with inputs, nor with what follows in place."""
        others = [(other, b) for other, b in enumerate(self._tensors) if b.kind == "in"]
        others += [(other, b) for other, b in self._updated if other > at]
        lines = [f"__at = {a.name}.data_ptr()", *self._apart(at, a, others, asked)]
        if not a.when:
            return [f"    {line}" for line in lines]
        return [f"    if {a.name} is not None:", *(f"        {line}" for line in lines)]

    def _output(self, at: int, a: Declared, asked: str) -> list[str]:
        """Make an output, or see that the caller's shares no memory with others."""
        make = f"{a.name} = __empty(__plan.shape{at}, dtype=__plan.dtype{at}, device=__plan.device)"
        wanted = f"{a.name} is True" if a.when else f"{a.name} is None"
        given = f"elif {a.name} is not None and {a.name} is not False:" if a.when else "else:"
        others = [(other, b) for other, b in enumerate(self._tensors) if other != at]
        return [
            f"    if {wanted}:",
            f"        {make}",
            f"        if type({a.name}) is not __Tensor:",  # made by a mode
            f"            return __slow(None, {asked}, None)",
            f"    {given}",
            f"        __at = {a.name}.data_ptr()",
            *(f"        {line}" for line in self._apart(at, a, others, asked)),
            f"        __count_writes(({a.name},))",
        ]

    def _noted(self, a: Declared) -> list[str]:
        """Let autograd know that what is updated in place is written."""
        there = f"if {a.name} is not None: " if a.when else ""
        return [f"    {there}__count_writes(({a.name},))"]

    def _apart(self, at: int, a: Declared, others: Sequence[tuple[int, Declared]], asked: str) -> list[str]:
        """Hand on calls in which the memory of ``a``, from ``__at`` on, and of another tensor meet.

        Parts of one tensor may meet and share nothing: their distances are known after the first call.
        """
        tensors = f"({''.join(f'{self._asked(b)}, ' for b in self._tensors)})"
        lines = []
        for other_at, other in others:
            name = other.name
            there = f"{name} is not None and " if other.when or other.kind == "out" else ""
            there += f"{name} is not True and {name} is not False and " if other.kind == "out" else ""
            there += f"{name} is not {a.name} and " if name in a.may_alias else ""
            lines += [
                f"if {there}__at < {name}.data_ptr() + __plan.bytes{other_at} and "
                f"{name}.data_ptr() < __at + __plan.bytes{at} and not __plan.plan.is_apart({tensors}):",
                f"    return __slow(None, {asked}, None)",
            ]
        return lines

    def _result(self) -> str:
        """What is returned: outputs that are there."""
        outputs = [a for _, a in self._outputs]
        if not outputs:
            return "None"
        if not any(a.when for a in outputs):
            return ", ".join(a.name for a in outputs)
        words = [
            f"*(() if {a.name} is None or {a.name} is False else ({a.name},))" if a.when else a.name
            for a in outputs
        ]
        return f"__one_or_all(({''.join(f'{word}, ' for word in words)}))"


def one_or_all(outputs: tuple[Any, ...]) -> Any:
    """Return the only one of ``outputs``, all of several, None for none."""
    return outputs if len(outputs) > 1 else outputs[0] if outputs else None
