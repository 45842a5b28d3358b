import cutlass, cutlass.cute as cute
import cuda.bindings.driver as cuda

@cute.kernel
def scale(x: cute.Tensor, y: cute.Tensor, factor: cutlass.Float32):
    t, _, _ = cute.arch.thread_idx()
    b, _, _ = cute.arch.block_idx()
    i = b * 128 + t
    if i < y.shape[0]:
        y[i] = x[i] * factor

@cute.kernel
def bump(y: cute.Tensor):
    t, _, _ = cute.arch.thread_idx()
    b, _, _ = cute.arch.block_idx()
    i = b * 64 + t
    cute.arch.griddepcontrol_wait()
    if i < y.shape[0]:
        y[i] = y[i] + 1.0

@cute.jit
def launch(x: cute.Tensor, y: cute.Tensor, factor: cutlass.Float32, stream: cuda.CUstream):
    scale(x, y, factor).launch(grid=(cute.ceil_div(y.shape[0], 128), 1, 1), block=(128, 1, 1), stream=stream, min_blocks_per_mp=1)
    bump(y).launch(grid=(cute.ceil_div(y.shape[0], 64), 1, 1), block=(64, 1, 1), cluster=(2,1,1), stream=stream, min_blocks_per_mp=1, use_pdl=True)

KERNELS = (scale, bump)

def fake_arguments():
    n = cute.sym_int()
    f = lambda: cute.runtime.make_fake_compact_tensor(cutlass.Float32, (n,), assumed_align=4)
    return f(), f(), cutlass.Float32(1.0), cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
