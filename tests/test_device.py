"""Facts and readings of a GPU, against stand-ins for the driver and for NVML."""

from __future__ import annotations

import ctypes
import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from cutegen.errors import ArchError, DeviceError
from cutegen.measure.device import Device, present_device
from cutegen.measure.nvml import ClockMeter, ClockReading

UUID = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
H200 = Device("NVIDIA H200", (9, 0), 132, 62914560, 150_000_000_000, "580.1", "13.0", UUID)


class FakeDriver:
    """libcuda with one H200."""

    def __init__(self, count: int = 1, init: int = 0) -> None:
        self.count = count
        self.init = init

    def cuInit(self, flags: Any) -> int:
        return self.init

    def cuGetErrorString(self, status: Any, text: Any) -> int:
        text._obj.value = b"no CUDA-capable device is detected"
        return 0

    def cuDeviceGetCount(self, out: Any) -> int:
        out._obj.value = self.count
        return 0

    def cuDeviceGet(self, out: Any, index: Any) -> int:
        out._obj.value = index.value
        return 0

    def cuDriverGetVersion(self, out: Any) -> int:
        out._obj.value = 13000
        return 0

    def cuDeviceGetAttribute(self, out: Any, attribute: Any, handle: Any) -> int:
        out._obj.value = {16: 132, 38: 62914560, 75: 9, 76: 0}[attribute.value]
        return 0

    def cuDeviceGetName(self, text: Any, size: Any, handle: Any) -> int:
        text.value = b"NVIDIA H200"
        return 0

    def cuDeviceTotalMem_v2(self, out: Any, handle: Any) -> int:
        out._obj.value = 150_000_000_000
        return 0

    def cuDeviceGetUuid_v2(self, out: Any, handle: Any) -> int:
        for i in range(16):
            out._obj[i] = i
        return 0


class NVMLError(Exception):
    pass


def fake_nvml(**changes: Any) -> SimpleNamespace:
    def refuse(*arguments: Any) -> None:
        raise NVMLError("not supported")

    def find(uuid: str) -> str:
        if uuid != UUID:
            raise NVMLError("not found")
        return uuid

    calls: dict[str, Any] = {
        "NVMLError": NVMLError,
        "NVML_CLOCK_SM": 1,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "580.1",
        "nvmlDeviceGetHandleByUUID": find,
        "nvmlDeviceGetClockInfo": lambda handle, kind: 1980,
        "nvmlDeviceGetPowerUsage": lambda handle: 650_000,
        "nvmlDeviceGetTotalEnergyConsumption": lambda handle: 123_456,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 0x4 | 0x1 | 0x20,
    }
    return SimpleNamespace(**{**calls, **dict.fromkeys(changes, refuse)})


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: fake)
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    return fake


def test_facts_come_from_the_driver_and_nvml(driver: FakeDriver) -> None:
    """All eight fields; the arch follows from the compute capability."""
    assert present_device() == H200
    assert H200.arch.name == "sm_90a"


def test_without_nvml_the_facts_are_still_there(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the kernel driver's version is unknown."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert present_device().driver_version == "unknown"
    assert present_device().uuid == UUID


def test_missing_things_are_device_errors(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """No driver, no GPU, no such index: each says which."""
    with pytest.raises(DeviceError, match="no GPU of index 1; this process sees 1"):
        present_device(1)
    driver.init = 100
    with pytest.raises(DeviceError, match="cuInit failed with status 100: no CUDA-capable device"):
        present_device()

    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    with pytest.raises(DeviceError, match="no NVIDIA driver on this machine"):
        present_device()


def test_device_survives_json_and_has_a_key_of_its_kind() -> None:
    """The key is the same for two GPUs of one kind, and another for another kind."""
    assert Device.from_json(json.loads(json.dumps(H200.to_json()))) == H200
    twin = Device.from_json({**H200.to_json(), "uuid": "GPU-other", "driver_version": "590"})
    sliced = Device.from_json({**H200.to_json(), "sm_count": 16})
    assert twin.key == H200.key != sliced.key
    with pytest.raises(ArchError, match=r"no target for compute capability 7\.5"):
        _ = Device.from_json({**H200.to_json(), "compute_capability": [7, 5]}).arch


def test_meter_reads_units_and_reasons(driver: FakeDriver) -> None:
    """Milliwatts become watts, idle is no reason, power and heat are."""
    with ClockMeter(UUID) as meter:
        assert meter.read() == ClockReading(1980.0, 123_456.0, 650.0, ("power_cap", "thermal"))
        assert meter.sm_mhz() == 1980.0 and meter.read().power_limited
        assert meter.energy_mj() == 123_456.0
    meter.close()
    assert meter.read() == ClockReading() and meter.sm_mhz() is None and meter.energy_mj() is None


def test_meter_says_none_for_what_is_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that hides energy and power still gives its clock."""
    hidden = fake_nvml(nvmlDeviceGetTotalEnergyConsumption=0, nvmlDeviceGetPowerUsage=0)
    monkeypatch.setitem(sys.modules, "pynvml", hidden)
    reading = ClockMeter(UUID).read()
    assert (reading.sm_mhz, reading.energy_mj, reading.power_w) == (1980.0, None, None)
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(nvmlInit=0))
    assert ClockMeter(UUID).read() == ClockReading()
    assert not ClockMeter("GPU-unknown").uuid
