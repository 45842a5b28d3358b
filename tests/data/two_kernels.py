"""Two launches from one host function: the second in clusters, overlapping the first's end."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import memory


@cute.kernel
def scale(x: cute.Tensor, y: cute.Tensor, factor: cutlass.Float32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * 128 + thread
    if i < y.shape[0]:
        y[i] = x[i] * factor


@cute.kernel
def bump(y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    smem = memory.SmemAllocator()
    staged = smem.allocate_tensor(cutlass.Float32, cute.make_layout(SMEM_ELEMENTS), byte_alignment=16)
    cute.arch.griddepcontrol_wait()
    i = block * 64 + thread
    if i < y.shape[0]:
        staged[thread] = y[i]
        y[i] = staged[thread] + 1.0


@cute.jit
def launch(x: cute.Tensor, y: cute.Tensor, factor: cutlass.Float32, stream: cuda.CUstream):
    blocks = cute.ceil_div(y.shape[0], 128)
    scale(x, y, factor).launch(grid=(blocks, 1, 1), block=(128, 1, 1), stream=stream, min_blocks_per_mp=1)
    bump(y).launch(
        grid=(2 * blocks, 1, 1),
        block=(64, 1, 1),
        cluster=(2, 1, 1),
        stream=stream,
        min_blocks_per_mp=1,
        use_pdl=True,
    )


SMEM_ELEMENTS = 16384
KERNELS = (scale, bump)


def fake_arguments():
    n = cute.sym_int()
    x, y = (cute.runtime.make_fake_compact_tensor(cutlass.Float32, (n,), assumed_align=4) for _ in range(2))
    return x, y, cutlass.Float32(1.0), cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
