# Rendered by tools/render_kernels.py for gemm 1x6144x4096 bf16 kk on sm_90a.
# Do not edit: change the template.
"""D = A @ B of up to 1 row on sm_90a.

Sums in registers, without tensor cores: lanes of a warp lie along k, where A and B are contiguous.
bf16 operands, fp32 accumulation, bf16 output, layout tn.
algorithm=few_rows rows_per_cta=1 threads_per_cta=128 columns_per_warp=2 warps_along_k=4 unroll=2
cluster_k=1 use_pdl=true
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import memory

ROWS = 1  # of A and D, at most
COLUMNS = 2  # of D, for each warp
K_WARPS = 4  # warps of a CTA that share columns, each with a part of k
COLUMN_WARPS = 1
CLUSTER_K = 1  # CTAs that share columns
UNROLL = 2  # loads of a thread from each of its columns before it multiplies
AB, OUT = cutlass.BFloat16, cutlass.BFloat16

VECTOR = 128 // AB.width  # elements of one load
STRIDE = 32 * K_WARPS * CLUSTER_K  # vectors along k that all threads load at a time
THREADS = 32 * K_WARPS * COLUMN_WARPS
CTA_COLUMNS = COLUMNS * COLUMN_WARPS
RESULTS = ROWS * CTA_COLUMNS  # sums of a CTA


def reorder(tensor, modes):
    """The same memory with its modes in the kernel's order."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=modes))


@cute.jit
def launch(
    a: cute.Tensor,
    b: cute.Tensor,
    d: cute.Tensor,
    stream: cuda.CUstream,
):
    """Compute D on ``stream``."""
    m_a, m_b, m_d = reorder(a, [0, 1]), reorder(b, [1, 0]), reorder(d, [0, 1])
    tiles = (m_d.shape[1] - 1) // CTA_COLUMNS + 1
    kernel(
        m_a,
        m_b,
        m_d,
    ).launch(
        grid=(tiles, 1, 1),
        block=(THREADS, 1, 1),
        stream=stream,
        min_blocks_per_mp=1,
        use_pdl=True,
    )


def vectors_of(tensor, row):
    """A row along k as vectors; 64 bits, since a matrix may hold 2^31 elements."""
    start = cutlass.Int64(row) * tensor.stride[0]
    layout = cute.make_layout((VECTOR, tensor.shape[1] // VECTOR), stride=(1, VECTOR))
    return cute.make_tensor((tensor.iterator + start).align(16), layout)


def weight_load():
    """Load of weights that nobody reads again: they are to leave the L1 cache to A."""
    return cute.make_copy_atom(
        cute.nvgpu.CopyG2ROp(),
        AB,
        num_bits_per_copy=128,
        l1c_evict_priority=cute.nvgpu.CacheEvictionPriority.NO_ALLOCATE,
    )


def widen(vector):
    """The elements of one vector as fp32."""
    # bf16 is the upper half of fp32, so that a shift and a mask do it.
    words = cute.recast_tensor(vector, cutlass.Uint32)
    halves = []
    for i in range(VECTOR // 2):
        halves += [words[i] << 16, words[i] & cutlass.Uint32(0xFFFF0000)]
    return [half.bitcast(cutlass.Float32) for half in halves]


@cute.jit
def add_products(
    sums: cute.Tensor,
    rows: cutlass.Constexpr,
    columns: cutlass.Constexpr,
    first: cutlass.Int32,
    last: cutlass.Int32,
    whole: cutlass.Constexpr,
):
    """Add the products of UNROLL vectors of each column; unless all of them are there, zero from ``last`` on."""
    loaded = [[cute.make_rmem_tensor((VECTOR,), AB) for _ in columns] for _ in range(UNROLL)]
    for step in cutlass.range_constexpr(UNROLL):
        at = first + step * STRIDE
        if cutlass.const_expr(whole):
            for c in cutlass.range_constexpr(COLUMNS):
                cute.copy(weight_load(), columns[c][None, at], loaded[step][c])
        else:
            for c in cutlass.range_constexpr(COLUMNS):
                loaded[step][c].fill(0)
            if at < last:
                for c in cutlass.range_constexpr(COLUMNS):
                    cute.copy(weight_load(), columns[c][None, at], loaded[step][c])
    for step in cutlass.range_constexpr(UNROLL):
        at = first + step * STRIDE
        here = [cute.make_rmem_tensor((VECTOR,), AB) for _ in rows]
        for r in cutlass.range_constexpr(ROWS):
            if cutlass.const_expr(whole):
                cute.autovec_copy(rows[r][None, at], here[r])
            else:
                here[r].fill(0)
                if at < last:
                    cute.autovec_copy(rows[r][None, at], here[r])
        weights = [widen(vector) for vector in loaded[step]]
        for r in cutlass.range_constexpr(ROWS):
            values = widen(here[r])
            for c in cutlass.range_constexpr(COLUMNS):
                so_far = sums[c, r]
                for i in cutlass.range_constexpr(VECTOR):
                    so_far = weights[c][i] * values[i] + so_far
                sums[c, r] = so_far


def sum_over_warp(values, lane):
    """Sums over the lanes: each lane gets those of its own ``len(values) / 32`` places, or shares one.

    Halving the values with the lanes takes one exchange for each value, not five.
    """
    offset = 16
    while offset:
        if len(values) > 1:
            half = len(values) // 2
            upper = (lane & offset) != 0
            kept = []
            for low, high in zip(values[:half], values[half:]):
                mine, other = cutlass.select_(upper, high, low), cutlass.select_(upper, low, high)
                kept.append(mine + cute.arch.shuffle_sync_bfly(other, offset))
            values = kept
        else:
            values = [values[0] + cute.arch.shuffle_sync_bfly(values[0], offset)]
        offset //= 2
    return values


@cute.kernel
def kernel(
    m_a: cute.Tensor,
    m_b: cute.Tensor,
    m_d: cute.Tensor,
):
    """A warp takes COLUMNS columns and a part of k; the sums of the parts meet in shared memory."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    warp, lane = cute.arch.make_warp_uniform(thread // 32), thread % 32
    group, k_warp = warp // K_WARPS, warp % K_WARPS
    m, n = m_d.shape[0], m_d.shape[1]
    smem = memory.SmemAllocator()
    sums = smem.allocate_tensor(
        cutlass.Float32, cute.make_layout((RESULTS, K_WARPS)), byte_alignment=16
    )
    # The next kernel may take over multiprocessors as they fall free; it waits for our results itself.
    cute.arch.griddepcontrol_launch_dependents()
    # Everything above overlapped with the kernel before us; what follows may read what it wrote.
    cute.arch.griddepcontrol_wait()
    # Rows and columns beyond the last are computed as copies of it, and not stored.
    column = block * CTA_COLUMNS + group * COLUMNS
    columns = [vectors_of(m_b, cutlass.min(column + c, n - 1)) for c in range(COLUMNS)]
    rows = [vectors_of(m_a, cutlass.min(r, m - 1)) for r in range(ROWS)]
    vectors = m_a.shape[1] // VECTOR
    first = k_warp * 32 + lane
    acc = cute.make_rmem_tensor((COLUMNS, ROWS), cutlass.Float32)
    acc.fill(0.0)
    rounds = vectors // (UNROLL * STRIDE)
    for _ in cutlass.range(rounds, unroll=1):
        add_products(acc, rows, columns, first, vectors, True)
        first += UNROLL * STRIDE
    if rounds * (UNROLL * STRIDE) < vectors:
        add_products(acc, rows, columns, first, vectors, False)
    values = [acc[c, r] for r in range(ROWS) for c in range(COLUMNS)]
    values = sum_over_warp(values, lane)
    place = lane // 16
    if lane % 16 == 0:
        sums[place // COLUMNS * CTA_COLUMNS + group * COLUMNS + place % COLUMNS, k_warp] = values[0]
    cute.arch.sync_threads()
    for turn in cutlass.range_constexpr((RESULTS + THREADS - 1) // THREADS):
        result = turn * THREADS + thread
        if result < RESULTS:
            total = sums[result, 0]
            for other in cutlass.range_constexpr(1, K_WARPS):
                total += sums[result, other]
            finish(m_d, total, result // CTA_COLUMNS, block * CTA_COLUMNS + result % CTA_COLUMNS, m, n)


@cute.jit
def finish(
    m_d: cute.Tensor,
    total: cutlass.Float32,

    row: cutlass.Int32,
    column: cutlass.Int32,
    m: cutlass.Int32,
    n: cutlass.Int32,
):
    """Epilogue of one sum, if its place is inside D."""
    if row < m and column < n:
        found = cute.make_rmem_tensor((1,), cutlass.Float32)
        out = cute.make_rmem_tensor((1,), OUT)
        found[0] = total
        value = found.load()
        out.store(value.to(OUT))
        m_d[row, column] = out[0]


KERNELS = (kernel,)


def fake_arguments():
    """Stand-ins for the arguments of ``launch``: dtypes, strides and alignment, with symbolic extents."""
    m, n, k = cute.sym_int(), cute.sym_int(divisibility=8), cute.sym_int(divisibility=8)

    def matrix(dtype, rows, cols, contiguous, align):
        """A matrix contiguous along mode ``contiguous``, every other stride ``align`` bytes."""
        pitch = [cute.sym_int64(divisibility=align * 8 // dtype.width) for _ in range(1)]
        stride = (1, pitch[0]) if contiguous == 0 else (pitch[0], 1)
        shape = (rows, cols)
        return cute.runtime.make_fake_tensor(dtype, shape, stride=stride, assumed_align=align)

    return (
        matrix(AB, m, k, 1, 16),
        matrix(AB, k, n, 0, 16),
        matrix(OUT, m, n, 1, 16),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
