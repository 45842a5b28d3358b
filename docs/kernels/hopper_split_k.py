# Rendered by tools/render_kernels.py for gemm 64x2112x7168 bf16 kk bias=n act=relu on sm_90a.
# Do not edit: change the template.
"""D = act(A @ B + bias) on sm_90a.

Persistent, warp-specialised WGMMA with TMA.
bf16 operands, fp32 accumulation, bf16 output, layout tn.
tile_shape_mn=64x64 tile_k=128 cluster_shape_mn=1x1 mma_warpgroups=1 pingpong=false swap_ab=false
use_tma_store=false use_pdl=false stream_k=false reduction=fixed split_k=2
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import memory, tensor_utils
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.pipeline import pipeline_init_arrive, pipeline_init_wait
from cutlass.utils import hopper_helpers as sm90

TILE_M, TILE_N, TILE_K = 64, 64, 128
CLUSTER_M, CLUSTER_N = 1, 1
GPCS, SMALL = 8, 1  # GPCs that take turns, and which of them is full first
FULL = 8 // (CLUSTER_M * CLUSTER_N)  # clusters of that one
PAIRS = 4  # groups of two SMs, which take turns first
APART = 2 * (PAIRS + GPCS)  # clusters that start while they do
LATE = APART + (FULL - 2) * GPCS  # clusters that start before the small GPC is full
KNOWN = 132  # clusters at a time on GPUs whose turns are known
MMA_WGS = 1  # warpgroups that share one tile
GROUPS = 1  # sets of such warpgroups, each on its own tile
STAGES = 7
EPI_N, EPI_STAGES = 32, 2  # columns and buffers of one warpgroup's store
AB, ACC, OUT = cutlass.BFloat16, cutlass.Float32, cutlass.BFloat16
A_MAJOR = OperandMajorMode.K
B_MAJOR = OperandMajorMode.K
A_LAYOUT = tensor_utils.LayoutEnum.ROW_MAJOR
B_LAYOUT = tensor_utils.LayoutEnum.ROW_MAJOR
D_LAYOUT = tensor_utils.LayoutEnum.ROW_MAJOR

# How L2 is to keep what TMA loads (CUTLASS, TMA::CacheHintSm90).
EVICT_NORMAL, EVICT_FIRST, EVICT_LAST = 0x1000000000000000, 0x12F0000000000000, 0x14F0000000000000
WG = 128  # threads of a warpgroup
THREADS = WG * (1 + MMA_WGS * GROUPS)
REPS = TILE_M // (64 * MMA_WGS)  # 64-row slabs that one warpgroup owns
SUBTILES = TILE_N // EPI_N
FRAGMENT = 64 * EPI_N // WG  # accumulators of one thread in a 64 x EPI_N subtile
CHUNKS = REPS * TILE_N * 64 // WG // 4  # 16-byte pieces of one thread's accumulators
RED_N = 8  # columns of a 64-row piece of a tile, which the reduction finishes as one
PIECES = TILE_N // RED_N
UNITS = MMA_WGS * REPS * PIECES
RED_FRAGMENT = 64 * RED_N // WG
ADDERS = 4  # warpgroups of a thread block there; a piece has one, two or all of them


def smem_layout(layout, major, rows, stages):
    """Swizzled staged layout of one operand's tiles."""
    k_major = major == OperandMajorMode.K
    atom = warpgroup.make_smem_layout_atom(
        sm90.get_smem_layout_atom(layout, AB, TILE_K if k_major else rows), AB
    )
    return cute.tile_to_shape(atom, (rows, TILE_K, stages), order=(0, 1, 2) if k_major else (1, 0, 2))


def load_atom(tensor, smem, rows, multicast):
    """TMA load of a rows x TILE_K tile, shared by ``multicast`` thread blocks."""
    op = cpasync.CopyBulkTensorTileG2SMulticastOp() if multicast > 1 else cpasync.CopyBulkTensorTileG2SOp()
    return cpasync.make_tiled_tma_atom(
        op, tensor, cute.select(smem, mode=[0, 1]), (rows, TILE_K), num_multicast=multicast
    )


def tiles_along_k(tma, tensor, smem, first, rows, part, parts):
    """Stages, and tiles of ``rows`` rows from ``first`` on: what block ``part`` of ``parts`` loads."""
    tiles = cute.local_tile(cute.domain_offset((first, 0), tensor), (rows, TILE_K), (0, None))
    return cpasync.tma_partition(
        tma, part, cute.make_layout(parts), cute.group_modes(smem, 0, 2), cute.group_modes(tiles, 0, 2)
    )


def reorder(tensor, modes):
    """The same memory with its modes in the kernel's order."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=modes))


@cute.jit
def launch(
    a: cute.Tensor,
    b: cute.Tensor,
    d: cute.Tensor,
    bias: cute.Tensor,
    workspace: cute.Tensor,
    clusters: cutlass.Int32,
    swizzle: cutlass.Int32,
    along_m: cutlass.Int32,
    splits: cutlass.Int32,
    stream: cuda.CUstream,
):
    """Compute D on ``stream`` with at most ``clusters`` resident clusters."""
    m_a, m_b, m_d = reorder(a, [0, 1]), reorder(b, [1, 0]), reorder(d, [0, 1])
    mma = sm90.make_trivial_tiled_mma(AB, AB, A_MAJOR, B_MAJOR, ACC, (MMA_WGS, 1, 1), tiler_mn=(64, TILE_N))
    s_a = smem_layout(A_LAYOUT, A_MAJOR, TILE_M, STAGES)
    s_b = smem_layout(B_LAYOUT, B_MAJOR, TILE_N, STAGES)
    tma_a, g_a = load_atom(m_a, s_a, TILE_M, CLUSTER_N)
    tma_b, g_b = load_atom(m_b, s_b, TILE_N, CLUSTER_M)
    # Clusters of tiles are walked along the major axis in bands that are `swizzle` wide.
    tiles_m = cute.ceil_div(m_d.shape[0], TILE_M * CLUSTER_M)
    tiles_n = cute.ceil_div(m_d.shape[1], TILE_N * CLUSTER_N)
    major, minor = tiles_n, tiles_m
    if along_m != 0:
        major, minor = tiles_m, tiles_n
    band = cutlass.min(swizzle, minor)
    bands = cute.ceil_div(minor, band)
    tiles = tiles_m * tiles_n
    total = tiles * splits
    blocks_m, blocks_n = tiles_m * CLUSTER_M, tiles_n * CLUSTER_N
    blocks = blocks_m * blocks_n
    # The first work units of GPCs, a byte each: by the turns of clusters that start early, and of late ones.
    early_units, late_units = cutlass.Int64(0), cutlass.Int64(0)
    if clusters == KNOWN:
        units = cutlass.min(clusters, total)
        early, late = cutlass.min(units, LATE), cutlass.max(units - LATE, 0)
        pairs = cutlass.min(early, APART)
        early = early - pairs
        next_unit = pairs // (PAIRS + GPCS) * PAIRS + cutlass.min(pairs % (PAIRS + GPCS), PAIRS)
        for gpc in cutlass.range_constexpr(GPCS):
            early_units = early_units | (cutlass.Int64(next_unit) << (8 * gpc))
            turn = gpc if gpc < SMALL else gpc - 1
            if cutlass.const_expr(gpc != SMALL):
                late_units = late_units | (cutlass.Int64(next_unit + FULL) << (8 * turn))
                next_unit += (late + (GPCS - 2 - turn)) // (GPCS - 1)
            next_unit += (early + (GPCS - 1 - gpc)) // GPCS
            next_unit += (pairs + (GPCS - 1 - gpc)) // (PAIRS + GPCS)
    # Where D is short, few clusters read a tile of the long operand: it leaves L2 first, the other one stays.
    # Not where D is more than an eighth of that operand: there it takes longer.
    keep_a, keep_b = cutlass.Int64(EVICT_NORMAL), cutlass.Int64(EVICT_NORMAL)
    short = cutlass.min(512, m_a.shape[1] * AB.width // (8 * OUT.width))
    if m_d.shape[1] <= short and 8 * m_d.shape[1] <= m_d.shape[0] and tiles_n <= 4:
        keep_a, keep_b = cutlass.Int64(EVICT_FIRST), cutlass.Int64(EVICT_LAST)
    if m_d.shape[0] <= short and 8 * m_d.shape[0] <= m_d.shape[1] and tiles_m <= 4:
        keep_a, keep_b = cutlass.Int64(EVICT_LAST), cutlass.Int64(EVICT_FIRST)
    kernel(
        tma_a,
        g_a,
        tma_b,
        g_b,
        mma,
        s_a,
        s_b,
        m_d,
        workspace,
        cute.fast_divmod_create_divisor_v2(splits),
        splits,
        blocks,
        blocks_m,
        cute.fast_divmod_create_divisor_v2(tiles),
        cute.fast_divmod_create_divisor_v2(band * major),
        cute.fast_divmod_create_divisor_v2(band),
        cute.fast_divmod_create_divisor_v2(minor - (bands - 1) * band),
        band,
        bands - 1,
        along_m,
        total,
        early_units,
        late_units,
        keep_a,
        keep_b,
    ).launch(
        grid=(CLUSTER_M, CLUSTER_N, cutlass.min(clusters, total)),
        block=(THREADS, 1, 1),
        cluster=(CLUSTER_M, CLUSTER_N, 1),
        stream=stream,
        min_blocks_per_mp=1,  # without it ptxas drops setmaxnreg and aims for fewer registers
    )
    # Several warpgroups on a piece add faster as long as all of them run at once: 16 to a multiprocessor,
    # of which clusters leave some out.
    log_adders = cutlass.Int32(0)
    room = clusters * (CLUSTER_M * CLUSTER_N * 18)
    for log in cutlass.range_constexpr(1, 3):
        if 2**log <= splits and 2**log * blocks * UNITS <= room:
            log_adders = cutlass.Int32(log)
    units = ((UNITS << log_adders) + ADDERS - 1) // ADDERS
    reduce_kernel(
        m_d,
        bias,
        workspace,
        splits,
        log_adders,
        blocks,
        cute.fast_divmod_create_divisor_v2(blocks_m),
    ).launch(grid=(blocks, units, 1), block=(WG, ADDERS, 1), stream=stream, use_pdl=True)


@cute.jit
def own_unit(cluster: cutlass.Int32, early_units: cutlass.Int64, late_units: cutlass.Int64):
    """The first work unit of a cluster: those of one GPC follow each other."""
    late = cluster - LATE
    place = (late * 9363) >> 16  # late // 7 of what is less than a thousand
    turn, firsts = late - 7 * place, late_units
    if late < 0:
        early = cluster - 2 * PAIRS
        turn, place, firsts = early & 7, early >> 3, early_units
        if cluster < APART:
            place = (cluster * 5462) >> 16  # cluster // 12
            turn = cluster - place * (PAIRS + GPCS) - PAIRS
    unit = cutlass.Int32((firsts >> cutlass.Int64(8 * cutlass.max(turn, 0))) & 255) + place
    if turn < 0:
        unit = cluster - place * GPCS
    if early_units == 0:  # turns are not known
        unit = cluster
    return unit


@cute.jit
def locate(
    work: cutlass.Int32,
    div_tiles: cute.FastDivmodDivisorV2,
    div_band: cute.FastDivmodDivisorV2,
    div_full: cute.FastDivmodDivisorV2,
    div_last: cute.FastDivmodDivisorV2,
    band: cutlass.Int32,
    last_band: cutlass.Int32,
    along_m: cutlass.Int32,
):
    """Cluster coordinates of a work unit and the rest of its number."""
    rest, work = divmod(work, div_tiles)
    at, within = divmod(work, div_band)
    major, minor = divmod(within, div_full)
    if at == last_band:
        major, minor = divmod(within, div_last)
    minor = minor + at * band
    cm, cn = minor, major
    if along_m != 0:
        cm, cn = major, minor
    return rest, cm, cn


@cute.jit
def load_bias(
    bias: cute.Tensor,
    m_g: cutlass.Int32,
    n_g: cutlass.Int32,
    rows: cutlass.Int32,
    cols: cutlass.Int32,
    count: cutlass.Constexpr,
):
    """The bias at the places of one accumulator fragment, zero outside, as fp32."""
    found = cute.make_rmem_tensor((count,), OUT)
    found.fill(0)
    for v in cutlass.range_constexpr(count):
        n = n_g + v // 4 * 8 + v % 2
        if n < cols:
            found[v] = bias[n]
    return found.load().to(cutlass.Float32)


def activate(x):
    """max(x, 0), on fp32."""
    return cute.where(x < 0.0, cute.full_like(x, 0.0), x)  # NaN stays NaN


@cute.jit
def store_direct(
    m_d: cute.Tensor,
    out: cute.Tensor,
    m_g: cutlass.Int32,
    n_g: cutlass.Int32,
    rows: cutlass.Int32,
    cols: cutlass.Int32,
    count: cutlass.Constexpr,
):
    """Write one fragment from registers, leaving out what lies outside D."""
    # The row pitch is a multiple of 16 bytes, so neighbouring columns go out as one aligned pair.
    for half in cutlass.range_constexpr(2):
        if m_g + half * 8 < rows:
            for block in cutlass.range_constexpr(count // 4):
                n = n_g + block * 8
                if n < cols:
                    pair = cute.make_rmem_tensor((2,), OUT)
                    pair[0], pair[1] = out[block * 4 + half * 2], out[block * 4 + half * 2 + 1]
                    row = m_d[(m_g + half * 8, None)]
                    where = cute.assume(n, divby=2)
                    cute.autovec_copy(pair, cute.make_tensor(row.iterator + where, cute.make_layout(2)))


@cute.kernel
def kernel(
    tma_a: cute.CopyAtom,
    g_a: cute.Tensor,
    tma_b: cute.CopyAtom,
    g_b: cute.Tensor,
    mma: cute.TiledMma,
    s_a: cute.ComposedLayout,
    s_b: cute.ComposedLayout,
    m_d: cute.Tensor,
    workspace: cute.Tensor,
    div_splits: cute.FastDivmodDivisorV2,
    splits: cutlass.Int32,
    blocks: cutlass.Int32,
    blocks_m: cutlass.Int32,
    div_tiles: cute.FastDivmodDivisorV2,
    div_band: cute.FastDivmodDivisorV2,
    div_full: cute.FastDivmodDivisorV2,
    div_last: cute.FastDivmodDivisorV2,
    band: cutlass.Int32,
    last_band: cutlass.Int32,
    along_m: cutlass.Int32,
    total: cutlass.Int32,
    early_units: cutlass.Int64,
    late_units: cutlass.Int64,
    keep_a: cutlass.Int64,
    keep_b: cutlass.Int64,
):
    """One warpgroup loads, the others multiply and store; every role walks the same work units."""
    tidx, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    wg = cute.arch.make_warp_uniform(tidx // WG)
    bx, by, bz = cute.arch.block_idx()
    _, _, gz = cute.arch.grid_dim()
    if warp == 0:
        cpasync.prefetch_descriptor(tma_a)
        cpasync.prefetch_descriptor(tma_b)
    cluster = cute.make_layout((CLUSTER_M, CLUSTER_N, 1))
    rank = cluster.get_flat_coord(cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()))
    mask_a = cute.make_layout_image_mask(cluster, rank, mode=1) if CLUSTER_N > 1 else 0
    mask_b = cute.make_layout_image_mask(cluster, rank, mode=0) if CLUSTER_M > 1 else 0

    smem = memory.SmemAllocator()
    sm_a = smem.allocate_tensor(AB, s_a.outer, byte_alignment=1024, swizzle=s_a.inner)
    sm_b = smem.allocate_tensor(AB, s_b.outer, byte_alignment=1024, swizzle=s_b.inner)
    # A stage is free once every warp that read it has said so, in each block that shares its tiles.
    loads = pipeline.PipelineTmaAsync.create(
        num_stages=STAGES,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(
            pipeline.Agent.Thread, (CLUSTER_M + CLUSTER_N - 1) * MMA_WGS * 4
        ),
        tx_count=(TILE_M + TILE_N) * TILE_K * AB.width // 8,
        cta_layout_vmnk=cute.make_layout((1, CLUSTER_M, CLUSTER_N, 1)),
        defer_sync=True,
    )
    pipeline_init_arrive(cluster_shape_mn=(CLUSTER_M, CLUSTER_N), is_relaxed=True)

    bz = own_unit(bz, early_units, late_units)
    gt_d = cute.local_tile(m_d, (TILE_M, TILE_N), (None, None))
    k_all = cute.ceil_div(g_a.shape[1], TILE_K)
    # The last tiles end with D, since TMA is slow beyond. Rows that two tiles share get the same bits twice.
    last_m, last_n = cutlass.max(m_d.shape[0] - TILE_M, 0), cutlass.max(m_d.shape[1] - TILE_N, 0)
    pipeline_init_wait(cluster_shape_mn=(CLUSTER_M, CLUSTER_N))
    # The next kernel may take over multiprocessors as they fall free; it waits for our results itself.
    cute.arch.griddepcontrol_launch_dependents()

    if wg == 0:
        if warp == 0:
            put = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, STAGES)
            work = bz
            while work < total:
                rest, cm, cn = locate(work, div_tiles, div_band, div_full, div_last, band, last_band, along_m)
                m, n = cm * CLUSTER_M + bx, cn * CLUSTER_N + by
                m_0, n_0 = cutlass.min(m * TILE_M, last_m), cutlass.min(n * TILE_N, last_n)
                part = rest
                # Each part takes every splits-th k tile: parts that run together read memory side by side.
                k_tiles, _ = divmod(k_all - part + splits - 1, div_splits)
                to_a, from_a = tiles_along_k(tma_a, g_a, sm_a, m_0, TILE_M, rank[1], CLUSTER_N)
                to_b, from_b = tiles_along_k(tma_b, g_b, sm_b, n_0, TILE_N, rank[0], CLUSTER_M)
                for k in cutlass.range(k_tiles, unroll=1):
                    loads.producer_acquire(put)
                    full = loads.producer_get_barrier(put)
                    cute.copy(
                        tma_a,
                        from_a[(None, part + k * splits)],
                        to_a[(None, put.index)],
                        tma_bar_ptr=full,
                        mcast_mask=mask_a,
                        cache_policy=keep_a,
                    )
                    cute.copy(
                        tma_b,
                        from_b[(None, part + k * splits)],
                        to_b[(None, put.index)],
                        tma_bar_ptr=full,
                        mcast_mask=mask_b,
                        cache_policy=keep_b,
                    )
                    loads.producer_commit(put)
                    put.advance()
                work += gz
            loads.producer_tail(put)
    else:
        wg_tid = tidx % WG
        mma_wg = wg - 1
        thr = mma.get_slice(cute.make_layout(MMA_WGS, stride=WG)(mma_wg))
        r_a, r_b = mma.make_fragment_A(thr.partition_A(sm_a)), mma.make_fragment_B(thr.partition_B(sm_b))
        acc = cute.make_rmem_tensor(thr.partition_C(gt_d).shape[:3], ACC)
        get = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
        free = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
        four = cute.make_rmem_tensor((4,), ACC)
        work = bz
        while work < total:
            rest, cm, cn = locate(work, div_tiles, div_band, div_full, div_last, band, last_band, along_m)
            m, n = cm * CLUSTER_M + bx, cn * CLUSTER_N + by
            part = rest
            # Each part takes every splits-th k tile: parts that run together read memory side by side.
            k_tiles, _ = divmod(k_all - part + splits - 1, div_splits)
            mma.set(warpgroup.Field.ACCUMULATE, False)
            for k in cutlass.range(k_tiles, unroll=1):
                loads.consumer_wait(get)
                warpgroup.fence()
                for kb in cutlass.range_constexpr(cute.size(r_a, mode=[2])):
                    at = (None, None, kb, get.index)
                    cute.gemm(mma, acc, r_a[at], r_b[at], acc)
                    mma.set(warpgroup.Field.ACCUMULATE, True)
                warpgroup.commit_group()
                warpgroup.wait_group(1)
                if k > 0:  # the stage before is no longer read
                    loads.consumer_release(free)
                    free.advance()
                get.advance()
            warpgroup.wait_group(0)
            loads.consumer_release(free)
            free.advance()
            # Partial sums go out in register order: 16 bytes per thread, whole lines per warp.
            block = n * blocks_m + m
            slot = ((part * blocks + block) * MMA_WGS + mma_wg) * CHUNKS
            for chunk in cutlass.range_constexpr(CHUNKS):
                for v in cutlass.range_constexpr(4):
                    four[v] = acc[chunk * 4 + v]
                cute.autovec_copy(four, chunk_at(workspace, slot + chunk, wg_tid))
            work += gz


def chunk_at(workspace, slot, wg_tid):
    """Where thread ``wg_tid`` keeps its 16 bytes of piece ``slot``."""
    sums = workspace.iterator
    return cute.make_tensor((sums + (slot * WG + wg_tid) * 4).align(16), cute.make_layout(4))


@cute.kernel
def reduce_kernel(
    m_d: cute.Tensor,
    bias: cute.Tensor,
    workspace: cute.Tensor,
    splits: cutlass.Int32,
    log_adders: cutlass.Int32,
    blocks: cutlass.Int32,
    div_m: cute.FastDivmodDivisorV2,
):
    """Add up the parts of some 64 x RED_N pieces, each always in the same order, and finish them."""
    wg_tid, wg, _ = cute.arch.thread_idx()
    block, units, _ = cute.arch.block_idx()
    adders = cutlass.Int32(1) << log_adders
    team = wg >> log_adders
    adder = wg - (team << log_adders)
    unit = units * (ADDERS >> log_adders) + team
    rows, cols = m_d.shape[0], m_d.shape[1]
    n, m = divmod(block, div_m)
    rest, sub = unit // PIECES, unit % PIECES
    mma_wg, rep = rest // REPS, rest % REPS
    # The last tiles end with D, since TMA is slow beyond. Rows that two tiles share get the same bits twice.
    last_m, last_n = cutlass.max(m_d.shape[0] - TILE_M, 0), cutlass.max(m_d.shape[1] - TILE_N, 0)
    row, col = cutlass.min(m * TILE_M, last_m), cutlass.min(n * TILE_N, last_n)
    m_g = row + (rep * MMA_WGS + mma_wg) * 64 + wg_tid // 32 * 16 + wg_tid % 32 // 4
    n_g = col + sub * RED_N + wg_tid % 4 * 2
    first, end = (adder * splits) >> log_adders, ((adder + 1) * splits) >> log_adders
    part_slots = blocks * MMA_WGS * CHUNKS
    slot = (block * MMA_WGS + mma_wg) * CHUNKS + (rep * PIECES + sub) * (RED_FRAGMENT // 4)
    slot += first * part_slots
    frag = cute.make_rmem_tensor((RED_FRAGMENT,), ACC)
    part = cute.make_rmem_tensor((RED_FRAGMENT,), ACC)
    sums = memory.SmemAllocator().allocate_tensor(
        ACC,
        cute.make_layout((RED_FRAGMENT, WG, ADDERS), stride=(WG, 1, WG * RED_FRAGMENT)),
        byte_alignment=16,
    )
    frag.fill(0.0)
    cute.arch.griddepcontrol_wait()
    mine = unit < UNITS
    if not mine:
        end = first
    for _ in cutlass.range(end - first, unroll=4):
        for chunk in cutlass.range_constexpr(RED_FRAGMENT // 4):
            four = cute.make_tensor(part.iterator + chunk * 4, cute.make_layout(4))
            cute.autovec_copy(chunk_at(workspace, slot + chunk, wg_tid), four)
        frag.store(frag.load() + part.load())
        slot += part_slots
    for v in cutlass.range_constexpr(RED_FRAGMENT):
        sums[v, wg_tid, wg] = frag[v]
    cute.arch.sync_threads()
    if adder == 0 and mine:
        for other in cutlass.range_constexpr(1, ADDERS):
            if other < adders:
                for v in cutlass.range_constexpr(RED_FRAGMENT):
                    frag[v] += sums[v, wg_tid, wg + other]
        finish(m_d, frag, bias, m_g, n_g, rows, cols)


@cute.jit
def finish(
    m_d: cute.Tensor,
    frag: cute.Tensor,
    bias: cute.Tensor,
    m_g: cutlass.Int32,
    n_g: cutlass.Int32,
    rows: cutlass.Int32,
    cols: cutlass.Int32,
):
    """Epilogue of one summed fragment."""
    out = cute.make_rmem_tensor((RED_FRAGMENT,), OUT)
    value = frag.load()
    value = value + load_bias(bias, m_g, n_g, rows, cols, RED_FRAGMENT)
    value = activate(value)
    out.store(value.to(OUT))
    store_direct(m_d, out, m_g, n_g, rows, cols, RED_FRAGMENT)


KERNELS = (kernel, reduce_kernel)


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
        cute.runtime.make_fake_tensor(OUT, (n,), stride=(1,), assumed_align=OUT.width // 8),
        cute.runtime.make_fake_tensor(cutlass.Float32, (cute.sym_int(),), stride=(1,), assumed_align=16),
        cutlass.Int32(1),
        cutlass.Int32(1),
        cutlass.Int32(0),
        cutlass.Int32(2),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
