"""Kernels of a user's that tests declare: with scratch and integers, in place, with several outputs."""

from __future__ import annotations

from pathlib import Path

from cutegen.arch import Arch
from cutegen.build import Builder, Result
from cutegen.build.render import Source, render
from cutegen.build.store import Store
from cutegen.families import registry
from cutegen.family import Problem

__all__ = ["ROPE", "SPLIT", "SUMS", "build_every_config", "write_kernel"]

#: Sums of rows: parts of each row are summed by CTAs of their own, then the parts. Sizes are all free.
SPLIT = {
    "split_sum.py": """
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute

THREADS = 128


@cute.kernel
def sum_parts(x: cute.Tensor, partial: cute.Tensor, parts: cutlass.Int32):
    thread, _, _ = cute.arch.thread_idx()
    row, part, _ = cute.arch.block_idx()
    share = (x.shape[1] + parts - 1) // parts
    end = cutlass.min(x.shape[1], (part + 1) * share)
    total = cutlass.Float32(0.0)
    at = part * share + thread
    while at < end:
        total += x[row, at].to(cutlass.Float32)
        at += THREADS
    total = cute.arch.warp_reduction_sum(total)
    smem = cutlass.utils.SmemAllocator()
    sums = smem.allocate_tensor(cutlass.Float32, cute.make_layout(THREADS // 32))
    if thread % 32 == 0:
        sums[thread // 32] = total
    cute.arch.sync_threads()
    if thread == 0:
        total = cutlass.Float32(0.0)
        for warp in cutlass.range_constexpr(THREADS // 32):
            total += sums[warp]
        partial[row * parts + part] = total


@cute.kernel
def add_parts(partial: cute.Tensor, y: cute.Tensor, parts: cutlass.Int32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    row = block * THREADS + thread
    if row < y.shape[0]:
        total = cutlass.Float32(0.0)
        for part in cutlass.range(parts):
            total += partial[row * parts + part]
        y[row] = total


@cute.jit
def launch(x: cute.Tensor, y: cute.Tensor, parts: cutlass.Int32, partial: cute.Tensor, stream: cuda.CUstream):
    sum_parts(x, partial, parts).launch(
        grid=(x.shape[0], parts, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1
    )
    add_parts(partial, y, parts).launch(
        grid=((x.shape[0] + THREADS - 1) // THREADS, 1, 1), block=(THREADS, 1, 1), stream=stream
    )
""",
    "declaration.py": '''
from cutegen.kernel import Kernel, free, read, write

kernel = Kernel(
    "split_sum",
    "sums of rows in parts",
    entry="split_sum:launch",
    sizes={"m": free, "n": free},
    options={"dtype": ("fp32", "bf16")},
    arguments=(read("x", "dtype", ("m", "n")), write("y", "fp32", ("m",))),
    call="x, y, parts, partial, stream",
    knobs={"split": (1, 2, 4, 8, 16)},
    default={"split": 1},
    rows="m",
    aligned=False,
)


@kernel.rule
def parts_are_long(n, split):
    """A part has at least 64 elements, so that a warp has something to do."""
    return split == 1 or n >= 64 * split


@kernel.integer
def parts(split):
    return split


@kernel.workspace()
def partial(m, parts):
    return 4 * m * parts


@kernel.reference
def reference(x):
    return x.sum(-1)


@kernel.tolerance
def tolerance(output, want, problem):
    return want.abs().mul(2**-20).add(problem.n * 2.0**-20)
''',
}

#: Rotary embedding in place, on whole heads.
ROPE = {
    "rope.py": """
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute


class Rope:
    def __init__(self, dtype, d, threads):
        self.dtype, self.half, self.threads = dtype, d // 2, threads

    @cute.jit
    def __call__(self, x: cute.Tensor, cos: cute.Tensor, sin: cute.Tensor, stream: cuda.CUstream):
        self.kernel(x, cos, sin).launch(
            grid=(x.shape[0], 1, 1), block=(self.threads, 1, 1), stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, cos: cute.Tensor, sin: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        token, _, _ = cute.arch.block_idx()
        at = thread
        while at < x.shape[1] * self.half:
            head, column = at // self.half, at % self.half
            c, s = cos[token, column], sin[token, column]
            a = x[token, head, column].to(cutlass.Float32)
            b = x[token, head, column + self.half].to(cutlass.Float32)
            x[token, head, column] = (a * c - b * s).to(self.dtype)
            x[token, head, column + self.half] = (b * c + a * s).to(self.dtype)
            at += self.threads
""",
    "declaration.py": """
from cutegen.kernel import Kernel, fixed, free, read, update

kernel = Kernel(
    "own_rope",
    "rotary embedding in place",
    entry="rope:Rope",
    sizes={"t": free, "h": free, "d": fixed, "half": fixed},
    options={"dtype": ("bf16", "fp32")},
    arguments=(
        update("x", "dtype", ("t", "h", "d")),
        read("cos", "fp32", ("t", "half")),
        read("sin", "fp32", ("t", "half")),
    ),
    construct="dtype, d, threads",
    knobs={"threads": (128, 256)},
    rows="t",
    repeat="bounded",
)


@kernel.inputs
def inputs(t, half, generator):
    import torch

    angle = torch.rand((t, half), generator=generator, device=generator.device) * 6.0
    return {"cos": angle.cos(), "sin": angle.sin()}


@kernel.reference
def reference(x, cos, sin, half):
    a, b = x[..., :half], x[..., half:]
    c, s = cos[:, None], sin[:, None]
    import torch

    return torch.cat([a * c - b * s, b * c + a * s], -1)


@kernel.tolerance
def tolerance(output, want, problem):
    wide, near = (2**-8, 2**-7) if problem.dtype == "bf16" else (2**-20, 2**-18)
    return want.abs().mul(wide).add(near)
""",
}

#: Rows over their root mean square and, where they are asked for, the factors; a warp has a row.
SUMS = {
    "sums.py": """
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute


@cute.kernel
def kernel(x: cute.Tensor, y: cute.Tensor, rstd, rows: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    row, lane = block * rows + thread // 32, thread % 32
    if row < x.shape[0]:
        total = cutlass.Float32(0.0)
        at = lane
        while at < x.shape[1]:
            value = x[row, at].to(cutlass.Float32)
            total += value * value
            at += 32
        factor = cute.math.rsqrt(cute.arch.warp_reduction_sum(total) / x.shape[1])
        at = lane
        while at < x.shape[1]:
            y[row, at] = (x[row, at].to(cutlass.Float32) * factor).to(y.element_type)
            at += 32
        if cutlass.const_expr(rstd is not None):
            if lane == 0:
                rstd[row] = factor


@cute.jit
def launch(x: cute.Tensor, y: cute.Tensor, rstd, rows: cutlass.Constexpr, stream: cuda.CUstream):
    kernel(x, y, rstd, rows).launch(
        grid=((x.shape[0] + rows - 1) // rows, 1, 1), block=(32 * rows, 1, 1), stream=stream
    )
""",
    "declaration.py": """
from cutegen.kernel import Kernel, free, read, write

kernel = Kernel(
    "own_sums",
    "rows over their root mean square",
    entry="sums:launch",
    sizes={"m": free, "n": free},
    options={"dtype": ("fp32", "bf16"), "sums": False},
    arguments=(
        read("x", "dtype", ("m", "n")),
        write("y", "dtype", ("m", "n")),
        write("rstd", "fp32", ("m",), when="sums"),
    ),
    knobs={"rows": (1, 4)},
    rows="m",
    aligned=False,
)


@kernel.reference
def reference(x):
    rstd = x.square().mean(-1).rsqrt()
    return {"y": x * rstd[:, None], "rstd": rstd}
""",
}


def write_kernel(folder: Path, files: dict[str, str]) -> Path:
    """Write the files of a kernel and return its declaration."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder / "declaration.py"


def build_every_config(problem: Problem, arch: Arch, folder: Path) -> list[tuple[Source, Result]]:
    """Return what becomes of each config that is valid for a problem, compiled into a store of its own."""
    configs = registry.find_space(problem.family, arch).configs(problem)
    with Builder(Store(folder), workers=2) as builder:
        return list(builder.build(render(problem, config, arch) for config in configs))
