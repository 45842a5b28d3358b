# Rendered by tools/render_kernels.py for activation 8192x16384 bf16 on sm_90a.
# Do not edit: change the template.
"""out = act(x) for act = gelu, on sm_90a.

Rows of 16384 bf16 elements.
Arithmetic is in fp32, and every output is rounded once.
access_bytes=8 threads=128 vectors_per_thread=4 ctas_per_sm=0 pdl=off
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute

N = 16384  # elements of a row of out
X = cutlass.BFloat16
ELEMENTS = 4  # of one memory access
BYTES = ELEMENTS * X.width // 8
VECTORS = N // ELEMENTS  # of a row
THREADS = 128
STEPS = 4  # vectors that a thread has at a time
TILE = THREADS * STEPS  # vectors that a CTA has at a time
ROWS_HELD = 1760  # of x, which L2 holds; of more rows the last come first, since it still has them
PASSING_FROM, PASSING_TO = 200, 4800  # rows between which all rows leave L2 first
EVICT_NORMAL, EVICT_FIRST = 0x1000000000000000, 0x12F0000000000000  # (CUTLASS, TMA::CacheHintSm90)


@cute.jit
def launch(
    x: cute.Tensor,
    out: cute.Tensor,
    stream: cuda.CUstream,
):
    """Compute all rows on ``stream``."""
    rows = x.shape[0]
    tiles = cutlass.Int32((cutlass.Uint32(rows) * VECTORS - 1) // TILE + 1)
    # Where the first CTA begins, and how far on the next one does.
    first, step = cutlass.Int32(0), cutlass.Int32(TILE)
    if rows > ROWS_HELD:
        first, step = (tiles - 1) * step, -step
    # Inputs come first: an argument beyond one line of the constant cache costs loads another miss.
    kernel(
        place_of(x),
        first,
        step,
        rows,
        place_of(out),
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


TAIL = (-0.07566165179014206, 0.2393118143081665, -0.12241274118423462, 0.1791081577539444)
TAIL += (0.06786781549453735, 0.10837419331073761, 0.10341227054595947, 0.0)


def normal(x):
    """The normal distribution function of x, and its density times the root of 2 pi.

    exp(x * x / 2) times the tail beyond |x| is a polynomial in 1 / (1 + 0.26 * |x|): TAIL, fitted up to 9 by
    least relative error, 3e-7. It takes half as many instructions as erf, and small tails keep their digits.
    """
    bell = cute.math.exp2(x * x * -0.7213475204444817, fastmath=True)
    t = cute.arch.rcp_approx(1.0 + 0.26 * cutlass.select_(x < 0.0, -x, x))
    tail = TAIL[0]
    for coefficient in TAIL[1:]:
        tail = tail * t + coefficient
    tail = tail * bell
    return cutlass.select_(x < 0.0, tail, 1.0 - tail), bell


def activate(x):
    """x * Phi(x)."""
    return x * normal(x)[0]


@cute.jit
def compute_tile(
    x: tuple,
    out: tuple,
    row: cutlass.Uint32,
    at: cutlass.Uint32,
    policy: cutlass.Int64,
):
    """Compute STEPS vectors of a row, from ``at`` on."""
    loaded = []
    for step in cutlass.range_constexpr(STEPS):
        x_in = load(vector(start_of(x, row, at, step * THREADS)), policy)
        loaded.append(x_in)
    for step in cutlass.range_constexpr(STEPS):
        x_in = loaded[step]
        outs = [activate(value) for value in widen(x_in)]
        store(outs, vector(start_of(out, row, at, step * THREADS)), policy)


@cute.kernel
def kernel(
    x: tuple,
    first: cutlass.Int32,
    step: cutlass.Int32,
    rows: cutlass.Int32,
    out: tuple,
):
    """A CTA takes one tile; tiles lie ``step`` vectors apart, from ``first`` on."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    policy = cutlass.Int64(EVICT_NORMAL)
    if rows > PASSING_FROM and rows <= PASSING_TO:
        policy = cutlass.Int64(EVICT_FIRST)
    at = cutlass.Uint32(first + thread + block * step)
    compute_tile(x, out, at // VECTORS, at, policy)


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
        matrix(N),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
