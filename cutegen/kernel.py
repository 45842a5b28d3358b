"""What a declaration file imports: how a kernel of yours is tuned, checked and called.

See ``docs/own_kernel.md``. Importing this imports neither torch nor the DSL.
"""

from __future__ import annotations

from cutegen.families.declared import read, scalar, update, write
from cutegen.families.user.declaration import Kernel, fixed, free

__all__ = ["Kernel", "fixed", "free", "read", "scalar", "update", "write"]
