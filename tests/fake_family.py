"""Kernels of declared families that compute their reference on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fake_kernels import FakeGpu

from cutegen.families.registry import find_family

__all__ = ["FakeFamilies"]


class FakeFamilies(FakeGpu):
    """A GPU whose kernels compute what their family declares, and round once."""

    def load(self, library: Path, symbol: str) -> Callable[..., Any]:
        self.loaded.append(symbol)
        signature = self._signatures[symbol].signature
        family: Any = find_family(signature.family)
        options = dict(signature.options)
        declared = [a for a in family.declared_arguments if a.is_present(options)]
        named = {o.name: options[o.name] for o in family.named_options}

        def function(*arguments: Any) -> None:
            self.calls.append(arguments)
            given = dict(zip([a.name for a in declared], arguments, strict=True))
            values = {a.name: given.get(a.name) for a in family.declared_arguments if a.kind != "out"}
            wide = {k: v.double() if hasattr(v, "double") else v for k, v in values.items()}
            found = {k: v.clone() for k, v in family._reference(**wide, **named).items()}
            for a in declared:
                if a.kind in ("out", "inout"):
                    given[a.name].copy_(found[a.name])

        return function
