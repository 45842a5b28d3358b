"""What a row takes of kernels over rows: accesses, steps, registers, bytes of shared memory.

A row has ``n`` elements, a number that is compiled in: the loops over a row are unrolled, and every thread
knows while it is compiled which of its accesses can lie beyond the end. ``m`` is free.
"""

from __future__ import annotations

from typing import Any

ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
ACCESS_BYTES = 16
"""The widest access of a thread to memory. Source: PTX ISA, ld.global.v4.b32."""
PEELED_ROW = 1024
"""Bytes of a row that starts anywhere from which it is read as vectors. Source: judgement."""
WARP = 32


def inputs(problem: Any) -> int:
    """Return how many matrices are read: one, and a residual where there is one."""
    return 2 if getattr(problem.signature, "residual", False) else 1


def along_row(problem: Any) -> list[str]:
    """Return the dtypes of what is read along with every row: a weight, a bias."""
    sig = problem.signature
    found = [getattr(sig, name, "") for name in ("weight", "bias")]
    return [sig.dtype if dtype == "same" else dtype for dtype in found if dtype]


def is_wide(problem: Any) -> bool:
    """Return whether rows are in 16 bits and something along them in fp32."""
    return bool(problem.signature.dtype != "fp32" and "fp32" in along_row(problem))


def is_peeled(problem: Any) -> bool:
    """Return whether rows that start anywhere are read and written as vectors, but for their ends.

    Only where rows are all that a kernel reads and writes. Source: an H200: softmax of 4099 and 1001 elements
    takes 7 and 19 % less with vectors; LayerNorm with a weight and a bias, which would have to be shifted
    for every row, 8 % more, and cross-entropy, with more registers beside its values, 4 to 18 % more.
    """
    sig = problem.signature
    if not sig.unaligned or problem.n * ELEMENT_BYTES[sig.dtype] < PEELED_ROW:
        return False
    return len(problem.declared.arguments(problem)) == 2


def access_elements(problem: Any) -> int:
    """Return the elements of one access: 16 bytes, or a single element of short rows that start anywhere."""
    if problem.signature.unaligned and not is_peeled(problem):
        return 1
    return ACCESS_BYTES // ELEMENT_BYTES[problem.signature.dtype]


def vectors(problem: Any) -> int:
    """Return the accesses that a row takes, at most: rows that start anywhere begin and end within one."""
    each = access_elements(problem)
    around = 2 * each - 2 if is_peeled(problem) else each - 1
    return int((problem.n + around) // each)


def part(problem: Any, cluster_n: int) -> int:
    """Return how many of these one CTA of a cluster has; the last CTA may have fewer."""
    return -(-vectors(problem) // cluster_n)


def part_bytes(problem: Any, cluster_n: int) -> int:
    """Return the bytes of that part."""
    return part(problem, cluster_n) * access_elements(problem) * ELEMENT_BYTES[problem.signature.dtype]


def steps(problem: Any, threads_per_row: int, cluster_n: int) -> int:
    """Return how many of these one thread has; in the last step some threads may have none."""
    return -(-part(problem, cluster_n) // threads_per_row)


def values_per_thread(problem: Any, threads_per_row: int, cluster_n: int) -> int:
    """Return how many elements of one row a thread holds."""
    return steps(problem, threads_per_row, cluster_n) * access_elements(problem)


def values_registers(problem: Any, accesses: int, rows_per_thread: int, prefetch_weight: bool) -> int:
    """Return the registers for one thread's values of its rows: as loaded or as fp32, and for its weights."""
    sig = problem.signature

    def packed(element_bytes: int) -> int:
        return max(1, access_elements(problem) * element_bytes // 4)

    loaded = accesses * packed(ELEMENT_BYTES[sig.dtype]) * inputs(problem)
    values = max(loaded, accesses * access_elements(problem))
    if not prefetch_weight:
        return values
    weights = sum(packed(ELEMENT_BYTES[dtype]) for dtype in along_row(problem))
    return values + accesses // rows_per_thread * weights


def staged_bytes(problem: Any, cluster_n: int) -> int:
    """Return the shared memory that one CTA takes for its part of a row, and of the residual."""
    return part_bytes(problem, cluster_n) * inputs(problem)


def along_bytes(problem: Any, cluster_n: int) -> int:
    """Return the bytes of one CTA's part of what is read along with every row."""
    has = part(problem, cluster_n) * access_elements(problem)
    return has * sum(ELEMENT_BYTES[dtype] for dtype in along_row(problem))


def slots(threads_per_row: int, cluster_n: int) -> int:
    """Return the places for partial sums of one row, rounded up to 16 bytes."""
    return -(-(threads_per_row // WARP * cluster_n) // 4) * 4


def sums_of_lane(threads_per_row: int, cluster_n: int) -> int:
    """Return how many warps' sums of a row each lane reads: all of up to 8, of more every 32nd."""
    if threads_per_row <= WARP:
        return 0
    warps = threads_per_row // WARP * cluster_n
    return warps if warps <= 8 else -(-warps // WARP)
