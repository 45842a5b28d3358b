"""What tools/profile_gemm.py runs under Nsight Compute: the vendor's call and ours, in ranges that name them.

python -m tools.benchmark.profile_child 'gemm 16x8192x8192 bf16 tn' 5 TABLE.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from cutegen.problem import Problem
from cutegen.space import Launch
from tools.benchmark.child import GEMM_CALL, load
from tools.benchmark.results import OWN

__all__ = ["MARK", "REFERENCE", "main"]

#: What the names of ranges begin with; whose call it is follows.
MARK = "cutegen-profile"
#: Whose call it is that is not ours.
REFERENCE = "vendor"
#: Calls before the first one that counts: cuBLAS loads its kernels, we ours.
_WARM_UPS = 2


def main(words: Sequence[str]) -> None:
    """Make the calls that the command line asks for: a problem, how many, and a table's file or nothing."""
    problem, count, table = Problem.parse(words[0]), int(words[1]), words[2]
    import torch

    from cutegen.measure.vendor import vendor_call
    from cutegen.measure.workload import Workload

    generator = torch.Generator(device="cuda").manual_seed(0)
    workload = Workload.fill(problem, generator)
    d = Workload.new_output(problem, generator.device)
    _, vendor = vendor_call(workload, d)
    own = load(Path(GEMM_CALL), json.dumps({"table": table, "problem": str(problem)}))
    arguments = workload.arguments(d, Launch((), 0), None)
    _repeat(REFERENCE, lambda: vendor(workload, d), count)
    _repeat(OWN, lambda: own(*arguments), count)


def _repeat(name: str, call: Callable[[], None], count: int) -> None:
    import torch

    for _ in range(_WARM_UPS):
        call()
    for _ in range(count):
        torch.cuda.synchronize()
        torch.cuda.nvtx.range_push(f"{MARK} {name}")  # type: ignore[no-untyped-call]
        call()
        torch.cuda.synchronize()
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main(sys.argv[1:])
