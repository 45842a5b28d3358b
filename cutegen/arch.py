"""The limits of each target: what a kernel may use, with the source of every number.

An architecture is a value, so that every step up to an artifact works for a GPU that is not there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from cutegen.errors import ArchError

__all__ = [
    "ARCHES",
    "Arch",
    "Calibration",
    "find_arch",
    "from_compute_capability",
    "resident_clusters",
    "with_calibration",
]


class Calibration(NamedTuple):
    """A file of what was measured on one GPU, which performance models prefer to what the package ships.

    Attributes:
        path: The file.
        digest: Of its content: a process that read it goes on with what it read.
    """

    path: str
    digest: str


@dataclass(frozen=True, eq=False)
class Arch:
    """One compile target and its limits.

    Attributes:
        name: The compiler's name, suffix included: ``sm_90a``. The suffix is part of the identity.
        family: The name that templates and spaces use: ``sm90``.
        compute_capability: Major and minor number that the driver reports.
        smem_bytes: Shared memory one thread block may use, in bytes.
            Source: CUDA C++ Programming Guide, technical specifications (227 KB for 9.0 and 10.x).
        registers: 32-bit registers of one SM. Source: as above (64 K).
        registers_per_thread: Most registers one thread may hold. Source: as above.
        threads_per_block: Most threads of one block. Source: as above.
        portable_cluster: Most thread blocks of one cluster without the non-portable attribute.
            Source: CUDA C++ Programming Guide, thread block clusters.
        max_cluster: Most thread blocks of one cluster with that attribute.
        tmem_columns: Columns of tensor memory (128 lanes of 32 bits each), 0 where there is none.
            Source: PTX ISA, tcgen05.
        l2_bytes: Size of L2. Source: NVIDIA H200 datasheet; cudaDeviceProp of a B200 (pytorch/ao#4002,
            chipsandcheese.com).
        smem_bytes_per_clk: Bytes shared memory moves per clock and SM.
            Source: 32 banks of 4 bytes (CUDA C++ Programming Guide).
        mma_flops_per_clk: Dense 16-bit multiply-adds times two, per clock and SM.
            Source: datasheet peak / (SMs x boost clock): 989 TFLOP/s on 132 at 1.83 GHz,
            2250 TFLOP/s on 148 at 1.856 GHz.
        known_parts: SMs of known products, by the name NVML reports.
            Source: NVIDIA datasheets of the H100, H200, B200 and B300.
        calibration: What predictions for the GPU at hand follow from; None leaves them to the package.
    """

    name: str
    family: str
    compute_capability: tuple[int, int]
    smem_bytes: int
    registers: int
    registers_per_thread: int
    threads_per_block: int
    portable_cluster: int
    max_cluster: int
    tmem_columns: int
    l2_bytes: int
    smem_bytes_per_clk: int
    mma_flops_per_clk: int
    known_parts: Mapping[str, int]
    calibration: Calibration | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def nominal_sm_count(self) -> int:
        """SMs of this architecture's main product, for predictions without a GPU."""
        return next(iter(self.known_parts.values()))


_HOPPER = Arch(
    name="sm_90a",
    family="sm90",
    compute_capability=(9, 0),
    smem_bytes=232448,
    registers=65536,
    registers_per_thread=255,
    threads_per_block=1024,
    portable_cluster=8,
    max_cluster=16,
    tmem_columns=0,
    l2_bytes=50 * 2**20,
    smem_bytes_per_clk=128,
    mma_flops_per_clk=4096,
    known_parts={"NVIDIA H200": 132, "NVIDIA H100 80GB HBM3": 132, "NVIDIA H100 PCIe": 114},
)


def _blackwell(name: str, compute_capability: tuple[int, int], parts: Mapping[str, int]) -> Arch:
    return Arch(
        name=name,
        family="sm100",
        compute_capability=compute_capability,
        smem_bytes=232448,
        registers=65536,
        registers_per_thread=255,
        threads_per_block=1024,
        portable_cluster=8,
        max_cluster=16,
        tmem_columns=512,
        l2_bytes=126 * 2**20,
        smem_bytes_per_clk=128,
        mma_flops_per_clk=8192,
        known_parts=parts,
    )


ARCHES: Mapping[str, Arch] = {
    arch.name: arch
    for arch in (
        _HOPPER,
        _blackwell("sm_100a", (10, 0), {"NVIDIA B200": 148}),
        _blackwell("sm_103a", (10, 3), {"NVIDIA B300": 148}),
    )
}


def find_arch(name: str) -> Arch:
    """Return the architecture called ``name``, such as ``sm_90a``.

    Raises:
        ArchError: No such architecture; the message lists the known ones.
    """
    try:
        return ARCHES[name]
    except KeyError:
        hint = f"; did you mean {name}a" if f"{name}a" in ARCHES else ""
        raise ArchError(f"unknown architecture {name!r}{hint}; known: {', '.join(ARCHES)}") from None


@cache
def with_calibration(arch: Arch, calibration: Calibration) -> Arch:
    """Return ``arch`` with what its models shall read: the same object for the same file and content."""
    return replace(arch, calibration=calibration)


def from_compute_capability(capability: tuple[int, int]) -> Arch:
    """Return the architecture whose kernels run at their best on a GPU of ``capability``.

    Raises:
        ArchError: cutegen has no target for that compute capability.
    """
    for arch in ARCHES.values():
        if arch.compute_capability == capability:
            return arch
    major, minor = capability
    known = ", ".join(f"{a.compute_capability[0]}.{a.compute_capability[1]}" for a in ARCHES.values())
    raise ArchError(f"no target for compute capability {major}.{minor}; supported: {known}")


def resident_clusters(sm_count: int, blocks: int, per_sm: int = 1) -> int:
    """Return how many clusters of ``blocks`` thread blocks run at once, ``per_sm`` blocks on each SM.

    Clusters stay inside a GPC, and four do not divide the SMs of all of them; a persistent kernel
    with one cluster too many would run it alone, after all others, so this is rather too low than too high.
    Source: cuOccupancyMaxActiveClusters on one H200 of 132: 66, 30, 15 and 7 of 2, 4, 8 and 16 blocks. Chips
    differ in where they lack SMs; up to 32 of four would fit elsewhere. Of several blocks per SM more find
    room: 62, 30 and 14 of 4, 8 and 16 blocks for two, 124, 62 and 28 for four, 186, 92 and 42 for six.
    """
    if blocks <= 2:
        return max(1, sm_count * per_sm // blocks)
    if per_sm == 1:
        return max(1, sm_count * 10 // 11 // blocks)
    return max(1, sm_count * (31 if blocks <= 8 else 28) * per_sm // (33 * blocks))
