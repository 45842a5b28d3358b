"""Generate, compile, measure and pick CuTe DSL kernels for the GPU, shape and dtype at hand.

Importing this package imports nothing else; each name below is fetched when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cutegen.arch import Arch, find_arch
    from cutegen.dispatch import Answer, Dispatcher
    from cutegen.errors import CutegenError
    from cutegen.kernels import Kernels
    from cutegen.ops import gemm, linear, load_table, scaled_gemm, use
    from cutegen.problem import Epilogue, Problem
    from cutegen.space import Config
    from cutegen.store import Store
    from cutegen.table import Table
    from cutegen.tuner import AutoTuner

__version__ = "0.1.0"

__all__ = [
    "Answer",
    "Arch",
    "AutoTuner",
    "Config",
    "CutegenError",
    "Dispatcher",
    "Epilogue",
    "Kernels",
    "Problem",
    "Store",
    "Table",
    "__version__",
    "find_arch",
    "gemm",
    "linear",
    "load_table",
    "scaled_gemm",
    "use",
]

_HOMES = {
    "Answer": "dispatch",
    "Arch": "arch",
    "AutoTuner": "tuner",
    "Config": "space",
    "CutegenError": "errors",
    "Dispatcher": "dispatch",
    "Epilogue": "problem",
    "Kernels": "kernels",
    "Problem": "problem",
    "Store": "store",
    "Table": "table",
    "find_arch": "arch",
    "gemm": "ops",
    "linear": "ops",
    "load_table": "ops",
    "scaled_gemm": "ops",
    "use": "ops",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{home}")
    if home == "ops":
        module.prepare()  # before torch.compile traces a call: registering operators cannot be traced
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
