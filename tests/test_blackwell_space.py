"""The Blackwell GEMM space: its rules one by one, what it derives, and the text of its kernels."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from cutegen.arch import find_arch
from cutegen.build.render import render
from cutegen.errors import ConfigError, ProblemError
from cutegen.families.gemm.family import GEMM
from cutegen.families.gemm.problem import Epilogue, Problem
from cutegen.families.registry import find_space
from cutegen.search.strategies import rank, refine
from cutegen.space import Config, Space, Value
from tools.bringup_parts.random_problems import BLACKWELL_DTYPES, random_pairs

ROOT = Path(__file__).resolve().parent.parent
SPACES = [find_space("gemm", find_arch(name)) for name in ("sm_100a", "sm_103a")]
SPACE = SPACES[0]
PLAIN = Problem(4096, 4096, 4096)
REPRESENTATIVE = [PLAIN, Problem(512, 4096, 4096), Problem(4096, 4097, 4096), Problem(256, 256, 65536)]

#: Problems and changes of the default that break exactly one rule each.
ONLY = {
    "int8_tiles_have_widths_of_the_mma": (
        "gemm 4096x4096x4096 int8 kk",
        "mma_tiler_mn=64x40 use_2cta_instrs=false",
    ),
    "rows_fit_the_instruction": (
        "gemm 4096x4096x4096 bf16 kk",
        "mma_tiler_mn=256x256 use_2cta_instrs=false",
    ),
    "pairs_split_columns_evenly": ("gemm 4096x4096x4096 bf16 kk", "mma_tiler_mn=128x240"),
    "tf32_columns_fill_swizzle_rows": ("gemm 4096x4096x4096 tf32 kn", "mma_tiler_mn=256x96"),
    "pairs_lie_along_m": ("gemm 4096x4096x4096 bf16 kk", "cluster_shape_mn=1x2"),
    "shares_of_b_are_whole_rows": (
        "gemm 4096x4096x4096 bf16 kn",
        "mma_tiler_mn=64x40 use_2cta_instrs=false cluster_shape_mn=16x1",
    ),
    "tma_store_needs_aligned_output": ("gemm 4096x4097x4096 bf16 kk", "use_tma_store=true"),
    "swap_ab_is_for_narrow_m": ("gemm 4104x4096x4096 bf16 kk", "swap_ab=true"),
    "split_k_leaves_work": ("gemm 512x512x4088 bf16 kk", "split_k=16 use_tma_store=false"),
    "split_k_stores_partial_sums": ("gemm 512x512x4096 bf16 kk", "split_k=2"),
    "split_k_is_for_few_tiles": (
        "gemm 4096x4104x4096 bf16 kk",
        "split_k=2 use_tma_store=false mma_tiler_mn=128x128 use_2cta_instrs=false",
    ),
    "split_k_workspace_is_bounded": (
        "gemm 4096x4096x65536 bf16 kk",
        "split_k=5 use_tma_store=false mma_tiler_mn=128x256",
    ),
    "cluster_is_no_larger_than_problem": ("gemm 4096x256x4096 bf16 kk", "cluster_shape_mn=2x8"),
    "tile_counts_fit_32_bits": ("gemm 2147479552x2147479552x64 bf16 kk", ""),
    "sizes_round_up_below_2_to_31": ("gemm 2147479553x8x64 bf16 kk", ""),
}


def parsed(line: str, words: str) -> tuple[Problem, Config]:
    """A problem, and its default config with some knobs changed."""
    problem = Problem.parse(line)
    return problem, SPACE.choose_default(SPACE, problem).replace(**Config.parse(words))


def number(value: Value) -> int:
    assert type(value) is int
    return value


def pair(value: Value) -> tuple[int, int]:
    assert isinstance(value, tuple)
    return value[0], value[1]


def test_every_rule_has_an_example_that_it_alone_rejects() -> None:
    """No rule is dead, and none repeats another."""
    assert set(ONLY) | {"arch_multiplies_the_dtype"} == {rule.name for rule in SPACE.rules}
    for name, example in ONLY.items():
        problem, config = parsed(*example)
        assert [v.rule for v in SPACE.explain(problem, config)] == [name]
        with pytest.raises(ConfigError, match=name):
            SPACE.require(problem, config)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("gemm 4096x4096x4096 bf16 kk", "mma_tiler_mn=256x224"),
        ("gemm 4096x4096x4096 bf16 kk", "mma_tiler_mn=128x240 use_2cta_instrs=false"),
        ("gemm 4096x4096x4096 bf16 kk", "mma_tiler_mn=64x16 use_2cta_instrs=false"),
        ("gemm 4096x4096x4096 bf16 kk", "mma_tiler_mn=64x24 use_2cta_instrs=false"),
        ("gemm 4096x4096x4096 bf16 kn", "mma_tiler_mn=64x40 use_2cta_instrs=false cluster_shape_mn=8x1"),
        ("gemm 4096x4096x4096 bf16 kn", "mma_tiler_mn=64x48 use_2cta_instrs=false cluster_shape_mn=16x1"),
        ("gemm 4096x4096x4096 bf16 kk", "mma_tiler_mn=256x32 cluster_shape_mn=16x1"),
        ("gemm 4096x4096x4096 bf16 kk", "use_clc=true use_pdl=true"),
        ("gemm 512x512x4096 bf16 kk", "split_k=16 use_tma_store=false"),
        ("gemm 512x512x4096 e4m3 kk scale promote", "split_k=8 use_tma_store=false"),
        ("gemm 4096x4096x4096 int8 kk", "mma_tiler_mn=64x24 use_2cta_instrs=false"),
        ("gemm 4096x4096x4096 int8 kk", "mma_tiler_mn=64x48 use_2cta_instrs=false"),
        ("gemm 4096x4096x65536 bf16 kk", "split_k=4 use_tma_store=false mma_tiler_mn=128x256"),
        ("gemm 4096x4096x4096 tf32 kn", "mma_tiler_mn=256x64"),
        ("gemm 4096x4096x4096 tf32 kk", "mma_tiler_mn=256x96"),
        ("gemm 16x4096x4096 tf32 mn", ""),
        ("gemm 4096x4096x4096 bf16 kk", "mma_tiler_mn=128x32 cluster_shape_mn=16x1"),
        ("gemm 512x4096x4096 bf16 kk", "swap_ab=true"),
        ("gemm 4096x4096x64 fp16 mn out=fp32 alpha beta bias=m act=gelu scale any_order", ""),
    ],
)
def test_limits_are_reached(line: str, words: str) -> None:
    """One step inside the limits of the examples above, configs are legal."""
    assert SPACE.explain(*parsed(line, words)) == ()


@pytest.mark.parametrize("space", SPACES, ids=lambda space: space.arch.name)
def test_every_value_of_every_knob_can_be_had(space: Space) -> None:
    """On both targets, and a plain problem has hundreds of kernels."""
    assert space.unreachable(REPRESENTATIVE) == ()
    kernels = {space.compile_view(config) for config in space.configs(PLAIN)}
    assert len(kernels) > 400


def test_integers_are_refused_where_there_is_no_mma_for_them() -> None:
    """No config is legal on sm_103a, and asking for the default says why; on sm_100a hundreds are."""
    problem = Problem(512, 512, 512, ab_dtype="int8")
    b200, b300 = SPACES
    assert next(b300.configs(problem), None) is None
    with pytest.raises(
        ProblemError, match="cannot be computed on sm_103a: arch_multiplies_the_dtype: sm_103a"
    ):
        b300.default(problem)
    assert len({b200.compile_view(config) for config in b200.configs(problem)}) > 400
    widths = {pair(config["mma_tiler_mn"])[1] for config in b200.configs(problem)}
    assert widths == {16, 24, *range(32, 257, 16)}


@pytest.mark.parametrize(("dtype", "tile_k"), [("e4m3", 128), ("e5m2", 128), ("fp16", 64), ("tf32", 32)])
def test_a_k_tile_is_one_swizzle_row_of_any_type(dtype: str, tile_k: int) -> None:
    """128 bytes; a tile of 256x256 of a pair then brings 64 KiB in each stage, whatever the type."""
    problem = Problem(4096, 4096, 4096, ab_dtype=dtype)
    derived = SPACE.derive(SPACE.default(problem), problem, SPACE.arch)
    assert (derived["tile_k"], derived["expected_bytes"]) == (tile_k, 65536)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("", {"empty_arrivals": 1, "acc_arrivals": 8, "answers": 0}),
        ("cluster_shape_mn=4x2", {"empty_arrivals": 3, "acc_arrivals": 8}),
        (
            "mma_tiler_mn=128x64 use_2cta_instrs=false cluster_shape_mn=4x2",
            {"empty_arrivals": 5, "expected_bytes": 24576, "acc_arrivals": 4},
        ),
        ("use_clc=true", {"answers": 1, "answer_arrivals": 13, "threads": 224}),
        ("use_clc=true cluster_shape_mn=4x4", {"answer_arrivals": 97, "empty_arrivals": 5}),
    ],
)
def test_arrivals_are_counted_over_all_who_share(words: str, wanted: dict[str, int]) -> None:
    """Stages: pairs in a row and column; accumulators: epilogue warps; responses: all working warps."""
    problem, config = parsed("gemm 4096x4096x4096 bf16 kk", words)
    derived = SPACE.derive(config, problem, SPACE.arch)
    assert {name: derived[name] for name in wanted} == wanted


def test_defaults_share_tiles_only_where_there_are_enough() -> None:
    """Pairs of blocks for a large product, lone ones for a small one, swapped for few rows."""
    large, small, flat = (SPACE.default(p) for p in (PLAIN, Problem(512, 512, 512), Problem(16, 4096, 4096)))
    assert (large["use_2cta_instrs"], large["cluster_shape_mn"]) == (True, (2, 1))
    assert (small["use_2cta_instrs"], small["swap_ab"]) == (False, False)
    assert (flat["use_2cta_instrs"], flat["swap_ab"], flat["mma_tiler_mn"]) == (False, True, (128, 16))


def test_what_is_derived_fits_tensor_memory_and_the_barriers() -> None:
    """Two tiles of sums in a power of two of columns; barriers in the 1024 bytes set aside for them."""
    for problem, config in random_pairs(SPACE, seed=1, count=300, per_problem=2, dtypes=BLACKWELL_DTYPES):
        derived = SPACE.derive(config, problem, SPACE.arch)
        tiler, columns = pair(config["mma_tiler_mn"]), number(derived["tmem_columns"])
        blocks = 2 if config["use_2cta_instrs"] else 1
        assert columns in (32, 64, 128, 256, 512) and columns <= SPACE.arch.tmem_columns
        assert columns * 128 >= number(derived["acc_stages"]) * tiler[0] * tiler[1] // blocks
        barriers = 16 * sum(number(derived[name]) for name in ("stages", "acc_stages", "answers"))
        assert barriers + 16 * number(derived["answers"]) + 32 <= 1024
        assert number(derived["threads"]) * number(derived["max_registers"]) <= SPACE.arch.registers
        assert tiler[1] % number(derived["epi_n"]) == 0
        assert number(derived["epi_n"]) * tiler[0] // blocks <= 4096
        assert number(derived["vector"]) <= number(derived["epi_n"])


def test_a_launch_has_small_integers_and_room_for_partial_sums() -> None:
    """Scalars as on Hopper, without clusters where the hardware hands out work; never more than fit."""
    for problem, config in random_pairs(SPACE, seed=2, count=200, dtypes=BLACKWELL_DTYPES):
        for sm_count in (1, 74, 148):
            launch = SPACE.launch(config, problem, sm_count)
            scalars, splits = list(launch.scalars), number(config["split_k"])
            blocks = int.__mul__(*pair(config["cluster_shape_mn"]))
            if not config["use_clc"]:
                assert 1 <= scalars.pop(0) <= max(1, sm_count // blocks)
            assert scalars == [
                config["swizzle_size"],
                int(bool(config["raster_along_m"])),
                *([splits] if splits > 1 else []),
            ]
            sums = 4 * splits * problem.batch * problem.m * problem.n if splits > 1 else 0
            assert sums <= launch.workspace_bytes <= 256 * 2**20 and not launch.zeroed
            assert (launch.workspace_bytes == 0) == (splits == 1)


@pytest.fixture
def without_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows how fast these kernels are."""
    monkeypatch.setattr(GEMM, "strategy", lambda *_: None)


@pytest.mark.usefixtures("without_a_model")
def test_without_a_model_the_default_leads_a_survey_of_the_space() -> None:
    """Kernels are spread over all tiles, none twice; restrictions are kept; what follows is new."""
    found = rank(SPACE, PLAIN, 148, 40)
    assert found[0] == SPACE.default(PLAIN) and len(set(found)) == len(found)
    assert [len({SPACE.compile_view(config) for config in part}) for part in (found[:40], found)] == [40, 40]
    assert len({config["mma_tiler_mn"] for config in found}) > 15
    assert found == rank(SPACE, PLAIN, 148, 40)
    lone = rank(SPACE, PLAIN, 148, 8, {"use_2cta_instrs": [False]})
    assert len(lone) == 8 and not any(config["use_2cta_instrs"] for config in lone)
    results = {config: float(i) for i, config in enumerate(found)}
    more = refine(SPACE, PLAIN, results, 12)
    assert len(more) == 12 and not set(more) & set(found)
    for config in more:
        SPACE.require(PLAIN, config)


@pytest.mark.usefixtures("without_a_model")
def test_a_survey_has_kernels_that_split_k() -> None:
    """They are kernels of their own, whatever the default's split; each comes with the first legal value, and
    a few more at even distances, since how often to split depends on the problem."""
    deep = Problem(256, 256, 65536)
    found = rank(SPACE, deep, 148, 40)
    assert found[0]["split_k"] == 1 and {config["split_k"] for config in found[:40]} == {1, 2}
    assert len({SPACE.compile_view(config) for config in found}) == 40
    splits: dict[Config, set[Value]] = {}
    for config in found:
        splits.setdefault(SPACE.compile_view(config), set()).add(config["split_k"])
        SPACE.require(deep, config)
    assert {frozenset(values) for values in splits.values()} == {frozenset([1]), frozenset([2, 3, 6, 10, 16])}
    short = rank(SPACE, Problem(256, 256, 512), 148, 8, {"split_k": [16, 2]})
    assert len(short) == 8 and {config["split_k"] for config in short} == {2}


# --- the text ---


def test_launch_takes_what_the_calling_convention_says() -> None:
    """In order: tensors, the launch's scalars, alpha and beta, the stream; one stand-in for each."""
    for problem, config in random_pairs(SPACE, seed=3, count=60, dtypes=BLACKWELL_DTYPES):
        epilogue = problem.epilogue
        wanted = ["a", "b", "d"] + ["c"] * epilogue.beta + ["bias"] * bool(epilogue.bias)
        split = config["split_k"] != 1
        wanted += ["scale_a", "scale_b"] * epilogue.scale + ["workspace"] * split
        wanted += ["clusters"] * (not config["use_clc"]) + ["swizzle", "along_m"] + ["splits"] * split
        wanted += ["alpha"] * epilogue.alpha + ["beta"] * epilogue.beta + ["stream"]
        tree = ast.parse(render(problem, config, SPACE.arch).text)
        functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert [a.arg for a in functions["launch"].args.args] == wanted
        made = functions["fake_arguments"].body[-1]
        assert isinstance(made, ast.Return) and isinstance(made.value, ast.Tuple)
        assert len(made.value.elts) == len(wanted)


def test_a_plain_product_has_no_trace_of_an_epilogue() -> None:
    """Parts that a kernel does not use are left out, words and all."""
    text = render(PLAIN, SPACE.default(PLAIN), SPACE.arch).text
    assert not any(
        word in text
        for word in ("alpha", "bias", "activate", "load_c", "batch", "store_direct", "splits", "answers")
    )
    fused = Problem(512, 512, 512, epilogue=Epilogue(True, True, "n", "gelu", True))
    text = render(fused, SPACE.default(fused), SPACE.arch).text
    assert text.startswith('"""D = act(alpha * scale_a * scale_b * A @ B + beta * C + bias) on sm_100a.')
