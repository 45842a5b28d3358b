"""Facts about the present GPU, from the driver and NVML: no torch, no CUDA context."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from cutegen.arch import Arch, from_compute_capability
from cutegen.digest import Json, digest
from cutegen.errors import DeviceError
from cutegen.measure.nvml import NvmlHandle

__all__ = ["Device", "index_of", "or_else", "present_device"]

# CUdevice_attribute values. Source: CUDA driver API, enumeration CUdevice_attribute.
_SM_COUNT, _L2_BYTES, _MAJOR, _MINOR = 16, 38, 75, 76


@dataclass(frozen=True)
class Device:
    """One GPU, as far as tuning results depend on it.

    Attributes:
        name: Product name, such as ``NVIDIA H200``.
        compute_capability: Major and minor number.
        sm_count: SMs that this process may use.
        l2_bytes: Size of the L2 cache, in bytes.
        memory_bytes: Size of the device memory, in bytes.
        driver_version: Of the kernel driver, such as ``580.159.03``; ``unknown`` where NVML does not answer.
        cuda_driver_version: Highest CUDA version the driver serves, such as ``13.0``.
        uuid: ``GPU-...`` (or ``MIG-...``), as NVML prints it.
    """

    name: str
    compute_capability: tuple[int, int]
    sm_count: int
    l2_bytes: int
    memory_bytes: int
    driver_version: str
    cuda_driver_version: str
    uuid: str

    @property
    def arch(self) -> Arch:
        """The compile target for this GPU.

        Raises:
            ArchError: cutegen has no target for it.
        """
        return from_compute_capability(self.compute_capability)

    @property
    def key(self) -> str:
        """A short name for the kind of GPU: equal for two GPUs whose timings may be compared."""
        return digest([self.name, list(self.compute_capability), self.sm_count, self.l2_bytes], length=12)

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON data."""
        return {**asdict(self), "compute_capability": list(self.compute_capability)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Device:
        """Return the device that :meth:`to_json` described."""
        major, minor = data["compute_capability"]
        return cls(**{**data, "compute_capability": (major, minor)})


class _Driver:
    """The few calls of the CUDA driver API that read attributes."""

    def __init__(self) -> None:
        try:
            self._lib = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DeviceError(f"no NVIDIA driver on this machine ({error})") from None
        self._call("cuInit", ctypes.c_uint(0))

    def _call(self, name: str, *arguments: Any) -> None:
        status: int = getattr(self._lib, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._lib.cuGetErrorString(ctypes.c_int(status), ctypes.byref(text))
            reason = text.value.decode(errors="replace") if text.value else "unknown error"
            raise DeviceError(f"{name} failed with status {status}: {reason}")

    def integer(self, name: str, *arguments: Any) -> int:
        """Return what ``name`` writes through its first parameter, an int."""
        value = ctypes.c_int()
        self._call(name, ctypes.byref(value), *arguments)
        return value.value

    def attribute(self, device: ctypes.c_int, attribute: int) -> int:
        """Return one CUdevice_attribute of ``device``."""
        return self.integer("cuDeviceGetAttribute", ctypes.c_int(attribute), device)

    def device_name(self, device: ctypes.c_int) -> str:
        """Return the product name."""
        text = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", text, ctypes.c_int(len(text)), device)
        return text.value.decode(errors="replace")

    def memory(self, device: ctypes.c_int) -> int:
        """Return the bytes of device memory."""
        size = ctypes.c_size_t()
        self._call("cuDeviceTotalMem_v2", ctypes.byref(size), device)
        return size.value

    def uuid(self, device: ctypes.c_int) -> str:
        """Return the 16 bytes that identify ``device``, in the usual grouping and without a prefix."""
        raw = (ctypes.c_ubyte * 16)()
        self._call("cuDeviceGetUuid_v2", ctypes.byref(raw), device)
        text = bytes(raw).hex()
        return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def present_device(index: int = 0) -> Device:
    """Return the facts of GPU ``index`` as CUDA counts them (``CUDA_VISIBLE_DEVICES`` applies).

    Initialises the driver but creates no context. A process that called it must not fork users of CUDA.

    Raises:
        DeviceError: There is no driver, no GPU, or none of that index; the message says which.
    """
    driver = _Driver()
    count = driver.integer("cuDeviceGetCount")
    if not 0 <= index < count:
        raise DeviceError(f"no GPU of index {index}; this process sees {count}")
    device = ctypes.c_int(driver.integer("cuDeviceGet", ctypes.c_int(index)))
    version = driver.integer("cuDriverGetVersion")
    uuid, driver_version = _ask_nvml(driver.uuid(device))
    return Device(
        name=driver.device_name(device),
        compute_capability=(driver.attribute(device, _MAJOR), driver.attribute(device, _MINOR)),
        sm_count=driver.attribute(device, _SM_COUNT),
        l2_bytes=driver.attribute(device, _L2_BYTES),
        memory_bytes=driver.memory(device),
        driver_version=driver_version,
        cuda_driver_version=f"{version // 1000}.{version % 1000 // 10}",
        uuid=uuid,
    )


def index_of(device: Device) -> int:
    """Return the index of ``device`` as CUDA counts them in this process.

    Raises:
        DeviceError: This process does not see it, or there is no driver.
    """
    for index in range(_Driver().integer("cuDeviceGetCount")):
        if present_device(index).uuid == device.uuid:
            return index
    raise DeviceError(
        f"{device.name} ({device.uuid}) is no GPU that this process sees; CUDA_VISIBLE_DEVICES may hide it"
    )


def _ask_nvml(bare_uuid: str) -> tuple[str, str]:
    """Return the full UUID and the kernel driver's version."""
    with NvmlHandle(bare_uuid) as nvml:
        return nvml.uuid or f"GPU-{bare_uuid}", nvml.driver_version


@contextmanager
def or_else(advice: str) -> Iterator[None]:
    """Add to an error about a GPU what a user without it can do.

    Raises:
        DeviceError: What was raised inside, with ``advice`` behind a semicolon.
    """
    try:
        yield
    except DeviceError as error:
        raise DeviceError(f"{error}; {advice}") from error
