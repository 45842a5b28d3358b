"""Host time of calls in two checkouts that take turns, each in a process of its own.

What differs between two runs of a benchmark, such as clocks and neighbours, is larger than a few percent of a
microsecond. Here a round times every statement in one checkout and then in the other, within milliseconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from cutegen.errors import ResourceError
from cutegen.system.closing import Closing
from cutegen.system.temporary import TemporaryFolder

__all__ = ["Turns", "take_turns"]

#: Runs in either checkout, so it uses only what both have: the public calls, and the plans behind them.
_CHILD = """
import sys, timeit
sys.path.insert(0, sys.argv[1])
m, n, k = (int(word) for word in sys.argv[2:5])
import torch, cutegen
torch.manual_seed(0)
a = torch.rand(m, k, device="cuda").sub(0.5).to(torch.bfloat16)
w = torch.rand(n, k, device="cuda").sub(0.5).to(torch.bfloat16)
bias = torch.rand(n, device="cuda").to(torch.bfloat16)
b, c = w.t(), torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
gemm, linear, mm = cutegen.gemm, cutegen.linear, torch.mm
if hasattr(cutegen, "configure"):
    cutegen.configure(build="allow")
gemm(a, b, out=c)
torch.testing.assert_close(c.float(), a.float() @ b.float(), rtol=2e-2, atol=2e-2 * k**0.5)
gemm(a, b, out=c, bias=bias, activation="relu")  # both checkouts compile it at the same time
plans = sys.modules[gemm.__module__]._plans
key = next(iter(plans))
print(cutegen.__file__, flush=True)
timers = {}
for line in sys.stdin:
    calls, text = line.rstrip("\\n").split(" ", 1)
    if text not in timers:
        timers[text] = timeit.Timer(text, globals=globals())
        timers[text].timeit(int(calls))
    torch.cuda.synchronize()
    print(timers[text].timeit(int(calls)) / int(calls) * 1e6, flush=True)
torch.cuda.synchronize()
"""


class Turns(Closing):
    """A process that times calls in the checkout at ``root``; its cache folder is empty at first.

    A context manager that ends it.
    """

    def __init__(self, root: Path, cache: Path, sizes: Sequence[int]) -> None:
        cache.mkdir(mode=0o700)
        path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
        self._root = root
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(root), *map(str, sizes)],
            cwd=root,
            env={**os.environ, "CUTEGEN_CACHE_DIR": str(cache), "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait(self) -> None:
        """Wait until it has imported and compiled what it calls.

        Raises:
            ResourceError: The process ended, or imported another cutegen.
        """
        found = Path(self._answer())
        if not found.is_relative_to(self._root):
            raise ResourceError(f"{found} was imported in place of the checkout {self._root}")

    def time_us(self, statement: str, calls: int) -> float:
        """Return the microseconds of one call, as the mean of so many in a row."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{calls} {statement}\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        """Close the pipes, at which the process ends."""
        try:
            self._process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise ResourceError(f"the process of checkout {self._root} ended early")
        return line


def take_turns(
    ours: Path, other: Path, sizes: Sequence[int], statements: Mapping[str, str], rounds: int, calls: int
) -> dict[str, tuple[list[float], list[float]]]:
    """Return microseconds per call of each statement, one sample a round: of ``ours`` and of ``other``."""
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in statements}
    with (
        TemporaryFolder() as scratch,
        Turns(ours, scratch.path / "ours", sizes) as first,
        Turns(other, scratch.path / "other", sizes) as second,
    ):
        first.wait()  # both compile meanwhile
        second.wait()
        for number in range(rounds):
            sides = [(first, 0), (second, 1)]
            for name, text in statements.items():
                for process, side in sides if number % 2 else reversed(sides):
                    found[name][side].append(process.time_us(text, calls))
    return found
