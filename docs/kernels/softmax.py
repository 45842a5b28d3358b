# Rendered by tools/render_kernels.py for softmax 1024x131072 bf16 on sm_90a.
# Do not edit: change the template.
"""y = exp(x - max(x)) / sum(exp(x - max(x))) for each row, on sm_90a.

Rows of 131072 bf16 elements, fp32 arithmetic, rounded once.
threads_per_row=256 rows_per_cta=1 rows_per_thread=1 cluster_n=8 row_in=smem turn=2 pdl=off
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import memory
from cutlass.experimental import primitives

N = 131072  # elements of a row
X = cutlass.BFloat16
ELEMENTS = 8  # of one memory access
VECTORS = N // ELEMENTS
CLUSTER = 8  # CTAs that share a row
PART = (VECTORS + CLUSTER - 1) // CLUSTER  # vectors of one CTA
THREADS_PER_ROW = 256
STEPS = (PART + THREADS_PER_ROW - 1) // THREADS_PER_ROW  # vectors of one thread
WHOLE_STEPS = 8  # of these, how many are inside every row
GROUPS = 1  # groups of THREADS_PER_ROW threads, each on rows of its own
THREADS = GROUPS * THREADS_PER_ROW
TURN = 2  # vectors that a thread holds at a time
WARPS = THREADS_PER_ROW // 32  # of a group
SUMS = WARPS * CLUSTER  # partial sums of a row
SLOTS = 64  # room for them, aligned
MOST_ROWS = 2**31 - 1  # what indices of rows may be below
ROWS_HELD = 120  # of x, which L2 holds; of more rows the last come first, since it still has them
LOG2_E = 1.4426950408889634
LOWEST = -3.4028234663852886e38  # of fp32; stands for -inf, which cannot be subtracted from itself


@cute.jit
def launch(
    x: cute.Tensor,
    y: cute.Tensor,
    stream: cuda.CUstream,
):
    """Take the softmax of the rows of ``x`` on ``stream``."""
    rows = x.shape[0]
    blocks = (rows - 1) // 1 + 1
    order = cutlass.Int32(0)
    if rows > ROWS_HELD:
        order = blocks - 1
    kernel(
        without_rows(x),
        rows,
        order,
        without_rows(y),
    ).launch(
        grid=(blocks * CLUSTER, 1, 1),
        block=(THREADS, 1, 1),
        cluster=(CLUSTER, 1, 1),
        stream=stream,
        min_blocks_per_mp=6,
        preferred_smem_carveout=100,
    )


def without_rows(tensor):
    """A tensor as the kernel takes it, which learns elsewhere how many rows there are."""
    layout = cute.make_layout((MOST_ROWS, *tensor.shape[1:]), stride=tensor.stride)
    return cute.make_tensor(tensor.iterator, layout)


def row_of(tensor, row, first_vector):
    """Row ``row`` from vector ``first_vector`` on; 64 bits, since a matrix may hold 2^31 elements."""
    return vectors_of(tensor.iterator + (row * tensor.stride[0] + first_vector * ELEMENTS), ELEMENTS, PART)


def vectors_of(start, elements, count):
    """The memory from ``start`` as ``count`` vectors, each aligned like the first, up to 16 bytes."""
    align = min(16, elements * start.dtype.width // 8)
    return cute.make_tensor(start.align(align), cute.make_layout((elements, count), stride=(1, elements)))


@cute.jit
def load_vectors(
    vectors: cute.Tensor,
    first: cutlass.Int32,
    last: cutlass.Int32,
    steps: cutlass.Constexpr = STEPS,
    whole: cutlass.Constexpr = WHOLE_STEPS,
    policy: cutlass.Constexpr = None,
):
    """Load vectors ``first``, ``first`` + THREADS_PER_ROW and so on into registers, -inf from ``last`` on."""
    found = [cute.make_rmem_tensor((ELEMENTS,), vectors.element_type) for _ in range(steps)]
    for step in cutlass.range_constexpr(steps):
        at, here = first + step * THREADS_PER_ROW, found[step]
        if cutlass.const_expr(step < whole):
            copy_in(vectors[None, at], here, policy)
        else:
            here.fill(-cutlass.Float32.inf)
            if at < last:
                copy_in(vectors[None, at], here, policy)
    return found


@cute.jit
def store_vectors(
    values: cutlass.Constexpr,
    vectors: cute.Tensor,
    first: cutlass.Int32,
    last: cutlass.Int32,
    whole: cutlass.Constexpr = WHOLE_STEPS,
    policy: cutlass.Constexpr = None,
):
    """Round fp32 values to the dtype of ``vectors`` and store them where :func:`load_vectors` loads."""
    for step in cutlass.range_constexpr(len(values)):
        at = first + step * THREADS_PER_ROW
        wide = cute.make_rmem_tensor((ELEMENTS,), cutlass.Float32)
        for i in cutlass.range_constexpr(ELEMENTS):
            wide[i] = values[step][i]
        here = cute.make_rmem_tensor((ELEMENTS,), vectors.element_type)
        here.store(wide.load().to(vectors.element_type))
        if cutlass.const_expr(step < whole):
            copy_out(here, vectors[None, at], policy)
        else:
            if at < last:
                copy_out(here, vectors[None, at], policy)


def fp32(vectors):
    """Values in registers as fp32: a list for every vector."""
    return [widen(vector) for vector in vectors]


def widen(vector):
    """The elements of one vector as fp32."""
    if vector.element_type is cutlass.BFloat16:
        # bf16 is the upper half of fp32, so that a shift and a mask do it.
        words = cute.recast_tensor(vector, cutlass.Uint32)
        halves = []
        for i in range(ELEMENTS // 2):
            halves += [words[i] << 16, words[i] & cutlass.Uint32(0xFFFF0000)]
        return [half.bitcast(cutlass.Float32) for half in halves]
    values = vector.load().to(cutlass.Float32)
    return [values[i] for i in range(ELEMENTS)]


def copy_in(source, target, policy):
    """Load a vector to registers; ``policy`` is for L2, None if it is not in device memory or L2 decides."""
    if policy is None:
        cute.autovec_copy(source, target)
    else:
        bits = ELEMENTS * source.element_type.width
        atom = cute.make_copy_atom(cute.nvgpu.CopyG2ROp(), source.element_type, num_bits_per_copy=bits)
        cute.copy(atom, source, target, cache_policy=policy)


def copy_out(source, target, policy):
    """Store a vector from registers; ``policy`` is for L2, None if it decides."""
    if policy is None:
        cute.autovec_copy(source, target)
    else:
        bits = ELEMENTS * target.element_type.width
        atom = cute.make_copy_atom(cute.nvgpu.CopyR2GOp(), target.element_type, num_bits_per_copy=bits)
        cute.copy(atom, source, target, cache_policy=policy)


def sum_of(values):
    """Sum of values of one thread, a power of two of them, added as a tree."""
    while len(values) > 1:
        values = [a + b for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def sum_over_warp(value):
    """Sum over the warp, in every lane of it."""
    return cute.arch.warp_reduction_sum(value, threads_in_group=32)


def max_of(values):
    """The largest of one thread's fp32 values, found as a tree."""
    while len(values) > 1:
        pairs = zip(values[::2], values[1::2], strict=False)
        values = [cute.arch.fmax(a, b) for a, b in pairs] + values[len(values) // 2 * 2 :]
    return values[0]


def max_over_warp(value):
    """The largest in the warp, in every lane of it."""
    return cute.arch.warp_reduction_max(value, threads_in_group=32)


@cute.jit
def share_pair(
    first: cutlass.Float32,
    second: cutlass.Float32,
    pairs: cute.Tensor,
    arrived: cute.Pointer,
    rank: cutlass.Int32,
    group: cutlass.Int32,
    thread: cutlass.Int32,
):
    """Put this warp's numbers, which all lanes have, into ``pairs`` of all CTAs, once per kernel."""
    warp, lane = thread // 32, thread % 32
    # A barrier in each CTA of the cluster counts the bytes that come from all of them.
    if thread == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(arrived, SUMS * 8)
    if lane < CLUSTER:
        slot = pairs.iterator + 2 * (rank * WARPS + warp)
        bits = (first.bitcast(cutlass.Int32), second.bitcast(cutlass.Int32))
        cute.arch.store_async_dsmem(slot.align(8), bits, arrived, lane)
    cute.arch.mbarrier_wait(arrived, 0)


@cute.jit
def pairs_of_row(pairs: cute.Tensor, thread: cutlass.Int32, absent: cutlass.Constexpr):
    """The numbers of this lane's and every 32nd warp, ``absent`` beyond the last."""
    found = cute.make_rmem_tensor((2, (SUMS + 31) // 32), cutlass.Float32)
    for turn in cutlass.range_constexpr((SUMS + 31) // 32):
        warp = turn * 32 + thread % 32
        found[0, turn] = pairs[0, warp]
        found[1, turn] = pairs[1, warp]
    return [[found[place, turn] for turn in range((SUMS + 31) // 32)] for place in range(2)]


def max_of_row(values):
    """The largest of what :func:`pairs_of_row` found in all lanes."""
    return cute.arch.warp_reduction_max(max_of(values))


def sum_of_row(values):
    """The sum of what :func:`pairs_of_row` found in all lanes."""
    total = values[0]
    for value in values[1:]:
        total += value
    return cute.arch.warp_reduction_sum(total)


def power(value, peak):
    """exp(value - peak); the difference is rounded once, so that it is exact where it matters."""
    return cute.math.exp2((value - peak) * LOG2_E, fastmath=True)


def powers(vectors, peak):
    """:func:`power` of one thread's values."""
    return [[power(value, peak) for value in vector] for vector in vectors]


def peak_of(vectors):
    """The largest of one thread's values."""
    return max_of([value for vector in vectors for value in vector])


def sum_of_vectors(vectors):
    """Sum of one thread's values: a chain for each place in a vector, added as a tree."""
    sums = vectors[0]
    for vector in vectors[1:]:
        sums = [so_far + value for so_far, value in zip(sums, vector, strict=True)]
    return sum_of(sums)


@cute.jit
def over_row(
    peak: cutlass.Float32,
    total: cutlass.Float32,
    pairs: cute.Tensor,
    arrived: cute.Pointer,
    rank: cutlass.Int32,
    group: cutlass.Int32,
    thread: cutlass.Int32,
):
    """The row's largest value, and its sum of powers relative to it, from those of each warp."""
    share_pair(peak, total, pairs, arrived, rank, group, thread)
    peaks, totals = pairs_of_row(pairs, thread, (LOWEST, 0.0))
    highest = max_of_row(peaks)
    return highest, sum_of_row([t * power(p, highest) for p, t in zip(peaks, totals, strict=True)])


@cute.jit
def add_powers(
    x: cute.Tensor,
    at: cutlass.Int32,
    end: cutlass.Int32,
    sums: cute.Tensor,
    whole: cutlass.Constexpr,
):
    """Add the powers of TURN vectors to ``sums``, one for each place in a vector, relative to its last:
    the largest value so far."""
    h = fp32(load_vectors(x, at, end, TURN, whole))
    peak = cute.arch.fmax(sums[ELEMENTS], peak_of(h))
    before = power(sums[ELEMENTS], peak)
    sums[ELEMENTS] = peak
    for i in cutlass.range_constexpr(ELEMENTS):
        sums[i] = sums[i] * before
    for vector in powers(h, peak):
        for i in cutlass.range_constexpr(ELEMENTS):
            sums[i] = sums[i] + vector[i]


@cute.jit
def scale_powers(
    x: cute.Tensor,
    y: cute.Tensor,
    highest: cutlass.Float32,
    factor: cutlass.Float32,
    at: cutlass.Int32,
    end: cutlass.Int32,
    whole: cutlass.Constexpr,
):
    """Read TURN vectors again and store their powers times ``factor``."""
    h = fp32(load_vectors(x, at, end, TURN, whole))
    y_out = [[v * factor for v in vs] for vs in powers(h, highest)]
    store_vectors(y_out, y, at, end, whole)


@cute.jit
def fetch(
    source: cute.Tensor, target: cute.Tensor, at: cutlass.Int32, size: cutlass.Int32, loaded: cute.Pointer
):
    """Start the copy of ``size`` bytes from vector ``at`` on to shared memory; the barrier counts them."""
    primitives.cp_async_bulk_shared_cluster_global(
        target[None, at].iterator.llvm_ptr, source[None, at].iterator.llvm_ptr, loaded.llvm_ptr, size
    )


@cute.kernel
def kernel(
    x: cute.Tensor,
    rows: cutlass.Int32,
    order: cutlass.Int32,
    y: cute.Tensor,
):
    """A cluster takes a row, TURN vectors of a thread at a time."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    rank = block % CLUSTER
    first = rank * PART
    last = order
    block = block // CLUSTER
    if last > 0:
        block = last - block
    row = cutlass.Int64(block)
    end = PART
    smem = memory.SmemAllocator()
    x_part = smem.allocate_tensor(X, cute.make_layout((ELEMENTS, PART)), byte_alignment=16)
    sums = smem.allocate_tensor(cutlass.Float32, cute.make_layout((2, SLOTS, 1)), byte_alignment=16)
    loaded = smem.allocate_array(cutlass.Int64, 4)
    arrived = smem.allocate_array(cutlass.Int64, 1)
    if thread == 0:
        cute.arch.mbarrier_init(arrived, 1)
        for turn in cutlass.range_constexpr(4):
            cute.arch.mbarrier_init(loaded + turn, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.cluster_arrive_relaxed()
    x_row = row_of(x, row, first)
    if thread == 0:
        for turn in cutlass.range_constexpr(4):
            at = turn * TURN * THREADS_PER_ROW
            size = cutlass.max(0, cutlass.min(TURN * THREADS_PER_ROW, end - at)) * (ELEMENTS * X.width // 8)
            cute.arch.mbarrier_arrive_and_expect_tx(loaded + turn, 1 * size)
            if size > 0:
                fetch(x_row, x_part, at, size, loaded + turn)
    cute.arch.cluster_wait()
    mine = cute.make_rmem_tensor((ELEMENTS + 1,), cutlass.Float32)
    mine.fill(0.0)
    mine[ELEMENTS] = cutlass.Float32(LOWEST)
    for turn in cutlass.range(4, unroll=1):
        cute.arch.mbarrier_wait(loaded + turn, 0)
        add_powers(x_part, thread + turn * (TURN * THREADS_PER_ROW), end, mine, TURN)
    peak = max_over_warp(mine[ELEMENTS])
    total = sum_over_warp(sum_of([mine[i] for i in range(ELEMENTS)]) * power(mine[ELEMENTS], peak))
    highest, total = over_row(peak, total, sums[None, None, 0], arrived, rank, 0, thread)
    factor = cute.arch.rcp_approx(total)
    y_row = row_of(y, row, first)
    for turn in cutlass.range(4, unroll=1):
        scale_powers(x_part, y_row, highest, factor, thread + turn * (TURN * THREADS_PER_ROW), end, TURN)


KERNELS = (kernel,)


def fake_arguments():
    """Stand-ins for the arguments of ``launch``: dtypes, strides and alignment, with any number of rows."""
    rows = cute.sym_int()

    def matrix():
        """Rows of N elements, contiguous each, that start at multiples of 16 bytes."""
        pitch = cute.sym_int64(divisibility=8)
        return cute.runtime.make_fake_tensor(X, (rows, N), stride=(pitch, 1), assumed_align=16)

    return (
        matrix(),
        matrix(),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
