"""``cutegen.cross_entropy`` with kernels that compute on the CPU, and its kernels in the compiler."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from row_compile import build, require_predicted

from cutegen.arch import ARCHES, find_arch
from cutegen.build import Builder
from cutegen.build.render import render
from cutegen.families.cross_entropy.family import CROSS_ENTROPY
from cutegen.families.registry import find_space, parse_problem

torch = pytest.importorskip("torch")

from fake_family import FakeFamilies  # noqa: E402
from fake_kernels import calls_go_to  # noqa: E402
from torch import library as registry  # noqa: E402

import cutegen  # noqa: E402
from cutegen.errors import OperandError  # noqa: E402
from cutegen.torch_ops import cross_entropy as operator_module  # noqa: E402
from cutegen.torch_ops import gemm as state  # noqa: E402

N = 64
HOPPER = find_space("cross_entropy", find_arch("sm_90a"))
SMEM: dict[str, Any] = {"row_in": "smem", "turn": 2}
ALL = "gradient lse smoothing"
#: The target, a problem, and knobs that differ from its default config.
KERNELS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("sm_90a", "16384x4096 bf16", {}),
    ("sm_90a", f"4096x32000 bf16 {ALL}", {"pdl": "late"}),
    (
        "sm_90a",
        "16384x128 fp16 gradient",
        {"threads_per_row": 16, "rows_per_thread": 2, "rows_per_cta": 16},
    ),
    ("sm_90a", f"16x1001 bf16 {ALL}", {"pdl": "late"}),
    (
        "sm_90a",
        f"256x32768 bf16 {ALL}",
        {"threads_per_row": 256, "cluster_n": 4, "row_in": "registers", "turn": 1},
    ),
    ("sm_90a", f"8192x32000 bf16 {ALL}", {**SMEM, "threads_per_row": 256, "cluster_n": 2, "pdl": "early"}),
    # Rows that wait in shared memory of one CTA, and warps with 64 registers for whole rows.
    ("sm_90a", f"32768x8192 bf16 {ALL}", {}),
    ("sm_90a", "32768x12288 fp16 gradient", {}),
    ("sm_90a", f"65536x1000 fp16 {ALL}", {}),
    ("sm_100a", "65536x1000 bf16 gradient", {}),
    ("sm_90a", "1x262143 bf16 gradient", {}),
    ("sm_90a", "8192x128256 bf16 gradient", {}),
    ("sm_90a", f"8192x151936 bf16 {ALL}", {}),
    ("sm_90a", "2048x262144 bf16 lse", {"pdl": "late"}),
    ("sm_90a", f"1024x262144 fp32 {ALL}", {**SMEM, "turn": 4}),
    ("sm_100a", "1024x131072 bf16 gradient", {**SMEM, "threads_per_row": 256, "cluster_n": 8}),
    ("sm_103a", f"16384x4096 fp32 {ALL}", {"threads_per_row": 256}),
)


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[FakeFamilies]:
    """Every call of the test goes to kernels on the CPU."""
    with calls_go_to(FakeFamilies(tmp_path)) as fake:
        yield fake


def logits(*shape: int, dtype: Any = None) -> tuple[Any, Any]:
    """Logits, and a target for each row of which some are ignored."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator).to(dtype or torch.float32)
    target = torch.randint(0, shape[-1], shape[:-1], generator=generator)
    target.view(-1)[::4] = -100
    return x, target


def wanted(x: Any, target: Any, smoothing: float, z: float, reduction: str) -> Any:
    losses = torch.nn.functional.cross_entropy(
        x.double().reshape(-1, x.shape[-1]), target.view(-1), label_smoothing=smoothing, reduction="none"
    )
    counts = target.view(-1) != -100
    losses = losses + torch.where(counts, z * x.double().reshape(-1, x.shape[-1]).logsumexp(-1).square(), 0.0)
    if reduction == "none":
        return losses.view(target.shape)
    return losses.sum() / (counts.sum() if reduction == "mean" else 1)


@pytest.mark.parametrize(
    ("compiled", "smoothing", "z", "reduction"),
    [
        *(
            (False, s, z, how)
            for s, z in ((0.0, 0.0), (0.1, 0.0), (0.2, 0.01))
            for how in ("mean", "sum", "none")
        ),
        (True, 0.2, 0.01, "mean"),
        (True, 0.0, 0.0, "none"),
    ],
)
def test_loss_and_gradient_are_those_of_torch(
    gpu: FakeFamilies, compiled: bool, smoothing: float, z: float, reduction: str
) -> None:
    x, target = logits(2, 5, N)
    x.requires_grad_()

    def step(x: Any) -> Any:
        return cutegen.cross_entropy(x * 2, target, label_smoothing=smoothing, z_loss=z, reduction=reduction)

    run = torch.compile(step, fullgraph=True, backend="aot_eager") if compiled else step
    got = run(x)
    assert got.dtype == torch.float32
    weights = torch.linspace(1, 2, got.numel()).view(got.shape)
    (got * weights).sum().backward()
    wide = x.detach().double().requires_grad_()
    want = wanted(wide * 2, target, smoothing, z, reduction)
    (want * weights).sum().backward()
    assert torch.allclose(got.double(), want, rtol=1e-5)
    assert torch.allclose(x.grad.double(), wide.grad, rtol=1e-4, atol=1e-6)


def test_the_gradient_takes_the_place_of_the_logits(gpu: FakeFamilies) -> None:
    x, target = logits(6, N)
    leaf = x.clone().requires_grad_()
    cutegen.cross_entropy(leaf * 1.0, target).backward()
    other = x.clone().requires_grad_()
    inner = other * 1.0
    address = inner.data_ptr()
    loss = cutegen.cross_entropy(inner, target, inplace_backward=True)
    (found,) = torch.autograd.grad(loss, inner)
    assert found.data_ptr() == address and torch.equal(found, leaf.grad)


def test_log_sums_are_returned_without_a_gradient(gpu: FakeFamilies) -> None:
    x, target = logits(2, 3, N)
    loss, lse = cutegen.cross_entropy(x.requires_grad_(), target, reduction="none", return_lse=True)
    assert loss.shape == lse.shape == (2, 3) and not lse.requires_grad and loss.requires_grad
    assert torch.allclose(lse.double(), x.double().logsumexp(-1))
    assert (loss.view(-1)[::4] == 0).all()


def test_labels_need_not_start_at_16_bytes(gpu: FakeFamilies) -> None:
    x, target = logits(5, N)
    got = cutegen.cross_entropy(x[1:], target[1:])
    assert torch.allclose(got.double(), wanted(x[1:], target[1:], 0, 0, "mean"), rtol=1e-5)
    assert not gpu.compiled[-1].signature.unaligned


@pytest.mark.parametrize("smoothing", [0.0, 0.25])
def test_labels_that_are_no_columns_are_harmless_without_a_kernel(tmp_path: Path, smoothing: float) -> None:
    """Of an index that is out of range torch ends the process' use of a GPU; what computes while the kernel
    compiles must do with such labels what the kernel does: a loss of NaN, and a gradient without a target."""
    x, _ = logits(4, N)
    target, good = torch.tensor([5, N, -3, 7]), torch.tensor([True, False, False, True])
    fake = FakeFamilies(tmp_path)
    fake.gate.clear()
    before = state._dispatcher
    state.use(fake.dispatcher(build="background"))
    try:
        x.requires_grad_()
        losses = cutegen.cross_entropy(x, target, label_smoothing=smoothing, reduction="none")
        losses[good].sum().backward()
        assert isinstance(losses, torch.Tensor) and not fake.calls
        loss = cutegen.cross_entropy(x, target, label_smoothing=smoothing, reduction="none", return_lse=True)
    finally:
        state.use(before)
        fake.gate.set()
    want = torch.nn.functional.cross_entropy(
        x.detach()[good].double(), target[good], label_smoothing=smoothing, reduction="none"
    )
    assert torch.equal(losses.isnan(), ~good) and torch.equal(loss[0].isnan(), ~good)
    assert torch.allclose(losses[good].double(), want) and loss[1].isfinite().all()
    assert x.grad is not None and x.grad.isfinite().all()


def test_nothing_to_do_is_done(gpu: FakeFamilies) -> None:
    """No rows: torch's mean of nothing is NaN, the sum zero."""
    x, target = torch.zeros(0, N), torch.zeros(0, dtype=torch.int64)
    assert math.isnan(cutegen.cross_entropy(x, target))
    assert cutegen.cross_entropy(x, target, reduction="sum") == 0
    assert not gpu.calls


BAD: list[tuple[str, Callable[[Any, Any], Any], str]] = [
    (
        "shape",
        lambda x, t: cutegen.cross_entropy(x, t[1:]),
        r"target has shape \(2,\); it must be that of x without its last dimension, \(3,\)",
    ),
    (
        "int32",
        lambda x, t: cutegen.cross_entropy(x, t.int()),
        "target has dtype torch.int32; it must be torch.int64",
    ),
    (
        "reduction",
        lambda x, t: cutegen.cross_entropy(x, t, reduction="max"),
        "reduction='max' is not valid; valid: mean, sum, none",
    ),
    (
        "smoothing",
        lambda x, t: cutegen.cross_entropy(x, t, label_smoothing=1.5),
        "label_smoothing=1.5 must be from 0 to 1",
    ),
    (
        "ignore_index",
        lambda x, t: cutegen.cross_entropy(x, t, ignore_index=2**40),
        "ignore_index=1099511627776 must be an integer of 32 bits",
    ),
    (
        "fraction",
        lambda x, t: cutegen.cross_entropy(x, t, ignore_index=1.5),
        "ignore_index=1.5 must be an integer of 32 bits",
    ),
    ("z", lambda x, t: cutegen.cross_entropy(x, t, z_loss="a"), "z_loss='a' must be a number"),
    ("fp64", lambda x, t: cutegen.cross_entropy(x.double(), t), "x has dtype torch.float64"),
    ("list", lambda x, t: cutegen.cross_entropy(x, [1, 2, 3]), "target is a list"),
]


@pytest.mark.parametrize(("call", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_what_cannot_be_is_named(gpu: FakeFamilies, call: Callable[[Any, Any], Any], message: str) -> None:
    with pytest.raises(OperandError, match=message):
        call(*logits(3, N))
    assert not gpu.calls


def test_torch_traces_the_operator(gpu: FakeFamilies) -> None:
    operator_module.prepare()
    operator = torch.ops.cutegen.cross_entropy.default
    x, target = logits(3, N)
    arguments = (x.requires_grad_(), target, None, -100, 0.1, 0.01, True, ["loss", "lse"], None)
    registry.opcheck(operator, arguments)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("awkward", [False, True])
@pytest.mark.parametrize("words", ["", " smoothing"])
def test_the_check_passes_fp32_and_catches_small_mistakes(dtype: str, awkward: bool, words: str) -> None:
    problem = CROSS_ENTROPY.parse(f"cross_entropy 60x1500 {dtype} gradient lse{words}")
    inputs = CROSS_ENTROPY.inputs(problem, torch.Generator().manual_seed(0), awkward=awkward)
    given, numbers = inputs.tensors, inputs.scalars
    x, target = given["x"].float(), given["target"]
    s = numbers["label_smoothing"] if words else 0.0
    lse = x.logsumexp(-1)
    counts = target != numbers["ignore_index"]
    at = torch.where(counts, target, 0)[:, None]
    logit = x.gather(-1, at)[:, 0]
    mean = x.mean(-1) if words else 0.0
    loss = torch.where(counts, lse - (1 - s) * logit - s * mean + numbers["z_loss"] * lse.square(), 0.0)
    p = (x - x.amax(-1, keepdim=True)).exp()
    p = p / p.sum(-1, keepdim=True) * (1 + 2 * numbers["z_loss"] * lse[:, None])
    hit = torch.zeros_like(x).scatter_(-1, at, 1 - s)
    grad = (p - s / 1500 - hit) * torch.where(counts, given["row_scale"], 0.0)[:, None]
    reference = CROSS_ENTROPY.reference(problem, inputs)

    def passes(output: str, got: Any) -> bool:
        chunks = list(reference.chunks(output, got))
        return all(bool(((c.got - c.want).abs() <= c.allowed).all()) for c in chunks)

    assert passes("loss", loss) and passes("lse", lse) and passes("grad", grad.to(given["x"].dtype))
    assert not passes("loss", loss * 1.0005) and not passes("lse", lse + 0.01)
    assert not passes("grad", (grad * 1.02).to(given["x"].dtype))
    assert not passes("grad", (grad + hit * 0.02 * given["row_scale"][:, None]).to(given["x"].dtype))


@pytest.mark.dsl
@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs the CuTe DSL")
def test_a_kernel_takes_what_its_space_predicts_and_spills_nothing(compiler: Builder) -> None:
    require_predicted(build("cross_entropy", KERNELS, compiler))


def test_without_a_gradient_nothing_is_read_twice() -> None:
    for line in ("8192x128256 bf16", "8192x128256 bf16 gradient"):
        problem = parse_problem(f"cross_entropy {line}")
        text = render(problem, HOPPER.default(problem), HOPPER.arch).text
        assert text.count("share_pair(") == 2
        assert ("store_gradients(" in text) == ("gradient" in line)


@pytest.mark.parametrize(
    "options", [{}, {"dtype": "fp32", "gradient": True}, {"smoothing": True, "lse": True}]
)
@pytest.mark.parametrize("m", [1, 64, 16384, 1_000_000])
def test_every_vocabulary_has_a_default(m: int, options: dict[str, Any]) -> None:
    for n in (1, 7, 17, 64, 128, 1000, 4099, 32_000, 50_257, 128_256, 151_936, 201_088, 262_143, 262_144):
        for unaligned in (False, True):
            problem = CROSS_ENTROPY.problem({"m": m, "n": n}, {**options, "unaligned": unaligned})
            assert not HOPPER.explain(problem, HOPPER.default(problem)), problem


def test_every_knob_value_is_reached_by_an_example() -> None:
    assert not HOPPER.unreachable(CROSS_ENTROPY.typical())


@pytest.mark.parametrize("arch", [arch for arch in ARCHES.values() if arch.name != "sm_90a"], ids=str)
def test_blackwell_has_the_same_space(arch: Any) -> None:
    problem = parse_problem("cross_entropy 16384x128256 bf16 gradient")
    assert list(find_space("cross_entropy", arch).configs(problem)) == list(HOPPER.configs(problem))
