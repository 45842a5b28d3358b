"""Opening the GPU beside the import of torch: in the right order, and silent where there is none."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from cutegen.measure.wake import begin_waking

#: A driver that writes down what it is asked; ``MISSING`` leaves a function out.
DRIVER = """
#include <stdio.h>
static void note(const char *what) {
    FILE *log = fopen(LOG, "a");
    fprintf(log, "%s\\n", what);
    fclose(log);
}
int cuInit(unsigned flags) { note("init"); return STATUS; }
int cuDeviceGet(int *device, int index) { note("get"); *device = 10 + index; return 0; }
#ifndef MISSING
int cuDevicePrimaryCtxRetain(void **context, int device) { note(device == 13 ? "retain 13" : "?"); return 0; }
#endif
"""


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        (["-DSTATUS=0"], ["init", "get", "retain 13"]),
        (["-DSTATUS=100"], ["init"]),
        (["-DSTATUS=0", "-DMISSING"], ["init", "get"]),
    ],
)
def test_the_context_of_the_device_is_made(tmp_path: Path, options: list[str], asked: list[str]) -> None:
    """Of the device that the index stands for; a driver that refuses or is too old is left alone."""
    source, library, log = tmp_path / "d.c", tmp_path / "d.so", tmp_path / "log"
    source.write_text(DRIVER)
    command = ["gcc", "-shared", "-fPIC", f'-DLOG="{log}"', *options, str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    begin_waking(3, str(library)).join(100)
    assert log.read_text().split("\n")[:-1] == asked


def test_without_a_driver_nothing_happens(capfd: pytest.CaptureFixture[str]) -> None:
    """Torch has the better message."""
    thread = begin_waking(0, "libnodriver.so")
    thread.join(10)
    assert not thread.is_alive() and capfd.readouterr() == ("", "")
