"""``cutegen.load``: the kernel of a declaration file as a function with the declared argument names.

A call of known shapes runs code that is written for the kernel: a tuple of shapes and strides, one probe of a
dict, one call. Everything else goes through the operator that all declared families have.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cutegen.errors import OperandError
from cutegen.families.declared import Declared
from cutegen.families.registry import load_kernel
from cutegen.torch_ops import gemm as state
from cutegen.torch_ops.family_operator import MAKE, DeclaredOperator
from cutegen.torch_ops.gemm_plan import AnyConfig, as_config
from cutegen.torch_ops.written_call import FastPlan, one_or_all, written_call

__all__ = ["UserKernel", "load", "prepare"]

#: By declaration file.
_loaded: dict[Path, UserKernel] = {}


def load(path: str | os.PathLike[str]) -> UserKernel:
    """Return the kernel of a declaration file as a function of tensors; loading it again does nothing.

    It is registered with torch as ``torch.ops.cutegen.NAME``: ``torch.compile`` and export see one operator.

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
        _loaded[file] = UserKernel(operator)
    return _loaded[file]


def prepare() -> None:
    """Import torch and register the GEMM with it; again does nothing."""
    state.prepare()


class UserKernel:
    """A kernel of a declaration file, called with the declared names.

    Inputs, tensors that are updated in place, and scalars come in the declared order; what may be absent is
    None by default, and a scalar its first declared value. Outputs are keywords: without one a new tensor is
    made, a tensor is written into; one that is not always there is made if it is ``True``. Options that no
    tensor tells are keywords too. ``config`` overrides the choice of kernel. Returned are the outputs, in
    their order: the tensor itself if there is one, None if there is none.

    Attributes:
        operator: What tells torch about it.
    """

    def __init__(self, operator: DeclaredOperator) -> None:
        self.operator = operator
        self._family = operator.family
        self.__name__ = self.__qualname__ = operator.family.name
        self.__doc__ = f"{operator.family.meaning}; see {type(self).__name__}."
        self.__signature__ = _signature(operator)
        self._call = written_call(operator, self.__signature__, self._slow)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Launch the kernel.

        Raises:
            OperandError: A tensor cannot be an operand; the message names it and what would be valid.
            LaunchError: There is no kernel to launch, or it failed to.
            TypeError: An argument is missing or unknown.
        """
        return self._call(*arguments, **named)

    def __repr__(self) -> str:
        return f"<kernel {self.__name__}{self.__signature__}>"

    def _slow(
        self,
        key: Any,
        values: Sequence[Any],
        scalars: Sequence[Any],
        options: tuple[str | bool, ...],
        config: AnyConfig,
    ) -> Any:
        """Answer a call by the operator, and remember how under ``key``."""
        operator = self.operator
        given = []
        for argument, value in zip(operator.tensors, values, strict=True):
            if value is None or value is MAKE:
                continue
            if not hasattr(value, "stride"):
                name = type(value).__name__
                raise OperandError(f"{argument.name} is a {name}; it must be a torch.Tensor")
            if value.requires_grad and state.is_grad_enabled():
                raise OperandError(
                    f"{argument.name} requires grad, but {self.__name__} computes no gradients; call it "
                    "under torch.no_grad()"
                )
            given.append(value)
        numbers = [_number(a, value) for a, value in zip(operator.scalars, scalars, strict=True)]
        chosen = None if config is None else as_config(config)
        if state.must_trace(*given):
            return _result(operator, operator.traced(values, numbers, chosen, options))
        if any(tensor.numel() == 0 for tensor in given):
            return _result(operator, operator.of_nothing(values))
        found = operator(values, numbers, chosen, options)
        if key is not None:
            operator.fast[key] = FastPlan(operator, values, options, found)
        return _result(operator, found)


def _number(argument: Declared, value: Any) -> float:
    try:
        return int(value) if argument.dtype.startswith("int") else float(value)
    except (TypeError, ValueError) as error:
        raise OperandError(f"{argument.name} is {value!r}; it must be a number") from error


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
    ordered += [
        kind(option.name, kind.KEYWORD_ONLY, default=False if option.is_flag else option.default)
        for option in operator.options
    ]
    return inspect.Signature([*ordered, kind("config", kind.KEYWORD_ONLY, default=None)])


def _positional(operator: DeclaredOperator) -> tuple[Declared, ...]:
    """Return what callers pass in order: all but outputs."""
    declared = operator.family.declared_arguments
    return tuple(a for a in declared if a.kind in ("in", "inout", "scalar"))
