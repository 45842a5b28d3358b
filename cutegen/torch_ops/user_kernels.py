"""``cutegen.load``: the kernel of a declaration file as a function with the declared argument names.

A call of known shapes runs code that is written for the kernel: a tuple of shapes and strides, one probe of a
dict, one call. Everything else goes through the operator that all declared families have.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from operator import index
from pathlib import Path
from typing import Any

from cutegen.dtypes import INTEGER_RANGES, SHORT_NAMES
from cutegen.errors import OperandError, UsageError
from cutegen.families.calls import require_tensor
from cutegen.families.declared import Declared, DeclaredProblem
from cutegen.families.registry import load_kernel
from cutegen.runtime.dispatch import Dispatcher
from cutegen.torch_ops import gemm as state
from cutegen.torch_ops.family_operator import DeclaredOperator
from cutegen.torch_ops.gemm_plan import AnyConfig, as_config
from cutegen.torch_ops.operator_schema import Word
from cutegen.torch_ops.operator_values import MAKE
from cutegen.torch_ops.written_call import FastPlan, one_or_all, written_call

__all__ = ["load", "prepare", "problem_of_call"]

#: Types of the words of a call.
_PLAIN = (str, bool, int)
#: By declaration file.
_loaded: dict[Path, Callable[..., Any]] = {}


def load(path: str | os.PathLike[str]) -> Callable[..., Any]:
    """Return the kernel of a declaration file as a function of tensors; loading it again does nothing.

    The function takes inputs, tensors that are updated in place, and scalars in the declared order; what may
    be absent is None by default, and a scalar its first declared value. Outputs are keywords: without one a
    new tensor is made, a tensor is written into; one that is not always there is made if it is ``True``.
    Options and sizes that no input tells are keywords too. ``config`` overrides the choice of kernel. It
    returns the outputs, in their order: the tensor itself if there is one, None if there is none. It raises
    what :func:`cutegen.gemm` does.

    It is registered with torch as ``torch.ops.cutegen.NAME``: ``torch.compile`` and export see one operator.
    Load outside of what they trace: only the function is for there.

    Args:
        path: The file, see ``docs/own_kernel.md``.

    Raises:
        FamilyError: The file cannot be read, or declares no kernel, or one that contradicts itself.
    """
    file = Path(path).absolute()
    if file not in _loaded:
        prepare()
        family = load_kernel(file)
        operator = DeclaredOperator(family, state.default_dispatcher, state.workspaces)
        operator.register()
        signature = _signature(operator)
        call = written_call(operator, signature, _Slow(operator).answer)
        call.__name__ = call.__qualname__ = family.name
        vars(call)["operator"] = operator
        call.__doc__ = f"{family.meaning}; declared in {file.name}, see cutegen.load."
        _loaded[file] = call
    return _loaded[file]


def problem_of_call(
    kernel: Callable[..., Any],
    arguments: Sequence[Any],
    named: Mapping[str, Any],
    dispatcher: Dispatcher,
) -> DeclaredProblem:
    """Return the problem that a call of a loaded kernel poses.

    Raises:
        UsageError: The kernel was not loaded.
        OperandError: A tensor cannot be an operand.
        TypeError: An argument is missing or unknown.
    """
    operator = getattr(kernel, "operator", None)
    if not isinstance(operator, DeclaredOperator):
        raise UsageError(f"{kernel!r} is no kernel that cutegen.load returned")
    bound = inspect.signature(kernel).bind(*arguments, **named)
    bound.apply_defaults()
    given = bound.arguments
    values = [_asked(a, given[a.name]) for a in operator.tensors]
    return operator.problem_of(values, tuple(given[word.name] for word in operator.words), dispatcher)


def _asked(argument: Declared, value: Any) -> Any:
    """Return the value of a tensor as the operator takes it."""
    if argument.kind != "out":
        return value
    absent = value is None or value is False
    return (None if argument.when else MAKE) if absent else MAKE if value is True else value


def prepare() -> None:
    """Import torch and register the GEMM with it; again does nothing."""
    state.prepare()


class _Slow:
    """Answers calls that are not known, or not plain.

    Args:
        operator: Of the kernel.
    """

    def __init__(self, operator: DeclaredOperator) -> None:
        self._operator = operator

    def answer(
        self,
        key: Any,
        values: Sequence[Any],
        scalars: Sequence[Any],
        words: tuple[Any, ...],
        config: AnyConfig,
    ) -> Any:
        """Answer a call by the operator, and remember how under ``key``."""
        operator = self._operator
        options = tuple([_word(w, value) for w, value in zip(operator.words, words, strict=True)])
        given = []
        for argument, value in zip(operator.tensors, values, strict=True):
            if value is MAKE or (value is None and (argument.when or argument.kind == "out")):
                continue
            require_tensor(argument.name, value)
            if value.requires_grad and state.is_grad_enabled():
                raise OperandError(
                    f"{argument.name} requires grad, but {operator.family.name} computes no gradients; "
                    "call it under torch.no_grad()"
                )
            given.append(value)
        numbers = [_number(a, value) for a, value in zip(operator.scalars, scalars, strict=True)]
        chosen = as_config(config)
        if state.must_trace(*given):
            return _result(operator, operator.traced(values, numbers, chosen, options))
        if any(tensor.numel() == 0 for tensor in given):
            return _result(operator, operator.of_nothing(values, options))
        found = operator(values, numbers, chosen, options)
        plan = None if key is None else operator.planned(values, options)
        if plan is not None:
            operator.remember(key, FastPlan(operator, plan, found))
        return _result(operator, found)


def _word(word: Word, value: Any) -> Any:
    """Return a word of a call: the name of a dtype of torch's, anything else as it is."""
    if word.kind == "bool" and not (value is None or (isinstance(value, int) and value in (0, 1))):
        raise OperandError(f"{word.name} is {value!r}; it must be True or False")
    return value if value is None or type(value) in _PLAIN else SHORT_NAMES.get(str(value), value)


def _number(argument: Declared, value: Any) -> float:
    """Return a scalar of a call; what is no integer is not rounded to one."""
    whole = argument.dtype in INTEGER_RANGES
    try:
        if not whole:
            return float(value)
        return value if isinstance(value, int) else index(value)  # a compiler traces numbers that say int
    except (TypeError, ValueError) as error:
        kind = "an integer" if whole else "a number"
        raise OperandError(f"{argument.name} is {value!r}; it must be {kind}") from error


def _result(operator: DeclaredOperator, found: Sequence[Any]) -> Any:
    pairs = zip(operator.tensors, found, strict=True)
    return one_or_all(tuple(tensor for a, tensor in pairs if a.kind == "out" and tensor is not None))


def _signature(operator: DeclaredOperator) -> inspect.Signature:
    kind = inspect.Parameter
    parameters = []
    for a in _positional(operator):
        default: Any = inspect.Parameter.empty
        if a.kind == "scalar":
            default = a.values[0]
        elif a.when:
            default = None
        parameters.append(kind(a.name, kind.POSITIONAL_OR_KEYWORD, default=default))
    seen = False
    for at, parameter in enumerate(parameters):  # what follows a default has one too
        seen = seen or parameter.default is not kind.empty
        if seen and parameter.default is kind.empty:
            parameters[at] = parameter.replace(kind=kind.KEYWORD_ONLY)
    ordered = [p for p in parameters if p.kind is not kind.KEYWORD_ONLY]
    ordered += [p for p in parameters if p.kind is kind.KEYWORD_ONLY]
    ordered += [kind(a.name, kind.KEYWORD_ONLY, default=None) for a in operator.tensors if a.kind == "out"]
    ordered += [kind(word.name, kind.KEYWORD_ONLY, default=word.default) for word in operator.words]
    return inspect.Signature([*ordered, kind("config", kind.KEYWORD_ONLY, default=None)])


def _positional(operator: DeclaredOperator) -> tuple[Declared, ...]:
    """Return what callers pass in order: all but outputs."""
    declared = operator.family.declared_arguments
    return tuple(a for a in declared if a.kind in ("in", "inout", "scalar"))
