"""What is wrong with broken kernels that go element by element, gated or not, in their tests on a GPU."""

from __future__ import annotations

from typing import Any

from family_kernels import Broken

__all__ = ["KNOBS", "STORES", "WRONG_SLOPE"]

_STORE = "            store(outs, vector(start_of(out, row, at)), policy)\n"
#: Of the kernels that are broken.
KNOBS: dict[str, Any] = {"access_bytes": 16, "threads": 128, "vectors_per_thread": 2, "ctas_per_sm": 0}
STORES = {
    "last tile unwritten": Broken(
        "VECTORS - 1) // TILE + 1)\n",
        "VECTORS - 1) // TILE)\n",
        r"out: \d+ of \d+ elements .*never written",
    ),
    "one element past the end": Broken(
        _STORE,
        _STORE
        + "            if at == total - 1:\n"
        + "                vector(start_of(out, row, at) + BYTES)[0] = X(0.0)\n",
        r"out: 1 elements outside of the output were written",
    ),
    "input modified": Broken(
        _STORE,
        _STORE
        + "            if at == 5 * VECTORS:\n                vector(start_of(x, row, at))[3] = X(77.0)\n",
        r"wrote its input x, first at \(5, 3\)",
    ),
}
WRONG_SLOPE = Broken("return y, s + y * (1.0 - s)", "return y, s + y", r"dx\[\d+.* should be")
