"""Host time of calls in two checkouts that take turns, each in a process of its own.

What differs between two runs of a benchmark, such as clocks and neighbours, is larger than a few percent of a
microsecond. Here a round times every statement in one checkout and then in the other, within milliseconds.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from cutegen.system.temporary import TemporaryFolder
from tools.benchmark.checkout_process import CheckoutProcess

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


class Turns(CheckoutProcess):
    """A process that times calls in the checkout at ``root``; its cache folder is empty at first."""

    def __init__(self, root: Path, cache: Path, sizes: Sequence[int]) -> None:
        cache.mkdir(mode=0o700)
        path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
        super().__init__(
            root,
            ["-c", _CHILD, str(root), *map(str, sizes)],
            {**os.environ, "CUTEGEN_CACHE_DIR": str(cache), "PYTHONPATH": path},
        )

    def time_us(self, statement: str, calls: int) -> float:
        """Return the microseconds of one call, as the mean of so many in a row."""
        return float(self.ask(f"{calls} {statement}"))


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
