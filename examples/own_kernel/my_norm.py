"""A small RMSNorm in the CuTe DSL, written without a thought of cutegen: one row per CTA, or several."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute


class RMSNorm:
    """y = x * rsqrt(mean(x^2) + eps) * w, row by row; a row is held in registers between its two passes.

    Args:
        dtype: Of x, w and y.
        n: Elements of a row, a multiple of 16 bytes.
        threads: Threads of a CTA.
        threads_per_row: How many of them share a row.
    """

    def __init__(self, dtype, n, threads, threads_per_row):
        if threads % threads_per_row or threads_per_row % 32:
            raise ValueError(
                f"threads ({threads}) must be a multiple of threads_per_row ({threads_per_row}), "
                "and that one of 32"
            )
        self.dtype = dtype
        self.n = n
        self.threads = threads
        self.threads_per_row = threads_per_row
        self.rows = threads // threads_per_row
        self.elements = 128 // dtype.width
        self.vectors = n // self.elements
        self.steps = -(-self.vectors // threads_per_row)
        self.warps = threads_per_row // 32

    @cute.jit
    def __call__(
        self, x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, eps: cutlass.Float32, stream: cuda.CUstream
    ):
        self.kernel(x, w, y, eps).launch(
            grid=((x.shape[0] + self.rows - 1) // self.rows, 1, 1),
            block=(self.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    def row(self, tensor, at):
        """A row as vectors of 16 bytes."""
        start = tensor.iterator + cutlass.Int64(at) * tensor.stride[0]
        return cute.make_tensor(
            start.align(16), cute.make_layout((self.elements, self.vectors), stride=(1, self.elements))
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, eps: cutlass.Float32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        group = thread // self.threads_per_row
        lane = thread % self.threads_per_row
        at = block * self.rows + group
        # Threads of the rows behind the last work on the last one and store nothing.
        inside = at < x.shape[0]
        last = x.shape[0] - 1
        xs = self.row(x, at if inside else last)
        ys = self.row(y, at if inside else last)
        ws = cute.make_tensor(
            w.iterator.align(16), cute.make_layout((self.elements, self.vectors), stride=(1, self.elements))
        )

        held = []
        total = cutlass.Float32(0.0)
        for step in cutlass.range_constexpr(self.steps):
            vector = lane + step * self.threads_per_row
            loaded = cute.make_rmem_tensor((self.elements,), self.dtype)
            loaded.fill(0.0)
            if vector < self.vectors:
                cute.autovec_copy(xs[None, vector], loaded)
            values = loaded.load().to(cutlass.Float32)
            held.append(values)
            total += (values * values).reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0)

        total = cute.arch.warp_reduction_sum(total)
        if cutlass.const_expr(self.warps > 1):
            smem = cutlass.utils.SmemAllocator()
            sums = smem.allocate_tensor(cutlass.Float32, cute.make_layout((self.rows, self.warps)))
            if lane % 32 == 0:
                sums[group, lane // 32] = total
            cute.arch.sync_threads()
            total = cutlass.Float32(0.0)
            for warp in cutlass.range_constexpr(self.warps):
                total += sums[group, warp]
        scale = cute.math.rsqrt(total / self.n + eps)

        for step in cutlass.range_constexpr(self.steps):
            vector = lane + step * self.threads_per_row
            if inside and vector < self.vectors:
                weight = cute.make_rmem_tensor((self.elements,), self.dtype)
                cute.autovec_copy(ws[None, vector], weight)
                out = cute.make_rmem_tensor((self.elements,), self.dtype)
                out.store((held[step] * scale * weight.load().to(cutlass.Float32)).to(self.dtype))
                cute.autovec_copy(out, ys[None, vector])
