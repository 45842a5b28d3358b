"""Deployment folders to test with: made from recording kernels, loaded over a stand-in for torch."""

from __future__ import annotations

import importlib.util
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

from fake_gpu import DATA
from fake_kernels import H200, FakeGpu
from fake_torch import Torch

from cutegen.build import Artifact, Toolchain
from cutegen.build.render import Source
from cutegen.build.store import Store
from cutegen.families.gemm.problem import Problem
from cutegen.families.ranges import is_range, parse_range
from cutegen.families.registry import parse_problem
from cutegen.records.entry import Entry, Fingerprint
from cutegen.records.range_entry import Piece, RangeEntry
from cutegen.records.table import Table

LINES = (
    "gemm 64x128x256 bf16 kk",
    "gemm 128x64x256 bf16 kn",
    "gemm 3x64x128x64 fp16 mn",
    "gemm 64x100x128 bf16 kk alpha beta bias=n act=relu",
    "gemm 64x128x128 bf16 kk out=fp32 bias=m",
    "gemm 64x128x256 e4m3 kk scale promote",
    "gemm 64x128x8192 bf16 kk",
    "gemm 64x128x128 bf16 kk beta",
)


class Workshop(FakeGpu):
    """Compiles every source into the recording kernel, once, and keeps it beside the store."""

    def compile(self, source: Source, store: Store) -> Artifact:
        # The store itself would take a folder without meta.json for a damaged entry.
        artifact = super().compile(source, Store(store.root / "made"))
        if artifact.shared_object.exists():
            return artifact
        artifact.folder.mkdir(parents=True, exist_ok=True)
        artifact.source.write_text(source.text)
        import tvm_ffi.libinfo

        include = [f"-I{path}" for path in tvm_ffi.libinfo.include_paths()]
        command = ["gcc", "-shared", "-fPIC", f"-DENTRY=__tvm_ffi_{artifact.symbol}", *include]
        command += [str(DATA / "recording_kernel.c"), "-o", str(artifact.shared_object)]
        subprocess.run(command, check=True)
        return artifact


def write_table(path: Path, lines: tuple[str, ...] = LINES, **changes: Any) -> Path:
    """Write a table of the default configs of ``lines``; a range has two pieces, with those of its ends."""
    gpu = FakeGpu(path.parent / "unused")
    dispatcher = gpu.dispatcher()
    entries, ranges = [], []
    for line in lines:
        if is_range(line):
            of = parse_range(line)
            middle = (of.first + of.last) // 2
            configs = [dispatcher.explain(end).config for end in (of.low, of.high)]
            pieces = ((of.first, middle, configs[0]), (middle + 1, of.last, configs[1]))
            ranges.append(RangeEntry(of, tuple(Piece(*piece) for piece in pieces)))
            continue
        problem = parse_problem(line)
        config = dispatcher.explain(problem).config
        assert config is not None
        if problem.sizes.get("k") == 8192:
            config = config.replace(split_k=4, use_tma_store=False)
        entries.append(Entry(problem, config, time_us=1.0))
    fingerprint = replace(Fingerprint.of(H200, Toolchain.current()), **changes)
    Table(fingerprint, entries, ranges).save(path)
    return path


def load_module(folder: Path) -> Any:
    """Import the folder's own loader, as a deployment does."""
    spec = importlib.util.spec_from_file_location("pinned_under_test", folder / "pinned.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load(folder: Path, torch: Torch | None = None) -> tuple[Any, Torch]:
    """Return the deployment in a folder by its own loader, over a stand-in for torch."""
    deployment = load_module(folder).Deployment(folder)
    torch = torch or Torch()
    deployment.torch, deployment.raw_stream = torch, torch._C._cuda_getCurrentRawStream
    deployment.count_writes = torch._C._increment_version
    return deployment, torch


def operands(problem: Problem, torch: Torch) -> tuple[Any, Any, dict[str, Any]]:
    """Stand-ins for the tensors of ``problem``, and the options of its call."""
    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "e4m3": "float8_e4m3fn"}
    dtype, out = names[problem.ab_dtype], names[problem.out_dtype]
    lead = (problem.batch,) if problem.batch > 1 else ()

    def matrix(rows: int, columns: int, swapped: bool) -> Any:
        shape = (*lead, columns, rows) if swapped else (*lead, rows, columns)
        made = torch.tensor(*shape, dtype=dtype)
        if not swapped:
            return made
        last = (-1, -2)
        order = lambda values: (*values[:-2], *(values[at] for at in last))  # noqa: E731
        return replace(made, shape=order(made.shape), strides=order(made.strides))

    a = matrix(problem.m, problem.k, problem.layout in ("mn", "mk"))
    b = matrix(problem.k, problem.n, problem.layout in ("kk", "mk"))
    options: dict[str, Any] = {"out": torch.tensor(*lead, problem.m, problem.n, dtype=out)}
    epilogue = problem.epilogue
    if epilogue.alpha:
        options["alpha"] = 2.5
    if epilogue.beta:
        options |= {"c": torch.tensor(problem.m, problem.n, dtype=out), "beta": -0.5}
    if epilogue.bias:
        shape = (problem.n,) if epilogue.bias == "n" else (problem.m, 1)
        options["bias"] = torch.tensor(*shape, dtype=out)
    if epilogue.scale:
        options["scales"] = (torch.tensor(1, dtype="float32"), torch.tensor(1, dtype="float32"))
    if epilogue.activation:
        options["activation"] = epilogue.activation
    return a, b, options


def contents(folder: Path) -> dict[str, bytes | str]:
    """Everything below a folder: files with their bytes, links with their targets, folders."""
    found: dict[str, bytes | str] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = str(path.readlink())
        else:
            found[name] = path.read_bytes() if path.is_file() else "folder"
    return found


def hidden(folder: Path) -> list[str]:
    """What stands in a folder under a hidden name."""
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def kernel_file(folder: Path, ending: str) -> Path:
    """A library (``so``) or a source (``py``) of a deployment."""
    return next((folder / "kernels").glob(f"*.{ending}"))
