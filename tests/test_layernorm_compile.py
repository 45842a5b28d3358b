"""LayerNorm kernels through the real compiler: what the space says of them holds, on every target."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from row_compile import REGISTERS, build, require_predicted, ring

from cutegen.arch import ARCHES, find_arch
from cutegen.build import Builder
from cutegen.build.render import render
from cutegen.families.layernorm.family import LAYERNORM
from cutegen.families.registry import find_space, parse_problem

SMEM: dict[str, Any] = {"rows_per_cta": 1, "row_in": "smem", "turn": 2}
#: The target, a problem, and knobs that differ from its default config.
KERNELS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("sm_90a", "16384x4096 bf16 stats", {}),
    ("sm_90a", "16384x5120 bf16", {"pdl": "late"}),
    (
        "sm_90a",
        "16384x128 fp16 weight=none bias=none",
        {"threads_per_row": 16, "rows_per_thread": 2, "rows_per_cta": 16},
    ),
    ("sm_90a", "16x1001 bf16 stats", {"pdl": "late"}),
    ("sm_90a", "4096x32768 bf16 stats", {}),  # two rows at a time
    ("sm_90a", "4001x65536 fp16 bias=none", {}),
    ("sm_90a", "3001x40960 bf16 weight=none", {}),
    (
        "sm_90a",
        "256x32768 bf16 weight=fp32 bias=fp32 stats",
        {**REGISTERS, "threads_per_row": 256, "cluster_n": 4, "prefetch_weight": True},
    ),
    ("sm_90a", "16384x8192 bf16", {"threads_per_row": 256, "prefetch_weight": False, "pdl": "late"}),
    # A weight that comes late beside statistics, as in every step of training.
    ("sm_90a", "8192x7168 bf16 stats", {}),
    ("sm_90a", "8192x8192 fp32 stats", {}),
    (
        "sm_100a",
        "64x7168 bf16 weight=fp32 bias=fp32 stats",
        {**REGISTERS, "threads_per_row": 256, "cluster_n": 1, "prefetch_weight": False, "pdl": "off"},
    ),
    ("sm_90a", "1x262143 bf16", {}),
    ("sm_90a", "2048x65536 bf16", {}),
    ("sm_90a", "64x100008 bf16 stats", {"pdl": "late"}),
    ("sm_90a", "1024x262144 fp32", {**SMEM, "turn": 4}),
    ("sm_100a", "1024x131072 bf16", {**SMEM, "threads_per_row": 256, "cluster_n": 8}),
    ("sm_103a", "16384x4096 fp32 stats", {"threads_per_row": 256, "prefetch_weight": True}),
    (
        "sm_103a",
        "256x32768 bf16 bias=none",
        {**REGISTERS, "threads_per_row": 256, "cluster_n": 4, "prefetch_weight": True, "pdl": "early"},
    ),
)
#: Whether weights stay in registers, else in shared memory.
HELD, APART = {"prefetch_weight": True}, {"prefetch_weight": False}
#: Rows that come through a ring.
RINGS: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    ("sm_90a", "1024x131072 bf16", ring(512, 1, 8, **APART)),
    ("sm_90a", "2048x65536 bf16", ring(512, 2, 8, **HELD)),
    ("sm_90a", "32768x4096 bf16", ring(128, 4, 1, turn=4, **HELD)),
    ("sm_90a", "32768x4096 bf16", ring(128, 1, 1, turn=2, **HELD)),
    ("sm_90a", "4096x32768 bf16", ring(256, 1, 4, turn=2, **APART)),
    ("sm_90a", "1024x131072 bf16", ring(256, 2, 16, **HELD)),
    ("sm_90a", "3001x24776 bf16 stats", ring(224, 1, 4, turn=4, **APART)),
    ("sm_90a", "2201x20000 bf16 weight=fp32 bias=fp32 stats", ring(512, 1, 2, **HELD)),
    ("sm_90a", "801x65536 fp16 bias=none", ring(256, 2, 8, **APART)),
    ("sm_90a", "17001x1000 bf16 stats", ring(32, 16, 1, **HELD)),
    ("sm_90a", "1101x32768 fp32 weight=none bias=none", ring(256, 2, 8, **HELD)),
    ("sm_100a", "1101x100008 bf16", ring(448, 1, 8, **HELD)),
    ("sm_103a", "32768x4096 bf16", ring(256, 2, 1, **APART)),
)
HOPPER = find_space("layernorm", find_arch("sm_90a"))
LENGTHS = (
    1,
    2,
    7,
    17,
    64,
    128,
    1000,
    2880,
    4099,
    8192,
    16384,
    32771,
    65536,
    100_008,
    131_072,
    262_143,
    262_144,
)


@pytest.mark.dsl
@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs the CuTe DSL")
def test_a_kernel_takes_what_its_space_predicts_and_spills_nothing(compiler: Builder) -> None:
    require_predicted(build("layernorm", (*KERNELS, *RINGS), compiler))


def test_there_is_one_exchange() -> None:
    for line in ("16384x4096 bf16", "32768x32768 bf16", "1024x131072 bf16"):
        problem = parse_problem(f"layernorm {line}")
        config = HOPPER.default(problem)
        text, rows = render(problem, config, HOPPER.arch).text, config.integer("rows_per_thread")
        assert text.count("share_pair(") == 1 + rows and text.count("over_row(") == 1 + rows


@pytest.mark.parametrize("line", ["8192x768 bf16", "262144x128 bf16", "1024x131072 bf16", "2048x65536 bf16"])
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_lanes_join_their_means_and_squares(line: str, offset: float) -> None:
    """The kernel's own function, with an array of lanes for a register, beside fp64."""
    problem = parse_problem(f"layernorm {line}")
    text = render(problem, HOPPER.default(problem), HOPPER.arch).text
    functions = {f.name: f for f in ast.parse(text).body if isinstance(f, ast.FunctionDef)}
    lanes, held = 32, 24
    arch = SimpleNamespace(shuffle_sync_bfly=lambda value, offset: value[np.arange(lanes) ^ offset])
    space: dict[str, Any] = {"cute": SimpleNamespace(arch=arch)}
    exec(ast.unparse(functions["joined"]), space)
    x = np.random.default_rng(0).standard_normal((lanes, held)) + offset
    mean, squares = x.mean(1).astype(np.float32), (x.var(1) * held).astype(np.float32)
    found = space["joined"](mean, squares, held, lanes)
    assert all((value == value[0]).all() and value.dtype == np.float32 for value in found)
    assert found[0][0] == pytest.approx(x.mean(), rel=1e-6)
    assert found[1][0] == pytest.approx(x.var() * x.size, rel=1e-6 + 1e-7 * offset)


@pytest.mark.parametrize(
    "options", [{}, {"dtype": "fp32", "weight": "none"}, {"weight": "fp32", "bias": "fp32"}]
)
@pytest.mark.parametrize("m", [1, 64, 16384, 1_000_000])
def test_every_length_of_row_has_a_default(m: int, options: dict[str, str]) -> None:
    for n in LENGTHS:
        for unaligned in (False, True):
            problem = LAYERNORM.problem({"m": m, "n": n}, {**options, "unaligned": unaligned})
            assert not HOPPER.explain(problem, HOPPER.default(problem)), problem


def test_every_knob_value_is_reached_by_an_example() -> None:
    assert not HOPPER.unreachable(LAYERNORM.typical())


@pytest.mark.parametrize("arch", [arch for arch in ARCHES.values() if arch.name != "sm_90a"], ids=str)
def test_blackwell_has_the_same_space(arch: Any) -> None:
    problem = parse_problem("layernorm 16384x4096 bf16")
    assert list(find_space("layernorm", arch).configs(problem)) == list(HOPPER.configs(problem))


@pytest.mark.parametrize("n", [5120, 100_008, 4096, 2880, 32_771, 262_144])
def test_warps_hold_a_row_between_them(n: int) -> None:
    """The kernel's count of a warp, worked out here as its text has it, adds up to the row."""
    problem = LAYERNORM.problem({"m": 16384, "n": n}, {})
    for config in HOPPER.configs(problem, {"pdl": ["off"]}):
        derived = {k: int(str(v)) for k, v in HOPPER.derive(config, problem, HOPPER.arch).items()}
        threads, warps = int(str(config["threads_per_row"])), derived["warps_per_row"]
        held = 0
        for warp in range(warps * int(str(config["cluster_n"]))):
            inside = min(derived["part"], derived["vectors"] - warp // warps * derived["part"])
            inside = max(inside - warp % warps * 32, 0)
            held += inside // threads * 32 + min(inside % threads, 32)
        assert threads < 32 or held == derived["vectors"], config
