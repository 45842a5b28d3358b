"""What a kernel over rows is expected to take: a few terms, by which the defaults are chosen.

A multiprocessor has as many CTAs at a time as find room in its registers, threads and shared memory; a GPU
has fewer clusters at a time where their size does not divide the multiprocessors of each GPC. Each CTA waits
for its loads, exchanges sums, and stores; so a kernel takes the longer of what the memory needs for all bytes
and what the CTAs need one after another, and where these are alike a little more than either.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from cutegen.arch import Arch, resident_clusters
from cutegen.space import Config, as_integer
from cutegen.space.space import Derived

__all__ = ["Counts", "Kernel", "Terms", "counts_of", "expected_us", "microseconds"]

_BYTES_PER_US = 4.2e6
"""Of a copy. Source: an H200."""
_WARP = 32


@dataclass(frozen=True)
class Terms:
    """What the expectation is made of, in microseconds but for the last. Source: tools/fit_rows.py.

    Attributes:
        kernel: Of a kernel without rows.
        cta: From a CTA's first load to its last store.
        exchange: More of it where warps exchange their sums.
        cluster: More for each doubling of the CTAs that share a row.
        messages: More for every 64 messages to a CTA of those that share a row: each warp sends one to each.
        access: More for each access of a thread.
        threads: More for each 256 threads of a CTA.
        late: More for each access of a thread where a weight is loaded behind the sums.
        smem: More where a row is in shared memory.
        volume: More for each 16 KiB that a CTA loads: a multiprocessor takes so much of it at a time.
        start: Between the starts of two CTAs on a multiprocessor.
        overlap: How far the longer of two times hides the other: an exponent, 1 for not at all.
    """

    kernel: float
    cta: float
    exchange: float
    cluster: float
    messages: float
    access: float
    threads: float
    late: float
    smem: float
    volume: float
    start: float
    overlap: float


class Kernel(NamedTuple):
    """What does not depend on the number of rows.

    Attributes:
        config: Its config.
        derived: What the space derives from it.
        accesses: Of one thread.
        resident: CTAs that a multiprocessor has at a time.
    """

    config: Config
    derived: Derived
    accesses: int
    resident: int


class Counts(NamedTuple):
    """How often a kernel has what takes its time, in the order of the terms.

    Attributes:
        doublings: Of the CTAs that share a row.
        messages: To a CTA from those that share its row, in 64.
        accesses: Of a thread.
        threads: Of a CTA, in 256.
        exchanges: Whether warps exchange sums: 1, or 0.
        late: Accesses of a thread if a weight is loaded behind the sums, or 0.
        smem: Whether a row is in shared memory: 1, or 0.
        volume: What a CTA loads, in 16 KiB.
        waves: How many CTAs follow one another.
        ctas: Of a multiprocessor.
        memory_us: What the memory needs for all bytes.
    """

    doublings: float
    messages: float
    accesses: int
    threads: float
    exchanges: int
    late: int
    smem: int
    volume: float
    waves: float
    ctas: float
    memory_us: float


def counts_of(kernel: Kernel, rows: int, min_bytes: int, arch: Arch) -> Counts:
    """Return the counts of a kernel; see expected_us."""
    config, derived, accesses, resident = kernel
    threads, cluster_n = as_integer(derived["threads"]), config.integer("cluster_n")
    clusters = -(-rows // config.integer("rows_per_cta"))
    return Counts(
        doublings=math.log2(cluster_n),
        messages=threads / _WARP * cluster_n / 64 if cluster_n > 1 else 0.0,
        accesses=accesses,
        threads=threads / 256,
        exchanges=int(config.integer("threads_per_row") > _WARP),
        late=accesses if config.get("prefetch_weight") is False else 0,
        smem=int(config["row_in"] == "smem"),
        volume=threads * accesses / 1024,
        waves=_waves(clusters / resident_clusters(arch.nominal_sm_count, cluster_n, resident)),
        ctas=clusters * cluster_n / arch.nominal_sm_count,
        memory_us=min_bytes / _BYTES_PER_US,
    )


def microseconds(counts: Counts, terms: Terms) -> float:
    """Return what a kernel with these counts is expected to take."""
    each = terms.cta + terms.cluster * counts.doublings + terms.messages * counts.messages
    each += terms.access * counts.accesses
    each += terms.threads * counts.threads + terms.exchange * counts.exchanges + terms.late * counts.late
    each += terms.smem * counts.smem + terms.volume * counts.volume
    one_by_one = each * counts.waves + terms.start * counts.ctas
    both: float = (counts.memory_us**terms.overlap + one_by_one**terms.overlap) ** (1 / terms.overlap)
    return terms.kernel + both


def expected_us(kernel: Kernel, rows: int, min_bytes: int, arch: Arch, terms: Terms) -> float:
    """Return microseconds of a kernel.

    Args:
        kernel: What does not depend on the number of rows.
        rows: How many there are.
        min_bytes: Bytes that must cross device memory.
        arch: The GPU it runs on.
        terms: Of its family.
    """
    return microseconds(counts_of(kernel, rows, min_bytes, arch), terms)


def _waves(share: float) -> float:
    """Return how many CTAs follow one another, for so many times those that find room at a time.

    As many in the mean; but where few follow, a last one that is alone takes as long as the others.
    """
    whole = max(1, math.ceil(share))
    return max(1.0, share + (whole - share) / whole)
