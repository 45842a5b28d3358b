"""What the performance model believes of each GPU: rates, latencies and the clock under power."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from cutegen.arch import Arch, Calibration, find_arch
from cutegen.errors import ArchError, StoreError
from cutegen.families.gemm.perf_model.calibration_file import read_calibration

__all__ = [
    "B200",
    "B300",
    "H200",
    "Factors",
    "Machine",
    "find_machine",
    "is_measured",
    "is_modelled",
    "read_factors",
    "scaled",
]


@dataclass(frozen=True)
class Machine:
    """What the model believes of one GPU; every number can be replaced to fit another.

    ``fitted`` below means chosen so that known times of one H200 (700 W, random data) come out right.

    Attributes:
        boost_mhz: SM clock when power does not limit. Source: NVML on that H200 under short loads.
        settled_mhz: SM clock under a load at ``settled_flops``. Source: 1440-1500 MHz seen by NVML on large
            products; fitted within.
        power_flops: Work per microsecond, in flop equivalents, above which the clock begins to fall.
            Source: fitted; GEMMs of 350 TFLOP/s run near boost, those of 480 settle.
        settled_flops: Work per microsecond, as it would be at boost, that settles at ``settled_mhz``.
        settled_exponent: How much the clock still answers to work beyond. Source: assumed; power goes
            with the cube of the clock when voltage follows it.
        hbm_flops: Flop equivalents in energy of one byte of device memory. Source: assumed from
            40-50 pJ/byte of HBM against about 0.6 pJ/flop; not calibrated.
        l2_flops: The same for a byte from L2. Source: assumed, not calibrated.
        smem_flops: The same for a byte of shared memory. Source: assumed, not calibrated.
        hbm_bytes_us: Device memory bytes per microsecond. Source: fitted; 1x129280x7168 runs at 4.5 TB/s.
        short_run: Share of it that rows of 128 bytes per load reach. Source: fitted to 1x129280x7168 with
            a tile of 64 along k.
        same_channel: Share of it that is left when rows, and parts of k, start at the same memory channel.
            Source: fitted to 16x8192x8192 and 64x4096x14336, which stay below 3.4 TB/s; coarse.
        channel_period: Bytes after which addresses come back to a channel. Source: fitted; rows of 14336
            bytes are not slow, those of 28672 are.
        l2_bytes: Size of L2.
        l2_bytes_us: Bytes per microsecond that loads from L2 reach together. Source: fitted; 1024^3 and
            4096x256x7168 with 64x128 tiles need 13 to 16 TB/s. That is more than L2 delivers alone (DeepGEMM
            assumes 8): equal lines wanted by neighbouring SMs at one time travel once.
        l2_bytes_us_sm: Bytes per microsecond that one SM can take in. Source: fitted; 256x256x65536 on 16
            thread blocks reaches 190 GB/s.
        split_line: By how much loads from L2 slow down when rows do not start at its lines of 128 bytes, so
            that each run of 128 bytes lies in two. Source: fitted to 30 kernels on 20 such shapes.
        latency_us: From issuing a load to its arrival, loaded. Source: assumed from 0.55-0.7 us measured
            on B200 and 0.7-1 us seen here.
        mma_efficiency: Share of the peak multiply rate in a long main loop. Source: fitted to 4096^3 at
            settled clocks.
        drain_clk: From a warpgroup's last multiply to its result, which promotion waits for when nobody else
            multiplies. Source: fitted to 4096^3 in fp8, ping-pong against two warpgroups on a tile.
        smem_overlap: Share of shared-memory reads plus writes that costs time. Source: fitted to
            64x2112x7168 and 4096x256x7168.
        step_clk: Fewest clocks of one k step: barriers and issue. Source: assumed.
        store_bytes_clk: Bytes per clock that one warpgroup's epilogue stores through TMA. Source: fitted
            to 8192x8192x512 with 128x256 tiles.
        direct_share: Share of that rate for stores from registers. Source: assumed.
        epilogue_clk: Clocks of an epilogue that stores nothing. Source: fitted to 512x1024x128.
        launch_us: From one kernel's end to the next one's start in a graph. Source: fitted, as above.
        pdl_us: What programmatic dependent launch hides of both. Source: assumed.
        cluster_wait: Share by which each further thread block of a cluster slows a k step. Source: assumed.
        fill_us: From the start of a kernel to its first multiply. Source: fitted, as above.
        reduce_us: What a split-k reduction adds before it moves a byte. Source: three GEMMs timed with and
            without it on an H200 took 0.9 to 2.1 us longer, with 1 to 4 MB of partial sums.
        reduce_bytes_us: Bytes per microsecond of that reduction, from L2. Source: assumed.
    """

    boost_mhz: float = 1980.0
    settled_mhz: float = 1540.0
    power_flops: float = 650e6
    settled_flops: float = 930e6
    settled_exponent: float = 0.33
    hbm_flops: float = 80.0
    l2_flops: float = 13.0
    smem_flops: float = 2.5
    hbm_bytes_us: float = 4.55e6
    short_run: float = 0.95
    same_channel: float = 0.85
    channel_period: int = 4096
    l2_bytes: int = find_arch("sm_90a").l2_bytes
    l2_bytes_us: float = 17e6
    l2_bytes_us_sm: float = 0.2e6
    split_line: float = 2.0
    latency_us: float = 1.0
    mma_efficiency: float = 0.94
    drain_clk: float = 50.0
    smem_overlap: float = 0.6
    step_clk: float = 80.0
    store_bytes_clk: float = 14.0
    direct_share: float = 0.5
    epilogue_clk: float = 600.0
    launch_us: float = 1.4
    fill_us: float = 0.9
    pdl_us: float = 0.5
    cluster_wait: float = 0.008
    reduce_us: float = 1.0
    reduce_bytes_us: float = 5e6


H200 = Machine()

#: The B200 SXM. Nothing was measured by us: what is not from a public source is taken to be as on the H200,
#: or assumed, and says so. Trust the order of configs little, the microseconds less.
B200 = Machine(
    boost_mhz=1856.0,  # Source: NVIDIA Blackwell datasheet, 2250 TFLOP/s dense bf16 / (148 SMs x 8192)
    # Clocks under power. Source: chosen so that large squares come to 1.7 to 1.75 PFLOP/s, as the best of
    # mamf-finder do (stas00/ml-engineering: 1745 TFLOP/s); where between it begins is assumed.
    settled_mhz=1540.0,
    power_flops=1500e6,
    settled_flops=2500e6,
    settled_exponent=0.33,  # Source: as on the H200
    # Energy of bytes. Source: as on the H200, where a flop takes twice as much; assumed.
    hbm_flops=160.0,
    l2_flops=26.0,
    smem_flops=5.0,
    hbm_bytes_us=7.26e6,  # Source: SemiAnalysisAI/microbench-blackwell, by TMA; the datasheet has 8 TB/s
    short_run=0.95,  # Source: as on the H200
    same_channel=1.0,  # Source: assumed; how addresses spread over channels is not known
    l2_bytes=find_arch("sm_100a").l2_bytes,
    l2_bytes_us=19e6,  # Source: assumed; the H200's for each SM
    l2_bytes_us_sm=0.2e6,  # Source: as on the H200
    split_line=2.0,  # Source: as on the H200
    # Source: Little's law with 32 KB under way in each SM at 5.9 TB/s (microbench-blackwell): 0.8 us; with
    # 8 KB at 2.2 TB/s 0.55 us.
    latency_us=0.7,
    mma_efficiency=0.94,  # Source: as on the H200; alone, MMAs of 128 columns and more run at their full rate
    drain_clk=0.0,  # Source: sums stay in tensor memory, so nothing is promoted
    smem_overlap=1.0,  # Source: reads at 128 bytes per clock give the rates that it found for narrow MMAs
    step_clk=80.0,  # Source: as on the H200
    store_bytes_clk=32.0,  # Source: assumed
    direct_share=0.5,  # Source: as on the H200
    epilogue_clk=500.0,  # Source: assumed
    launch_us=1.4,  # Source: as on the H200, like all that follow
    fill_us=0.9,
    pdl_us=0.5,
    cluster_wait=0.008,
    reduce_us=1.0,
    reduce_bytes_us=5e6,
)
#: The B300 SXM: the same chip for 16-bit products, with more power. Source: mamf-finder, 1769 TFLOP/s; NVIDIA
#: datasheet, 8 TB/s and 2250 TFLOP/s dense bf16, as the B200.
B300 = replace(B200, settled_mhz=1560.0)
_MACHINES: Mapping[str, Machine] = {"sm_90a": H200, "sm_100a": B200, "sm_103a": B300}
#: Targets whose constants were fitted to measurements.
_MEASURED = ("sm_90a",)


def is_modelled(arch: Arch) -> bool:
    """Return whether anything is known of the speed of ``arch``."""
    return arch.name in _MACHINES


def is_measured(arch: Arch) -> bool:
    """Return whether what is known of ``arch`` follows from measurements of ours."""
    return arch.name in _MEASURED


class Factors(NamedTuple):
    """By what a calibration multiplies constants of a machine that nobody had measured.

    Attributes:
        clock: Clocks, and the work at which power lowers them.
        memory: Bandwidth of device memory.
        l2: Bandwidth of L2, of all SMs and of one.
        fixed: What a launch takes before its first multiply, and what a reduction adds.
        epilogue: Clocks of an epilogue.
    """

    clock: float = 1.0
    memory: float = 1.0
    l2: float = 1.0
    fixed: float = 1.0
    epilogue: float = 1.0


def scaled(machine: Machine, factors: Factors) -> Machine:
    """Return ``machine`` with its constants multiplied."""
    f, m = factors, machine
    return replace(
        m,
        boost_mhz=m.boost_mhz * f.clock,
        settled_mhz=m.settled_mhz * f.clock,
        power_flops=m.power_flops * f.clock,
        settled_flops=m.settled_flops * f.clock,
        hbm_bytes_us=m.hbm_bytes_us * f.memory,
        l2_bytes_us=m.l2_bytes_us * f.l2,
        l2_bytes_us_sm=m.l2_bytes_us_sm * f.l2,
        launch_us=m.launch_us * f.fixed,
        fill_us=m.fill_us * f.fixed,
        reduce_us=m.reduce_us * f.fixed,
        epilogue_clk=m.epilogue_clk * f.epilogue,
        store_bytes_clk=m.store_bytes_clk / f.epilogue,
    )


def read_factors(path: Path, digest: str = "") -> Factors:
    """Return the factors in the file of a calibration.

    Args:
        path: The file.
        digest: Of the content that is meant; empty for any.

    Raises:
        StoreError: There is no such file, or it holds no factors that make sense.
    """
    found = read_calibration(path, digest)
    try:
        factors = Factors(**{name: float(value) for name, value in found["factors"].items()})
        for name, factor in factors._asdict().items():
            if not 0.01 < factor < 100:
                raise ValueError(f"{name} is {factor:g}; valid: 0.01 to 100")
        return factors
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        raise StoreError(f"calibration {path} is malformed: {type(error).__name__}: {error}") from error


@lru_cache(maxsize=8)
def _calibrated(calibration: Calibration, name: str) -> Machine:
    return scaled(_MACHINES[name], read_factors(Path(calibration.path), calibration.digest))


def find_machine(arch: Arch) -> Machine:
    """Return what is believed of the main product of ``arch``, or of the GPU that its calibration is of.

    Constants that were fitted are left alone: of such a GPU a calibration corrects the fitted times.

    Raises:
        ArchError: Nothing is known of that architecture's speed.
        StoreError: The file of its calibration cannot be read.
    """
    try:
        known = _MACHINES[arch.name]
    except KeyError:
        raise ArchError(f"no performance model of {arch}; modelled: {', '.join(_MACHINES)}") from None
    return (
        known if is_measured(arch) or arch.calibration is None else _calibrated(arch.calibration, arch.name)
    )
