"""Loading and launching: the launch runtime against a driver that records instead of a GPU."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_gpu import DATA, build_driver, run_with_driver
from samples import TWO_KERNELS, source

from cutegen.build import Artifact, Builder
from cutegen.build.link import Linker
from cutegen.build.loader import load_kernel
from cutegen.build.store import Store, file_digest
from cutegen.build.toolchain import RUNTIME_SOURCE
from cutegen.errors import BuildError, LaunchError

pytestmark = pytest.mark.dsl

LAUNCH = """
from pathlib import Path
import tvm_ffi
from cutegen.errors import LaunchError
from cutegen.build.loader import load_kernel
from fake_gpu import FakeTensor
f = load_kernel(Path({library!r}), {symbol!r})
def tensors(device=0, n=1000):
    return [tvm_ffi.from_dlpack(FakeTensor(n, device=device, address=0x1000 * i)) for i in (1, 2)]
def attempt(*arguments):
    try:
        f(*arguments)
    except Exception as error:
        print(type(error).__name__, error)
"""


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    with Builder(Store(tmp_path_factory.mktemp("cache"))) as builder:
        [(_, result)] = builder.build([source(TWO_KERNELS)])
    assert isinstance(result, Artifact), result
    return result


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield build_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def launch(artifact: Artifact, driver: Path, tmp_path: Path):  # type: ignore[no-untyped-def]
    head = LAUNCH.format(library=str(artifact.shared_object), symbol=artifact.symbol)

    def run(code: str, **environment: str) -> tuple[str, list[str]]:
        return run_with_driver(driver, head + code, tmp_path / "log", **environment)

    return run


def calls(log: list[str], name: str) -> list[str]:
    return [line.removeprefix(f"{name} ") for line in log if line.startswith(f"{name} ")]


def test_loading_needs_no_driver_and_checks_what_it_loads(
    artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(load_kernel(artifact.shared_object, artifact.symbol, file_digest(artifact.shared_object)))
    with pytest.raises(LaunchError, match="has changed since it was built"):
        load_kernel(artifact.shared_object, artifact.symbol, "0" * 64)
    with pytest.raises(LaunchError, match="has no function nothing"):
        load_kernel(artifact.shared_object, "nothing")
    with pytest.raises(LaunchError, match=r"cannot load .*none.so"):
        load_kernel(tmp_path / "none.so", "f")
    with pytest.raises(LaunchError, match=r"cannot load .*none.so"):
        load_kernel(tmp_path / "none.so", "f", "0" * 64)
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(LaunchError, match="cannot load") as plain:
        load_kernel(tmp_path / "text.so", "f")
    assert "noexec" not in str(plain.value)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_NOEXEC))
    with pytest.raises(LaunchError, match="mounted with noexec: use a cache folder on another one"):
        load_kernel(tmp_path / "text.so", "f")


def test_both_kernels_are_launched_with_grid_block_cluster_and_overlap(launch) -> None:  # type: ignore[no-untyped-def]
    _, log = launch("f(*tensors(), 2.0)\n")
    first, second = calls(log, "cuLaunchKernelEx")
    assert " grid 8 1 1 block 128 1 1 smem 0 stream (nil) context 0x100 " in first
    assert " grid 16 1 1 block 64 1 1 smem 65536 stream (nil) context 0x100 " in second
    assert " attribute 4 2 1 1 " in second and " attribute 4 " not in first  # cluster dimension
    assert " attribute 6 1 " in second and " attribute 6 0 " in first  # programmatic serialization
    assert "first 0x1000 extra (nil)" in first and "first 0x2000 extra (nil)" in second


def test_limits_are_raised_once_for_each_kernel_and_device_in_use(launch) -> None:  # type: ignore[no-untyped-def]
    _, log = launch("for _ in range(3):\n    f(*tensors(), 2.0)\n")
    assert len(calls(log, "cuLibraryLoadData")) == 1
    assert len(calls(log, "cuLaunchKernelEx")) == 6
    limits = [line.split() for line in calls(log, "cuKernelSetAttribute")]
    # 8: dynamic shared memory, all a block may have less the 1024 static bytes; 14: clusters above 8
    assert sorted((line[0], line[1]) for line in limits) == [("14", "1")] * 2 + [("8", "231424")] * 2
    assert {line[3] for line in limits} == {"0"}  # the second device is left alone


def test_a_thread_without_a_context_gets_the_primary_one_of_the_tensors(launch) -> None:  # type: ignore[no-untyped-def]
    code = "import threading\nf(*tensors(1), 2.0)\nt = threading.Thread(target=lambda: f(*tensors(1), 2.0))\n"
    _, log = launch(code + "t.start(); t.join()\n")
    assert calls(log, "cuDevicePrimaryCtxRetain") == ["1"]
    assert calls(log, "cuCtxSetCurrent") == ["0x101", "0x101"]
    assert all("context 0x101" in line for line in calls(log, "cuLaunchKernelEx"))


def test_the_callers_context_comes_back_after_a_launch_on_another_device(launch) -> None:  # type: ignore[no-untyped-def]
    code = (
        "import ctypes\ndriver = ctypes.CDLL('libcuda.so.1')\n"
        "driver.cuCtxSetCurrent(ctypes.c_void_p(0x100))\n"
        "f(*tensors(1), 2.0)\nf(*tensors(0), 2.0)\nf(*tensors(1), 2.0)\n"
        "now = ctypes.c_void_p()\ndriver.cuCtxGetCurrent(ctypes.byref(now))\nprint(hex(now.value))\n"
    )
    out, log = launch(code)
    assert out == "0x100\n"
    contexts = [line.split("context ")[1].split()[0] for line in calls(log, "cuLaunchKernelEx")]
    assert contexts == ["0x101"] * 2 + ["0x100"] * 2 + ["0x101"] * 2
    assert {line.split()[3] for line in calls(log, "cuKernelSetAttribute")} == {"0", "1"}
    assert calls(log, "cuDevicePrimaryCtxRetain") == ["1"]


@pytest.mark.parametrize(
    ("failing", "message"),
    [
        (
            "cuLaunchKernelEx=1",
            "cuLaunchKernelEx (grid 8x1x1, block 128x1x1, cluster 1x1x1, 0 bytes of shared memory) failed: "
            "CUDA_ERROR_INVALID_VALUE (1): invalid argument",
        ),
        ("cuInit=100", "cuInit failed: CUDA_ERROR_OTHER (100): something else"),
        ("cuLibraryLoadData=209", "cuLibraryLoadData failed: CUDA_ERROR_OTHER (209): something else"),
        ("cuLibraryGetKernel=500", "cuLibraryGetKernel failed: CUDA_ERROR_OTHER (500): something else"),
        (
            "cuKernelSetAttribute=1",
            "cuKernelSetAttribute failed: CUDA_ERROR_INVALID_VALUE (1): invalid argument",
        ),
        (
            "cuDevicePrimaryCtxRetain=2",
            "cuDevicePrimaryCtxRetain failed: CUDA_ERROR_OTHER (2): something else",
        ),
        ("cuCtxGetDevice=700", "cuCtxGetDevice failed: CUDA_ERROR_ILLEGAL_ADDRESS (700): something else"),
    ],
)
def test_a_failing_driver_is_a_launch_error_with_name_and_number(  # type: ignore[no-untyped-def]
    launch, failing: str, message: str
) -> None:
    code = "import ctypes\nctypes.CDLL('libcuda.so.1').cuCtxSetCurrent(ctypes.c_void_p(0x100))\n"
    if failing.startswith("cuDevicePrimary"):
        code = ""
    out, _ = launch(code + "attempt(*tensors(), 2.0)\n", FAKE_DRIVER_FAIL=failing)
    assert out == f"LaunchError {message}\n"


def test_a_failure_to_start_can_be_overcome_by_a_later_call(launch) -> None:  # type: ignore[no-untyped-def]
    code = "import os\nattempt(*tensors(), 2.0)\nlibc = __import__('ctypes').CDLL(None)\n"
    code += "libc.unsetenv(b'FAKE_DRIVER_FAIL')\nf(*tensors(), 2.0)\n"
    out, log = launch(code, FAKE_DRIVER_FAIL="cuLibraryLoadData=2")
    assert out.count("LaunchError") == 1 and len(calls(log, "cuLaunchKernelEx")) == 2


def test_without_a_driver_the_launch_fails_with_the_reason(artifact: Artifact, tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_text("no library")
    code = (
        LAUNCH.format(library=str(artifact.shared_object), symbol=artifact.symbol)
        + "attempt(*tensors(), 2.0)\n"
    )
    out, _ = run_with_driver(tmp_path, code, tmp_path / "log")
    assert out.startswith("LaunchError no CUDA driver: ") and "libcuda.so.1" in out


def test_wrong_arguments_are_told_before_anything_is_launched(launch) -> None:  # type: ignore[no-untyped-def]
    out, log = launch(
        "x, y = tensors()\nattempt(x, y)\nattempt(x, tensors(n=7)[1], 2.0)\nattempt(x, y, 'two')\n"
    )
    kinds = [line.split()[0] for line in out.splitlines() if line.startswith(("TypeError", "ValueError"))]
    assert kinds == ["TypeError", "ValueError", "TypeError"]
    assert calls(log, "cuLaunchKernelEx") == []


def test_many_threads_share_one_loading(launch) -> None:  # type: ignore[no-untyped-def]
    code = (
        "from concurrent.futures import ThreadPoolExecutor\npairs = [tensors() for _ in range(8)]\n"
        "with ThreadPoolExecutor(8) as pool:\n"
        "    list(pool.map(lambda p: [f(*p, 2.0) for _ in range(20)], pairs))\n"
    )
    _, log = launch(code)
    assert len(calls(log, "cuLibraryLoadData")) == 1
    assert len(calls(log, "cuKernelSetAttribute")) == 4
    assert len(calls(log, "cuLaunchKernelEx")) == 8 * 20 * 2


def test_a_forked_child_leaves_the_parents_library_alone(launch) -> None:  # type: ignore[no-untyped-def]
    code = "import os, sys\nf(*tensors(), 2.0)\npid = os.fork()\n"
    code += "if pid == 0:\n    sys.exit(0)\nos.waitpid(pid, 0)\n"
    _, log = launch(code)
    assert len(calls(log, "cuLibraryUnload")) == 1


def test_the_runtime_compiles_without_a_warning_and_names_an_unknown_need(tmp_path: Path) -> None:
    flags = ["-std=c11", "-Wall", "-Wextra", "-Wshadow", "-Werror", "-fsyntax-only"]
    subprocess.run(["gcc", *flags, str(RUNTIME_SOURCE)], check=True)
    (tmp_path / "k.c").write_text(
        "int _cudaSomethingNew(void); int __tvm_ffi_k(void) { return _cudaSomethingNew(); }"
    )
    subprocess.run(["gcc", "-c", "-fPIC", str(tmp_path / "k.c"), "-o", str(tmp_path / "k.o")], check=True)
    with pytest.raises(BuildError) as info:
        Linker(tmp_path).link(tmp_path / "k.o", tmp_path / "k.so")
    assert "_cudaSomethingNew" in info.value.log


def test_without_a_c_compiler_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="no C compiler; install one of gcc, cc, clang"):
        Linker(tmp_path)


def test_the_stand_in_driver_has_all_that_the_runtime_asks_for() -> None:
    asked = [
        line.split('"')[1]
        for line in RUNTIME_SOURCE.read_text().splitlines()
        if line.strip().startswith('{"cu')
    ]
    text = (DATA / "fake_driver.c").read_text()
    assert len(asked) == 14 and all(f"int {name}(" in text for name in asked)
