# Rendered by tools/render_kernels.py for gemm 8192x8192x8192 bf16 kk on sm_100a.
# Do not edit: change the template.
"""D = A @ B on sm_100a.

Persistent, warp-specialised tcgen05 with TMA.
bf16 operands, fp32 accumulation, bf16 output, layout tn.
mma_tiler_mn=256x256 use_2cta_instrs=true cluster_shape_mn=2x1 swap_ab=false use_tma_store=true
use_clc=false use_pdl=false split_k=1

Roles, by warp: 0 to 3 store, a quarter of tensor memory each; 4 multiplies, 5 loads.
Rings of buffers go round between them. A stage has a full barrier, which its filler completes, and an empty
one, which its users complete; each count is of arrivals per phase.

ab: tiles of A and B in shared memory, 6 stages.
  full   1 arrival: warp 5 of the leader, with 65536 bytes to come by TMA. Waits: warp 4 of the leader.
  empty  1 arrival: the MMAs of each pair in the same row or column of the cluster. Waits: warp 5.
acc: sums of a tile in tensor memory, 2 stages.
  full   1 arrival: the MMAs of the pair, in both blocks. Wait: warps 0 to 3.
  empty  8 arrivals: a thread of each of warps 0 to 3 of both blocks. Waits: warp 4 of the leader.
Store buffers have no barriers: warp 0 waits for its own stores, and warps 0 to 3 meet at named barrier 1.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import memory, tensor_utils
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.pipeline import pipeline_init_arrive, pipeline_init_wait
from cutlass.utils import blackwell_helpers as sm100
from cutlass.utils.gemm.sm100 import transform_partitioned_tensor_layout

ARCH = "sm_100"
MMA_M, MMA_N, TILE_K = 256, 256, 64
PAIR = 2  # thread blocks that share one MMA, each with MMA_M / PAIR rows of it
CLUSTER_M, CLUSTER_N = 2, 1
STAGES, STAGE_BYTES, STAGE_USERS = 6, 65536, 1
ACC_STAGES, ACC_USERS, TMEM_COLUMNS = 2, 8, 512
EPI_N = 32  # columns that leave tensor memory at once
EPI_STAGES = 4
AB, ACC, OUT = cutlass.BFloat16, cutlass.Float32, cutlass.BFloat16
A_MAJOR = OperandMajorMode.K
B_MAJOR = OperandMajorMode.K
D_LAYOUT = tensor_utils.LayoutEnum.ROW_MAJOR

TILE_M = MMA_M // PAIR
EPI_WARPS, MMA_WARP, TMA_WARP = 4, 4, 5
THREADS = 192
FRAGMENT = TILE_M * EPI_N // (32 * EPI_WARPS)  # accumulators of one thread in an epilogue tile


def epilogue_tile():
    """Rows and columns that leave tensor memory together; half of the warps may own far columns."""
    return (cute.make_layout(TILE_M), cute.make_layout(EPI_N))


def reorder(tensor, modes):
    """The same memory with its modes in the kernel's order."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=modes))


def one_stage(layout):
    """The layout of a single stage."""
    return cute.select(layout, mode=[0, 1, 2])


def sums_in_tmem(mma):
    """The stages of sums as the MMA leaves them, at address 0."""
    return mma.make_fragment_C(cute.append(mma.partition_shape_C((MMA_M, MMA_N)), ACC_STAGES))


def ways_out(mma, sums, tidx, half):
    """The copy to registers, what of ``sums`` a thread reads, and where its elements lie inside a tile."""
    read_for = D_LAYOUT, OUT
    load = sm100.get_tmem_load_op((TILE_M, MMA_N, TILE_K), *read_for, ACC, epilogue_tile(), PAIR == 2)
    pieces = cute.flat_divide(transform_partitioned_tensor_layout(sums), epilogue_tile())
    places = cute.flat_divide(
        transform_partitioned_tensor_layout(
            mma.get_slice(half).partition_C(cute.make_identity_tensor((MMA_M, MMA_N)))
        ),
        epilogue_tile(),
    )
    t2r = tcgen05.make_tmem_copy(load, pieces[(None, None, 0, 0, 0)])
    thr = t2r.get_slice(tidx)
    return t2r, thr.partition_S(pieces), cute.group_modes(thr.partition_D(places), 3, 5)


@cute.jit
def launch(
    a: cute.Tensor,
    b: cute.Tensor,
    d: cute.Tensor,
    clusters: cutlass.Int32,
    swizzle: cutlass.Int32,
    along_m: cutlass.Int32,
    stream: cuda.CUstream,
):
    """Compute D on ``stream`` with at most ``clusters`` resident clusters."""
    m_a, m_b, m_d = reorder(a, [0, 1]), reorder(b, [1, 0]), reorder(d, [0, 1])
    blocks = tcgen05.CtaGroup.TWO
    mma = sm100.make_trivial_tiled_mma(AB, AB, A_MAJOR, B_MAJOR, ACC, blocks, (MMA_M, MMA_N))
    tiler = (MMA_M, MMA_N, TILE_K)
    cluster = cute.tiled_divide(cute.make_layout((CLUSTER_M, CLUSTER_N, 1)), (mma.thr_id.shape,))
    s_a = sm100.make_smem_layout_a(mma, tiler, AB, STAGES)
    s_b = sm100.make_smem_layout_b(mma, tiler, AB, STAGES)
    load_a = sm100.cluster_shape_to_tma_atom_A((CLUSTER_M, CLUSTER_N), mma.thr_id)
    load_b = sm100.cluster_shape_to_tma_atom_B((CLUSTER_M, CLUSTER_N), mma.thr_id)
    tma_a, g_a = cute.nvgpu.make_tiled_tma_atom_A(load_a, m_a, one_stage(s_a), tiler, mma, cluster.shape)
    tma_b, g_b = cute.nvgpu.make_tiled_tma_atom_B(load_b, m_b, one_stage(s_b), tiler, mma, cluster.shape)
    s_d = sm100.make_smem_layout_epi(OUT, D_LAYOUT, epilogue_tile(), EPI_STAGES)
    tma_d, g_d = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileS2GOp(), m_d, cute.select(s_d, mode=[0, 1]), epilogue_tile()
    )
    # Clusters of tiles are walked along the major axis in bands that are `swizzle` wide.
    tiles_m = cute.ceil_div(m_d.shape[0], TILE_M * CLUSTER_M)
    tiles_n = cute.ceil_div(m_d.shape[1], MMA_N * CLUSTER_N)
    major, minor = tiles_n, tiles_m
    if along_m != 0:
        major, minor = tiles_m, tiles_n
    band = cutlass.min(swizzle, minor)
    bands = cute.ceil_div(minor, band)
    tiles = tiles_m * tiles_n
    total = tiles
    kernel(
        tma_a,
        g_a,
        tma_b,
        g_b,
        tma_d,
        g_d,
        s_d,
        mma,
        cluster,
        s_a,
        s_b,
        m_d,
        cute.fast_divmod_create_divisor_v2(band * major),
        cute.fast_divmod_create_divisor_v2(band),
        cute.fast_divmod_create_divisor_v2(minor - (bands - 1) * band),
        band,
        bands - 1,
        along_m,
        total,
    ).launch(
        grid=(CLUSTER_M, CLUSTER_N, cutlass.min(clusters, total)),
        block=(THREADS, 1, 1),
        cluster=(CLUSTER_M, CLUSTER_N, 1),
        stream=stream,
        min_blocks_per_mp=1,  # without it ptxas aims for fewer registers
    )


@cute.jit
def locate(
    work: cutlass.Int32,
    div_band: cute.FastDivmodDivisorV2,
    div_full: cute.FastDivmodDivisorV2,
    div_last: cute.FastDivmodDivisorV2,
    band: cutlass.Int32,
    last_band: cutlass.Int32,
    along_m: cutlass.Int32,
):
    """Cluster coordinates of a work unit."""
    at, within = divmod(work, div_band)
    major, minor = divmod(within, div_full)
    if at == last_band:
        major, minor = divmod(within, div_last)
    minor = minor + at * band
    cm, cn = minor, major
    if along_m != 0:
        cm, cn = major, minor
    return cm, cn


@cute.kernel
def kernel(
    tma_a: cute.CopyAtom,
    g_a: cute.Tensor,
    tma_b: cute.CopyAtom,
    g_b: cute.Tensor,
    tma_d: cute.CopyAtom,
    g_d: cute.Tensor,
    s_d: cute.ComposedLayout,
    mma: cute.TiledMma,
    cluster: cute.Layout,
    s_a: cute.ComposedLayout,
    s_b: cute.ComposedLayout,
    m_d: cute.Tensor,
    div_band: cute.FastDivmodDivisorV2,
    div_full: cute.FastDivmodDivisorV2,
    div_last: cute.FastDivmodDivisorV2,
    band: cutlass.Int32,
    last_band: cutlass.Int32,
    along_m: cutlass.Int32,
    total: cutlass.Int32,
):
    """Four warps store, one multiplies, one loads; every role walks the same work units."""
    tidx, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    x, by, bz = cute.arch.block_idx()
    _, _, gz = cute.arch.grid_dim()
    half = x % PAIR
    leader = half == 0  # it issues the MMAs of both
    if warp == TMA_WARP:
        cpasync.prefetch_descriptor(tma_a)
        cpasync.prefetch_descriptor(tma_b)
        cpasync.prefetch_descriptor(tma_d)
    in_cluster = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    rank = cluster.get_flat_coord(in_cluster)
    mask_a, mask_b = None, None
    if cutlass.const_expr(CLUSTER_M * CLUSTER_N > 1):
        mask_a = cpasync.create_tma_multicast_mask(cluster, rank, mcast_mode=2)
        mask_b = cpasync.create_tma_multicast_mask(cluster, rank, mcast_mode=1)

    put, get = pipeline.PipelineTmaUmma.create(
        num_stages=STAGES,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, STAGE_USERS),
        tx_count=STAGE_BYTES,
        cta_layout_vmnk=cluster,
        defer_sync=True,
    ).make_participants()
    sums = pipeline.PipelineUmmaAsync.create(
        num_stages=ACC_STAGES,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, ACC_USERS),
        cta_layout_vmnk=cluster,
        defer_sync=True,
    )
    tmem = memory.TmemAllocator(
        barrier_for_retrieve=pipeline.NamedBarrier(barrier_id=2, num_threads=32 * (EPI_WARPS + 1)),
        allocator_warp_id=0,
        is_two_cta=PAIR == 2,
        arch=ARCH,
    )
    pipeline_init_arrive(cluster_shape_mn=cluster, is_relaxed=True)

    smem = memory.SmemAllocator()
    sm_a = smem.allocate_tensor(AB, s_a.outer, byte_alignment=1024, swizzle=s_a.inner)
    sm_b = smem.allocate_tensor(AB, s_b.outer, byte_alignment=1024, swizzle=s_b.inner)
    sm_d = smem.allocate_tensor(OUT, s_d.outer, byte_alignment=1024, swizzle=s_d.inner)
    thr = mma.get_slice(half)
    gt_a = cute.local_tile(g_a, (MMA_M, TILE_K), (None, None))
    gt_b = cute.local_tile(g_b, (MMA_N, TILE_K), (None, None))
    k_tiles = cute.size(gt_a, mode=[3])
    ts_a, tg_a = cpasync.tma_partition(
        tma_a,
        rank[2],
        cute.make_layout(cute.slice_(cluster, (0, 0, None, 0)).shape),
        cute.group_modes(sm_a, 0, 3),
        cute.group_modes(thr.partition_A(gt_a), 0, 3),
    )
    ts_b, tg_b = cpasync.tma_partition(
        tma_b,
        rank[1],
        cute.make_layout(cute.slice_(cluster, (0, None, 0, 0)).shape),
        cute.group_modes(sm_b, 0, 3),
        cute.group_modes(thr.partition_B(gt_b), 0, 3),
    )
    r_a, r_b = mma.make_fragment_A(sm_a), mma.make_fragment_B(sm_b)
    in_tmem = sums_in_tmem(mma)
    assert (MMA_M + MMA_N) * TILE_K * AB.width // 8 == STAGE_BYTES
    assert cute.size(cluster.shape[2]) + cute.size(cluster.shape[1]) - 1 == STAGE_USERS
    assert memory.get_num_tmem_alloc_cols(in_tmem, arch=ARCH) == TMEM_COLUMNS
    pipeline_init_wait(cluster_shape_mn=cluster)

    if warp == TMA_WARP:
        work = bz
        while work < total:
            cm, cn = locate(work, div_band, div_full, div_last, band, last_band, along_m)
            m_block, n = cm * CLUSTER_M + x, cn * CLUSTER_N + by
            m = m_block // PAIR
            put.reset()
            ready = put.try_acquire()
            for k in cutlass.range(k_tiles, unroll=1):
                stage = put.acquire_and_advance(ready)
                cute.copy(
                    tma_a,
                    tg_a[(None, m, k)],
                    ts_a[(None, stage.index)],
                    tma_bar_ptr=stage.barrier,
                    mcast_mask=mask_a,
                )
                cute.copy(
                    tma_b,
                    tg_b[(None, n, k)],
                    ts_b[(None, stage.index)],
                    tma_bar_ptr=stage.barrier,
                    mcast_mask=mask_b,
                )
                ready = cutlass.Boolean(1)
                if stage.count + 1 < k_tiles:
                    ready = put.try_acquire()
            work += gz
        put.tail()

    if warp == MMA_WARP:
        tmem.wait_for_alloc()
        acc = cute.make_tensor(tmem.retrieve_ptr(ACC), in_tmem.layout)
        fill = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, ACC_STAGES)
        work = bz
        while work < total:
            if leader:
                tile = acc[(None, None, None, fill.index)]
                get.reset()
                ready = get.try_wait()
                sums.producer_acquire(fill)
                mma.set(tcgen05.Field.ACCUMULATE, False)
                for _ in cutlass.range(k_tiles, unroll=1):
                    stage = get.wait_and_advance(ready)
                    for kb in cutlass.range_constexpr(cute.size(r_a, mode=[2])):
                        at = (None, None, kb, stage.index)
                        cute.gemm(mma, tile, r_a[at], r_b[at], tile)
                        mma.set(tcgen05.Field.ACCUMULATE, True)
                    stage.release()
                    ready = cutlass.Boolean(1)
                    if stage.count + 1 < k_tiles:
                        ready = get.try_wait()
                sums.producer_commit(fill)
            fill.advance()
            work += gz
        sums.producer_tail(fill)

    if warp < EPI_WARPS:
        tmem.allocate(TMEM_COLUMNS)
        tmem.wait_for_alloc()
        tmem_ptr = tmem.retrieve_ptr(ACC)
        t2r, source, all_places = ways_out(mma, cute.make_tensor(tmem_ptr, in_tmem.layout), tidx, half)
        frag = cute.make_rmem_tensor(all_places[(None, None, None, 0)].shape, ACC)
        out = cute.make_rmem_tensor(frag.shape, OUT)
        r2s = cute.make_tiled_copy_D(sm100.get_smem_store_op(D_LAYOUT, OUT, ACC, t2r), t2r)
        rs_d = r2s.get_slice(tidx).partition_D(sm_d)
        rs_out = r2s.retile(out)
        gt_d = cute.local_tile(g_d, (MMA_M, MMA_N), (None, None))
        ts_d, tg_d = cpasync.tma_partition(
            tma_d,
            0,
            cute.make_layout(1),
            cute.group_modes(sm_d, 0, 2),
            cute.group_modes(
                cute.flat_divide(transform_partitioned_tensor_layout(thr.partition_C(gt_d)), epilogue_tile()),
                0,
                2,
            ),
        )
        stores = pipeline.PipelineTmaStore.create(
            num_stages=EPI_STAGES,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 32 * EPI_WARPS),
        )
        buffer = cutlass.Int32(0)
        together = pipeline.NamedBarrier(barrier_id=1, num_threads=32 * EPI_WARPS)
        drain = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, ACC_STAGES)
        work = bz
        while work < total:
            cm, cn = locate(work, div_band, div_full, div_last, band, last_band, along_m)
            m_block, n = cm * CLUSTER_M + x, cn * CLUSTER_N + by
            m = m_block // PAIR
            target = cute.group_modes(tg_d[(None, None, None, m, n)], 1, 3)
            pieces = cute.group_modes(source[(None, None, None, None, None, drain.index)], 3, 5)
            count = cute.size(pieces.shape, mode=[3])
            sums.consumer_wait(drain)
            for piece in cutlass.range(count, unroll=1):  # rolled: compiles in two thirds of the time
                cute.copy(t2r, pieces[(None, None, None, piece)], frag)
                cute.arch.fence_view_async_tmem_load()  # until then the registers hold nothing
                if piece == count - 1:  # all of the tile is out of tensor memory
                    with cute.arch.elect_one():
                        sums.consumer_release(drain)
                value = frag.load()
                out.store(value.to(OUT))
                if warp == 0:
                    stores.producer_acquire()
                together.arrive_and_wait()
                cute.copy(r2s, rs_out, rs_d[(None, None, None, buffer)])
                cute.arch.fence_proxy("async.shared", space="cta")
                together.arrive_and_wait()
                if warp == 0:
                    cute.copy(tma_d, ts_d[(None, buffer)], target[(None, piece)])
                    stores.producer_commit()
                buffer = (buffer + 1) % EPI_STAGES
            drain.advance()
            work += gz
        stores.producer_tail()
        together.arrive_and_wait()  # no warp reads tensor memory any more
        tmem.relinquish_alloc_permit()
        tmem.free(tmem_ptr)


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
        cutlass.Int32(1),
        cutlass.Int32(1),
        cutlass.Int32(0),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
