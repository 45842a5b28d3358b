"""A copy as a contestant: what memory gives, beside GEMMs that do little else than read it.

A GEMM of few rows streams its weights once. How well it does that is its bytes per second over those of a
copy that moves as many bytes, half of them read and half written, in the same rounds. Two copies run, and the
faster one counts: the driver's, and a kernel of torch that inverts what it reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutegen.errors import LaunchError
from cutegen.families.gemm.problem import Problem as GemmProblem
from cutegen.family import Problem
from cutegen.measure import Candidate
from cutegen.space import Launch
from tools.benchmark.contest import Arena, Entrant, Finalist, UnsupportedError
from tools.benchmark.results import COPY

if TYPE_CHECKING:
    import torch

__all__ = ["COPY_CALL", "FEW_ROWS", "Copy", "CopyCall"]

#: Stands for a copy of as many bytes as a problem has; the symbol says by what, and how many it reads.
COPY_CALL = "call-copy"
#: Products of at most so many rows are compared with a copy: they are bound by memory on every GPU we know.
FEW_ROWS = 16
#: What copies: the driver, which torch asks for equal layouts, or a kernel.
METHODS = ("copy_", "bitwise_not")
#: Destinations take turns over so many bytes, so that none is still in the L2 cache when its turn comes.
#: More than four times the 60 MiB of an H200, as its driver reports them.
_RING_BYTES = 2**28
_MOST_DESTINATIONS = 512


class Copy:
    """A copy that moves as many bytes as a problem must; it computes no GEMM."""

    name = COPY

    def prepare(self, problems: Sequence[Problem]) -> None:
        """Do nothing: torch is there."""

    @staticmethod
    def concerns(problem: Problem) -> bool:
        """Whether a copy says something about ``problem``."""
        return isinstance(problem, GemmProblem) and problem.m <= FEW_ROWS

    def enter(self, arena: Arena, problem: Problem) -> Entrant:
        """Name both copies; there is no GEMM to check.

        Raises:
            UnsupportedError: The problem is not one that only streams.
        """
        if not self.concerns(problem):
            raise UnsupportedError(f"copies are compared for m of at most {FEW_ROWS}")
        return Entrant(tuple(self._finalists(problem)), details={"moved_bytes": 2 * _half(problem)})

    def _finalists(self, problem: Problem) -> Iterator[Finalist]:
        for method in METHODS:
            symbol = f"{method} {_half(problem)}"
            candidate = Candidate(f"copy by {method}", Path(COPY_CALL), symbol, Launch((), 0), problem)
            yield Finalist(candidate, method, {"method": method})


def _half(problem: Problem) -> int:
    """Return how many bytes are read; as many are written. Both copies want whole steps of 16."""
    return problem.min_bytes // 32 * 16


class CopyCall:
    """Copies the beginning of B, taking a kernel's arguments and leaving its output alone.

    Operands take turns over three times the L2 cache, and so do the destinations; therefore what is read is
    cold, although only half of each B is.

    Args:
        order: Method and bytes, as in the symbol.
    """

    def __init__(self, order: str) -> None:
        method, count = order.split()
        self._count = int(count)
        self._method = method
        self._turn = 0
        self._ring: list[torch.Tensor] = []

    def __call__(self, a: torch.Tensor, b: torch.Tensor, *rest: Any) -> None:
        """Copy.

        Raises:
            LaunchError: B holds fewer bytes than are to be read.
        """
        source = self._source(b)
        if not self._ring:
            self._ring = self._destinations(source)
        target = self._ring[self._turn % len(self._ring)]
        self._turn += 1
        self._copy(source, target)

    def _source(self, b: torch.Tensor) -> torch.Tensor:
        import torch

        storage, start = b.untyped_storage(), b.storage_offset() * b.element_size()
        if storage.nbytes() - start < self._count:
            raise LaunchError(
                f"B holds {storage.nbytes() - start} bytes; the copy is to read {self._count} of it"
            )
        whole = torch.empty(0, dtype=torch.uint8, device=b.device)
        return whole.set_(storage, start, (self._count,), (1,)).view(torch.int64)

    def _destinations(self, source: torch.Tensor) -> list[torch.Tensor]:
        import torch

        count = min(-(-_RING_BYTES // self._count), _MOST_DESTINATIONS)
        return list(torch.empty((count, *source.shape), dtype=source.dtype, device=source.device))

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        import torch

        if self._method == "copy_":
            target.copy_(source)
        else:
            torch.bitwise_not(source, out=target)
