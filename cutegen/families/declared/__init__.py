"""A family from a declaration: sizes, options, arguments, a reference in a few lines; the rest follows.

::

    FAMILY = DeclaredFamily(
        "rmsnorm",
        "root-mean-square norm of rows",
        sizes=(Size("m", "rows"), Size("n", "columns", free=False)),
        options=(Option("dtype", "of x and y", ("bf16", "fp16", "fp32"), "bf16"),),
        arguments=(
            read("x", "dtype", ("m", "n")),
            write("y", "dtype", ("m", "n")),
            scalar("eps", "fp32", (1e-6, 0.25)),
        ),
        reference=rms_norm,
        rows="m",
    )
"""

from __future__ import annotations

from cutegen.families.declared.arguments import (
    Declared,
    integers,
    multiple,
    read,
    scalar,
    scratch,
    update,
    write,
)
from cutegen.families.declared.drawing import with_gaps
from cutegen.families.declared.family import DeclaredFamily
from cutegen.families.declared.problem import DeclaredProblem, DeclaredSignature
from cutegen.families.declared.reference import DeclaredReference, rounding_error

__all__ = [
    "Declared",
    "DeclaredFamily",
    "DeclaredProblem",
    "DeclaredReference",
    "DeclaredSignature",
    "integers",
    "multiple",
    "read",
    "rounding_error",
    "scalar",
    "scratch",
    "update",
    "with_gaps",
    "write",
]
