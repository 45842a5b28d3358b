"""What rendered kernels are compiled for, argument by argument.

``python arguments.py KERNEL.py ...`` writes a JSON list with one list per kernel. A tensor is its dtype, the
names of its sizes, and what its sizes and strides are multiples of, 0 for a stride that is 1; a number is
its type. No GPU, no torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

sys.modules["torch"] = None  # type: ignore[assignment]


def multiple(size: Any) -> int:
    """What an size or stride that is not known yet is a multiple of."""
    return 0 if size == 1 else int(size._divisibility)


def arguments(path: Path) -> list[object]:
    """What one kernel says."""
    module = ModuleType(path.stem)
    module.__dict__["__file__"] = str(path)
    sys.modules[path.stem] = module
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    names: dict[int, int] = {}
    found: list[object] = []
    for given in module.fake_arguments():
        if not hasattr(given, "stride"):
            found.append(type(given).__name__)
            continue
        found.append(
            {
                "dtype": str(given.element_type),
                "names": [names.setdefault(id(size), len(names)) for size in given.shape],
                "sizes": [multiple(size) for size in given.shape],
                "strides": [multiple(stride) for stride in given.stride],
            }
        )
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps([arguments(Path(name)) for name in sys.argv[1:]]))
