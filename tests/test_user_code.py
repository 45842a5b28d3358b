"""Code of users in compiling children: what it needs, what it must not do, and what is said of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from own_registry import without_user_families

from cutegen.arch import find_arch
from cutegen.build import Artifact, Builder, Failure
from cutegen.build.render import render
from cutegen.build.store import Store
from cutegen.families import registry

pytestmark = pytest.mark.dsl
ARCH = find_arch("sm_90a")

KERNEL = """
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
{top}


@cute.kernel
def kernel(x: cute.Tensor, y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    if block * {threads} + thread < x.shape[0]:
        y[block * {threads} + thread] = x[block * {threads} + thread] * {factor}


@cute.jit
def launch(x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream, threads: cutlass.Constexpr):
{body}
    kernel(x, y).launch(
        grid=((x.shape[0] + {threads} - 1) // {threads}, 1, 1), block=({threads}, 1, 1), stream=stream
    )
"""
DECLARATION = """
from cutegen.kernel import Kernel, free, read, write

kernel = Kernel(
    "copies",
    entry="own_copy:launch",
    sizes={{"m": free}},
    arguments=(read("x", "fp32", ("m",)), write("y", "fp32", ("m",))),
    call="x, y, stream, threads",
    knobs={{"threads": (32, 64)}},
    {more}
)


@kernel.reference
def reference(x):
    return 2 * x
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    without_user_families(monkeypatch)
    (tmp_path / "own").mkdir()
    return tmp_path / "own"


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    with Builder(Store(tmp_path_factory.mktemp("store")), workers=2) as opened:
        yield opened


def compile_it(
    folder: Path,
    builder: Builder,
    *,
    top: str = "",
    body: str = "    pass",
    more: str = "",
    factor: str = "2.0",
    **files: str,
) -> Artifact | Failure:
    """Return what becomes of the default config, with lines at the kernel's top and in its launch."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return compile_all(folder, builder, top=top, body=body, more=more, factor=factor)[0]


def compile_all(
    folder: Path,
    builder: Builder,
    *,
    top: str = "",
    body: str = "    pass",
    more: str = "",
    factor: str = "2.0",
) -> list[Artifact | Failure]:
    """Return what becomes of each config, the default first."""
    (folder / "own_copy.py").write_text(KERNEL.format(top=top, body=body, threads=32, factor=factor))
    (folder / "declaration.py").write_text(DECLARATION.format(more=more))
    family = registry.load_kernel(folder / "declaration.py")
    problem = family.parse("copies 100")
    configs = registry.find_space(family.name, ARCH).configs(problem)
    sources = [render(problem, config, ARCH) for config in configs]
    results = {source.text: result for source, result in builder.build(sources)}
    return [results[source.text] for source in sources]


def failure(result: Artifact | Failure) -> Failure:
    assert isinstance(result, Failure), result
    return result


def test_a_module_that_imports_torch_gets_the_real_one_without_a_gpu(folder: Path, builder: Builder) -> None:
    pytest.importorskip("torch")
    top = "import torch\nassert not torch.cuda.is_available()\nF = torch.tensor(3.0).item()"
    result = compile_it(folder, builder, top=top, factor="F")
    assert isinstance(result, Artifact), result


def test_parts_of_torch_that_a_kernel_loads_are_there_for_the_next(folder: Path, tmp_path: Path) -> None:
    """Each child would load them anew otherwise, which can take longer than compiling."""
    pytest.importorskip("torch")
    part = "torch.utils.bundled_inputs"
    top = f"import sys\nif {part!r} in sys.modules:\n    raise ValueError('it is there')\nimport {part}"
    with Builder(Store(tmp_path / "store"), workers=1) as one_by_one:
        first, second = compile_all(folder, one_by_one, top=top)
    assert isinstance(first, Artifact), first
    assert failure(second).message == "it is there"


def test_torch_is_not_there_for_others(folder: Path, builder: Builder) -> None:
    top = "def lazy():\n    import torch\n    return 3.0"
    refused = failure(compile_it(folder, builder, top=top, body="    lazy()"))
    assert refused.outcome == "error", refused
    assert refused.message == (
        "own_copy.py, line 6: imports torch while it is compiled; declare modules=('torch',)"
    )


def test_a_declaration_can_ask_for_torch(folder: Path, builder: Builder) -> None:
    pytest.importorskip("torch")
    top = "def lazy():\n    import torch\n    return 3.0"
    result = compile_it(folder, builder, top=top, body="    lazy()", more='modules=("torch",),')
    assert isinstance(result, Artifact), result


def test_a_module_that_is_missing_is_named(folder: Path, builder: Builder) -> None:
    refused = failure(compile_it(folder, builder, top="import no_such_thing"))
    assert refused.outcome == "error", refused
    assert refused.message.startswith("own_copy.py, line 5: imports no_such_thing, which is not installed")


def test_a_question_to_the_driver_is_named(folder: Path, builder: Builder) -> None:
    top = "result, = cuda.cuInit(0)\nif result != cuda.CUresult.CUDA_SUCCESS:\n"
    top += "    raise RuntimeError(f'CUDA_ERROR: {result}')"
    refused = failure(compile_it(folder, builder, top=top))
    assert refused.outcome == "error", refused
    assert "asks the driver while it is compiled, where there is no GPU" in refused.message
    assert refused.message.startswith("own_copy.py, line ")


def test_a_question_to_torch_about_a_gpu_is_named(folder: Path, builder: Builder) -> None:
    """Also by a torch that knows no CUDA, or by one that has counted GPUs before."""
    pytest.importorskip("torch")
    for before in ("", "torch.cuda.device_count()", "torch.cuda.is_available()"):
        top = f"import torch\n{before}\nX = torch.zeros(3, device='cuda')"
        refused = failure(compile_it(folder, builder, top=top))
        assert refused.outcome == "error", refused
        assert refused.message.startswith("own_copy.py, line 7: asks the driver while it is compiled, where")


def test_a_fork_of_a_process_that_counted_gpus_asks_the_driver_too(folder: Path, builder: Builder) -> None:
    """A torch with CUDA says so in a child of the compile daemon."""
    top = "raise RuntimeError('Cannot re-initialize CUDA in forked subprocess.')"
    refused = failure(compile_it(folder, builder, top=top))
    assert refused.outcome == "error", refused
    assert "asks the driver while it is compiled, where there is no GPU" in refused.message


def test_hardware_facts_come_from_the_target_and_are_recorded(folder: Path, builder: Builder) -> None:
    body = "    assert cutlass.utils.HardwareInfo().get_device_multiprocessor_count() == 132"
    result = compile_it(folder, builder, body=body)
    assert isinstance(result, Artifact) and result.sm_count == 132
    registry._registered.pop("copies")
    registry._space.cache_clear()


def test_a_declaration_says_another_count(folder: Path, builder: Builder) -> None:
    body = "    assert cutlass.utils.HardwareInfo().get_max_active_clusters(2) == 57"
    result = compile_it(folder, builder, body=body, more="sm_count=114,")
    assert isinstance(result, Artifact) and result.sm_count == 114


def test_what_prints_does_not_matter(folder: Path, builder: Builder) -> None:
    assert isinstance(compile_it(folder, builder, top="print('hello')"), Artifact)


@pytest.mark.parametrize(
    ("how", "said"), [("import sys\nsys.exit(3)", "SystemExit(3)"), ("import os\nos._exit(4)", "status 4")]
)
def test_what_exits_costs_itself_only(folder: Path, builder: Builder, how: str, said: str) -> None:
    refused = failure(compile_it(folder, builder, top=how))
    assert refused.outcome in ("error", "abort") and said in refused.message


def test_what_hangs_is_ended(folder: Path, tmp_path: Path) -> None:
    with Builder(Store(tmp_path / "store"), workers=1, timeout_s=1.0) as builder:
        refused = failure(compile_it(folder, builder, top="import time\ntime.sleep(60)"))
    assert refused.outcome == "timeout"


def test_the_authors_words_are_kept(folder: Path, builder: Builder) -> None:
    body = "    if cutlass.const_expr(threads != 48):\n        raise ValueError('48 threads or nothing')"
    refused = failure(compile_it(folder, builder, body=body))
    assert (refused.outcome, refused.message) == ("rejected", "48 threads or nothing")


def test_a_module_that_no_import_names_is_refused(folder: Path, builder: Builder) -> None:
    top = "import importlib\nF = importlib.import_module('hid' + 'den').F"
    refused = failure(compile_it(folder, builder, top=top, factor="F", hidden="F = 2.0\n"))
    assert "loads the module hidden" in refused.message and "modules=('hidden',)" in refused.message


def test_a_module_that_is_declared_is_part_of_the_name(folder: Path, builder: Builder) -> None:
    top = "import importlib\nF = importlib.import_module('hid' + 'den').F"
    result = compile_it(folder, builder, top=top, factor="F", more='modules=("hidden",),', hidden="F = 2.0\n")
    assert isinstance(result, Artifact)
    assert "    hidden " in result.source.read_text()


def test_a_variable_that_is_read_by_a_hidden_name_is_refused(folder: Path, builder: Builder) -> None:
    top = "import os\nNAME = 'MY_' + 'FACTOR'\nF = float(os.environ.get(NAME, '2'))"
    refused = failure(compile_it(folder, builder, top=top, factor="F"))
    assert "reads the environment variable MY_FACTOR" in refused.message
    assert "environment=('MY_FACTOR',)" in refused.message


def test_a_variable_that_is_read_by_its_name_is_part_of_the_kernel(
    folder: Path, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_FACTOR", "3")
    top = "import os\nF = float(os.environ.get('MY_FACTOR', '2'))"
    result = compile_it(folder, builder, top=top, factor="F")
    assert isinstance(result, Artifact)
    assert "environment variable MY_FACTOR" in result.source.read_text()
