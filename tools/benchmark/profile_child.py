"""What tools/profile_gemm.py runs under Nsight Compute: the vendor's call and ours, in ranges that name them.

python -m tools.benchmark.profile_child 'gemm 16x8192x8192 bf16 kk' 5 TABLE.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from cutegen.families.registry import find_family, parse_problem
from cutegen.family import bind
from cutegen.measure.poisoned_output import new_output
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
    problem, count, table = parse_problem(words[0]), int(words[1]), words[2]
    import torch

    family = find_family(problem.family)
    arguments = family.arguments(problem)
    generator = torch.Generator(device="cuda").manual_seed(0)
    inputs = family.inputs(problem, generator)
    outputs = {a.name: new_output(a, generator.device) for a in arguments if a.kind == "out"}
    baseline = next(iter(family.baselines(problem, inputs, outputs).values()))
    own = load(Path(GEMM_CALL), json.dumps({"table": table, "problem": str(problem)}))
    bound = bind(arguments, {**inputs.tensors, **inputs.scalars, **outputs}, Launch((), 0))
    _repeat(REFERENCE, lambda: baseline(inputs, outputs), count)
    _repeat(OWN, lambda: own(*bound), count)


def _repeat(name: str, call: Callable[[], object], count: int) -> None:
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
