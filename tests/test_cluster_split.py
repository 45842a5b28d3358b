"""GEMMs whose clusters split k: which configs exist, what is refused, how the search comes by them."""

from __future__ import annotations

import pytest

from cutegen.arch import ARCHES, find_arch, resident_clusters
from cutegen.build.render import render
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.search.defaults import default_config, default_of_algorithm, predictor
from cutegen.search.strategies import likely, rank, refine
from cutegen.space import Config

ARCH = find_arch("sm_90a")
SPACE = find_space("gemm", ARCH, algorithm="cluster_split")
MIDDLE = Problem(213, 5632, 3072)


def config_of(words: str) -> Config:
    """A valid config of the middle problem, with some knobs changed."""
    config = Config.parse(
        "algorithm=cluster_split tile_shape_mn=192x112 tile_k=64 cluster_shape_mn=1x2 cluster_k=2 "
        "mma_warpgroups=3 swap_ab=true use_tma_store=true use_pdl=false"
    )
    return config.replace(**Config.parse(words))


@pytest.mark.parametrize(
    ("line", "words", "rule"),
    [
        ("213x5632x3072 e4m3 kk", "tile_k=128", "operands_have_16_bits"),
        ("8192x5632x3072 bf16 kk", "", "product_has_few_tiles"),
        ("213x5632x448 bf16 kk", "", "parts_leave_work"),
        ("213x5632x3072 bf16 kk", "tile_shape_mn=192x40 cluster_k=4", "tiles_are_few"),
        ("24x5632x3072 bf16 kk", "tile_shape_mn=192x24", "cluster_is_no_larger_than_problem"),
        ("213x5632x3072 bf16 kk", "tile_shape_mn=192x208", "accumulators_fit_registers"),
    ],
)
def test_a_rule_refuses_what_it_says(line: str, words: str, rule: str) -> None:
    broken = SPACE.explain(Problem.parse(f"gemm {line}"), config_of(words))
    assert any(violation.rule.startswith(rule) for violation in broken), broken


def test_the_kernel_is_for_hopper_only() -> None:
    for arch in ARCHES.values():
        broken = find_space("gemm", arch, algorithm="cluster_split").explain(MIDDLE, {})
        assert [violation.rule for violation in broken] == (
            [] if arch.family == "sm90" else ["cluster_split_is_for_hopper"]
        )


def test_a_launch_fills_clusters_and_walks_tiles_of_the_same_weights_first() -> None:
    """Clusters have the blocks of the tile's cluster times the parts; swapped, m is the second axis."""
    for words, along_m in (("", 0), ("swap_ab=false tile_shape_mn=64x96 mma_warpgroups=1", 1)):
        launch = SPACE.launch(config_of(words), MIDDLE, 132)
        assert launch.scalars == (resident_clusters(132, 4), 1, along_m) and launch.workspace_bytes == 0


def test_sums_fit_where_stages_were() -> None:
    """For every config of a problem, by the space's own account of shared memory."""
    from spaces.gemm.cluster_split import sums_bytes
    from spaces.gemm.hopper_resources import stage_bytes

    found = 0
    for config in SPACE.configs(MIDDLE, {"use_pdl": (False,), "tile_k": (64,), "cluster_k": (4,)}):
        derived = SPACE.derive(config, MIDDLE, ARCH)
        room = int(derived["stages"]) * stage_bytes(config.pair("tile_shape_mn"), 64, MIDDLE)  # type: ignore[arg-type]
        assert sums_bytes(config, MIDDLE) <= room, config
        found += 1
    assert found > 100


def test_proposals_fit_m_and_run_at_once() -> None:
    """The best come first, tiles divide m evenly, and all clusters are resident."""
    found = rank(SPACE, MIDDLE, 132, 12)
    predict = predictor(find_space("gemm", ARCH), MIDDLE, 132)
    assert predict is not None and len(found) > 6
    assert predict(found[0]) == min(us for config in found if (us := predict(config)) is not None)
    for config in found:
        rows, columns = (5632, 213) if config["swap_ab"] else (213, 5632)
        tile, cluster = config.pair("tile_shape_mn"), config.pair("cluster_shape_mn")
        across = -(-columns // tile[1])
        assert tile[1] == -(-columns // (8 * across)) * 8
        count = -(-rows // (tile[0] * cluster[0])) * -(-across // cluster[1])
        assert count <= resident_clusters(132, cluster[0] * cluster[1] * config.integer("cluster_k"))
    assert likely(SPACE, MIDDLE, 132, 8) == found[:3]


def test_refinement_starts_from_the_fastest_and_untuned_calls_stay_general() -> None:
    found = rank(SPACE, MIDDLE, 132, 4)
    near = refine(SPACE, MIDDLE, dict.fromkeys(found, 20.0) | {found[1]: 12.0}, 6)
    assert near and not set(near) & set(found)
    assert all(SPACE.is_valid(MIDDLE, config) for config in near)
    assert default_config(find_space("gemm", ARCH), MIDDLE).algorithm == ""
    assert default_of_algorithm(SPACE, MIDDLE) == found[0]


def test_blocks_of_a_cluster_share_k_in_the_text() -> None:
    text = render(MIDDLE, config_of("cluster_k=2"), ARCH).text
    assert "cluster=(CLUSTER_M, CLUSTER_N, CLUSTER_K)" in text and "CLUSTER_K = 2" in text
    assert text.count("cute.arch.cluster_arrive()") == text.count("cute.arch.cluster_wait()")
