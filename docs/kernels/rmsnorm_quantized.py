# Rendered by tools/render_kernels.py for rmsnorm_quantized 16384x4096 bf16 residual residual_out on sm_90a.
# Do not edit: change the template.
"""y = h * rsqrt(mean(h^2) + eps) * weight over scale, h = x + residual, for each row, on sm_90a.

Rows of 4096 bf16 elements, fp32 arithmetic, rounded to e4m3 once.
threads_per_row=128 rows_per_cta=1 rows_per_thread=1 cluster_n=1 row_in=registers turn=1 pdl=off
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import memory

N = 4096  # elements of a row
X = cutlass.BFloat16
ELEMENTS = 8  # of one memory access
VECTORS = N // ELEMENTS
CLUSTER = 1  # CTAs that share a row
PART = (VECTORS + CLUSTER - 1) // CLUSTER  # vectors of one CTA
THREADS_PER_ROW = 128
STEPS = (PART + THREADS_PER_ROW - 1) // THREADS_PER_ROW  # vectors of one thread
WHOLE_STEPS = 4  # of these, how many are inside every row
GROUPS = 1  # groups of THREADS_PER_ROW threads, each on rows of its own
THREADS = GROUPS * THREADS_PER_ROW
WARPS = THREADS_PER_ROW // 32  # of a group
SUMS = WARPS * CLUSTER  # partial sums of a row
SLOTS = 4  # room for them, aligned
MOST_ROWS = 2**31 - 1  # what indices of rows may be below
ROWS_HELD = 7040  # of x, which L2 holds; of more rows the last come first, since it still has them
PASSING_FROM, PASSING_TO = 457, 10969  # rows between which all rows leave L2 first
EVICT_NORMAL, EVICT_FIRST = 0x1000000000000000, 0x12F0000000000000  # (CUTLASS, TMA::CacheHintSm90)
LARGEST = 448.0  # of e4m3
LEAST = 2.0**-126  # scale: the smallest normal number, so that a row of zeros has one too


@cute.jit
def launch(
    x: cute.Tensor,
    weight: cute.Tensor,
    residual: cute.Tensor,
    y: cute.Tensor,
    scale: cute.Tensor,
    residual_out: cute.Tensor,
    eps: cutlass.Float32,
    stream: cuda.CUstream,
):
    """Normalise and quantise the rows of ``x`` on ``stream``."""
    rows = x.shape[0]
    blocks = (rows - 1) // 1 + 1
    order = cutlass.Int32(0)
    if rows > ROWS_HELD:
        order = blocks - 1
    if rows > PASSING_FROM and rows <= PASSING_TO:
        order = ~order
    kernel(
        without_rows(x),
        rows,
        order,
        without_rows(residual),
        weight,
        without_rows(y),
        without_rows(scale),
        without_rows(residual_out),
        eps,
    ).launch(
        grid=(blocks, 1, 1),
        block=(THREADS, 1, 1),
        stream=stream,
        min_blocks_per_mp=1,
    )


def without_rows(tensor):
    """A tensor as the kernel takes it, which learns elsewhere how many rows there are."""
    layout = cute.make_layout((MOST_ROWS, *tensor.shape[1:]), stride=tensor.stride)
    return cute.make_tensor(tensor.iterator, layout)


def row_of(tensor, row, first_vector):
    """Row ``row`` from vector ``first_vector`` on; 64 bits, since a matrix may hold 2^31 elements."""
    return vectors_of(tensor.iterator + (row * tensor.stride[0] + first_vector * ELEMENTS), ELEMENTS, PART)


def added(x, residual):
    """x + residual in fp32."""
    pairs = zip(fp32(x), fp32(residual), strict=True)
    return [[a + b for a, b in zip(vx, vr, strict=True)] for vx, vr in pairs]


def weighted(h, weights):
    """h * weight in fp32."""
    pairs = zip(h, fp32(weights), strict=True)
    return [[v * w for v, w in zip(vs, ws, strict=True)] for vs, ws in pairs]


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
    """Load vectors ``first``, ``first`` + THREADS_PER_ROW and so on into registers, zero from ``last`` on."""
    found = [cute.make_rmem_tensor((ELEMENTS,), vectors.element_type) for _ in range(steps)]
    for step in cutlass.range_constexpr(steps):
        at, here = first + step * THREADS_PER_ROW, found[step]
        if cutlass.const_expr(step < whole):
            copy_in(vectors[None, at], here, policy)
        else:
            here.fill(0)
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


def sum_of_squares(vectors):
    """Sum of the squares of one thread's fp32 values: a chain for each place in a vector, added as a tree."""
    sums = [value * value for value in vectors[0]]
    for vector in vectors[1:]:
        sums = [value * value + so_far for value, so_far in zip(vector, sums, strict=True)]
    return sum_of(sums)


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
    group: cutlass.Int32,
    thread: cutlass.Int32,
):
    """Put this warp's numbers, which all lanes have, into ``pairs`` of the CTA, once per kernel."""
    warp, lane = thread // 32, thread % 32
    if lane == 0:
        pairs[0, warp] = first
        pairs[1, warp] = second
    cute.arch.sync_threads()


def pairs_of_row(pairs, thread, absent):
    """The numbers of all warps of the row."""
    return [[pairs[place, warp] for warp in range(SUMS)] for place in range(2)]


def max_of_row(values):
    """The largest of what :func:`pairs_of_row` found."""
    return max_of(values)


def sum_of_row(values):
    """The sum of what :func:`pairs_of_row` found."""
    total = values[0]
    for value in values[1:]:
        total += value
    return total


def largest_of(vectors):
    """The largest magnitude among one thread's values."""
    return max_of([cute.arch.fmax(value, -value) for vector in vectors for value in vector])


@cute.jit
def over_row(
    total: cutlass.Float32,
    largest: cutlass.Float32,
    pairs: cute.Tensor,
    group: cutlass.Int32,
    thread: cutlass.Int32,
):
    """The row's sum and its largest magnitude, from those of each warp."""
    share_pair(total, largest, pairs, group, thread)
    totals, magnitudes = pairs_of_row(pairs, thread, (0.0, 0.0))
    return sum_of_row(totals), max_of_row(magnitudes)


@cute.kernel
def kernel(
    x: cute.Tensor,
    rows: cutlass.Int32,
    order: cutlass.Int32,
    residual: cute.Tensor,
    weight: cute.Tensor,
    y: cute.Tensor,
    scale: cute.Tensor,
    residual_out: cute.Tensor,
    eps: cutlass.Float32,
):
    """A group of threads takes a row, all of it in registers."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    group, lane = 0, thread
    first = 0
    last = order ^ (order >> 31)
    block = abs(last - block)
    policy = cutlass.Int64(EVICT_NORMAL)
    if order < 0:
        policy = cutlass.Int64(EVICT_FIRST)
    row = cutlass.Int64(block)
    end = PART
    smem = memory.SmemAllocator()
    sums = smem.allocate_tensor(cutlass.Float32, cute.make_layout((2, SLOTS, GROUPS)), byte_alignment=16)
    x_in = load_vectors(row_of(x, row, first), lane, end, policy=policy)
    residual_in = load_vectors(row_of(residual, row, first), lane, end, policy=policy)
    weights = load_vectors(vectors_of(weight.iterator + first * ELEMENTS, ELEMENTS, PART), lane, end)
    h = added(x_in, residual_in)
    store_vectors(h, row_of(residual_out, row, first), lane, end, policy=policy)
    total = sum_over_warp(sum_of_squares(h))
    h = weighted(h, weights)
    largest = max_over_warp(largest_of(h))
    total, largest = over_row(total, largest, sums[None, None, group], group, lane)
    rms = cute.math.rsqrt(total * (1.0 / N) + eps, fastmath=True)
    scale_of_row = cute.arch.fmax(largest * rms * (1.0 / LARGEST), LEAST)
    if lane == 0:
        scale[row] = scale_of_row
    factor = rms / scale_of_row
    y_out = [[v * factor for v in vs] for vs in h]
    store_vectors(y_out, row_of(y, row, first), lane, end, policy=policy)


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
        cute.runtime.make_fake_tensor(X, (N,), stride=(1,), assumed_align=16),
        matrix(),
        cute.runtime.make_fake_tensor(
            cutlass.Float8E4M3FN,
            (rows, N),
            stride=(cute.sym_int64(divisibility=8), 1),
            assumed_align=8,
        ),
        cute.runtime.make_fake_tensor(cutlass.Float32, (rows,), stride=(1,), assumed_align=4),
        matrix(),
        cutlass.Float32(1e-6),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
