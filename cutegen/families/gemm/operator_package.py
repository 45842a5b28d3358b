"""NVIDIA's CUTLASS Operator API as it is installed here, found without importing it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from cutegen.digest import digest
from cutegen.errors import ResourceError

__all__ = ["EXTRA", "PACKAGE", "require_package"]

PACKAGE = "nvidia-cutlass-operators"
#: What to install for it.
EXTRA = "cutegen[operators]"
#: Where the package keeps its kernels, each in a file without the API around it.
_KERNELS = "cutlass/operators/providers/cutedsl/gemm/implementations"


@cache
def require_package() -> str:
    """Return name, version and a digest of the kernels of the installed package: 12 hexadecimal digits.

    Raises:
        ResourceError: It is not installed, or holds no kernels where they are looked for.
    """
    from importlib.metadata import PackageNotFoundError, distribution  # takes 40 ms

    try:
        found = distribution(PACKAGE)
    except PackageNotFoundError:
        raise ResourceError(
            f"{PACKAGE} is not installed, and kernels of source=operators come from it; pip install '{EXTRA}'"
        ) from None
    folder = Path(str(found.locate_file(_KERNELS)))
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))]
    if not texts:
        raise ResourceError(f"{PACKAGE} {found.version} has no kernels in {_KERNELS}; pip install '{EXTRA}'")
    return f"{PACKAGE} {found.version} ({digest(texts, length=12)})"
