"""Architectures: values with limits, found by name or by what a driver reports."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from cutegen.arch import ARCHES, Arch, find_arch, from_compute_capability
from cutegen.errors import ArchError


@pytest.mark.parametrize("arch", ARCHES.values(), ids=str)
def test_every_architecture_is_found_by_name_and_by_capability(arch: Arch) -> None:
    """Both ways lead to the same value."""
    assert find_arch(arch.name) is arch
    assert from_compute_capability(arch.compute_capability) is arch
    assert str(arch) == arch.name


def test_the_targets_of_this_version_are_there() -> None:
    """Hopper and both Blackwells for data centres, each with its suffix."""
    assert set(ARCHES) == {"sm_90a", "sm_100a", "sm_103a"}


@pytest.mark.parametrize("name", ["sm_90", "sm_75", "", "SM_90A", "hopper"])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    """The suffix is part of the name; leaving it out brings a hint."""
    with pytest.raises(ArchError) as caught:
        find_arch(name)
    assert repr(name) in str(caught.value) and "sm_100a" in str(caught.value)
    assert ("did you mean sm_90a" in str(caught.value)) == (name == "sm_90")


def test_an_unknown_capability_is_refused_with_the_known_ones() -> None:
    """The message has the number that the driver gave."""
    with pytest.raises(ArchError, match=r"8\.9.*9\.0, 10\.0, 10\.3"):
        from_compute_capability((8, 9))


@pytest.mark.parametrize("arch", ARCHES.values(), ids=str)
def test_limits_hang_together(arch: Arch) -> None:
    """A block's shared memory is what 228 KB leave after the system's 1 KB; warpgroups divide blocks."""
    assert arch.smem_bytes == 227 * 1024
    assert arch.registers == 65536 and arch.registers_per_thread == 255
    assert arch.threads_per_block % 128 == 0
    assert arch.portable_cluster <= arch.max_cluster
    assert (arch.tmem_columns > 0) == (arch.compute_capability[0] == 10)
    assert all(count > 0 for count in arch.known_parts.values())
    assert arch.nominal_sm_count in arch.known_parts.values()


def test_the_datasheet_peak_of_hopper_follows_from_its_numbers() -> None:
    """132 multiprocessors at 1.83 GHz make 989 TFLOP/s within one per cent."""
    arch = find_arch("sm_90a")
    assert arch.mma_flops_per_clk * 132 * 1.83e9 == pytest.approx(989e12, rel=0.01)


def test_an_architecture_cannot_change() -> None:
    """It is a value that keys artifacts."""
    with pytest.raises(FrozenInstanceError):
        find_arch("sm_90a").smem_bytes = 1  # type: ignore[misc]
