"""Kernels of declared families that compute their reference on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fake_kernels import FakeGpu, compute

from cutegen.families.registry import find_family

__all__ = ["AllFamilies", "FakeFamilies", "reference_kernel"]


class FakeFamilies(FakeGpu):
    """A GPU whose kernels compute what their family declares, and round once."""

    def load(self, library: Path, symbol: str) -> Callable[..., Any]:
        self.loaded.append(symbol)
        kernel = reference_kernel(self._signatures[symbol].signature)

        def function(*arguments: Any) -> None:
            self.calls.append(arguments)
            kernel(*arguments)

        return function


class AllFamilies(FakeGpu):
    """A GPU whose kernels compute GEMMs, and what declared families declare.

    Attributes:
        families: Whose kernels were launched, most recent last.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.families: list[str] = []

    def load(self, library: Path, symbol: str) -> Callable[..., Any]:
        self.loaded.append(symbol)
        source = self._signatures[symbol]
        family = source.signature.family

        def function(*arguments: Any) -> None:
            self.calls.append(arguments)
            self.families.append(family)
            if family in ("gemm", "gemm_blocks"):
                compute(source, arguments)
            else:
                reference_kernel(source.signature)(*arguments)

        return function


def reference_kernel(signature: Any) -> Callable[..., None]:
    """Return a kernel of a declared family, which computes its reference."""
    family: Any = find_family(signature.family)
    options = dict(signature.options)
    passed = [a for a in family.declared_arguments if a.kind not in ("scratch", "launch")]
    declared = [a for a in passed if a.is_present(options)]

    def kernel(*arguments: Any) -> None:
        # A workspace and the integers of a launch come behind; they say how, not what.
        given = dict(
            zip([a.name for a in declared], arguments, strict=len(passed) == len(family.declared_arguments))
        )
        values = {a.name: given.get(a.name) for a in passed if a.kind != "out"}
        wide = {k: v.double() if hasattr(v, "double") else v for k, v in values.items()}
        found = family.call_reference(signature, wide)
        rounded = {a.name: found[a.name].clone() for a in declared if a.kind in ("out", "inout")}
        for name, value in rounded.items():
            given[name].copy_(value)

    return kernel
