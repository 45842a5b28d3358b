"""One GPU through NVML: clocks, power, energy, and what limits them; None where NVML does not provide it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cutegen.system.closing import Closing

__all__ = ["ClockMeter", "ClockReading", "NvmlHandle"]

#: Bits of NVML's clock event reasons that mean "slower than it could be", by name.
#: Source: NVML API reference, nvmlClocksEventReasons.
_REASONS = {
    0x4: "power_cap",
    0x8: "hw_slowdown",
    0x20: "thermal",
    0x40: "hw_thermal",
    0x80: "power_brake",
}


@dataclass(frozen=True)
class ClockReading:
    """One reading of a GPU's clock, energy and power; None where they cannot be read.

    Attributes:
        sm_mhz: Clock of the SMs.
        energy_mj: Energy since the driver was loaded, in millijoules.
        power_w: Power as the board averages it.
        reasons: What limits the clock: ``power_cap``, ``thermal``, ``hw_slowdown``, ...
    """

    sm_mhz: float | None = None
    energy_mj: float | None = None
    power_w: float | None = None
    reasons: tuple[str, ...] = ()

    @property
    def power_limited(self) -> bool:
        """Whether power or heat, rather than the top clock, is the limit."""
        return bool(self.reasons)


class NvmlHandle(Closing):
    """One GPU as NVML knows it; a context manager. Without NVML, or such a GPU, there is no handle.

    Attributes:
        uuid: The UUID NVML knows the GPU by, empty when it does not know it.
        driver_version: Of the kernel driver, or ``unknown``.
    """

    def __init__(self, uuid: str) -> None:
        self.uuid = ""
        self.driver_version = "unknown"
        self._nvml: Any = None
        self._handle: Any = None
        try:
            import pynvml
        except ImportError:
            return
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            self._nvml = None
            return
        self.driver_version = str(pynvml.nvmlSystemGetDriverVersion())
        self._find(uuid)

    def _find(self, uuid: str) -> None:
        bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
        for name in (f"GPU-{bare}", f"MIG-{bare}"):
            try:
                self._handle = self._nvml.nvmlDeviceGetHandleByUUID(name)
            except self._nvml.NVMLError:
                continue
            self.uuid = name
            return

    def close(self) -> None:
        """Shut NVML down; calling it again does nothing."""
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
        self._nvml = self._handle = None


class ClockMeter(NvmlHandle):
    """Reads clock, power and energy of one GPU through NVML; None where NVML does not provide them.

    Without NVML, or some of its counters, timing still works: readings are only recorded, and the burn-in
    takes a fixed time.
    """

    def sm_mhz(self) -> float | None:
        """Return the present clock of the SMs; one query instead of four."""
        if self._handle is None:
            return None
        return self._ask(lambda: self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM))

    def energy_mj(self) -> float | None:
        """Return millijoules since the driver was loaded; they move in steps (0.1 s on an H200)."""
        if self._handle is None:
            return None
        return self._ask(lambda: self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))

    def read(self) -> ClockReading:
        """Return the present clock, power and energy; takes some tens of microseconds."""
        if self._handle is None:
            return ClockReading()
        nvml, handle = self._nvml, self._handle
        mask = self._ask(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        power = self._ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        return ClockReading(
            sm_mhz=self.sm_mhz(),
            energy_mj=self.energy_mj(),
            power_w=None if power is None else power / 1000,
            reasons=tuple(name for bit, name in _REASONS.items() if int(mask or 0) & bit),
        )

    def _ask(self, query: Callable[[], Any]) -> float | None:
        try:
            return float(query())
        except self._nvml.NVMLError:
            return None
