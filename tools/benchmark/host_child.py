"""First and later calls of ``cutegen.gemm`` in one checkout, without a GPU: kernels are there and do nothing.

Run as a program, by its path, so that it may import the cutegen of another checkout. That is why it uses only
what releases with a choice in C have in common.

    python host_child.py CHECKOUT FOLDER COUNT SEED

It answers each line of its standard input, a number of calls, with one line of JSON: microseconds of the
first call of every shape, of the choice of each, and of later calls of one shape, as the mean of so many.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

__all__ = ["main", "random_shapes"]

#: Products of up to so many rows; columns and depth are multiples of 64 up to the second number.
_MOST_ROWS, _MOST = 8192, 8192
#: Facts of the GPU that calls are answered for.
_GPU = ("NVIDIA H200", (9, 0), 132, 62914560, 150109880320, "none", "13.0", "none")


def random_shapes(count: int, seed: int) -> list[tuple[int, int, int]]:
    """Return different (m, n, k): m log-uniform and any integer, n and k multiples of 64."""
    generator = Random(seed)
    found: dict[tuple[int, int, int], None] = {}
    while len(found) < count:
        m = int(_MOST_ROWS ** generator.random())
        n, k = (64 * int((_MOST // 64) ** generator.random()) for _ in range(2))
        found[m, n, k] = None
    return list(found)


def main(arguments: Sequence[str]) -> int:
    """Answer until the standard input ends."""
    checkout, folder, count, seed = arguments
    sys.path[0] = checkout  # in place of this file's folder
    import cutegen

    print(cutegen.__file__, flush=True)
    calls = _Calls(Path(folder), random_shapes(int(count) + 1, int(seed)))
    for line in sys.stdin:
        print(json.dumps(calls.round(int(line))), flush=True)
    return 0


class _Calls:
    """The calls of one process, whose kernels are loaded before any is made.

    What a round begins with is not counted: it finds the processor's caches as the collector left them.
    """

    def __init__(self, folder: Path, shapes: Sequence[tuple[int, int, int]]) -> None:
        import torch

        import cutegen
        from cutegen.build.host_library import build_library
        from cutegen.families.gemm.perf_model.native_model import SOURCE
        from cutegen.families.gemm.problem import Problem
        from cutegen.families.registry import find_space
        from cutegen.measure.device import Device
        from cutegen.runtime.dispatch import Dispatcher
        from cutegen.runtime.workspace import Workspaces
        from cutegen.search.defaults import default_config, default_set
        from cutegen.torch_ops import gemm, gemm_plan

        kernels, device = _loaded_kernels(folder), Device(*_GPU)
        dispatcher = Dispatcher(kernels=kernels, device=lambda index: device, device_type="cpu")
        if build_library(SOURCE, kernels.store) is None:
            raise SystemExit("a C compiler is needed: without one numpy chooses")
        gemm.prepare()
        scratch = torch.empty(1 << 26, dtype=torch.float32)  # never written, so it takes no memory
        gemm._workspaces = Workspaces(lambda *_: scratch, lambda _: 0, lambda _: False)
        gemm_plan._vendor = _vendor
        cutegen.use(dispatcher)
        self._space, self._sm_count = find_space("gemm", dispatcher.arch()), device.sm_count
        for problem, config in default_set(self._space, Problem(64, 64, 64), self._sm_count):
            kernels.get(problem, config, dispatcher.arch())
        self._gemm, self._choose, self._problem = cutegen.gemm, default_config, Problem
        self._drop_plans, self._shapes = gemm.drop_plans, shapes
        longest = max(max(m * k, n * k, m * n) for m, n, k in shapes)
        a, b, out = (torch.empty(longest, dtype=torch.bfloat16) for _ in range(3))
        self._operands = [
            (a[: m * k].view(m, k), b[: n * k].view(n, k).t(), out[: m * n].view(m, n)) for m, n, k in shapes
        ]
        self.kernels = len(kernels.loaded)

    def round(self, calls: int) -> dict[str, Any]:
        """Return microseconds of one round."""
        gc.collect()
        gc.disable()
        self._drop_plans()
        found = {"first_us": [self._first_us(*each) for each in self._operands][1:]}
        found["choice_us"] = [self._choice_us(*shape) for shape in self._shapes][1:]
        a, b, out = self._operands[0]
        gemm = self._gemm
        began = time.perf_counter()
        for _ in range(calls):
            gemm(a, b, out=out)
        later_us = (time.perf_counter() - began) / calls * 1e6
        gc.enable()
        return {**found, "later_us": later_us, "kernels": self.kernels}

    def _first_us(self, a: Any, b: Any, out: Any) -> float:
        gemm = self._gemm
        began = time.perf_counter()
        gemm(a, b, out=out)
        return (time.perf_counter() - began) * 1e6

    def _choice_us(self, m: int, n: int, k: int) -> float:
        problem = self._problem(m, n, k)
        began = time.perf_counter()
        self._choose(self._space, problem, self._sm_count)
        return (time.perf_counter() - began) * 1e6


def _loaded_kernels(folder: Path) -> Any:
    """Return kernels that are rendered, neither compiled nor loaded, and do nothing when they are called."""
    from cutegen.build import Artifact, Resources, Toolchain, artifact_key, symbol_of
    from cutegen.build.store import Store
    from cutegen.runtime.kernel_cache import Kernels

    def artifact(source: Any, store: Any) -> Any:
        toolchain = Toolchain.current()
        key = artifact_key(source, toolchain)
        place = store.folder(source.arch, key)
        return Artifact(key, symbol_of(key), source.arch, place, Resources(), 0.0, source.digest, toolchain)

    def load(library: Path, symbol: str) -> Any:
        return _nothing

    return Kernels(Store(folder), build="allow", compile=artifact, load=load)


def _nothing(*arguments: Any) -> None:
    """Stands for a kernel, and for torch's own product."""


def _vendor(*, batched: bool) -> Any:
    return _nothing


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
