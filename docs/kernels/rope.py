# Rendered by tools/render_kernels.py for rope 8192x32x8x128x64x1 bf16 on sm_90a.
# Do not edit: change the template.
"""Rotary embedding of 32 heads of queries and 8 of keys, on sm_90a.

Heads of 128 bf16 elements, of which 128 are rotated, pairs half of that apart.
Arithmetic is in fp32, and every output is rounded once.
threads=256 heads_per_thread=1 pdl=off
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute

X = cutlass.BFloat16
TABLE = cutlass.Float32
HEADS_Q, HEADS_K = 32, 8
D = 128  # elements of a head
PAIRS = 64  # of a head that are rotated
ELEMENTS = 8  # of one memory access
UNITS = 8  # of a head
LANES = 8  # threads that share a head
HEADS_PER_THREAD = 1
MOST_ROWS = 2**31 - 1  # what indices of tokens may be below
ROWS_HELD = 7040  # of q, which L2 holds; of more rows the last come first, since it still has them
PASSING_FROM, PASSING_TO = 624, 14985  # rows between which all rows leave L2 first
EVICT_NORMAL, EVICT_FIRST = 0x1000000000000000, 0x12F0000000000000  # (CUTLASS, TMA::CacheHintSm90)
THREADS = 256


@cute.jit
def launch(
    q: cute.Tensor,
    k: cute.Tensor,
    cos: cute.Tensor,
    sin: cute.Tensor,
    q_out: cute.Tensor,
    k_out: cute.Tensor,
    stream: cuda.CUstream,
):
    """Rotate all heads on ``stream``: queries by the first CTAs, keys by the others."""
    tokens = q.shape[0]
    q_end = ctas(tokens, HEADS_Q, LANES)
    k_end = q_end + ctas(tokens, HEADS_K, LANES)
    kernel(
        q_end,
        tokens,
        without_rows(q),
        without_rows(cos),
        without_rows(sin),
        without_rows(q_out),
        without_rows(k),
        without_rows(k_out),
    ).launch(
        grid=(k_end, 1, 1),
        block=(THREADS, 1, 1),
        stream=stream,
        min_blocks_per_mp=1,
    )


def without_rows(tensor):
    """A tensor as the kernel takes it, which learns elsewhere how many rows there are."""
    layout = cute.make_layout((MOST_ROWS, *tensor.shape[1:]), stride=tensor.stride)
    return cute.make_tensor(tensor.iterator, layout)


def groups_of(heads):
    """Groups of threads among which the heads of a token are divided."""
    return (heads + HEADS_PER_THREAD - 1) // HEADS_PER_THREAD


def ctas(tokens, heads, lanes):
    """CTAs for ``lanes`` threads to each group of all tokens."""
    return (tokens * (groups_of(heads) * lanes) - 1) // THREADS + 1


def vector(tensor, at, align):
    """The ELEMENTS from element ``at``."""
    start = (tensor.iterator + at).toint()
    pointer = cute.make_ptr(tensor.element_type, start, cute.AddressSpace.gmem, assumed_align=align)
    return cute.make_tensor(pointer, cute.make_layout((ELEMENTS,)))


def of_head(tensor, token, head, at):
    """The vector at element ``at`` of a head; 64 bits, since a tensor may hold 2^31 elements."""
    start = cutlass.Int64(token) * tensor.stride[0] + cutlass.Int64(head) * tensor.stride[1]
    return vector(tensor, start + at, 16)


def load(source, policy=None):
    """Load a vector into registers."""
    here = cute.make_rmem_tensor((ELEMENTS,), source.element_type)
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


def paired(low, high):
    """The first and the second elements of the pairs in a unit's two vectors."""
    return low, high


def unpaired(first, second):
    """The two vectors of a unit with these pairs."""
    return first, second


@cute.jit
def rotate(
    index: cutlass.Int32,
    tokens: cutlass.Int32,
    x: cute.Tensor,
    y: cute.Tensor,
    cos: cute.Tensor,
    sin: cute.Tensor,
    heads: cutlass.Constexpr,
    policy: cutlass.Int64,
):
    """Rotate one unit of HEADS_PER_THREAD heads of a token; beyond the end load the last and store none."""
    groups = cutlass.const_expr(groups_of(heads))
    lane, rest = index % LANES, index // LANES
    group, place = rest % groups, rest // groups
    last = tokens - 1
    token = cutlass.min(place, last)
    token = cutlass.select_(last < ROWS_HELD, token, last - token)
    unit = lane
    low, high = unit * ELEMENTS, PAIRS + unit * ELEMENTS
    loaded = []
    for i in cutlass.range_constexpr(HEADS_PER_THREAD):
        head = cutlass.min(group + i * groups, heads - 1)
        loaded.append([load(of_head(x, token, head, at), policy) for at in (low, high)])
    row = cutlass.Int64(token)
    pair = unit * ELEMENTS
    cosines = widen(load(vector(cos, row * cos.stride[0] + pair, 16)))
    sines = widen(load(vector(sin, row * sin.stride[0] + pair, 16)))
    for i in cutlass.range_constexpr(HEADS_PER_THREAD):
        head = group + i * groups
        first, second = paired(widen(loaded[i][0]), widen(loaded[i][1]))
        turned, other = turn(first, second, cosines, sines)
        below, above = unpaired(turned, other)
        if place < tokens and head < heads:
            store(below, of_head(y, token, head, low), policy)
            store(above, of_head(y, token, head, high), policy)


def turn(first, second, cosines, sines):
    """The pairs, turned."""
    four = list(zip(first, second, cosines, sines, strict=True))
    return [a * c - b * s for a, b, c, s in four], [b * c + a * s for a, b, c, s in four]


@cute.kernel
def kernel(
    q_end: cutlass.Int32,
    tokens: cutlass.Int32,
    q: cute.Tensor,
    cos: cute.Tensor,
    sin: cute.Tensor,
    q_out: cute.Tensor,
    k: cute.Tensor,
    k_out: cute.Tensor,
):
    """A CTA has some heads of queries, or some of keys."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    policy = cutlass.Int64(EVICT_NORMAL)
    if tokens > PASSING_FROM and tokens <= PASSING_TO:
        policy = cutlass.Int64(EVICT_FIRST)
    at = block * THREADS + thread
    of_k = at - q_end * THREADS
    if block < q_end:
        rotate(at, tokens, q, q_out, cos, sin, HEADS_Q, policy)
    else:
        rotate(of_k, tokens, k, k_out, cos, sin, HEADS_K, policy)


KERNELS = (kernel,)


def fake_arguments():
    """Stand-ins for the arguments of ``launch``: dtypes, strides and alignment, with any number of tokens."""
    tokens = cute.sym_int()

    def heads(count):
        """Heads, contiguous each, that start at multiples of 16 bytes."""
        strides = [cute.sym_int64(divisibility=8) for _ in range(2)]
        return cute.runtime.make_fake_tensor(X, (tokens, count, D), stride=(*strides, 1), assumed_align=16)

    def table():
        pitch = cute.sym_int64(divisibility=4)
        return cute.runtime.make_fake_tensor(TABLE, (tokens, PAIRS), stride=(pitch, 1), assumed_align=16)

    return (
        heads(HEADS_Q),
        heads(HEADS_K),
        table(),
        table(),
        heads(HEADS_Q),
        heads(HEADS_K),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
