"""``cutegen.rms_norm(quantize=...)``: values, what is refused, tolerance, and its kernels in the compiler."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from disassembly import disassembled
from row_compile import REGISTERS, build, require_predicted, ring

from cutegen.arch import ARCHES, find_arch
from cutegen.build import Builder
from cutegen.build.render import render
from cutegen.dtypes import torch_dtype
from cutegen.families.registry import find_space, parse_problem
from cutegen.families.rmsnorm_quantized.family import LEAST_SCALE, RMSNORM_QUANTIZED

torch = pytest.importorskip("torch")

from fake_family import FakeFamilies  # noqa: E402
from fake_kernels import calls_go_to  # noqa: E402
from torch import library as registry  # noqa: E402

import cutegen  # noqa: E402
from cutegen.errors import OperandError  # noqa: E402
from cutegen.torch_ops import norms  # noqa: E402

N = 64
HOPPER = find_space("rmsnorm_quantized", find_arch("sm_90a"))
SMEM: dict[str, Any] = {"row_in": "smem", "turn": 2}
ALL = "residual residual_out"
#: The target, a problem, and knobs that differ from its default config.
KERNELS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("sm_90a", "16384x4096 bf16", {}),
    ("sm_90a", "16384x5120 bf16 residual residual_out", {"pdl": "late"}),
    (
        "sm_90a",
        "16384x128 fp16 weight=none",
        {"threads_per_row": 16, "rows_per_thread": 2, "rows_per_cta": 16},
    ),
    ("sm_90a", "16x1001 bf16", {"pdl": "late"}),
    ("sm_90a", f"4096x2024 bf16 {ALL}", {}),
    ("sm_90a", "2201x40008 fp16 weight=fp32", {**ring(512, 1, 4)}),
    ("sm_90a", f"256x32768 bf16 weight=fp32 {ALL}", {**REGISTERS, "threads_per_row": 256, "cluster_n": 4}),
    ("sm_90a", "1x262143 bf16", {}),
    ("sm_90a", f"2048x65536 bf16 {ALL}", {}),
    ("sm_90a", "64x100000 bf16", {"pdl": "late"}),
    ("sm_90a", "1024x262144 fp32", {**SMEM, "turn": 4}),
    ("sm_90a", "1024x262144 fp32 weight=fp32", {**SMEM, "turn": 2}),
    ("sm_100a", "1024x131072 bf16", {**SMEM, "threads_per_row": 256, "cluster_n": 8}),
    ("sm_103a", f"16384x4096 fp32 {ALL}", {"threads_per_row": 256}),
    ("sm_90a", "1024x131072 bf16", {**ring(512, 1, 8, turn=4)}),
    ("sm_90a", "17001x1008 fp16 weight=none", {**ring(32, 16, 1)}),
    ("sm_100a", f"801x40000 bf16 {ALL}", {**ring(512, 1, 4)}),
    ("sm_103a", "2201x16384 bf16 weight=fp32", {**ring(512, 1, 2)}),
)


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[FakeFamilies]:
    """Every call of the test goes to kernels on the CPU."""
    with calls_go_to(FakeFamilies(tmp_path)) as fake:
        yield fake


def tensor(*shape: int, dtype: Any = None) -> Any:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype or torch.bfloat16)


def norm(x: Any, w: Any, eps: float) -> Any:
    y = x.double() * (x.double().square().mean(-1, keepdim=True) + eps).rsqrt()
    return y if w is None else y * w.double()


@pytest.mark.parametrize("quantize", ["e4m3", "float8_e4m3fn", torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(3, N), (2, 3, N)])
def test_scales_times_values_are_the_norm(gpu: FakeFamilies, shape: tuple[int, ...], quantize: Any) -> None:
    x, w = tensor(*shape), tensor(N)
    q, scale = cutegen.rms_norm(x, w, 1e-3, quantize=quantize)
    want = norm(x, w, 1e-3)
    assert q.shape == shape and q.dtype == torch.float8_e4m3fn
    assert scale.shape == shape[:-1] and scale.dtype == torch.float32
    assert torch.allclose(scale.double(), want.abs().amax(-1) / 448, rtol=1e-6)
    assert q.float().abs().amax() == 448
    assert (
        (q.double() * scale[..., None].double() - want).abs() <= 2**-4 * want.abs() + scale.max() * 2**-9
    ).all()


def test_behind_a_residual_and_into_given_tensors(gpu: FakeFamilies) -> None:
    x, w, residual = tensor(3, N), tensor(N), tensor(3, N, dtype=torch.bfloat16) + 1
    total = x.double() + residual.double()
    q = torch.empty(3, N, dtype=torch.float8_e4m3fn)
    got, scale, h = cutegen.rms_norm(x, w, residual=residual, residual_out=residual, out=q, quantize="e4m3")
    assert got is q and h is residual and torch.equal(h, total.bfloat16())
    want = norm(total, w, 1e-6)
    assert torch.allclose(scale.double(), want.abs().amax(-1) / 448, rtol=1e-6)


@pytest.mark.parametrize(
    ("n", "dtype", "unaligned"),
    [
        *((1000, "bf16", False), (1001, "bf16", True), (1004, "bf16", True)),
        *((1000, "fp32", False), (1004, "fp32", True)),
    ],
)
def test_rows_of_fp8_start_at_multiples_of_8_bytes(
    gpu: FakeFamilies, n: int, dtype: str, unaligned: bool
) -> None:
    """Those of x at multiples of 16: 1004 elements of bf16 have 2008 bytes."""
    line = f"rmsnorm_quantized 3x{n} {dtype}"
    assert RMSNORM_QUANTIZED.parse(line).unaligned == unaligned
    assert str(RMSNORM_QUANTIZED.parse(line)) == line
    cutegen.rms_norm(tensor(3, n, dtype=torch_dtype(dtype)), quantize="e4m3")
    assert gpu.compiled[-1].signature.unaligned == unaligned


@pytest.mark.parametrize(
    ("start", "pitch", "unaligned"), [(8, N + 8, False), (4, N + 8, True), (8, N + 4, True), (1, N, True)]
)
def test_a_view_takes_the_kernel_for_where_its_rows_start(
    gpu: FakeFamilies, start: int, pitch: int, unaligned: bool
) -> None:
    memory = torch.zeros(4 * pitch, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert memory.data_ptr() % 16 == 0
    q, want = memory.as_strided((3, N), (pitch, 1), start), cutegen.rms_norm(tensor(3, N), quantize="e4m3")[0]
    got, _ = cutegen.rms_norm(tensor(3, N), quantize="e4m3", out=q)
    assert got is q and torch.equal(got.float(), want.float())
    assert [source.signature.unaligned for source in gpu.compiled] == [False, True][: 1 + unaligned]


@pytest.mark.parametrize("moved", [4, 8])
def test_rows_of_x_start_at_multiples_of_16_bytes(gpu: FakeFamilies, moved: int) -> None:
    x = tensor(3 * N + moved)[moved:].view(3, N)
    cutegen.rms_norm(x, quantize="e4m3")
    assert gpu.compiled[-1].signature.unaligned == (moved == 4)


def test_the_kernel_is_compiled_for_rows_of_fp8_at_multiples_of_8_bytes() -> None:
    texts = {
        line: render(problem, HOPPER.default(problem), HOPPER.arch).text
        for line in ("64x1000 bf16", "64x1000 bf16 unaligned")
        for problem in [RMSNORM_QUANTIZED.parse(f"rmsnorm_quantized {line}")]
    }
    aligned, unaligned = texts.values()
    assert "ELEMENTS = 8 " in aligned and "divisibility=8), 1),\n            assumed_align=8," in aligned
    assert "ELEMENTS = 1 " in unaligned and "divisibility=1), 1),\n            assumed_align=1," in unaligned


def test_a_row_of_zeros_has_a_scale(gpu: FakeFamilies) -> None:
    q, scale = cutegen.rms_norm(torch.zeros(2, N), quantize="e4m3")
    assert (q.float() == 0).all() and (scale == LEAST_SCALE).all()


def test_nothing_to_do_is_done(gpu: FakeFamilies) -> None:
    q, scale = cutegen.rms_norm(tensor(0, N), quantize="e4m3")
    assert q.shape == (0, N) and q.dtype == torch.float8_e4m3fn and scale.shape == (0,)
    assert not gpu.calls


BAD: list[tuple[str, Callable[[Any], Any], str]] = [
    ("int8", lambda x: cutegen.rms_norm(x, quantize="int8"), "quantize='int8' is not valid; valid: e4m3"),
    (
        "rstd",
        lambda x: cutegen.rms_norm(x, quantize="e4m3", return_rstd=True),
        "return_rstd is not written beside quantize",
    ),
    (
        "out of bf16",
        lambda x: cutegen.rms_norm(x, quantize="e4m3", out=torch.empty_like(x)),
        "out has dtype torch.bfloat16; it must be torch.float8_e4m3fn",
    ),
    ("gradients", lambda x: cutegen.rms_norm(x.float().requires_grad_(), quantize="e4m3"), "x requires grad"),
]


@pytest.mark.parametrize(("call", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_what_cannot_be_is_named(gpu: FakeFamilies, call: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(OperandError, match=message):
        call(tensor(3, N))
    assert not gpu.calls


def test_torch_traces_the_operator(gpu: FakeFamilies) -> None:
    norms.prepare()
    operator = torch.ops.cutegen.rmsnorm_quantized.default
    registry.opcheck(operator, (tensor(3, N), tensor(N), None, 1e-6, ["out", "scale"], None))


def test_the_check_passes_fp32_and_catches_scales_and_codes() -> None:
    problem = RMSNORM_QUANTIZED.parse("rmsnorm_quantized 64x4096 bf16")
    inputs = RMSNORM_QUANTIZED.inputs(problem, torch.Generator().manual_seed(0), awkward=True)
    x, w = inputs.tensors["x"].float(), inputs.tensors["weight"].float()
    y = x * (x.square().mean(-1, keepdim=True) + inputs.scalars["eps"]).rsqrt() * w
    scale = (y.abs().amax(-1) / 448).clamp_min(LEAST_SCALE)
    reference = RMSNORM_QUANTIZED.reference(problem, inputs)

    def passes(output: str, got: Any) -> bool:
        chunks = list(reference.chunks(output, got))
        return all(bool(((c.got - c.want).abs() <= c.allowed).all()) for c in chunks)

    q = (y / scale[:, None]).to(torch.float8_e4m3fn)
    assert passes("scale", scale) and passes("out", q)
    assert not passes("scale", scale * 1.0001)
    assert not passes("out", (y / scale[:, None] * 1.02).clamp(-448, 448).to(torch.float8_e4m3fn))


@pytest.mark.dsl
@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs the CuTe DSL")
def test_a_kernel_takes_what_its_space_predicts_and_spills_nothing(compiler: Builder) -> None:
    require_predicted(build("rmsnorm_quantized", KERNELS, compiler))


@pytest.mark.dsl
@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs the CuTe DSL")
@pytest.mark.parametrize(("line", "stores"), [("4096x2024 bf16", "STG.E.64"), ("4096x1000 fp32", "STG.E")])
def test_what_16_bytes_hold_of_x_is_stored_at_once(
    compiler: Builder, tmp_path: Path, line: str, stores: str
) -> None:
    """Besides the scales, of 4 bytes each."""
    [kernel] = build("rmsnorm_quantized", [("sm_90a", line, {})], compiler)
    [code] = disassembled([kernel.artifact], tmp_path)
    assert {*re.findall(r"\bLDG\S*", code)} == {"LDG.E.128"}
    assert {*re.findall(r"\bSTG\S*", code)} == {"STG.E", stores}


def test_there_is_one_exchange() -> None:
    for line in ("16384x4096 bf16", "32768x32768 bf16", "1024x131072 bf16"):
        problem = parse_problem(f"rmsnorm_quantized {line}")
        text = render(problem, HOPPER.default(problem), HOPPER.arch).text
        assert text.count("share_pair(") == 2 and text.count("over_row(") == 2


@pytest.mark.parametrize("options", [{}, {"dtype": "fp32", "weight": "none"}, {"residual": True}])
@pytest.mark.parametrize("m", [1, 64, 16384, 1_000_000])
def test_every_length_of_row_has_a_default(m: int, options: dict[str, Any]) -> None:
    for n in (1, 7, 17, 64, 128, 1000, 2880, 4099, 8192, 16384, 32771, 65536, 131_072, 262_143, 262_144):
        problem = RMSNORM_QUANTIZED.problem({"m": m, "n": n}, options)
        assert problem.unaligned == bool(n % 8)  # rows of 8 bits start at multiples of 8 bytes, or anywhere
        assert not HOPPER.explain(problem, HOPPER.default(problem)), problem


def test_every_knob_value_is_reached_by_an_example() -> None:
    assert not HOPPER.unreachable(RMSNORM_QUANTIZED.typical())


@pytest.mark.parametrize("arch", [arch for arch in ARCHES.values() if arch.name != "sm_90a"], ids=str)
def test_blackwell_has_the_same_space(arch: Any) -> None:
    problem = parse_problem("rmsnorm_quantized 16384x4096 bf16")
    assert list(find_space("rmsnorm_quantized", arch).configs(problem)) == list(HOPPER.configs(problem))
