"""What holds for every test."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

import pytest

from cutegen.build import Builder
from cutegen.build.store import Store

# A job in the background starts with Ctrl-C ignored, and its children inherit that; some tests send one.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests write modules anew within a second, for which Python would take bytecode of the text before.
sys.dont_write_bytecode = True
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"

# Commands wrap their lines at this width; tests of other widths set it themselves.
os.environ.pop("COLUMNS", None)

# Workers share the cores: threads of torch that wait for each other would keep them from the other worker.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # as many processes would import torch first
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")  # scalar code compiles in half of the time

# The same examples in every run, on however busy a machine: a test is not red because somebody else computes.
with suppress(ImportError):  # tests that need a GPU do without
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "cutegen",
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("cutegen")

GPU_TESTS = Path(__file__).parent / "gpu"


def pytest_runtest_setup() -> None:
    """Let unseeded tensors be the same in every run, whatever ran before in this process."""
    generator = getattr(sys.modules.get("torch"), "default_generator", None)
    if generator is not None:
        generator.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage while tests are collected, nor among these later: it took a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Among several workers, one runs all tests on the GPU, and one each module that compiles for its tests.

    Tests that share a fixture of their module stay together too: each worker would make it anew.
    With ``--dist loadgroup`` larger groups go first, so that nobody is left with a long one at the end.
    """
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("gpu"))
        elif item.get_closest_marker("dsl") or shares_a_fixture(item):
            item.add_marker(pytest.mark.xdist_group(item.path.name))


def shares_a_fixture(item: pytest.Item) -> bool:
    """Return whether something that a test needs is made once for its module."""
    asked = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}
    return any(found.scope == "module" for found in chain(*asked.values()))


@pytest.fixture(scope="session")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    """One builder for all tests that look at compiled kernels: its daemon imports the DSL once."""
    with Builder(Store(tmp_path_factory.mktemp("compiled"))) as builder:
        yield builder
