"""The Blackwell GEMM space: its rules one by one, what it derives, and the text of its kernels."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from walk import random_pairs

from cutegen.arch import find_arch
from cutegen.catalog import find_space
from cutegen.errors import ConfigError, ProblemError
from cutegen.problem import Epilogue, Problem
from cutegen.render import render
from cutegen.space import Config, Space, Value
from cutegen.survey import rank, refine

ROOT = Path(__file__).resolve().parent.parent
SPACES = [find_space("gemm", find_arch(name)) for name in ("sm_100a", "sm_103a")]
SPACE = SPACES[0]
PLAIN = Problem(4096, 4096, 4096)
REPRESENTATIVE = [PLAIN, Problem(512, 4096, 4096), Problem(4096, 4097, 4096)]

#: Problems and changes of the default that break exactly one rule each.
ONLY = {
    "operands_are_16_bit": ("gemm 4096x4096x4096 e4m3 tn", ""),
    "rows_fit_the_instruction": (
        "gemm 4096x4096x4096 bf16 tn",
        "mma_tiler_mn=256x256 use_2cta_instrs=false",
    ),
    "pairs_split_columns_evenly": ("gemm 4096x4096x4096 bf16 tn", "mma_tiler_mn=128x240"),
    "pairs_lie_along_m": ("gemm 4096x4096x4096 bf16 tn", "cluster_shape_mn=1x2"),
    "tma_store_needs_aligned_output": ("gemm 4096x4097x4096 bf16 tn", "use_tma_store=true"),
    "swap_ab_is_for_narrow_m": ("gemm 520x4096x4096 bf16 tn", "swap_ab=true"),
    "cluster_is_no_larger_than_problem": ("gemm 4096x256x4096 bf16 tn", "cluster_shape_mn=2x8"),
    "tile_counts_fit_32_bits": ("gemm 2147483640x2147483640x64 bf16 tn", ""),
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
    assert set(ONLY) == {rule.name for rule in SPACE.rules}
    for name, example in ONLY.items():
        problem, config = parsed(*example)
        assert [v.rule for v in SPACE.explain(problem, config)] == [name]
        with pytest.raises(ConfigError, match=name):
            SPACE.require(problem, config)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("gemm 4096x4096x4096 bf16 tn", "mma_tiler_mn=256x224"),
        ("gemm 4096x4096x4096 bf16 tn", "mma_tiler_mn=128x240 use_2cta_instrs=false"),
        ("gemm 4096x4096x4096 bf16 tn", "mma_tiler_mn=64x16 use_2cta_instrs=false"),
        ("gemm 4096x4096x4096 bf16 tn", "mma_tiler_mn=128x32 cluster_shape_mn=16x1"),
        ("gemm 512x4096x4096 bf16 tn", "swap_ab=true"),
        ("gemm 4096x4096x64 fp16 nt out=fp32 alpha beta bias=m act=gelu scale any_order", ""),
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


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2", "int8"])
def test_8_bit_problems_are_refused_with_the_reason(dtype: str) -> None:
    """No config is legal, and asking for the default says why."""
    problem = Problem(512, 512, 512, ab_dtype=dtype)
    assert next(SPACE.configs(problem), None) is None
    with pytest.raises(ProblemError, match="cannot be computed on sm_100a: operands_are_16_bit: "):
        SPACE.default(problem)


def test_defaults_share_tiles_only_where_there_are_enough() -> None:
    """Pairs of blocks for a large product, lone ones for a small one, swapped for few rows."""
    large, small, flat = (SPACE.default(p) for p in (PLAIN, Problem(512, 512, 512), Problem(16, 4096, 4096)))
    assert (large["use_2cta_instrs"], large["cluster_shape_mn"]) == (True, (2, 1))
    assert (small["use_2cta_instrs"], small["swap_ab"]) == (False, False)
    assert (flat["use_2cta_instrs"], flat["swap_ab"], flat["mma_tiler_mn"]) == (False, True, (128, 16))


def test_what_is_derived_fits_tensor_memory_and_the_barriers() -> None:
    """Two tiles of sums in a power of two of columns; barriers in the 1024 bytes set aside for them."""
    for problem, config in random_pairs(SPACE, seed=1, count=300, per_problem=2):
        derived = SPACE.derive(config, problem, SPACE.arch)
        tiler, columns = pair(config["mma_tiler_mn"]), number(derived["tmem_columns"])
        blocks = 2 if config["use_2cta_instrs"] else 1
        assert columns in (32, 64, 128, 256, 512) and columns <= SPACE.arch.tmem_columns
        assert columns * 128 >= number(derived["acc_stages"]) * tiler[0] * tiler[1] // blocks
        assert 16 * number(derived["stages"]) + 16 * number(derived["acc_stages"]) + 32 <= 1024
        assert tiler[1] % number(derived["epi_n"]) == 0
        assert number(derived["epi_n"]) * tiler[0] // blocks <= 4096
        assert number(derived["vector"]) <= number(derived["epi_n"])


def test_a_launch_has_small_integers_and_no_workspace() -> None:
    """Scalars as on Hopper: clusters, swizzle and direction; never more clusters than fit."""
    for problem, config in random_pairs(SPACE, seed=2, count=200):
        for sm_count in (1, 74, 148):
            launch = SPACE.launch(config, problem, sm_count)
            clusters, swizzle, along_m = launch.scalars
            blocks = int.__mul__(*pair(config["cluster_shape_mn"]))
            assert 1 <= clusters <= max(1, sm_count // blocks)
            assert swizzle in (1, 2, 4, 8) and along_m in (0, 1)
            assert (launch.workspace_bytes, launch.zeroed) == (0, False)


def test_without_a_model_the_default_leads_a_survey_of_the_space() -> None:
    """Kernels are spread over all tiles, none twice; restrictions are kept; what follows is new."""
    found = rank(SPACE, PLAIN, 148, 40)
    assert found[0] == SPACE.default(PLAIN) and len(found) == 40
    assert len({SPACE.compile_view(config) for config in found}) == 40
    assert len({config["mma_tiler_mn"] for config in found}) > 20
    assert found == rank(SPACE, PLAIN, 148, 40)
    lone = rank(SPACE, PLAIN, 148, 8, {"use_2cta_instrs": [False]})
    assert len(lone) == 8 and not any(config["use_2cta_instrs"] for config in lone)
    results = {config: float(i) for i, config in enumerate(found)}
    more = refine(SPACE, PLAIN, results, 12)
    assert len(more) == 12 and not set(more) & set(found)
    for config in more:
        SPACE.require(PLAIN, config)


# --- the text ---


def test_launch_takes_what_the_calling_convention_says() -> None:
    """In order: tensors, the launch's scalars, alpha and beta, the stream; one stand-in for each."""
    for problem, config in random_pairs(SPACE, seed=3, count=60):
        epilogue = problem.epilogue
        wanted = ["a", "b", "d"] + ["c"] * epilogue.beta + ["bias"] * bool(epilogue.bias)
        wanted += ["scale_a", "scale_b"] * epilogue.scale + ["clusters", "swizzle", "along_m"]
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
    assert not any(word in text for word in ("alpha", "bias", "activate", "load_c", "batch", "store_direct"))
    fused = Problem(512, 512, 512, epilogue=Epilogue(True, True, "n", "gelu", True))
    text = render(fused, SPACE.default(fused), SPACE.arch).text
    assert text.startswith('"""D = act(alpha * scale_a * scale_b * A @ B + beta * C + bias) on sm_100a.')


@pytest.mark.skipif(importlib.util.find_spec("ruff") is None, reason="needs ruff")
@pytest.mark.parametrize("command", ["check", "format"])
def test_a_kernel_is_as_tidy_as_the_rest_of_the_repository(tmp_path: Path, command: str) -> None:
    """ruff finds nothing to report and nothing to format, by the rules of this repository."""
    for problem, config in random_pairs(SPACE, seed=4, count=60):
        source = render(problem, config, SPACE.arch)
        (tmp_path / f"k_{source.digest}.py").write_text(source.text)
    options = ["--check"] if command == "format" else []
    line = [sys.executable, "-m", "ruff", command, *options, "--config", ROOT / "pyproject.toml", tmp_path]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
