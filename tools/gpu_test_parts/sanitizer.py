"""NVIDIA's compute-sanitizer around a process of tests: accesses outside of what was allocated are errors."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from cutegen.errors import BuildError

__all__ = ["Sanitizer"]

#: What a process may report, cut off behind this many characters.
_LONGEST = 6000
_FOUND = re.compile(r"^=+ (Invalid|Misaligned|ERROR SUMMARY: [1-9]|.*(not supported|out of bounds))", re.M)
_PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")


@dataclass(frozen=True)
class Sanitizer:
    """The sanitizer of a CUDA toolkit.

    Attributes:
        program: Its path.
    """

    program: str

    #: Torch otherwise serves tensors from large blocks, in which an access beyond a tensor is no error.
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}

    @classmethod
    def find(cls) -> Sanitizer:
        """Return the one on the PATH, or of the toolkit in its usual place.

        Raises:
            BuildError: There is none.
        """
        found = shutil.which("compute-sanitizer")
        for place in _PLACES:
            found = found or shutil.which("compute-sanitizer", path=place)
        if found is None:
            raise BuildError("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
        return cls(found)

    def prefix(self, folder: Path) -> list[str]:
        """Return the words before a command; what it starts is watched, too: that launches kernels."""
        words = ["--tool", "memcheck", "--target-processes", "all", "--report-api-errors", "no"]
        return [self.program, *words, "--log-file", str(folder / "sanitizer.%p.log")]

    def errors(self, folder: Path) -> str:
        """Return what it reported of the processes whose logs are there; empty when it found nothing.

        A log that only says that the GPU is not supported is an error, and no log at all is one.
        """
        logs = [path.read_text(encoding="utf-8", errors="replace") for path in folder.glob("sanitizer.*.log")]
        if not logs:
            return "compute-sanitizer wrote no log: it watched nothing"
        return "\n".join(text[:_LONGEST] for text in logs if _FOUND.search(text))
