"""Grouped fp8 products whose blocks have factors, without a GPU: inputs, reference, space, operator, kernels.

The last test needs the compiler and takes some seconds.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_family import FakeFamilies
from fake_kernels import calls_go_to

torch = pytest.importorskip("torch")

import cutegen  # noqa: E402
from cutegen.arch import find_arch  # noqa: E402
from cutegen.build import Artifact, Builder  # noqa: E402
from cutegen.build.render import render  # noqa: E402
from cutegen.build.store import Store  # noqa: E402
from cutegen.deploy.family_calls import _multiple as deployed_multiple  # noqa: E402
from cutegen.errors import OperandError, ProblemError  # noqa: E402
from cutegen.families.declared import multiple  # noqa: E402
from cutegen.families.grouped_gemm_blocks.strategy import side_by_side  # noqa: E402
from cutegen.families.registry import find_family, find_space, parse_problem  # noqa: E402
from cutegen.family import Inputs  # noqa: E402
from cutegen.measure.check import Verdict, judge  # noqa: E402
from cutegen.measure.poisoned_output import PoisonedOutput  # noqa: E402
from cutegen.search.defaults import default_config  # noqa: E402
from cutegen.space import Config, Query  # noqa: E402

ARCH = find_arch("sm_90a")
SPACE = find_space("grouped_gemm_blocks", ARCH)
FAMILY: Any = find_family("grouped_gemm_blocks")
E4M3 = torch.float8_e4m3fn


# --- problems, inputs and the check ---


def test_sizes_are_whole_blocks() -> None:
    """Of k and n; the factors lie a place in k, or a block of columns, after the other."""
    problem = parse_problem("grouped_gemm_blocks 300x256x384x5 e4m3 tokens=zipf")
    assert str(problem) == "grouped_gemm_blocks 300x256x384x5 e4m3 tokens=zipf"
    shapes = {a.name: a.shape for a in FAMILY.arguments(problem)}
    assert shapes["scale_a"] == (3, 300) and shapes["scale_b"] == (5, 2, 3)
    assert not problem.unaligned  # whatever m is, and however many blocks there are
    of_row, of_matrix = 384 + 4 * 3 + 2 * 256, 256 * 384 + 4 * 2 * 3
    assert problem.min_bytes == 300 * of_row + 5 * of_matrix
    assert problem.flops == 2 * 300 * 256 * 384
    for size, line in (("k=320", "300x256x320x5"), ("n=200", "300x200x384x5")):
        with pytest.raises(ProblemError, match=f"{size} must be a multiple of 128"):
            parse_problem(f"grouped_gemm_blocks {line} e4m3")


def test_an_axis_may_be_a_part_of_a_size() -> None:
    """The package and what deployments carry read it alike."""
    for read in (multiple, deployed_multiple):
        assert [read(dim) for dim in ("n", "2n", "n/128")] == [(1, "n"), (2, "n"), (1 / 128, "n")]


@pytest.mark.parametrize("awkward", [False, True])
@pytest.mark.parametrize("out", ["bf16", "fp32"])
def test_what_the_stand_in_computes_passes_and_a_wrong_factor_does_not(awkward: bool, out: str) -> None:
    problem: Any = parse_problem(f"grouped_gemm_blocks 300x256x384x5 e4m3 out={out}")
    inputs = FAMILY.inputs(problem, torch.Generator().manual_seed(3), awkward=awkward)
    [argument] = [a for a in FAMILY.arguments(problem) if a.kind == "inout"]
    output = PoisonedOutput(argument, torch.device("cpu"), gaps=awkward, initial=inputs.tensors["out"])

    def verdict(given: Inputs) -> Verdict:
        output.poison()
        FAMILY.stand_in(problem)(given, {"out": output.tensor})
        return judge({"out": output}, FAMILY.reference(problem, inputs))

    assert verdict(inputs).ok
    offs = inputs.tensors["offs"]
    group = int((offs > 0).nonzero()[0])
    factors = inputs.tensors["scale_a"][:, : int(offs[-1])]
    assert bool(((factors >= 0.5) & (factors <= 2)).all())
    assert bool(inputs.tensors["scale_a"][:, int(offs[-1]) :].isnan().all())
    for name, at in (("scale_a", (2, 0)), ("scale_b", (group, 1, 2))):
        wrong = inputs.tensors[name].clone()
        wrong[at] *= 1.5
        assert not verdict(Inputs({**inputs.tensors, name: wrong}, {})).ok, name


def test_a_loop_of_cublas_is_the_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets whole groups, with factors as it wants them."""
    seen: list[tuple[int, ...]] = []

    def product(a: Any, b: Any, scale_a: Any, scale_b: Any, *, out_dtype: Any, out: Any) -> None:
        assert scale_a.stride() == (1, len(a)) and scale_b.stride(0) == 1 and scale_b.stride(1) % 4 == 0
        seen.append((len(a), *scale_a.shape, *scale_b.shape))
        columns = scale_b.repeat_interleave(128, 0).repeat_interleave(128, 1)
        out.copy_((a.double() * scale_a.double().repeat_interleave(128, 1)) @ (b.double() * columns))

    monkeypatch.setattr(torch.ops.aten._scaled_mm, "out", product)
    problem = parse_problem("grouped_gemm_blocks 301x256x512x5 e4m3")
    inputs = FAMILY.inputs(problem, torch.Generator().manual_seed(3))
    [argument] = [a for a in FAMILY.arguments(problem) if a.kind == "inout"]
    output = PoisonedOutput(argument, torch.device("cpu"), initial=inputs.tensors["out"])
    [(name, loop)] = FAMILY.baselines(problem, inputs, {"out": output.tensor}).items()
    for _ in range(2):
        output.poison()
        assert loop(inputs, {"out": output.tensor}) is None
        assert judge({"out": output}, FAMILY.reference(problem, inputs)).ok
    assert name == "loop of torch._scaled_mm" and len(seen) == 10
    assert all(shape == (shape[0] // 4 * 4, shape[0], 4, 4, 2) for shape in seen)
    for other in ("301x256x512x5 e4m3 out=fp32", "301x256x384x5 e4m3"):
        problem = parse_problem(f"grouped_gemm_blocks {other}")
        inputs = FAMILY.inputs(problem, torch.Generator().manual_seed(3))
        [argument] = [a for a in FAMILY.arguments(problem) if a.kind == "inout"]
        output = PoisonedOutput(argument, torch.device("cpu"), initial=inputs.tensors["out"])
        [(name, loop)] = FAMILY.baselines(problem, inputs, {"out": output.tensor}).items()
        output.poison()
        loop(inputs, {"out": output.tensor})
        assert judge({"out": output}, FAMILY.reference(problem, inputs)).ok and name.endswith(
            "for each block"
        )


# --- the space ---

LARGE = "grouped_gemm_blocks 32768x4096x4096x4 e4m3"
FEW = "grouped_gemm_blocks 4096x1536x2048x128 e4m3"


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("tile_shape_mn=256x160 mma_warpgroups=2", "sums_fit_registers"),
        ("tile_shape_mn=128x112 mma_warpgroups=2", "tiles_lie_in_few_blocks"),
        ("tile_shape_mn=256x96 mma_warpgroups=2", ""),
        ("tile_shape_mn=192x128 mma_warpgroups=3", ""),
    ],
)
def test_rules_are_those_of_one_such_product(words: str, rule: str) -> None:
    problem = parse_problem(LARGE)
    config = SPACE.default(problem).replace(tile_k=128, swap_ab=False, **Config.parse(words))
    broken = [violation.rule for violation in SPACE.explain(problem, config)]
    assert broken == ([rule] if rule else [])


@pytest.mark.parametrize("g", [1, 7, 128, 512])
def test_every_problem_has_a_default(g: int) -> None:
    for m in (1, 37, 4096, 100_000):
        for n in (128, 1152, 4096):
            problem = parse_problem(f"grouped_gemm_blocks {m}x{n}x256x{g} e4m3")
            for config in (SPACE.default(problem), default_config(SPACE, problem)):
                assert not SPACE.explain(problem, config)
                assert SPACE.derive(config, problem, ARCH)["smem_bytes"] <= ARCH.smem_bytes  # type: ignore[operator]


def test_few_rows_of_a_group_are_columns_of_a_tile() -> None:
    many, few = (parse_problem(f"grouped_gemm_blocks {m}x4096x4096x128 e4m3") for m in (262144, 256))
    assert not default_config(SPACE, many)["swap_ab"] and default_config(SPACE, few)["swap_ab"]
    ranked = FAMILY.strategy(ARCH).rank(Query(SPACE, many, 132), 6)
    assert len(ranked) >= 6 and all(not SPACE.explain(many, config) for config in ranked)
    one = side_by_side(parse_problem("grouped_gemm_blocks 32768x4096x2048x128 e4m3"))
    assert str(one) == "gemm_blocks 272x524288x2048 e4m3 kk"


# --- the operator ---


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[FakeFamilies]:
    """Every call of the test goes to kernels on the CPU."""
    with calls_go_to(FakeFamilies(tmp_path)) as fake:
        yield fake


def operands(m: int = 20, n: int = 256, k: int = 384, g: int = 4) -> tuple[Any, Any, Any, Any]:
    draw = torch.Generator().manual_seed(m + n + k)
    a, b = (torch.randn(shape, generator=draw).to(E4M3) for shape in ((m, k), (g, n, k)))
    scale_a = torch.rand(k // 128, m, generator=draw).t() + 0.5
    return a, b, scale_a, torch.rand(g, n // 128, k // 128, generator=draw) + 0.5


def test_groups_are_multiplied(gpu: FakeFamilies) -> None:
    """Rows of no group stay what they are."""
    a, b, scale_a, scale_b = operands()
    ends = [3, 3, 4, 17]
    out = torch.full((20, 256), 7.0)
    assert cutegen.scaled_grouped_gemm(a, b, scale_a, scale_b, ends, out=out) is out
    x = a.double() * scale_a.double().repeat_interleave(128, 1)
    w = b.double() * scale_b.double().repeat_interleave(128, 1).repeat_interleave(128, 2)
    for group, (first, end) in enumerate(zip([0, *ends], ends, strict=False)):
        assert torch.allclose(out[first:end].double(), x[first:end] @ w[group].T, rtol=1e-4, atol=1e-4)
    assert bool((out[17:] == 7.0).all())
    made = cutegen.scaled_grouped_gemm(a, b, scale_a, scale_b, torch.tensor(ends))
    assert made.dtype == torch.bfloat16 and torch.allclose(made[:17].float(), out[:17], rtol=2**-8, atol=1e-6)
    half = cutegen.scaled_grouped_gemm(a, b, scale_a, scale_b, ends, out_dtype=torch.float16)
    assert half.dtype == torch.float16
    assert cutegen.scaled_grouped_gemm(a[:0], b, scale_a[:0], scale_b, [0] * 4).shape == (0, 256)


def test_compiled_calls_are_one_operator(gpu: FakeFamilies) -> None:
    """With a result of the caller's too, and with sizes that vary."""
    ends = (3, 3, 4, 17)
    for rows in (20, 24, 28):
        given = operands(rows)
        want = cutegen.scaled_grouped_gemm(*given, ends)
        run = torch.compile(cutegen.scaled_grouped_gemm, fullgraph=True, backend="eager", dynamic=rows > 20)
        assert torch.equal(run(*given, ends)[:17], want[:17])
        out = torch.zeros_like(want)
        assert run(*given, ends, out=out) is out and torch.equal(out[:17], want[:17])


def test_what_cannot_be_is_refused(gpu: FakeFamilies) -> None:
    a, b, scale_a, scale_b = operands()
    ends, call = [5, 10, 15, 20], cutegen.scaled_grouped_gemm
    cases: tuple[tuple[Any, str], ...] = (
        (
            lambda: call(a, b, scale_a.contiguous(), scale_b, ends),
            "columns must be contiguous: pass scale_a",
        ),
        (lambda: call(a, b, scale_a[:, 0], scale_b, ends), r"scale_a must be a matrix, \(m, k / 128\)"),
        (lambda: call(a, b, scale_a[:19], scale_b, ends), "which makes m 19, but a makes it 20"),
        (lambda: call(a, b, scale_a[:, :2], scale_b, ends), "which makes k 256, but a makes it 384"),
        (lambda: call(a, b, scale_a, scale_b[:, :1], ends), "which makes n 128, but b makes it 256"),
        (lambda: call(a, b, scale_a, scale_b[0], ends), r"scale_b has shape \(2, 3\); it must be \(g, n/128"),
        (lambda: call(a, b, scale_a.half(), scale_b, ends), "scale_a has dtype torch.float16"),
        (lambda: call(a.float(), b.float(), scale_a, scale_b, ends), "a has dtype torch.float32"),
        (lambda: call(a, b[:, :200], scale_a, scale_b, ends), "k and n must be multiples of 128"),
        (lambda: call(a[:, :320], b[..., :320], scale_a, scale_b, ends), "k and n must be multiples of 128"),
        (lambda: call(a, b, scale_a, scale_b, [5, 4, 15, 20]), r"offs\[1\] is 4; it must be not below"),
        (lambda: call(a, b, scale_a, scale_b, ends, tokens="even"), "tokens='even' is not valid"),
        (
            lambda: call(a, b, scale_a, scale_b, ends, out=torch.empty(20, 256), out_dtype=torch.float16),
            "out has dtype torch.float32, but out_dtype is torch.float16",
        ),
    )
    for wrong, message in cases:
        with pytest.raises(OperandError, match=message):
            wrong()
    assert not gpu.calls


# --- kernels ---


@pytest.mark.dsl
@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs the CuTe DSL")
def test_kernels_keep_their_sums_in_registers(tmp_path: Path) -> None:
    """The widest of each kind compiles without spills, and the assembler has nothing to say of its MMAs."""
    wanted = (
        (LARGE, "tile_shape_mn=256x96 cluster_shape_mn=1x2"),
        (f"{LARGE} out=fp32", "tile_shape_mn=128x192"),
        (
            FEW,
            "tile_shape_mn=256x104 swap_ab=true use_tma_store=false",
        ),
    )
    problems = {}
    for line, words in wanted:
        problem = parse_problem(line)
        base = {"tile_k": 128, "mma_warpgroups": 2, "swap_ab": False}
        config = SPACE.default(problem).replace(**{**base, **Config.parse(words)})
        problems[render(problem, config, ARCH)] = problem
    with Builder(Store(tmp_path)) as builder:
        for source, result in builder.build(problems):
            assert isinstance(result, Artifact), f"{source.config}: {result.message}\n{result.log[-800:]}"
            assert result.resources.spill_store_bytes == 0, source.config
            assert result.resources.notes == (), source.config
            derived = SPACE.derive(source.config, problems[source], ARCH)
            assert result.resources.smem_bytes == derived["smem_bytes"], source.config
