"""Generate, compile, measure and pick CuTe DSL kernels for the GPU, shape and dtype at hand.

Importing this package imports nothing else; each name below is fetched when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cutegen.arch import Arch, find_arch
    from cutegen.build.store import Store
    from cutegen.errors import CutegenError
    from cutegen.families.gemm.problem import Epilogue, Problem
    from cutegen.families.user.tunable import tunable
    from cutegen.records.table import Table
    from cutegen.runtime.answer_lookup import Answer
    from cutegen.runtime.dispatch import Dispatcher
    from cutegen.runtime.kernel_cache import Kernels
    from cutegen.space import Config
    from cutegen.torch_ops.activations import activate
    from cutegen.torch_ops.cross_entropy import cross_entropy
    from cutegen.torch_ops.gated_gemm import gated_gemm
    from cutegen.torch_ops.gates import gated, geglu, reglu, swiglu
    from cutegen.torch_ops.gemm import gemm, linear, scaled_gemm, use
    from cutegen.torch_ops.grouped_gemm import grouped_gemm, scaled_grouped_gemm
    from cutegen.torch_ops.inductor import inductor_options
    from cutegen.torch_ops.layer_norm import layer_norm
    from cutegen.torch_ops.modules import optimize, restore
    from cutegen.torch_ops.norms import rms_norm
    from cutegen.torch_ops.ranks import check_ranks
    from cutegen.torch_ops.recording import record
    from cutegen.torch_ops.rope import rope, rope_
    from cutegen.torch_ops.serving import counters, freeze, reset_counters
    from cutegen.torch_ops.settings import configure, load_table, wait_for_kernels
    from cutegen.torch_ops.softmax import softmax
    from cutegen.torch_ops.user_kernels import load
    from cutegen.torch_ops.warmup import warmup
    from cutegen.tuning import AutoTuner
    from cutegen.tuning.exhaustive import exhaustive_search
    from cutegen.tuning.model import autotune

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
    "activate",
    "autotune",
    "check_ranks",
    "configure",
    "counters",
    "cross_entropy",
    "exhaustive_search",
    "find_arch",
    "freeze",
    "gated",
    "gated_gemm",
    "geglu",
    "gemm",
    "grouped_gemm",
    "inductor_options",
    "layer_norm",
    "linear",
    "load",
    "load_table",
    "optimize",
    "record",
    "reglu",
    "reset_counters",
    "restore",
    "rms_norm",
    "rope",
    "rope_",
    "scaled_gemm",
    "scaled_grouped_gemm",
    "softmax",
    "swiglu",
    "tunable",
    "use",
    "wait_for_kernels",
    "warmup",
]

_HOMES = {
    "Answer": "runtime.answer_lookup",
    "Arch": "arch",
    "AutoTuner": "tuning",
    "Config": "space",
    "CutegenError": "errors",
    "Dispatcher": "runtime.dispatch",
    "Epilogue": "families.gemm.problem",
    "Kernels": "runtime.kernel_cache",
    "Problem": "families.gemm.problem",
    "Store": "build.store",
    "Table": "records.table",
    "activate": "torch_ops.activations",
    "autotune": "tuning.model",
    "check_ranks": "torch_ops.ranks",
    "configure": "torch_ops.settings",
    "counters": "torch_ops.serving",
    "cross_entropy": "torch_ops.cross_entropy",
    "exhaustive_search": "tuning.exhaustive",
    "find_arch": "arch",
    "freeze": "torch_ops.serving",
    "gated": "torch_ops.gates",
    "gated_gemm": "torch_ops.gated_gemm",
    "geglu": "torch_ops.gates",
    "gemm": "torch_ops.gemm",
    "grouped_gemm": "torch_ops.grouped_gemm",
    "inductor_options": "torch_ops.inductor",
    "layer_norm": "torch_ops.layer_norm",
    "linear": "torch_ops.gemm",
    "load": "torch_ops.user_kernels",
    "load_table": "torch_ops.settings",
    "optimize": "torch_ops.modules",
    "record": "torch_ops.recording",
    "reglu": "torch_ops.gates",
    "reset_counters": "torch_ops.serving",
    "restore": "torch_ops.modules",
    "rms_norm": "torch_ops.norms",
    "rope": "torch_ops.rope",
    "rope_": "torch_ops.rope",
    "scaled_gemm": "torch_ops.gemm",
    "scaled_grouped_gemm": "torch_ops.grouped_gemm",
    "softmax": "torch_ops.softmax",
    "tunable": "families.user.tunable",
    "swiglu": "torch_ops.gates",
    "use": "torch_ops.gemm",
    "wait_for_kernels": "torch_ops.settings",
    "warmup": "torch_ops.warmup",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{home}")
    if home.startswith("torch_ops."):
        module.prepare()  # before torch.compile traces a call: registering operators cannot be traced
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
