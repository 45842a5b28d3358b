"""What the knobs of the GEMM families do, and when each pays: the text behind ``docs/knobs.md``."""

from __future__ import annotations

__all__ = ["KNOBS"]

KNOBS = {
    "tile_shape_mn": (
        "Rows and columns of the output tile that a CTA (with pingpong: a warpgroup) computes at a time. "
        "Large tiles load fewer bytes per FLOP. Narrow ones pay where few tiles would leave SMs idle, or "
        "where a width other than a power of two fills the last wave."
    ),
    "tile_k": (
        "Elements along k of a pipeline stage: one or two rows of 128 bytes of shared memory. Two halve "
        "the barriers and read memory in longer runs, which pays for small tiles that stream weights."
    ),
    "cluster_shape_mn": (
        "CTAs of a cluster along m and n. They load what they share once, by TMA multicast. Pays where L2 "
        "bandwidth limits; costs where the number of tiles does not divide into whole clusters."
    ),
    "mma_warpgroups": (
        "Warpgroups of 128 threads that share one output tile, by rows. Two or three keep the "
        "accumulators of a large tile in registers; one is for small tiles, and for pingpong."
    ),
    "pingpong": (
        "Two warpgroups alternate, each with its own output tile: the epilogue of one overlaps with the "
        "MMAs of the other. Pays where k is short or power limits; a tile must fit one warpgroup."
    ),
    "swap_ab": (
        "Compute the transposed GEMM, so that m lies along the columns of the MMA, which can be as few as "
        "8. Pays for small m; tile_shape_mn then counts rows along n."
    ),
    "use_tma_store": (
        "Write D from shared memory by TMA. Without it threads write from registers, which takes outputs "
        "of any alignment and needs no shared memory, but makes more and shorter stores."
    ),
    "use_pdl": (
        "Programmatic dependent launch: set the kernel up while the one before it in the stream ends. "
        "Pays for short kernels that follow one another, as in a model; a lone launch gains nothing. "
        "On Hopper, launches without split_k or stream_k on about half of the SMs that load rows of 8 KiB "
        "and more do not overlap in any case: behind one another they take longer with it."
    ),
    "stream_k": (
        "Split the tiles of the last, partial wave along k among all CTAs. Pays where a large problem "
        "would leave most SMs idle in its last wave."
    ),
    "reduction": (
        "How split-K partials are added up. fixed: by a second kernel, in the same order in every run. "
        "arrival: with atomics in one kernel; faster for some problems, but the last bits differ from run "
        "to run, so the problem must allow it with any_order."
    ),
    "split_k": (
        "Number of splits along k. Different CTAs compute the splits, and their accumulators are added up "
        "afterwards. Pays for deep k with few output tiles."
    ),
    "swizzle_size": (
        "Rasterization: width, in clusters of tiles, of the bands in which the output is visited. Wide "
        "bands reuse operands in L2, and save energy, on large problems. On Hopper the SMs of a GPC work on "
        "tiles that follow each other in the bands, so that it loads what these share once. "
        "It has nothing to do with the swizzle of shared memory."
    ),
    "raster_along_m": (
        "Rasterization: visit the tiles of a band along m first instead of along n, so that CTAs that run "
        "at the same time share columns of B instead of rows of A. Which one reuses more of L2 depends on "
        "the shape."
    ),
    "mma_tiler_mn": (
        "Rows and columns of one tcgen05 MMA tile. With use_2cta_instrs two CTAs share it, half of the "
        "rows each. Large tiles load fewer bytes per FLOP; narrow ones fill more SMs."
    ),
    "use_2cta_instrs": (
        "One MMA instruction works for a pair of CTAs, each of which holds half of B. Halves the "
        "shared-memory traffic for B; pays for large tiles."
    ),
    "use_clc": (
        "Cluster launch control: the hardware hands out tiles as clusters become free, instead of a "
        "static persistent schedule. Pays where tiles take unequal time or other kernels share the GPU."
    ),
    "algorithm": (
        "A special algorithm for some GEMMs. few_rows is for m of at most 4: it uses no tensor cores, and "
        "reads B once, from device memory into registers."
    ),
    "rows_per_cta": (
        "Of few_rows: rows of A per CTA, at least m. Each row costs one multiplication for every element "
        "of B."
    ),
    "threads_per_cta": (
        "Of few_rows: threads of a CTA. Small CTAs leave an SM one by one, so that it always has loads in "
        "flight; large ones share the accumulation of deep k."
    ),
    "columns_per_warp": (
        "Of few_rows: columns of B per warp. With more columns, an element of A in a register is used "
        "more often."
    ),
    "warps_along_k": (
        "Of few_rows: warps of a CTA that split k of the same columns. More warps finish a column sooner; "
        "pays where there are few columns."
    ),
    "unroll": (
        "Of few_rows: loads of 16 bytes from each of its columns that a thread issues before it "
        "multiplies. With columns_per_warp it sets the bytes in flight; more need more registers, so "
        "fewer threads run at once."
    ),
    "cluster_k": (
        "Of few_rows: CTAs of a cluster that split k of the same columns; their accumulators are added in "
        "shared memory, always in the same order. Pays where columns are too few to keep all SMs busy."
    ),
    "source": "Whose kernel it is (provider): operators is NVIDIA's Operator API.",
    "operator": "Name of the kernel class in NVIDIA's Operator API.",
    "tile_scheduler": (
        "Of an Operator API kernel: static is a persistent schedule, clc is cluster launch control."
    ),
}
