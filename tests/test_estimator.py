"""The performance model: close to known times, and right about what makes a kernel slower."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutegen.arch import find_arch, resident_clusters
from cutegen.errors import ArchError
from cutegen.families.gemm.perf_model.estimator import Estimator, predict
from cutegen.families.gemm.perf_model.gpu_params import H200
from cutegen.families.gemm.problem import Epilogue, Problem
from cutegen.families.registry import find_space
from cutegen.space import Config

SM90 = find_arch("sm_90a")
SPACE = find_space("gemm", SM90)

#: Microseconds on one H200 (700 W, CUDA 13.0): random data, inputs rotated past L2, CUDA graphs.
#: m, n, k, layout: cuBLAS, then NVIDIA's example kernel at its best of 24 configs with that tile and cluster.
KNOWN = {
    "T1": (4096, 4096, 4096, "kk", 205.09, 204.48, (128, 256), (2, 1)),
    "T2": (1024, 1024, 1024, "kk", 6.25, 6.02, (64, 128), (1, 1)),
    "T4": (2048, 2048, 2048, "kk", 29.09, 29.44, (64, 256), (1, 2)),
    "T5": (8192, 8192, 8192, "kk", 1692.5, 1656.07, (128, 256), (2, 1)),
    "T6": (8192, 8192, 512, "kk", 128.85, 130.41, (128, 256), (1, 1)),
    "L1": (1, 6144, 4096, "kk", 15.54, 21.03, (64, 128), (1, 2)),
    "L2": (16, 28672, 4096, "kk", 55.57, 58.07, (64, 256), (1, 1)),
    "L3": (64, 4096, 14336, "kk", 35.54, 35.68, (64, 64), (1, 1)),
    "L4": (256, 6144, 4096, "kk", 21.49, 26.80, (128, 128), (1, 1)),
    "L5": (4096, 28672, 4096, "kk", 1396.91, 1412.45, (128, 256), (1, 2)),
    "L6": (4096, 4096, 14336, "kk", 687.53, 685.47, (128, 256), (2, 1)),
    "L7": (8192, 4096, 28672, "kn", 2752.56, 2758.08, (128, 256), (1, 2)),
    "L8": (28672, 4096, 8192, "mn", 2903.58, 2883.40, (128, 256), (1, 2)),
    "L9": (4096, 128256, 4096, "kk", 6273.25, 6248.26, (128, 256), (2, 1)),
    "D1": (64, 2112, 7168, "kk", 14.75, 15.66, (64, 64), (1, 1)),
    "D2": (128, 24576, 1536, "kk", 24.54, 23.64, (64, 128), (2, 1)),
    "D3": (128, 32768, 512, "kk", 13.21, 12.91, (128, 128), (1, 1)),
    "D4": (4096, 7168, 16384, "kk", 1392.52, 1395.31, (128, 256), (2, 1)),
    "D5": (4096, 4096, 7168, "kk", 350.27, 348.87, (128, 256), (2, 1)),
    "D6": (128, 7168, 2048, "kk", 10.59, 10.91, (128, 64), (1, 1)),
    "D7": (4096, 36864, 7168, "kk", 3077.82, 3059.46, (128, 256), (2, 1)),
    "D8": (1, 129280, 7168, "kk", 408.09, 427.77, (64, 256), (1, 1)),
    "D9": (4096, 256, 7168, "kk", 28.37, 24.56, (64, 128), (1, 2)),
    "D10": (4096, 2112, 7168, "kk", 180.55, 222.08, (128, 128), (2, 2)),
    "S1": (256, 256, 65536, "kk", 24.57, 91.00, (64, 64), (1, 1)),
    "S2": (3000, 5000, 1000, "kk", 56.45, 59.48, (128, 256), (2, 2)),
    "S3": (16, 8192, 8192, "kk", 33.13, 43.76, (64, 64), (1, 2)),
    "S4": (1, 8192, 8192, "kk", 33.47, 45.35, (64, 256), (2, 2)),
}


def _config(**changes: Any) -> dict[str, Any]:
    config = {
        "tile_shape_mn": (128, 256),
        "tile_k": 64,
        "cluster_shape_mn": (2, 1),
        "mma_warpgroups": 2,
        "pingpong": False,
        "swap_ab": False,
        "use_tma_store": True,
        "split_k": 1,
        "swizzle_size": 8,
        "raster_along_m": False,
    }
    return {**config, **changes}


def _stages(config: Mapping[str, Any]) -> int:
    """As many stages as fit beside small store buffers."""
    rows = sum(config["tile_shape_mn"])
    return int((SM90.smem_bytes - 17 * 1024) // (rows * config["tile_k"] * 2))


def _time(problem: Problem, **changes: Any) -> float:
    config = _config(**changes)
    return predict(problem, config, {"stages": _stages(config)}, SM90, 132).time_us


def _known(name: str) -> tuple[Problem, float, float]:
    """The problem, the measured time of a known kernel, and the model's for the same kernel."""
    m, n, k, layout, _, measured, tile, cluster = KNOWN[name]
    problem = Problem(m, n, k, layout=layout)
    walks = [(s, a) for s in (1, 2, 4, 8) for a in (False, True)]
    options = [{"swizzle_size": s, "raster_along_m": a} for s, a in walks]
    groups = 2 if tile[0] > 64 else 1
    fixed = {"tile_shape_mn": tile, "cluster_shape_mn": cluster, "mma_warpgroups": groups}
    return problem, measured, min(_time(problem, **fixed, **o) for o in options)


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_kernel_takes_the_predicted_time(name: str) -> None:
    """With the tile and cluster of a measured kernel, the estimate is within 25 % of its time."""
    _, measured, predicted = _known(name)
    assert 0.75 < predicted / measured < 1.25


def test_known_kernels_are_predicted_well_on_the_whole() -> None:
    """Over all measured kernels the errors are small and centred: root mean square 10 %, mean 5 %."""
    errors = [math.log(predicted / measured) for _, measured, predicted in map(_known, KNOWN)]
    assert math.sqrt(sum(e * e for e in errors) / len(errors)) < 0.10
    assert abs(sum(errors) / len(errors)) < 0.05


@pytest.mark.parametrize(
    ("layout", "swap", "loaded"), [("kk", 0, 176), ("kn", 0, 192), ("kn", 1, 176), ("mk", 1, 192)]
)
def test_columns_that_are_loaded_count(layout: str, swap: int, loaded: int) -> None:
    """Where an operand is contiguous along the columns of tiles, 176 of them take stages for 192."""
    problem = Problem(8192, 4096, 8192, layout=layout)
    config = _config(tile_shape_mn=(128, 176), swap_ab=bool(swap))
    derived = SPACE.derive(Config(config), problem, SM90)
    assert derived["loaded_n"] == loaded and derived["expected_bytes"] == (128 + loaded) * 64 * 2
    costs = [
        Estimator(problem, SM90, 132)._kernel(config, {**derived, "loaded_n": width})
        for width in (176, loaded)
    ]
    assert (costs[0].step_bytes < costs[1].step_bytes) == (costs[0].smem < costs[1].smem) == (loaded > 176)


def test_the_pingpong_of_a_short_k_is_predicted() -> None:
    """8192x8192x512: 98.8 us were measured for a tuned pingpong kernel, 130 us without pingpong."""
    problem = Problem(8192, 8192, 512)
    pingpong = _time(problem, tile_shape_mn=(128, 192), mma_warpgroups=1, pingpong=True)
    assert 0.85 < pingpong / 98.8 < 1.15
    assert pingpong < 0.85 * _time(problem)


def test_split_k_is_predicted_to_rescue_a_deep_product() -> None:
    """256x256x65536: 91 us were measured on 16 thread blocks; cuBLAS takes 24.6 us with k divided."""
    split = _time(
        Problem(256, 256, 65536),
        tile_shape_mn=(64, 128),
        mma_warpgroups=1,
        cluster_shape_mn=(1, 1),
        use_tma_store=False,
        split_k=15,
    )
    assert 0.7 < split / 24.57 < 1.3


def test_stream_k_shares_out_a_partial_wave() -> None:
    """Where the last of two waves holds one tile in eight, cutting its tiles along k saves most of it."""
    problem = Problem(128 * 74, 256 * 2, 8192)
    whole, streamed = (
        predict(
            problem,
            _config(cluster_shape_mn=(1, 1), stream_k=stream),
            {"stages": 4},
            SM90,
            132,
        )
        for stream in (False, True)
    )
    assert streamed.waves == whole.waves == 2
    assert 0.5 < streamed.time_us / whole.time_us < 0.85


def test_adding_in_arrival_order_saves_the_second_kernel() -> None:
    """With few and small parts the sums that meet as they arrive cost less than a second kernel."""
    config = {"tile_shape_mn": (64, 64), "mma_warpgroups": 1, "use_tma_store": False, "split_k": 2}
    problem = Problem(64, 1024, 8192)
    assert _time(problem, **config, reduction="arrival") < _time(problem, **config)


def test_swap_ab_wastes_less_on_a_single_row() -> None:
    """One row of output on the fine n axis of the tile costs less than on the 64-row axis."""
    problem = Problem(1, 8192, 8192)
    common = {"mma_warpgroups": 1, "cluster_shape_mn": (1, 1)}
    swapped = predict(
        problem, _config(tile_shape_mn=(64, 16), swap_ab=True, **common), {"stages": 20}, SM90, 132
    )
    plain = predict(problem, _config(tile_shape_mn=(64, 256), **common), {"stages": 5}, SM90, 132)
    assert swapped.terms["mma_us"] < plain.terms["mma_us"] / 3
    assert swapped.time_us < plain.time_us


def test_large_products_run_at_settled_clocks_and_small_ones_at_boost() -> None:
    """The clock falls to 1440-1500 MHz under a large product and stays at boost under a small one."""
    large = predict(Problem(8192, 8192, 8192), _config(), {"stages": 4}, SM90, 132)
    assert 1400 < large.terms["clock_mhz"] < 1520
    assert large.bound == "mma"
    small = predict(Problem(64, 2112, 7168), _config(tile_shape_mn=(64, 64)), {"stages": 13}, SM90, 132)
    assert small.terms["clock_mhz"] == H200.boost_mhz


def test_what_bounds_a_kernel_is_named() -> None:
    """Streaming weights is bound by device memory, a tiny product by its launch."""
    config = _config(tile_shape_mn=(64, 16), mma_warpgroups=1, swap_ab=True, cluster_shape_mn=(1, 1))
    assert predict(Problem(1, 129280, 7168), config, {"stages": 20}, SM90, 132).bound == "hbm"
    tiny = _config(tile_shape_mn=(64, 64), mma_warpgroups=1, cluster_shape_mn=(1, 1))
    assert predict(Problem(512, 1024, 128), tiny, {"stages": 13}, SM90, 132).bound == "launch"


def test_multicast_saves_loads() -> None:
    """A cluster loads less from L2 per thread block, and that shows where L2 is what limits."""
    problem = Problem(4096, 4096, 4096)
    alone, pair = (
        predict(problem, _config(cluster_shape_mn=shape), {"stages": 4}, SM90, 132).terms["l2_us"]
        for shape in ((1, 1), (2, 1))
    )
    assert pair < alone


def test_clusters_of_four_leave_some_multiprocessors_idle() -> None:
    """Of 132, an H200 holds 132, 66 and 30 clusters of one, two and four thread blocks."""
    assert [resident_clusters(132, blocks) for blocks in (1, 2, 4, 8, 16)] == [132, 66, 30, 15, 7]
    assert [resident_clusters(132, blocks, 2) for blocks in (1, 2, 4, 8, 16)] == [264, 132, 62, 31, 14]
    assert [resident_clusters(132, blocks, 8) for blocks in (4, 8, 16)] == [248, 124, 56]
    assert resident_clusters(1, 4) == 1


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 9000),
    n=st.integers(1, 1200).map(lambda x: 8 * x),
    k=st.integers(1, 1200).map(lambda x: 8 * x),
    batch=st.integers(1, 3),
    ab_dtype=st.sampled_from(["bf16", "e4m3", "int8"]),
    data=st.data(),
)
def test_every_legal_config_has_a_finite_estimate_above_the_floor(
    m: int, n: int, k: int, batch: int, ab_dtype: str, data: st.DataObject
) -> None:
    """No config is predicted faster than the peak rates allow, and none to take no or endless time."""
    if ab_dtype != "bf16":
        n, k = -(-n // 16) * 16, -(-k // 16) * 16
    problem = Problem(m, n, k, batch, ab_dtype)
    knobs = {knob: data.draw(st.sampled_from(domain)) for knob, domain in SPACE.domains.items()}
    config = next(
        SPACE.configs(problem, {k: [v] for k, v in knobs.items() if k in ("tile_shape_mn", "split_k")}), None
    )
    if config is None:
        config = SPACE.default(problem)
    estimate = Estimator(problem, SM90, 132).predict(config, SPACE.derive(config, problem, SM90))
    peak = 132 * SM90.mma_flops_per_clk * H200.boost_mhz * (2 if ab_dtype != "bf16" else 1)
    floor = max(problem.flops / peak, problem.min_bytes / H200.hbm_bytes_us)
    assert floor <= estimate.time_us < math.inf
    assert estimate.waves >= 1
    assert all(0 <= value < math.inf for value in estimate.terms.values())


@settings(max_examples=40, deadline=None)
@given(factor=st.integers(2, 8), m=st.sampled_from([64, 512, 4096]), k=st.sampled_from([512, 4096]))
def test_more_work_takes_longer(factor: int, m: int, k: int) -> None:
    """Multiplying an size never makes the same kernel faster."""
    problem = Problem(m, 4096, k)
    for axis in ("m", "n", "k"):
        larger = replace(problem, **{axis: getattr(problem, axis) * factor})
        assert _time(larger) >= _time(problem) * 0.999


def test_epilogues_cost_time_and_pingpong_hides_it() -> None:
    """An exact gelu behind a short product costs less with pingpong than without."""
    plain, gelu = Problem(8192, 8192, 512), Problem(8192, 8192, 512, epilogue=Epilogue(activation="gelu"))
    shared = {"tile_shape_mn": (128, 128)}
    cooperative = _time(gelu, **shared) - _time(plain, **shared)
    pingpong = {**shared, "mma_warpgroups": 1, "pingpong": True}
    hidden = _time(gelu, **pingpong) - _time(plain, **pingpong)
    assert cooperative > 0
    assert hidden < cooperative


def test_eight_bit_operands_go_about_twice_as_fast() -> None:
    """4096^3 in fp8 took 94 us with torch._scaled_mm where bf16 takes 205 us; promotion costs extra."""
    fp8 = Problem(4096, 4096, 4096, ab_dtype="e4m3")
    fast = _time(fp8, tile_k=128)
    assert 0.75 < fast / 94 < 1.25
    assert fast < _time(replace(fp8, promote=True), tile_k=128)


def test_an_unmodelled_architecture_is_refused_by_name() -> None:
    """The error says what is known."""
    with pytest.raises(ArchError, match=r"no performance model of sm_120a; modelled: sm_90a, sm_100a"):
        Estimator(Problem(8, 8, 8), replace(find_arch("sm_100a"), name="sm_120a"), 148)


def test_a_machine_can_be_replaced() -> None:
    """The constants are data: half the memory bandwidth makes a streaming kernel about twice as slow."""
    problem = Problem(1, 129280, 7168)
    config = _config(tile_shape_mn=(64, 16), mma_warpgroups=1, swap_ab=True, cluster_shape_mn=(1, 1))
    slow = Estimator(problem, SM90, 132, replace(H200, hbm_bytes_us=H200.hbm_bytes_us / 2))
    fast = Estimator(problem, SM90, 132)
    derived = {"stages": 20}
    ratio = slow.predict(config, derived).time_us / fast.predict(config, derived).time_us
    assert 1.9 < ratio < 2.01
