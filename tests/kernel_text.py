"""What the text of a kernel says of work units: executed as Python, on integers."""

from __future__ import annotations

import ast
import re
from contextlib import suppress
from types import CodeType, SimpleNamespace
from typing import Any

from cutegen.arch import find_arch
from cutegen.build.render import render
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.space import Config

__all__ = ["Text"]

#: Stand-ins for what the text asks of the DSL: a divisor is the integer itself.
DSL = {
    "cute": SimpleNamespace(
        jit=lambda function: function,
        ceil_div=lambda a, b: -(-a // b),
        fast_divmod_create_divisor_v2=lambda divisor: divisor,
        FastDivmodDivisorV2=int,
    ),
    "cutlass": SimpleNamespace(Int32=int, min=min, max=max),
}


class Text:
    """A rendered GEMM kernel whose constants, functions and lines are executed one by one.

    Args:
        line: The problem.
        words: Knobs in which the config differs from the default.
        arch: Name of the target.
    """

    def __init__(self, line: str, words: str, arch: str) -> None:
        problem, space = Problem.parse(line), find_space("gemm", find_arch(arch))
        config = space.default(problem).replace(**Config.parse(words))
        self.problem = problem
        self.text = render(problem, config, space.arch).text
        self.known: dict[str, Any] = {}
        self._lines: dict[tuple[str, str], CodeType] = {}
        for name, value in re.findall(r"^(\w+(?:, \w+)*) = ([^#\n]+)", self.text, re.MULTILINE):
            with suppress(NameError, SyntaxError):
                exec(f"{name} = {value}", {}, self.known)

    def function(self, name: str) -> Any:
        """A function of the text, as Python."""
        found = {node.name: node for node in ast.parse(self.text).body if isinstance(node, ast.FunctionDef)}
        names: dict[str, Any] = {**DSL, **self.known}
        exec(ast.unparse(found[name]), names)
        return names[name]

    def value(self, where: str, name: str, **values: Any) -> Any:
        """The value of the first assignment to ``name`` in the function ``where``."""
        if (where, name) not in self._lines:
            body = re.split(rf"^def {where}\(", self.text, flags=re.MULTILINE)[1]
            expression = re.findall(rf"^ +{re.escape(name)} = ([^#\n]+)", body, re.MULTILINE)[0]
            self._lines[where, name] = compile(expression.strip(), name, "eval")
        return eval(self._lines[where, name], DSL, {**self.known, **values})
