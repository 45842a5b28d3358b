"""One compilation, in a forked child: source to object, library and resources (GPU library: the DSL)."""

from __future__ import annotations

import ctypes
import importlib
import linecache
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from cutegen.arch import ARCHES
from cutegen.build.artifact import OBJECT, SOURCE
from cutegen.build.cubin import kernels_in
from cutegen.build.kernel_resources import Resources
from cutegen.build.link import Linker
from cutegen.build.remarks import add_remarks
from cutegen.build.store import LIBRARY
from cutegen.build.user_code import Refused, UserCode
from cutegen.digest import Json, digest
from cutegen.errors import BuildError

__all__ = ["Job", "SameKernel", "Traced", "compile_into", "warm_up"]

REMARKS = "remarks.yaml"
#: Compiled once before the first fork, so that no child pays for what the compiler sets up on first use.
_WARM_UP = """
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute


@cute.kernel
def kernel(x: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    x[thread] = x[thread] + 1.0


@cute.jit
def launch(x: cute.Tensor, stream: cuda.CUstream):
    kernel(x).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream, min_blocks_per_mp=1)


KERNELS = (kernel,)


def fake_arguments():
    x = cute.runtime.make_fake_compact_tensor(cutlass.Float32, (cute.sym_int(),), assumed_align=16)
    return x, cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
"""


@dataclass(frozen=True)
class Job:
    """One source to compile, as it travels to the daemon."""

    key: str
    arch: str
    symbol: str
    text: str
    about: dict[str, Json]
    opening: dict[str, Any] | None = None
    urgent: bool = False


#: Gets the digest of a traced kernel, and the answers to its questions about the hardware, before it is
#: compiled; returns whether to go on.
Traced = Callable[[str, dict[str, Json]], bool]


class SameKernel(BaseException):
    """The traced kernel is compiled under another key. Users' code must not catch it: no ``Exception``."""


def warm_up(*, torch: bool = False) -> dict[str, Json]:
    """Import the compiler, compile one trivial kernel, and return the compiler's own version words.

    Args:
        torch: Import torch first, for modules of users that need it. Otherwise it is blocked: the compiler
            would import it, which costs a second and 400 MB per process.

    Raises:
        BuildError: There is no torch.
    """
    if torch:
        _import_torch()
    else:
        sys.modules["torch"] = None  # type: ignore[assignment]
    import cutlass
    from cutlass import cute
    from cutlass.base_dsl.version_info import CUDA_VERSION

    # Exporting for another GPU than the present one looks these symbols up in the process.
    for library in cute.runtime.find_runtime_libraries(enable_tvm_ffi=False):
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    with tempfile.TemporaryDirectory(prefix="cutegen-warm-") as folder:
        job = Job("0" * 32, "sm_90a", "cutegen_warm_up", _WARM_UP, {})
        _compile(_import(job, Path(folder) / SOURCE), job, Path(folder))
    return {"version": str(cutlass.__version__), "cuda": f"{CUDA_VERSION.major}.{CUDA_VERSION.minor}"}


def _import_torch() -> None:
    try:
        importlib.import_module("torch")
    except ImportError as error:
        raise BuildError(f"a module of the kernel imports torch, which is not installed: {error}") from error


def compile_into(job: Job, staged: Path, final: Path, linker: Linker, traced: Traced) -> dict[str, Json]:
    """Compile, export and link ``job`` into the folder ``staged``; return what ``meta.json`` shall say.

    The source is imported under its final path, where line information and tracebacks will find it.

    Args:
        job: What to compile.
        staged: Where results go.
        final: Where they will be.
        linker: Makes the library.
        traced: Asked about kernels of users, which different sources may have in common.

    Raises:
        BuildError: The library could not be linked.
        Refused: A user's module did not accept what it was given.
        SameKernel: ``traced`` said no.
    """
    started = time.perf_counter()
    if job.opening is None:
        _compile(_import(job, final / SOURCE), job, staged)
    else:
        _compile_users(job, staged, final, traced)
    linker.link(staged / OBJECT, staged / LIBRARY)
    remarks = (
        (staged / REMARKS).read_text(encoding="utf-8", errors="replace")
        if (staged / REMARKS).exists()
        else ""
    )
    resources = Resources.of(*add_remarks(kernels_in((staged / OBJECT).read_bytes()), remarks))
    (staged / REMARKS).unlink(missing_ok=True)
    reason = _cannot_launch(resources, job.arch)
    return {
        "outcome": "rejected" if reason else "ok",
        "message": reason,
        "resources": resources.to_json(),
        "build_s": round(time.perf_counter() - started, 4),
    }


def _compile_users(job: Job, staged: Path, final: Path, traced: Traced) -> None:
    """Compile a source that opens modules of users."""
    assert job.opening is not None
    user = UserCode.from_json(job.opening, job.arch)
    refused: list[BuildError | Refused] = []

    def finished(owner: Any, module: Any, function: str) -> None:
        text = str(module).replace(job.symbol, "").replace(job.key, "")
        name = digest([text, job.arch])
        try:
            user.end()
        except (BuildError, Refused) as error:  # the compiler would wrap it
            refused.append(error)
            raise SameKernel from error
        if not traced(name, user.facts):
            raise SameKernel

    try:
        with user.tracing():
            _compile(_import(job, final / SOURCE), job, staged, finished)
    except SameKernel:
        if refused:
            raise refused[0] from None
        raise


def _import(job: Job, path: Path) -> ModuleType:
    name = f"cutegen_source_{job.key}"
    module = ModuleType(name)
    module.__file__ = str(path)
    # The compiler reads functions back through inspect.getsource.
    linecache.cache[str(path)] = (len(job.text), None, job.text.splitlines(keepends=True), str(path))
    sys.modules[name] = module
    exec(compile(job.text, str(path), "exec"), module.__dict__)
    for needed in ("launch", "KERNELS", "fake_arguments"):
        if not hasattr(module, needed):
            raise AttributeError(f"the source defines no {needed}")
    return module


def _compile(
    module: Any, job: Job, folder: Path, finished: Callable[[Any, Any, str], None] | None = None
) -> None:
    from cutlass import cute
    from cutlass.base_dsl.compiler import ExtraCompilerOpts

    module.launch.set_name_prefix(job.symbol, remove_cutlass_symbol=True)
    for number, kernel in enumerate(module.KERNELS):
        kernel.set_name_prefix(f"{job.symbol}_k{number}", remove_cutlass_symbol=True)
    options = (
        cute.GPUArch(job.arch),
        cute.EnableTVMFFI(True),
        ExtraCompilerOpts("diagnostic=ptx"),
        cute.PtxasOptions("-v"),
        cute.RemarkOutput(str(folder / REMARKS)),
    )
    more = {} if finished is None else {"trace_finalize_hooks": finished}
    compiled = cute.compile[options](module.launch, *module.fake_arguments(), no_jit_engine=True, **more)
    compiled.export_to_c(str(folder / OBJECT), function_name=job.symbol)


def _cannot_launch(resources: Resources, arch_name: str) -> str:
    """Return why no GPU of the architecture could launch it, which the compiler does not check."""
    arch = ARCHES.get(arch_name)
    if arch is not None and resources.smem_bytes > arch.smem_bytes:
        return f"takes {resources.smem_bytes} bytes of shared memory; {arch} has {arch.smem_bytes}"
    if arch is not None and resources.threads > arch.threads_per_block:
        return f"takes {resources.threads} threads per block; {arch} allows {arch.threads_per_block}"
    return ""
