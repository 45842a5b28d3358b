"""What tests on a GPU share: compiled kernels, a measuring process, calls that wait for kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from family_kernels import ARCH

from cutegen.build import Builder
from cutegen.build.render import Source, render
from cutegen.build.store import Store
from cutegen.measure import Bench
from cutegen.runtime.dispatch import Dispatcher
from cutegen.runtime.kernel_cache import Kernels


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test of kernels the cases that its module lists."""
    for name, listed in (("case", "CASES"), ("mutant", "MUTANTS")):
        if name in metafunc.fixturenames and hasattr(metafunc.module, listed):
            found = getattr(metafunc.module, listed)
            metafunc.parametrize(name, list(found.values()), ids=list(found))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Store:
    """An empty one, unless tools/run_gpu_tests.py names one that it keeps."""
    kept = request.config.getoption("--kernels", default=None)
    return Store(kept or tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def asked(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """The parameters of those tests of the module that run: nothing is compiled for the others."""
    items = [vars(item) for item in request.session.items if item.path == request.path]
    return [item["callspec"].params for item in items if "callspec" in item]


@pytest.fixture(scope="module")
def kernels(store: Store, asked: list[dict[str, Any]]) -> dict[Source, object]:
    """The kernels of those tests of the module that run."""
    sources = {render(problem, config, ARCH) for problem, config in (e["case"] for e in asked if "case" in e)}
    sources |= {each["mutant"].source for each in asked if "mutant" in each}
    with Builder(store) as builder:
        return dict(builder.build(sources))


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    """What PyTorch offers is not compiled: nothing is timed here."""
    with Bench(timeout_s=60) as opened:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TORCHDYNAMO_DISABLE", "1")
            opened.start()
        yield opened


@pytest.fixture
def own_kernels(store: Store) -> Iterator[None]:
    """Calls wait for their kernels, which a result then comes from."""
    import cutegen
    from cutegen.torch_ops import gemm as ops

    cutegen.gemm  # noqa: B018  prepares the operators
    before = ops.default_dispatcher()
    cutegen.use(Dispatcher(kernels=Kernels(store, build="allow")))
    yield
    cutegen.use(before)
