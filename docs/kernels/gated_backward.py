# Rendered by tools/render_kernels.py for gated_backward 8192x14336 bf16 on sm_90a.
# Do not edit: change the template.
"""Gradients of gate and up for act = silu, on sm_90a.

Rows of 14336 bf16 elements, gate and up side by side in one tensor.
Arithmetic is in fp32, and every output is rounded once.
access_bytes=8 threads=256 vectors_per_thread=1 ctas_per_sm=0 pdl=off
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute

N = 14336  # elements of a row of dout
X = cutlass.BFloat16
ELEMENTS = 4  # of one memory access
BYTES = ELEMENTS * X.width // 8
VECTORS = N // ELEMENTS  # of a row
THREADS = 256
STEPS = 1  # vectors that a thread has at a time
TILE = THREADS * STEPS  # vectors that a CTA has at a time
ROWS_HELD = 2011  # of dout, which L2 holds; of more rows the last come first, since it still has them
PASSING_FROM, PASSING_TO = 91, 2194  # rows between which all rows leave L2 first
EVICT_NORMAL, EVICT_FIRST = 0x1000000000000000, 0x12F0000000000000  # (CUTLASS, TMA::CacheHintSm90)


@cute.jit
def launch(
    dout: cute.Tensor,
    x: cute.Tensor,
    dx: cute.Tensor,
    stream: cuda.CUstream,
):
    """Compute all rows on ``stream``."""
    rows = dout.shape[0]
    tiles = cutlass.Int32((cutlass.Uint32(rows) * VECTORS - 1) // TILE + 1)
    # Where the first CTA begins, and how far on the next one does.
    first, step = cutlass.Int32(0), cutlass.Int32(TILE)
    if rows > ROWS_HELD:
        first, step = (tiles - 1) * step, -step
    # Inputs come first: an argument beyond one line of the constant cache costs loads another miss.
    kernel(
        place_of(dout),
        place_of(x),
        first,
        step,
        rows,
        place_of(dx),
    ).launch(
        grid=(tiles, 1, 1),
        block=(THREADS, 1, 1),
        stream=stream,
        min_blocks_per_mp=1,
    )


def place_of(tensor):
    """Where a matrix begins, and how many vectors lie between the end of a row and the next."""
    return tensor.iterator, tensor.stride[0] // ELEMENTS - VECTORS


def start_of(place, row, at, more):
    """The address of a vector, numbered over all rows; 64 bits, since a matrix may hold 2^31 elements."""
    begin, between = place
    before = cutlass.Int64(row) * between + cutlass.Int64(at)
    return begin.toint() + before * BYTES + BYTES * more


def vector(start):
    """The ELEMENTS from an address."""
    pointer = cute.make_ptr(X, start, cute.AddressSpace.gmem, assumed_align=BYTES)
    return cute.make_tensor(pointer, cute.make_layout((ELEMENTS,)))


def halves(place, row, at, more):
    """The vectors of gate and up."""
    start = start_of(place, row, at, more)
    return vector(start), vector(start + N * X.width // 8)


def load(source, policy):
    """Load a vector into registers."""
    here = cute.make_rmem_tensor((ELEMENTS,), X)
    copy_in(source, here, policy)
    return here


def store(values, target, policy):
    """Round fp32 values and store them."""
    wide = cute.make_rmem_tensor((ELEMENTS,), cutlass.Float32)
    for i in range(ELEMENTS):
        wide[i] = values[i]
    here = cute.make_rmem_tensor((ELEMENTS,), X)
    here.store(wide.load().to(X))
    copy_out(here, target, policy)


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


def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return cute.arch.rcp_approx(1.0 + cute.math.exp2(x * -1.4426950408889634, fastmath=True))


def slope(x):
    """The activation of x and its derivative."""
    s = sigmoid(x)
    y = x * s
    return y, s + y * (1.0 - s)


@cute.jit
def compute_tile(
    dout: tuple,
    x: tuple,
    dx: tuple,
    row: cutlass.Uint32,
    at: cutlass.Uint32,
    policy: cutlass.Int64,
):
    """Compute STEPS vectors of a row, from ``at`` on."""
    loaded = []
    for step in cutlass.range_constexpr(STEPS):
        dout_in = load(vector(start_of(dout, row, at, step * THREADS)), policy)
        x_in = [load(half, policy) for half in halves(x, row, at, step * THREADS)]
        loaded.append((dout_in, x_in))
    for step in cutlass.range_constexpr(STEPS):
        dout_in, x_in = loaded[step]
        gates, ups = unpacked(x_in)
        douts = widen(dout_in)
        slopes = [slope(g) for g in gates]
        dups = [d * y for d, (y, _) in zip(douts, slopes, strict=True)]
        dgates = [d * u * dy for d, u, (_, dy) in zip(douts, ups, slopes, strict=True)]
        dlow, dhigh = repacked(dgates, dups)
        low, high = halves(dx, row, at, step * THREADS)
        store(dlow, low, policy)
        store(dhigh, high, policy)


def unpacked(parts):
    """The fp32 values of gate and up in the two vectors of :func:`halves`."""
    low, high = [widen(part) for part in parts]
    return low, high


def repacked(gates, ups):
    """Values of gate and up as the two vectors of :func:`halves`."""
    return gates, ups


@cute.kernel
def kernel(
    dout: tuple,
    x: tuple,
    first: cutlass.Int32,
    step: cutlass.Int32,
    rows: cutlass.Int32,
    dx: tuple,
):
    """A CTA takes one tile; tiles lie ``step`` vectors apart, from ``first`` on."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    policy = cutlass.Int64(EVICT_NORMAL)
    if rows > PASSING_FROM and rows <= PASSING_TO:
        policy = cutlass.Int64(EVICT_FIRST)
    at = cutlass.Uint32(first + thread + block * step)
    compute_tile(dout, x, dx, at // VECTORS, at, policy)


KERNELS = (kernel,)


def fake_arguments():
    """Stand-ins for the arguments of ``launch``: dtypes, strides and alignment, with any number of rows."""
    rows = cute.sym_int()

    def matrix(columns):
        """Contiguous rows that start at multiples of 16 bytes."""
        pitch = cute.sym_int64(divisibility=8)
        return cute.runtime.make_fake_tensor(X, (rows, columns), stride=(pitch, 1), assumed_align=16)

    return (
        matrix(N),
        matrix(2 * N),
        matrix(2 * N),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
