"""The block-scaled Blackwell space: its rules, what it derives, the text of its kernels, who refuses it."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from blackwell import pair
from blockscaled import PLAIN, SPACE
from covering import cover
from fake_engine import DEVICE
from fake_tuning import Rig

from cutegen.arch import find_arch
from cutegen.build.render import render
from cutegen.cli.space import main
from cutegen.deploy import pin_table
from cutegen.errors import ConfigError, OperandError, PinError, ProblemError, ResourceError
from cutegen.families.gemm.operands import Request, describe
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.families.shapes import read_shapes
from cutegen.records.table import Table
from cutegen.space import Config, Value
from tools.bringup_parts.random_problems import random_pairs
from tools.schedule import lengths, pipelines, protocol_of, simulate_cluster
from tools.schedule.sm100 import BlackwellProtocol

ROOT = Path(__file__).resolve().parent.parent
B200, B300 = find_arch("sm_100a"), find_arch("sm_103a")

#: Problems and changes of the default that break exactly one rule each.
ONLY = {
    "nothing_but_alpha_is_fused": ("gemm_blockscaled 4096x4096x4096 nvfp4 kk alpha bias=n", ""),
    "rows_fit_the_instruction": (str(PLAIN), "mma_tiler_mn=128x192"),
    "pairs_lie_along_m": (str(PLAIN), "cluster_shape_mn=1x2"),
    "tma_store_needs_aligned_output": ("gemm_blockscaled 4096x4097x4096 nvfp4 kk", "use_tma_store=true"),
    "swap_ab_is_for_narrow_m": ("gemm_blockscaled 4104x4096x4096 nvfp4 kk", "swap_ab=true"),
    "cluster_is_no_larger_than_problem": ("gemm_blockscaled 8192x256x4096 nvfp4 kk", "cluster_shape_mn=2x4"),
    "tile_counts_fit_32_bits": ("gemm_blockscaled 536870784x536870784x64 nvfp4 kk", ""),
    "scale_factors_are_counted_in_32_bits": ("gemm_blockscaled 2x131072x128x131072 nvfp4 kk", ""),
}


def parsed(line: str, words: str) -> tuple[Problem, Config]:
    """A problem, and its default config with some knobs changed."""
    problem = Problem.parse(line)
    return problem, SPACE.choose_default(SPACE, problem).replace(**Config.parse(words))


def derived(line: str, words: str = "") -> dict[str, Value]:
    problem, config = parsed(line, words)
    SPACE.require(problem, config)
    return dict(SPACE.derive(config, problem, B200))


def number(value: Value) -> int:
    assert type(value) is int
    return value


def test_every_rule_has_an_example_that_it_alone_rejects() -> None:
    """No rule is dead, and none repeats another; the refusal names the rule."""
    assert set(ONLY) == {rule.name for rule in SPACE.rules}
    for name, example in ONLY.items():
        problem, config = parsed(*example)
        assert [v.rule for v in SPACE.explain(problem, config)] == [name]
        with pytest.raises(ConfigError, match=name):
            SPACE.require(problem, config)


@pytest.mark.parametrize("arch", [B200, B300], ids=str)
def test_every_value_of_every_knob_can_be_had(arch: object) -> None:
    """By problems with many and with few rows."""
    problems = [PLAIN, Problem.parse("gemm_blockscaled 512x4096x4096 mxfp8_e5m2 kk")]
    assert find_space("gemm_blockscaled", find_arch(str(arch))).unreachable(problems) == ()


def test_a_stage_holds_elements_and_scale_factors() -> None:
    """128 bytes of each row; per row 4 factors of mxfp8 and 16 of nvfp4, those of B for whole 128 columns."""
    lone, two = "mma_tiler_mn=128x64 use_2cta_instrs=false cluster_shape_mn=1x1", "mma_tiler_mn=256x192"
    for dtype, scales, tile_k in (("mxfp8_e4m3", 4, 128), ("nvfp4", 16, 256)):
        line = f"gemm_blockscaled 4096x4096x4096 {dtype} kk"
        found = derived(line, lone)
        assert found["tile_k"] == tile_k
        assert found["stage_bytes"] == found["expected_bytes"] == (128 + 64) * 128 + (128 + 128) * scales
        found = derived(line, two)
        assert found["stage_bytes"] == (128 + 96) * 128 + (128 + 256) * scales
        assert found["expected_bytes"] == 2 * number(found["stage_bytes"])


@pytest.mark.parametrize(
    ("line", "words", "wanted"),
    [
        ("mxfp8_e4m3", "mma_tiler_mn=256x64", (2, 4, 4, 256)),
        ("mxfp8_e4m3", "mma_tiler_mn=256x192", (2, 4, 8, 512)),
        ("mxfp8_e5m2", "mma_tiler_mn=256x256", (1, 4, 8, 512)),
        ("nvfp4", "mma_tiler_mn=256x64", (2, 16, 16, 256)),
        ("nvfp4", "mma_tiler_mn=256x128", (2, 16, 16, 512)),
        ("nvfp4", "mma_tiler_mn=256x256", (1, 16, 32, 512)),
    ],
)
def test_tensor_memory_holds_sums_and_scale_factors(line: str, words: str, wanted: tuple[int, ...]) -> None:
    """Two tiles of sums unless they and the scale factors need more than 512 columns."""
    found = derived(f"gemm_blockscaled 4096x4096x4096 {line} kk", words)
    names = ("acc_stages", "sfa_columns", "sfb_columns", "tmem_columns")
    assert tuple(number(found[name]) for name in names) == wanted


def test_what_is_derived_fits_the_target() -> None:
    """Whatever is legal: shared memory, tensor memory, the bytes of barriers, and at least three stages."""
    for problem, config in random_pairs(SPACE, seed=2, count=200, per_problem=3):
        found = SPACE.derive(config, problem, B200)
        tile_n = pair(config["mma_tiler_mn"])[1]
        columns = sum(number(found[name]) for name in ("sfa_columns", "sfb_columns"))
        columns += number(found["acc_stages"]) * tile_n
        assert columns <= number(found["tmem_columns"]) <= B200.tmem_columns
        assert number(found["tmem_columns"]).bit_count() == 1
        assert number(found["stages"]) >= 3
        assert 16 * (number(found["stages"]) + number(found["acc_stages"])) + 32 <= 1024
        assert number(found["smem_bytes"]) <= B200.smem_bytes


def test_a_launch_has_small_integers_and_no_workspace() -> None:
    """No more clusters than fit."""
    for problem, config in random_pairs(SPACE, seed=3, count=100):
        launch = SPACE.launch(config, problem, 148)
        clusters, swizzle, along_m = launch.scalars
        blocks = int.__mul__(*pair(config["cluster_shape_mn"]))
        assert 1 <= clusters <= 148 // blocks
        assert (swizzle, along_m) == (config["swizzle_size"], int(bool(config["raster_along_m"])))
        assert launch.workspace_bytes == 0


# --- the text ---


def test_the_text_says_what_is_computed_and_how_scale_factors_lie() -> None:
    """In its first lines; packed operands are taken as bytes, and nothing else of torch's types is needed."""
    text = render(*parsed("gemm_blockscaled 4096x4096x4096 nvfp4 kk alpha", ""), B300).text
    assert text.startswith('"""D = alpha * (scale_a * A) @ (scale_b * B) on sm_103a.')
    assert "e2m1 operands, two to a byte, with e4m3 scale factors for every 16 along k" in text
    assert "row r has 4 bytes at\nr % 32 * 16 + r // 32 * 4" in text
    assert "matrix(BYTES, m, k, 1, 16)" in text
    text = render(*parsed("gemm_blockscaled 4096x4096x4096 mxfp8_e5m2 kk", ""), B200).text
    assert "e5m2 operands with e8m0 scale factors for every 32 along k" in text
    assert "BYTES" not in text.replace("STAGE_BYTES", "") and "alpha" not in text


LOAD = re.compile(
    r"tma_(\w+),\n *tg_(\w+)\[\(None, (.+?), k.*\n *ts_(\w+)\[.*\n *tma_bar.*\n *mcast_mask=mask_(\w+),"
)


def test_every_load_goes_where_it_is_wanted() -> None:
    """Scale factors of A go with A; those of B go to the whole column, pairs or not."""
    for words, where in (("mma_tiler_mn=256x128", "n"), ("mma_tiler_mn=256x192", "scale_tile(n)")):
        text = render(*parsed(str(PLAIN), words), B200).text
        loads = [("a", "m", "a"), ("b", "n", "b"), ("sfa", "m", "a"), ("sfb", where, "sfb")]
        wanted = [(name, name, at, name, mask) for name, at, mask in loads]
        assert LOAD.findall(text) == wanted
        assert "mask_sfb = cpasync.create_tma_multicast_mask(cluster_sfb, rank_sfb, mcast_mode=1)" in text


def test_swapped_operands_keep_their_own_scale_factors() -> None:
    """What the kernel calls A is then the caller's B."""
    few = PLAIN.resized(64, 4096, 4096)
    for swap, lines in (
        (
            False,
            ("recast_tensor(reorder(a, [0, 1]), AB)", "scales_of(scale_a, m_a), scales_of(scale_b, m_b)"),
        ),
        (True, ("recast_tensor(reorder(b, [1, 0]), AB)", "scales_of(scale_b, m_a), scales_of(scale_a, m_b)")),
    ):
        text = render(few, SPACE.default(few).replace(swap_ab=swap), B200).text
        assert f"m_a, m_b = cute.{lines[0]}, " in text
        assert f"m_sfa, m_sfb = {lines[1]}\n" in text


def test_a_kernel_imports_the_compiler_only() -> None:
    """And holds no trace of the template's language."""
    for problem, config in random_pairs(SPACE, seed=5, count=40):
        text = render(problem, config, B200).text
        assert "{%" not in text and "{{" not in text
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in nodes}
        assert {str(name).split(".")[0] for name in names} == {"cutlass", "cuda"}


# --- who waits for whom ---


def test_kernels_that_hold_every_pair_of_facts_are_clean() -> None:
    """Simulated under priorities and at random; their text creates the pipelines that were simulated."""
    draws = list(random_pairs(SPACE, seed=6, count=150))

    def facts(problem: Problem, config: Config) -> list[object]:
        protocol = protocol_of(problem, config, B200)
        assert isinstance(protocol, BlackwellProtocol)
        found = {
            "cluster": (protocol.cluster, protocol.pair),
            "acc": protocol.acc_stages,
            "store": protocol.store_buffers,
            "scales": protocol.bytes_scales,
        }
        return list(combinations(found.items(), 2))

    kernels = cover(draws, facts)
    assert len(kernels) >= 15
    for problem, config in kernels:
        protocol = protocol_of(problem, config, B200)
        report = simulate_cluster(protocol.play(lengths(protocol, 3)), shuffles=2)
        assert report.clean, f"{problem} | {config}\n{report}"
        assert pipelines(render(problem, config, B200).text) == protocol.pipelines


def test_scale_factors_of_b_go_to_both_blocks_of_a_pair() -> None:
    """Without them, or with those of one block only, a stage never fills."""
    problem, config = parsed(str(PLAIN), "cluster_shape_mn=4x1")
    protocol = protocol_of(problem, config, B200)
    assert isinstance(protocol, BlackwellProtocol)
    assert protocol.bytes_scales == 256 * 16
    each = protocol.bytes_a + protocol.bytes_b + protocol.bytes_scales
    assert protocol.expected_bytes == 2 * each
    without = BlackwellProtocol(**{**vars(protocol), "bytes_scales": 0})
    assert simulate_cluster(without.play((3,))).kinds == {"deadlock"}


# --- the commands ---


def test_the_command_needs_no_dtype_and_finds_no_dead_value(capsys: pytest.CaptureFixture[str]) -> None:
    """Without problems of its own it takes some of each format; with a shape alone, the family's first."""
    assert main(["gemm_blockscaled", "--arch", "sm_100a", "--lint"]) == 0
    assert capsys.readouterr() == ("", "0 unused knob values over 12 problems on sm_100a\n")
    line = ["gemm_blockscaled", "--arch", "sm_103a", "--shape", "512x512x512"]
    assert main([*line, "--explain", "use_2cta_instrs=true", "cluster_shape_mn=1x1"]) == 0
    found = capsys.readouterr().out
    assert "gemm_blockscaled 512x512x512 mxfp8_e4m3 kk on sm_103a\n" in found
    assert "pairs_lie_along_m: use_2cta_instrs joins two blocks" in found
    assert main([*line, "--dtype", "bf16"]) == 2
    assert "gemm_blockscaled multiplies mxfp8_e4m3, mxfp8_e5m2, nvfp4" in capsys.readouterr().err


def test_a_shapes_file_needs_no_dtype_either(tmp_path: Path) -> None:
    """Each family has its own."""
    path = tmp_path / "shapes.toml"
    path.write_text("[[shape]]\nm = 64\nn = 64\nk = 64\n")
    for family, dtype in (("gemm", "bf16"), ("gemm_blockscaled", "mxfp8_e4m3")):
        [found] = read_shapes(path, family)
        assert str(found.problem) == f"{family} 64x64x64 {dtype} kk"


# --- who refuses it ---


def test_hopper_and_foreign_sources_have_no_such_kernels() -> None:
    """The message says which targets have."""
    with pytest.raises(ResourceError, match=r"no template of 'gemm_blockscaled' for sm_90a; it has .* sm100"):
        find_space("gemm_blockscaled", find_arch("sm_90a"))
    with pytest.raises(ResourceError, match="from operators"):
        find_space("gemm_blockscaled", B200, "operators")


def test_an_epilogue_is_refused_by_name() -> None:
    """Before anything is rendered."""
    problem = Problem.parse("gemm_blockscaled 4096x4096x4096 nvfp4 kk act=relu")
    with pytest.raises(ProblemError, match="nothing_but_alpha_is_fused"):
        SPACE.default(problem)


def test_with_a_gpu_candidates_are_checked_and_timed(tmp_path: Path) -> None:
    """As those of any family: the default competes with torch, the winner is written down."""
    rig = Rig(tmp_path, device=replace(DEVICE, name="Fake B200", compute_capability=(10, 0), sm_count=148))
    result = rig.tuner.tune_problem(PLAIN)
    assert rig.bench.opened == [PLAIN] and len(rig.bench.checked) > 5
    assert SPACE.default(PLAIN).digest in rig.bench.finals
    assert result.torch is not None and any(row.default for row in result.rows)
    entry = Table.load(rig.tuner.setting.table).entries[PLAIN]
    assert entry.config == result.config and SPACE.explain(PLAIN, result.config) == ()
    with pytest.raises(PinError, match="torch has no dtype nvfp4, so no call poses it"):
        pin_table(rig.tuner.setting.table, tmp_path / "pinned")


def test_the_library_takes_no_scale_factors_along_k() -> None:
    """Neither bytes of packed values nor blocks of factors are mistaken for something else."""
    torch = pytest.importorskip("torch")
    a, b = torch.zeros(64, 64, dtype=torch.float8_e4m3fn), torch.zeros(64, 64, dtype=torch.float8_e4m3fn)
    scales = torch.zeros(64, 2, dtype=torch.float8_e8m0fnu)
    with pytest.raises(OperandError, match=r"scale_a has dtype torch\.float8_e8m0fnu; .* torch\.float32"):
        describe(Request(a, b.t(), scale_a=scales, scale_b=scales), device_type="cpu")
    packed = torch.zeros(64, 32, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    with pytest.raises(
        OperandError, match=r"a has dtype torch\.float4_e2m1fn_x2; supported: torch\.bfloat16"
    ):
        describe(Request(packed, packed.t()), device_type="cpu")
