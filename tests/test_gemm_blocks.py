"""fp8 products whose blocks have factors: problems, calls, the check, the space, compiled kernels.

Needs the compiler for its last test, which takes some seconds, but no GPU.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fake_kernels import FakeGpu, operators_ask  # noqa: E402

import cutegen  # noqa: E402
from cutegen.arch import find_arch  # noqa: E402
from cutegen.build import Artifact, Builder  # noqa: E402
from cutegen.build.render import render  # noqa: E402
from cutegen.errors import OperandError, ProblemError, ResourceError  # noqa: E402
from cutegen.families.gemm.problem import Problem  # noqa: E402
from cutegen.families.registry import find_family, find_space, parse_problem  # noqa: E402
from cutegen.family import Inputs  # noqa: E402
from cutegen.space import Config  # noqa: E402
from tools.schedule import pipelines, protocol_of, simulate  # noqa: E402
from tools.schedule.sm90 import HopperProtocol  # noqa: E402

ARCH = find_arch("sm_90a")
SPACE = find_space("gemm_blocks", ARCH)
FAMILY = find_family("gemm_blocks")
M, N, K = 200, 300, 400
E4M3 = torch.float8_e4m3fn


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    with operators_ask(FakeGpu(tmp_path), monkeypatch) as fake:
        yield fake


def operands(m: int = M, n: int = N, k: int = K) -> tuple[Any, Any, Any, Any, Any]:
    """a, b, their factors as a quantizer leaves those of a weight, and the product in fp64."""
    g = torch.Generator().manual_seed(m + n + k)
    a, w = (torch.randn(rows, k, generator=g).to(E4M3) for rows in (m, n))
    blocks_k, blocks_n = -(-k // 128), -(-n // 128)
    scale_a = torch.rand(blocks_k, m, generator=g).t() + 0.5
    scale_w = torch.rand(blocks_n, blocks_k, generator=g) + 0.5
    wide = scale_w.double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    x = a.double() * scale_a.double().repeat_interleave(128, 1)[:, :k]
    return a, w.t(), scale_a, scale_w, x @ (w.double() * wide).t()


# --- problems ---


def test_a_problem_is_one_line_and_its_factors_count() -> None:
    """Sums are always promoted, so no word says it; its bytes are those of all operands."""
    problem = parse_problem("gemm_blocks 200x300x400 e4m3 kk bias=n")
    assert str(problem) == "gemm_blocks 200x300x400 e4m3 kk bias=n" and problem.promote
    assert problem.factor_shapes == ((200, 4), (4, 3))
    assert problem.min_bytes == 500 * 400 + 200 * 300 * 2 + 4 * (200 * 4 + 4 * 3)
    assert problem.with_sizes(m=7) == parse_problem("gemm_blocks 7x300x400 e4m3 kk bias=n")
    names = [argument.name for argument in FAMILY.arguments(problem)]
    assert names == ["a", "b", "out", "bias", "scale_a", "scale_b", "workspace", "launch"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("200x300x400 bf16 kk", "gemm_blocks multiplies e4m3 and nothing else, not bf16"),
        ("2x200x300x400 e4m3 kk", "no kernel for batch=2; valid: 1"),
        ("200x300x400 e4m3 kk scale", "no scale beside them"),
        ("200x300x401 e4m3 kk", "pad k to 416"),
        ("200x300x400 nvfp4 kk", "gemm_blocks does not multiply nvfp4"),
    ],
)
def test_what_has_no_kernel_is_refused(words: str, says: str) -> None:
    with pytest.raises(ProblemError, match=says):
        parse_problem(f"gemm_blocks {words}")


def test_it_is_for_hopper() -> None:
    says = "'gemm_blocks' for sm_100a; it has some for sm90, and for sm_100a .*: activation, .* gemm, "
    with pytest.raises(ResourceError, match=says):
        find_space("gemm_blocks", find_arch("sm_100a"))


# --- calls ---


def test_factors_are_taken_in_every_form(gpu: FakeGpu) -> None:
    """Those of a weight as they lie beside it, transposed, or padded as torch wants them."""
    a, b, scale_a, scale_w, want = operands()
    padded = torch.full((3, 8), torch.nan)[:, :4].copy_(scale_w).t()
    for scale_b in (scale_w, scale_w.t(), padded):
        found = cutegen.scaled_gemm(a, b, scale_a, scale_b, out_dtype=torch.float32)
        torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-3)
    *odd, of_weight, want_odd = operands(k=304)
    found = cutegen.scaled_gemm(*odd, torch.nn.functional.pad(of_weight, (0, 1)).t())  # rows: a multiple of 4
    torch.testing.assert_close(found.double(), want_odd, rtol=1e-2, atol=0.5)
    out, bias = torch.empty(M, N, dtype=torch.bfloat16), torch.randn(N).bfloat16()
    assert cutegen.scaled_gemm(a, b, scale_a, scale_w, out=out, bias=bias, activation="relu") is out
    torch.testing.assert_close(out.double(), (want + bias).relu(), rtol=1e-2, atol=0.5)
    assert {source.signature.family for source in gpu.compiled} == {"gemm_blocks"}


def test_a_square_of_factors_is_told_by_its_strides(gpu: FakeGpu) -> None:
    """As many blocks along n as along k: contiguous along k is what both forms are."""
    a, b, scale_a, scale_w, want = operands(64, 256, 256)
    for scale_b in (scale_w, scale_w.t()):
        found = cutegen.scaled_gemm(a, b, scale_a, scale_b, out_dtype=torch.float32)
        torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 300, 400), (1, 128, 128), (5, 100, 64), (1, 300, 64), (0, 64, 64)]
)
def test_single_rows_and_blocks_are_products_too(gpu: FakeGpu, m: int, n: int, k: int) -> None:
    a, b, scale_a, scale_w, want = operands(m, n, k)
    for of_a in (scale_a, scale_a.contiguous()) if m < 2 else (scale_a,):
        found = cutegen.scaled_gemm(a, b, of_a, scale_w, out_dtype=torch.float32)
        torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-3)


def test_a_compiled_graph_has_them(gpu: FakeGpu) -> None:
    a, b, scale_a, scale_w, want = operands()
    compiled = torch.compile(lambda *x: cutegen.scaled_gemm(*x), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(a, b, scale_a, scale_w).double(), want, rtol=1e-2, atol=0.5)


def bad_calls() -> dict[str, tuple[dict[str, Any], str]]:
    a, b, scale_a, scale_w, _ = operands()
    return {
        "rows of blocks": (
            {"scale_a": scale_a.contiguous()},
            r"scale_a has strides \(4, 1\); they must be \(1, 200\)",
        ),
        "of few rows": ({"scale_a": scale_a[:199]}, r"scale_a has shape \(199, 4\); it must be \(200, 4\)"),
        "of too few blocks": (
            {"scale_a": scale_a[:, :3]},
            r"scale_a has shape \(200, 3\); it must be \(200, 4\)",
        ),
        "half of a weight's": (
            {"scale_b": scale_w[:2]},
            r"scale_b has shape \(2, 4\); it must be \(4, 3\) or \(3, 4\)",
        ),
        "contiguous along n": (
            {"scale_b": scale_w.t().contiguous()},
            r"scale_b has shape \(4, 3\) and strides \(3, 1\).* pass scale_b\.t\(\)\.contiguous\(\)\.t\(\)",
        ),
        "a weight's along n": (
            {"scale_b": scale_w.t().contiguous().t()},
            r"scale_b has shape \(3, 4\) and strides \(1, 3\).* pass scale_b\.contiguous\(\)",
        ),
        "in bf16": (
            {"scale_a": scale_a.bfloat16()},
            "scale_a has dtype torch.bfloat16; factors are in torch.float32",
        ),
        "a vector": ({"scale_a": torch.ones(M), "scale_b": torch.ones(1)}, "scale_a has 200 elements"),
        "one alone": ({"scale_b": torch.ones(1)}, r"scale_b has shape \(1,\); it must be \(4, 3\)"),
        "of e5m2": (
            {"a": a.to(torch.float8_e5m2), "b": b.to(torch.float8_e5m2)},
            "a has shape .* torch.float8_e5m2; factors of blocks are for matrices in torch.float8_e4m3fn",
        ),
        "sums in tensor cores": ({"fast_accum": True}, "fast_accum leaves sums to the tensor cores"),
    }


@pytest.mark.parametrize("name", bad_calls())
def test_wrong_factors_are_named_with_what_would_be_right(gpu: FakeGpu, name: str) -> None:
    changes, says = bad_calls()[name]
    a, b, scale_a, scale_b, _ = operands()
    with pytest.raises(OperandError, match=says):
        cutegen.scaled_gemm(**{"a": a, "b": b, "scale_a": scale_a, "scale_b": scale_b, **changes})


# --- the check ---


@pytest.mark.parametrize("awkward", [False, True])
def test_the_check_tells_a_wrong_factor_from_rounding(awkward: bool) -> None:
    """Of one block of one row, by half; the stand-in, which adds up in fp32, passes."""
    problem = Problem.parse("gemm_blocks 200x300x1040 e4m3 kk")
    inputs = FAMILY.inputs(problem, torch.Generator().manual_seed(1), awkward=awkward)
    stand_in, reference = FAMILY.stand_in(problem), FAMILY.reference(problem, inputs)
    assert stand_in is not None and inputs.tensors["scale_b"].shape == (9, 3)
    out = torch.empty(200, 300, dtype=torch.bfloat16)

    def worst(given: Inputs) -> float:
        stand_in(given, {"out": out})
        return max(float(((c.got - c.want).abs() / c.allowed).max()) for c in reference.chunks("out", out))

    assert worst(inputs) < 1
    for name, at in (("scale_a", (17, 8)), ("scale_b", (3, 2))):
        wrong = inputs.tensors[name].clone()
        wrong[at] *= 1.5
        assert worst(Inputs({**inputs.tensors, name: wrong}, {})) > 2


# --- the space, and kernels ---


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("tile_shape_mn=256x160", "sums_fit_registers"),
        ("tile_shape_mn=192x160 mma_warpgroups=3", "sums_fit_registers"),
        ("tile_shape_mn=128x192 swap_ab=true", "sums_fit_registers"),
        ("tile_shape_mn=256x128", ""),
        ("tile_shape_mn=128x128 mma_warpgroups=1 pingpong=true", ""),
        ("tile_shape_mn=128x112", "tiles_lie_in_few_blocks"),
        ("tile_shape_mn=128x192", ""),
        ("tile_shape_mn=192x128 mma_warpgroups=3", ""),
        ("tile_shape_mn=128x112 swap_ab=true", ""),
    ],
)
def test_rules_leave_what_registers_and_blocks_allow(words: str, rule: str) -> None:
    problem = Problem.parse("gemm_blocks 4096x7168x2048 e4m3 kk")
    base = "tile_k=128 mma_warpgroups=2 swap_ab=false use_tma_store=true cluster_shape_mn=1x1"
    config = SPACE.default(problem).replace(**Config.parse(base)).replace(**Config.parse(words))
    broken = [violation.rule for violation in SPACE.explain(problem, config)]
    assert (rule in broken) if rule else not broken


@pytest.mark.parametrize("swap_ab", [False, True])
def test_factors_of_every_block_that_a_tile_lies_in_are_loaded(swap_ab: bool) -> None:
    """A tile begins at a multiple of its own extent; the last one of the step that the kernel rounds to."""
    problem = Problem.parse("gemm_blocks 4096x4096x2048 e4m3 kk")
    for config in SPACE.configs(problem):
        if config["swap_ab"] != swap_ab or config["split_k"] != 1 or config["cluster_shape_mn"] != (1, 1):
            continue
        derived, (tile_m, tile_n) = SPACE.derive(config, problem, ARCH), config.pair("tile_shape_mn")
        length, step = (tile_m, 64) if swap_ab else (tile_n, derived["step_n"])
        first = {*range(0, 4096, length), *range(0, 4096, int(str(step)))}
        most = max((at + length - 1) // 128 - at // 128 + 1 for at in first)
        assert derived["of_b"] == most <= 4, config


@pytest.mark.parametrize(
    "words",
    [
        "tile_shape_mn=256x128 mma_warpgroups=2 cluster_shape_mn=2x1",
        "tile_shape_mn=128x128 tile_k=256 mma_warpgroups=2",
        "tile_shape_mn=64x96 pingpong=true cluster_shape_mn=1x2",
        "tile_shape_mn=128x96 mma_warpgroups=2 use_tma_store=false split_k=3",
    ],
)
def test_no_order_of_events_goes_wrong(words: str) -> None:
    """By the model of the schedule, whose pipelines are those of the kernel's text."""
    problem = Problem.parse("gemm_blocks 4096x2112x7168 e4m3 kk")
    base = {"tile_k": 128, "mma_warpgroups": 1, "swap_ab": False}
    config = SPACE.default(problem).replace(**{**base, **Config.parse(words)})
    assert simulate(problem, config, ARCH, shuffles=2).clean
    text = render(problem, config, ARCH).text
    assert pipelines(text) == protocol_of(problem, config, ARCH).pipelines


def test_the_model_of_the_schedule_sees_factors_that_wait_for_no_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their warp overwrites what a warpgroup still reads, or fills a stage twice."""
    problem = Problem.parse("gemm_blocks 4096x2112x7168 e4m3 kk")
    config = SPACE.default(problem)
    waits = HopperProtocol._loader_of_factors

    def hasty(self: Any, board: Any, rings: Any, block: int, items: int) -> None:
        free = replace(rings, empty=[tuple(board.ring("free", block, self.stages, 1))] * (block + 1))
        waits(self, board, free, block, items)

    assert simulate(problem, config, ARCH, shuffles=2).clean
    monkeypatch.setattr(HopperProtocol, "_loader_of_factors", hasty)
    assert not simulate(problem, config, ARCH, shuffles=2).clean


@pytest.mark.dsl
@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs the CuTe DSL")
def test_kernels_keep_their_sums_in_registers(compiler: Builder) -> None:
    """The widest of each kind compiles without spills, and the assembler has nothing to say of its MMAs."""
    wanted = {
        "4096x7168x2048 e4m3 kk": "tile_shape_mn=256x128 cluster_shape_mn=1x2",
        "4096x7168x2048 e4m3 kk out=fp16": "tile_shape_mn=128x192 cluster_shape_mn=2x1",
        "4096x7168x2048 e4m3 kk out=fp32 bias=n act=silu": "tile_shape_mn=128x160",
        "200x7168x2048 e4m3 kk": "tile_shape_mn=256x104 swap_ab=true use_tma_store=false",
        "70x1001x1536 e4m3 kk": "tile_shape_mn=128x72 tile_k=256 swap_ab=true use_tma_store=false",
    }
    problems = {}
    for line, words in wanted.items():
        problem = Problem.parse(f"gemm_blocks {line}")
        base = {"tile_k": 128, "mma_warpgroups": 2, "swap_ab": False}
        config = SPACE.default(problem).replace(**{**base, **Config.parse(words)})
        problems[render(problem, config, ARCH)] = problem
    for source, result in list(compiler.build(problems)):
        assert isinstance(result, Artifact), f"{source.config}: {result.message}\n{result.log[-800:]}"
        assert result.resources.spill_store_bytes == 0, source.config
        assert result.resources.notes == (), source.config
        derived = SPACE.derive(source.config, problems[source], ARCH)
        assert result.resources.smem_bytes == derived["smem_bytes"], source.config
