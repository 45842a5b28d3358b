"""Call what a family's benchmark compares with once, in several processes: what it compiles stays on disk.

    python -m tools.benchmark.warm_calls "rmsnorm 16384x4096 bf16" ...

torch.compile takes seconds for a shape that it has not seen; with its caches warm it takes tenths of a
second. Nothing may be timed meanwhile.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from cutegen.families.registry import find_family, load_families, loaded_folders, parse_problem
from cutegen.family import Problem, bind
from cutegen.measure.poisoned_output import new_output
from cutegen.space import Launch
from cutegen.system.interpreter import python_command, python_environment

__all__ = ["warm_calls"]

_TIMEOUT_S = 240.0
_NO_PEERS = "--no-peers"
_IN_PLACE = "--in-place"
#: Before the path of a declaration, or of a folder of families.
_FAMILIES = "--families="
_FOLDER = Path(__file__).resolve().parents[2]


def warm_calls(
    problems: Sequence[Problem], processes: int, *, peers: bool = True, in_place: bool = False
) -> float:
    """Make the calls for ``problems`` in so many processes; return the seconds that it took.

    A call that fails is told about on stderr: the benchmark itself will say what is wrong.
    """
    started = time.perf_counter()
    flags = [*(f"{_FAMILIES}{path}" for path in loaded_folders()), *([] if peers else [_NO_PEERS])]
    flags += [_IN_PLACE] if in_place else []
    shares = [problems[i::processes] for i in range(min(processes, len(problems)))]
    running = [
        subprocess.Popen(
            python_command("tools.benchmark.warm_calls", [*map(str, share), *flags], first=[_FOLDER]),
            env={**python_environment(), "TORCHINDUCTOR_COMPILE_THREADS": "1"},
        )
        for share in shares
    ]
    for child in running:
        try:
            child.wait(max(1.0, started + _TIMEOUT_S - time.perf_counter()))
        except subprocess.TimeoutExpired:
            child.kill()
    return time.perf_counter() - started


def main(lines: Sequence[str]) -> int:
    """Make the calls for the problems that ``lines`` write."""
    import torch

    from tools.benchmark.family_child import FamilyCall, call_names

    for word in lines:
        if word.startswith(_FAMILIES):
            load_families(Path(word.removeprefix(_FAMILIES)))
    for line in (line for line in lines if not line.startswith("--")):
        problem = parse_problem(line)
        family = find_family(problem.family)
        generator = torch.Generator(device="cuda").manual_seed(0)
        inputs = family.inputs(problem, generator)
        arguments = family.arguments(problem)
        outputs = {a.name: new_output(a, torch.device("cuda")) for a in arguments if a.kind == "out"}
        bound = bind(arguments, {**inputs.tensors, **inputs.scalars, **outputs}, Launch((), 0), None)
        for name in call_names(problem, peers=_NO_PEERS not in lines, in_place=_IN_PLACE in lines):
            try:
                FamilyCall(line, name)(*bound)
            except Exception as error:  # noqa: BLE001 - a peer raises what it likes
                print(f"{name} on {line}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
        torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
