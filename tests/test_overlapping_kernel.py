"""The kernel before a launch that overlaps with its neighbours: what it touches, and how it is launched."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="it works on torch tensors")

from cutegen.errors import LaunchError  # noqa: E402
from cutegen.measure.overlapping_kernel import Rewriter, rewriter_on  # noqa: E402


class Result(Enum):
    """What calls of the driver return."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_PTX = 218


class Driver:
    """A driver that keeps what it is asked to launch."""

    CUresult = Result
    CUlaunchAttributeID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION="overlap")

    def __init__(self, loads: Result = Result.CUDA_SUCCESS) -> None:
        self.loads, self.launched = loads, list[tuple[Any, Any]]()

    def CUlaunchConfig(self) -> Any:
        return SimpleNamespace()

    def CUlaunchAttribute(self) -> Any:
        return SimpleNamespace(value=SimpleNamespace())

    def cuModuleLoadData(self, image: bytes) -> tuple[Result, str]:
        return self.loads, "module"

    def cuModuleGetFunction(self, module: str, name: bytes) -> tuple[Result, str]:
        return Result.CUDA_SUCCESS, f"{name.decode()} of {module}"

    def cuLaunchKernelEx(self, config: Any, kernel: str, values: Any, extra: int) -> tuple[Result]:
        assert kernel == "rewrite of module"
        self.launched.append((config, values[0]))
        return (Result.CUDA_SUCCESS,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made, stream = Driver(), SimpleNamespace(synchronize=lambda: None, cuda_stream=77)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device=None: stream)
    monkeypatch.setattr("torch.cuda.device", lambda device: torch.no_grad())
    monkeypatch.setattr("cuda.bindings.driver", made)
    return made


def launched(driver: Driver, tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return the bytes, from the first element on, between which a call for ``tensor`` works."""
    Rewriter(tensor.device)(tensor)()
    if not driver.launched:
        return None
    config, (first, accesses, zero) = driver.launched.pop()
    assert zero == 0 and config.hStream == 77 and config.numAttrs == len(config.attrs) == 1
    assert config.attrs[0].id == "overlap"
    assert config.attrs[0].value.programmaticStreamSerializationAllowed == 1
    assert (config.gridDimX - 1) * config.blockDimX < accesses <= config.gridDimX * config.blockDimX
    start = first - tensor.data_ptr()
    return start, start + 16 * accesses


def test_it_works_on_whole_accesses_of_what_a_tensor_spans(driver: Driver) -> None:
    """Transposed ones as they lie in memory, gaps included; nothing outside of it."""
    raw = torch.zeros(4096 + 16, dtype=torch.int32)
    whole = raw[(-(raw.data_ptr() // 4)) % 4 :][:4096]
    assert launched(driver, whole) == (0, 16384)
    assert launched(driver, whole.view(64, 64).t()) == (0, 16384)
    assert launched(driver, whole[:4094]) == (0, 16368)
    assert launched(driver, whole[1:]) == (12, 16380)
    assert launched(driver, whole.view(64, 64)[:, :60]) == (0, 16368)
    assert launched(driver, whole[1:4]) is None and launched(driver, whole[:0]) is None


def test_problems_that_follow_each_other_share_what_was_loaded(driver: Driver) -> None:
    """What could not be loaded is tried again."""
    rewriter_on.cache_clear()
    driver.loads = Result.CUDA_ERROR_INVALID_PTX
    with pytest.raises(LaunchError):
        rewriter_on(torch.device("cpu"))
    driver.loads = Result.CUDA_SUCCESS
    assert rewriter_on(torch.device("cpu")) is rewriter_on(torch.device("cpu"))
    rewriter_on.cache_clear()


def test_a_driver_that_cannot_load_it_is_quoted(driver: Driver) -> None:
    driver.loads = Result.CUDA_ERROR_INVALID_PTX
    with pytest.raises(LaunchError, match="before each launch: cannot load it: CUDA_ERROR_INVALID_PTX"):
        Rewriter(torch.device("cpu"))
