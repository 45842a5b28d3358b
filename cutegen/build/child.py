"""One compilation in a forked child: source to object, library and resources (GPU library: the DSL)."""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import gc
import importlib
import json
import linecache
import os
import re
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from cutegen.arch import ARCHES
from cutegen.build.artifact import LOG, OBJECT, SOURCE, Resources
from cutegen.build.cubin import kernels_in
from cutegen.build.link import Linker
from cutegen.build.remarks import add_remarks
from cutegen.build.store import LIBRARY
from cutegen.build.user_code import Refused, UserCode
from cutegen.digest import Json, digest
from cutegen.errors import BuildError

__all__ = ["GO", "Job", "SameKernel", "Traced", "compile_into", "plain", "run_and_exit", "warm_up"]

REMARKS = "remarks.yaml"
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PR_SET_PDEATHSIG, _SIGKILL = 1, 9
#: The order to compile a kernel that was traced.
GO = b"g"
#: Errors of the disk, not of the source.
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE}

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


def plain(text: str) -> str:
    """Return ``text`` without terminal colour codes."""
    return _ANSI.sub("", text)


def run_and_exit(
    work: Callable[[Traced], dict[str, Json]], folder: Path, report: int, orders: int, parent: int
) -> NoReturn:
    """Do ``work`` in this freshly forked process, write its answer to the descriptor ``report`` and exit.

    A traced kernel is reported on a line of its own; what comes from the descriptor ``orders`` says whether
    to go on.
    Whatever the source does ends here: output goes to the log file, an exception becomes the answer, an abort
    leaves its Python stack in the log, and the process dies with its parent.
    """
    before = frozenset(sys.modules)

    def traced(name: str, facts: dict[str, Json]) -> bool:
        return _ask(report, orders, {"traced": name, "facts": facts, "torch": _loaded_of_torch(before)})

    try:
        _isolate(folder, parent)
        answer = work(traced)
        _send(report, answer)
    except SameKernel:
        pass
    except BaseException as error:
        _print_from_source(error.__cause__ if isinstance(error, Refused) and error.__cause__ else error)
        _send(report, _explain(error))
        raise
    finally:
        sys.stderr.flush()
        os._exit(0)


def _print_from_source(error: BaseException) -> None:
    """Print the traceback without the frames that lead to the source."""
    whole = frame = error.__traceback__
    while frame is not None and not frame.tb_frame.f_code.co_filename.endswith(f"/{SOURCE}"):
        frame = frame.tb_next
    traceback.print_exception(type(error), error, frame or whole)


def _isolate(folder: Path, parent: int) -> None:
    os.setpgid(0, 0)
    gc.disable()  # the process is short-lived
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    log = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for target, own in ((null, 0), (log, 1), (log, 2)):
        os.dup2(target, own)
    sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115
    faulthandler.enable(file=2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chdir(folder)


def _ask(report: int, orders: int, traced: dict[str, Json]) -> bool:
    _send(report, traced)
    os.write(report, b"\n")
    return os.read(orders, 1) == GO


def _loaded_of_torch(before: frozenset[str]) -> list[Json]:
    """Return the modules of torch that were loaded meanwhile, in their order."""
    return [name for name in sys.modules if name.startswith("torch.") and name not in before]


def _send(descriptor: int, answer: dict[str, Json]) -> None:
    data = json.dumps(answer).encode()
    while data:
        data = data[os.write(descriptor, data) :]


def _explain(error: BaseException) -> dict[str, Json]:
    text = plain(str(error)).strip()
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    message = f"{type(error).__name__}: {first}" if first else type(error).__name__
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        return {"outcome": "store", "message": f"cannot write the cache folder: {error.strerror}"}
    if isinstance(error, Refused):
        return {"outcome": error.outcome, "message": plain(str(error)), "keep": error.outcome == "rejected"}
    if isinstance(error, (BuildError, MemoryError)):
        return {"outcome": "error", "message": first or message, "keep": False}
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.endswith(f"/{SOURCE}")]
    if frames:
        message += f" at line {frames[-1].lineno} of the source"
    return {"outcome": "error", "message": message}
