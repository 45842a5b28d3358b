"""The model of Blackwell: public facts that it gives back, and sane choices though nothing was measured."""

from __future__ import annotations

from random import Random

import pytest

from cutegen.arch import find_arch
from cutegen.errors import ProblemError
from cutegen.families.gemm.perf_model.blackwell import BlackwellEstimator
from cutegen.families.gemm.perf_model.gpu_params import find_machine, is_measured
from cutegen.families.gemm.problem import Epilogue, Problem
from cutegen.families.registry import find_family, find_space
from cutegen.search.defaults import default_config, default_of_algorithm, default_set, predictor
from cutegen.search.strategies import rank, refine
from cutegen.space import Config

ARCHES = ("sm_100a", "sm_103a")
SPACE = find_space("gemm", find_arch("sm_100a"))


def kernel(rows: int, columns: int, *, pair: bool = False) -> Config:
    return SPACE.default(Problem(4096, 4096, 4096)).replace(
        mma_tiler_mn=(rows, columns), use_2cta_instrs=pair, cluster_shape_mn=(2, 1) if pair else (1, 1)
    )


def clocks(config: Config) -> tuple[float, float]:
    """Clocks of one k step, if nothing but multiplying and reading shared memory took time."""
    problem, arch = Problem(4096, 4096, 4096), find_arch("sm_100a")
    terms = BlackwellEstimator(problem, arch, 148).predict(config, SPACE.derive(config, problem, arch)).terms
    efficiency, writes = find_machine(arch).mma_efficiency, 1.25
    steps = terms["mma_us"] * terms["clock_mhz"] * efficiency
    return steps, terms["smem_us"] * terms["clock_mhz"] / writes


@pytest.mark.parametrize(("columns", "rate"), [(64, 0.66), (96, 0.85), (112, 0.93), (128, 1.0), (256, 1.0)])
def test_narrow_mmas_of_one_block_wait_for_shared_memory(columns: int, rate: float) -> None:
    """As SemiAnalysisAI/microbench-blackwell measured them with 128 rows."""
    multiply, read = clocks(kernel(128, columns))
    assert multiply / max(multiply, read) == pytest.approx(rate, abs=0.02)


def test_pairs_read_half_of_b_and_half_of_the_rows_half_the_rate() -> None:
    """Two blocks reach the full rate from 96 columns on; an MMA of 64 rows takes as long as one of 128."""
    multiply, read = clocks(kernel(256, 96, pair=True))
    assert read < multiply
    alone, apart = clocks(kernel(128, 96)), clocks(kernel(256, 96, pair=True))
    assert apart[0] == pytest.approx(alone[0]) and apart[1] < 0.8 * alone[1]
    assert clocks(kernel(64, 128))[0] == pytest.approx(clocks(kernel(128, 128))[0] * _steps_ratio())


def _steps_ratio() -> float:
    """Twice the tiles of half the rows take twice the rounds, so the terms of a launch count them twice."""
    tiles = [-(-4096 // rows) * (4096 // 128) for rows in (64, 128)]
    return -(-tiles[0] // 148) / -(-tiles[1] // 148)


@pytest.mark.parametrize("arch", ARCHES)
def test_large_squares_come_to_what_others_measured(arch: str) -> None:
    """8192^3 in bf16: 1600 (Tilus, cuBLAS) to 1763 TFLOP/s (Modular); twice as fast in fp8, half in tf32."""
    space, times = find_space("gemm", find_arch(arch)), {}
    for dtype in ("bf16", "e4m3", "tf32"):
        problem = Problem(8192, 8192, 8192, ab_dtype=dtype)
        predict = predictor(space, problem)
        assert predict is not None
        found = predict(default_config(space, problem))
        assert found is not None
        times[dtype] = found
    assert 1550 < 2 * 8192**3 / times["bf16"] / 1e6 < 1790
    assert 1.7 < times["bf16"] / times["e4m3"] < 2.05 and 1.7 < times["tf32"] / times["bf16"] < 2.1


@pytest.mark.parametrize("arch", ARCHES)
def test_defaults_fit_the_shape(arch: str) -> None:
    """Wide tiles of pairs for large products, small swapped ones for few rows, parts of k for few tiles."""
    space = find_space("gemm", find_arch(arch))

    def default(*mnk: int) -> Config:
        return default_config(space, Problem(*mnk))

    for mnk in ((4096, 4096, 4096), (8192, 8192, 8192), (16384, 4096, 4096), (4096, 14336, 4096)):
        config = default(*mnk)
        assert config["use_2cta_instrs"] and config.pair("mma_tiler_mn")[0] == 256
        assert config.pair("mma_tiler_mn")[1] >= 160 and config["split_k"] == 1
    for m in (1, 8, 16):
        config = default(m, 8192, 8192)
        assert config["swap_ab"] and config.pair("mma_tiler_mn")[1] <= 32
    for m in (32, 64):
        config = default(m, 7168, 2048)
        assert config["swap_ab"] and config.pair("mma_tiler_mn")[1] <= 64
    assert default(256, 256, 65536).integer("split_k") > 8
    small = default(512, 512, 512)
    tiler = small.pair("mma_tiler_mn")
    assert tiler[0] * tiler[1] <= 256 * 128


@pytest.mark.parametrize("arch", ARCHES)
def test_defaults_are_valid_and_few(arch: str) -> None:
    """Whatever is computed; a program that never tunes compiles few kernels."""
    space, generator = find_space("gemm", find_arch(arch)), Random(5)
    dtypes = ("bf16", "fp16", "e4m3", "tf32") + (("int8",) if arch == "sm_100a" else ())
    for _ in range(150):
        dtype, layout = generator.choice(dtypes), generator.choice(("kk", "kn", "mk"))
        m, n, k = (16 * max(1, int(1000 ** generator.random())) for _ in range(3))
        epilogue = generator.choice((Epilogue(), Epilogue(bias="n", activation="silu")))
        try:
            problem = Problem(m, n, k, ab_dtype=dtype, layout=layout, epilogue=epilogue)
        except ProblemError:
            continue
        config = default_config(space, problem)
        space.require(problem, config)
        assert config["use_clc"] is False
    assert 15 <= len(default_set(space, Problem(64, 64, 64))) <= 25


def test_ranking_tries_several_ways_and_refinement_steps_from_the_fastest() -> None:
    """Pairs and single blocks, swapped and not; neighbours are valid and new."""
    problem = Problem(512, 4096, 4096)
    found = rank(SPACE, problem, 148, 16, default=default_of_algorithm(SPACE, problem, 148))
    assert len({SPACE.compile_view(config) for config in found}) <= 16
    assert {config["use_2cta_instrs"] for config in found} == {False, True}
    assert {config["swap_ab"] for config in found} == {False, True}
    results: dict[Config, float | None] = {config: 10.0 + at for at, config in enumerate(found)}
    more = refine(SPACE, problem, results, 6, sm_count=148)
    assert more and not set(more) & set(found)
    for config in more:
        SPACE.require(problem, config)
    tiles = {config.pair("mma_tiler_mn") for config in more}
    assert len(tiles) > 1


def test_nothing_is_called_measured() -> None:
    """Tables of predictions say so; products with scale factors have no model at all."""
    gemm, scaled = find_family("gemm"), find_family("gemm_blockscaled")
    for name in ARCHES:
        arch = find_arch(name)
        assert not is_measured(arch) and not gemm.is_fitted(Problem(64, 64, 64), arch)
        assert "Nothing was measured" in gemm.accuracy(arch)
        assert scaled.accuracy(arch) == "" and scaled.strategy(arch) is None
        assert gemm.strategy(arch, "few_rows") is None
    assert is_measured(find_arch("sm_90a")) and "measured" in gemm.accuracy(find_arch("sm_90a"))
