"""The backend ``cutegen``: graphs call our operators where kernels fit, and compute what torch computes."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

from fake_family import AllFamilies  # noqa: E402
from fake_kernels import FakeGpu, operators_ask  # noqa: E402
from forked_torch import ForkedTorch  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402
from torch._functorch import config as aot_config  # noqa: E402
from torch._inductor import config as inductor_config  # noqa: E402

import cutegen  # noqa: E402
from cutegen.torch_ops import inductor  # noqa: E402

BF16 = torch.bfloat16
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    torch._dynamo.reset()
    counters.clear()
    with (
        inductor_config.patch(fx_graph_cache=False),
        aot_config.patch(enable_autograd_cache=False),
        operators_ask(FakeGpu(tmp_path), monkeypatch) as fake,
    ):
        yield fake


@pytest.fixture
def all_families(gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AllFamilies]:
    with operators_ask(AllFamilies(tmp_path / "all"), monkeypatch) as fake:
        assert isinstance(fake, AllFamilies)
        yield fake


def compiled(function: Any, **settings: Any) -> Any:
    return torch.compile(function, backend=inductor.compile_with_cutegen, fullgraph=True, **settings)


def same(found: Any, want: Any) -> None:
    torch.testing.assert_close(found.float(), want.float(), rtol=3e-2, atol=3e-2)


def rand(*shape: int, dtype: Any = BF16) -> Any:
    return (torch.rand(shape) * 2 - 1).to(dtype)


FP8 = torch.float8_e4m3fn
LINEAR, GELU, SILU = torch.nn.functional.linear, torch.nn.functional.gelu, torch.nn.functional.silu
W, BIAS = rand(24, 32), rand(24)
#: What is computed for x, and the arguments of the kernel behind a and b that show what was fused.
FORMS: dict[str, Any] = {
    "plain": lambda x, r: LINEAR(x, W),
    "bias": lambda x, r: LINEAR(x, W, BIAS),
    "bias, relu": lambda x, r: torch.relu(LINEAR(x, W, BIAS)),
    "silu": lambda x, r: SILU(LINEAR(x, W)),
    "bias, silu": lambda x, r: SILU(LINEAR(x, W, BIAS)),
    "bias, gelu": lambda x, r: GELU(LINEAR(x, W, BIAS)),
    "bias, gelu_tanh": lambda x, r: GELU(LINEAR(x, W, BIAS), approximate="tanh"),
    "residual, gelu": lambda x, r: GELU(r + LINEAR(x, W)),
    "bias, residual, silu": lambda x, r: SILU(LINEAR(x, W, BIAS) + r),
    "residual": lambda x, r: LINEAR(x, W) + r,
    "bias, residual, relu": lambda x, r: torch.relu(r + LINEAR(x, W, BIAS)),
    "addmm": lambda x, r: torch.addmm(r.flatten(0, -2), x.flatten(0, -2), W.t(), alpha=0.5, beta=2.0),
    "not contiguous": lambda x, r: x.flatten(0, -2) @ rand_like_w(),
}


def rand_like_w() -> Any:
    return W.t().contiguous()


@pytest.mark.parametrize("name", FORMS)
def test_a_linear_layer_and_what_is_behind_it_is_one_kernel(gpu: FakeGpu, name: str) -> None:
    """Of 2 and 3 dimensions; no other call of the graph adds, or cuts off, anything."""
    from torch._inductor.utils import run_and_get_code

    for shape in ((16,), (2, 8)):
        x, residual = rand(*shape, 32), rand(*shape, 24)
        want = FORMS[name](x, residual)
        launched = len(gpu.calls)
        with torch.no_grad():
            found, code = run_and_get_code(compiled(FORMS[name]), x, residual)
            same(found, want)
        assert len(gpu.calls) == launched + 1
        left = any("cpp_fused" in text for text in code)
        assert left == (name == "not contiguous"), "only the copy is left for Inductor"
        extras = sum(word in name for word in ("bias", "residual", "addmm"))
        assert len([t for t in gpu.calls[-1] if hasattr(t, "shape")]) == 3 + extras


def test_training_graphs_call_kernels_for_every_gemm_and_compile_once(gpu: FakeGpu) -> None:
    """Forward, input gradient and weight gradient of two layers, whatever the number of rows."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 16)).to(BF16)
    twin = copy.deepcopy(model)
    run = compiled(model, dynamic=True)
    for rows in (7, 64, 1000):
        x = rand(rows, 32).requires_grad_()
        y = x.detach().clone().requires_grad_()
        launched = len(gpu.calls)
        run(x).float().square().mean().backward()
        twin(y).float().square().mean().backward()
        assert len(gpu.calls) == launched + 6
        same(x.grad, y.grad)
        for own, other in zip(model.parameters(), twin.parameters(), strict=True):
            same(own.grad, other.grad)
    assert counters["stats"]["unique_graphs"] == 1
    assert len({source.config for source in gpu.compiled}) > 3, "rows have configs of their own"
    launched = len(gpu.calls)
    run(rand(1, 32)).float().square().mean().backward()
    assert counters["stats"]["unique_graphs"] == 2, "torch compiles for one row anew"
    assert len(gpu.calls) == launched + 5, "the gradient of this input is not asked for"


def test_an_activation_whose_input_is_read_elsewhere_stays_a_call(gpu: FakeGpu) -> None:
    """The kernel keeps the input of gelu in training, and what is returned beside it."""

    def both(x: Any) -> Any:
        before = LINEAR(x, W, BIAS)
        return before, GELU(before)

    x = rand(16, 32)
    with torch.no_grad():
        for found, want in zip(compiled(both)(x), both(x), strict=True):
            same(found, want)
    x = rand(16, 32).requires_grad_()
    compiled(lambda x: GELU(LINEAR(x, W, BIAS)))(x).float().sum().backward()
    y = x.detach().float().requires_grad_()
    GELU(LINEAR(y, W.float(), BIAS.float())).sum().backward()
    same(x.grad, y.grad)
    assert len(gpu.calls) == 3


SCALE, WIDE_BIAS = torch.tensor(0.5), rand(48)
#: Products of fp8 operands: what is computed, and whether a kernel of ours does.
SCALED: dict[str, tuple[Any, bool]] = {
    "plain": (lambda a, b: torch._scaled_mm(a, b, SCALE, SCALE, out_dtype=BF16), True),
    "fast": (
        lambda a, b: torch._scaled_mm(a, b, SCALE, SCALE, out_dtype=BF16, use_fast_accum=True),
        True,
    ),
    "bias, gelu": (lambda a, b: GELU(torch._scaled_mm(a, b, SCALE, SCALE, WIDE_BIAS, out_dtype=BF16)), True),
    "scales of rows": (
        lambda a, b: torch._scaled_mm(a, b, torch.ones(16, 1), torch.ones(1, 48), out_dtype=BF16),
        False,
    ),
}


@pytest.mark.parametrize("name", SCALED)
def test_products_of_fp8_operands_are_replaced(gpu: FakeGpu, name: str) -> None:
    function, ours = SCALED[name]
    a, b = rand(16, 64).to(FP8), rand(48, 64).to(FP8).t()
    launched = len(gpu.calls)
    with torch.no_grad():
        try:
            want = function(a, b)
        except RuntimeError:
            pytest.skip("this torch does not compute it on a CPU")
        same(compiled(function)(a, b), want)
    assert len(gpu.calls) == launched + ours


def test_batched_gemms_are_replaced(gpu: FakeGpu) -> None:
    a, b = rand(3, 16, 32), rand(3, 32, 24)
    launched = len(gpu.calls)
    same(compiled(torch.bmm)(a, b), a @ b)
    assert len(gpu.calls) == launched + 1


def misaligned() -> Any:
    return torch.randn(16 * 32 + 1).to(BF16)[1:].view(16, 32)


#: Operands, and why no kernel takes them; what Inductor cannot know when it compiles is found at run time.
OPERANDS: dict[str, tuple[Any, str]] = {
    "fp32": (
        lambda: (rand(16, 32, dtype=torch.float32), rand(32, 24, dtype=torch.float32)),
        "is torch.float32",
    ),
    "fp64": (lambda: (rand(16, 32).double(), rand(32, 24).double()), "is torch.float64"),
    "odd k": (lambda: (rand(16, 31), rand(31, 24)), "multiples of 16 bytes"),
    "repeated rows": (lambda: (rand(1, 32).expand(16, 32), rand(32, 24)), "not known to be contiguous"),
    "every other column": (lambda: (rand(16, 64)[:, ::2], rand(32, 24)), "not known to be contiguous"),
    "misaligned": (lambda: (misaligned(), rand(32, 24)), ""),
    "no rows": (lambda: (rand(0, 32), rand(32, 24)), "an operand is empty"),
}


@pytest.mark.parametrize("name", OPERANDS)
def test_what_no_kernel_takes_is_computed_by_torch(gpu: FakeGpu, name: str) -> None:
    """And counted, once for a graph."""
    make, reason = OPERANDS[name]
    operands = make()
    launched = len(gpu.calls)
    same(compiled(torch.mm)(*operands), torch.mm(*operands))
    assert len(gpu.calls) == launched + (not reason)
    counted = list(cutegen.counters()["fallbacks"].items())
    assert not counted if not reason else reason in counted[0][0] and counted[0][1] == 1, counted


def test_extents_that_kernels_cannot_count_stay_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "_DEVICE", "meta")
    fits, beyond = (torch.empty(rows, 32, dtype=BF16, device="meta") for rows in (2**30, 2**31))
    assert inductor._unfit(fits) == "" and "an operand has an extent above" in inductor._unfit(beyond)


def test_options_and_modes_of_inductor_are_kept(gpu: FakeGpu) -> None:
    """And what it does not know is refused."""
    x = rand(16, 32)
    with torch.no_grad():
        same(compiled(FORMS["bias"], options={"max_fusion_size": 2})(x, None), LINEAR(x, W, BIAS))
        same(torch.compile(FORMS["bias"], options=inductor.inductor_options())(x, None), LINEAR(x, W, BIAS))
        same(compiled(FORMS["bias"], mode="max-autotune-no-cudagraphs")(x, None), LINEAR(x, W, BIAS))
    with pytest.raises(cutegen.CutegenError, match="does not know speed"):
        inductor.compile_with_cutegen(None, [], speed=1)
    with pytest.raises(cutegen.CutegenError, match="did you mean max_fusion_size"):
        inductor.compile_with_cutegen(None, [], options={"max_fusion_sise": 2})


WARM = """
import sys
sys.path[:0] = {paths!r}
from pathlib import Path
import torch
from fake_kernels import FakeGpu
import cutegen
from cutegen.records.entry import Entry, Fingerprint
from cutegen.records.table import Table
from cutegen.families.registry import find_space, parse_problem
from cutegen.torch_ops import inductor
from fake_kernels import H200
from torch._dynamo.utils import counters

inductor._DEVICE = "cpu"
problem = parse_problem("gemm 64x128x64 bf16 kk bias=n act=relu")
w, bias, x = (torch.full(shape, 0.5, dtype=torch.bfloat16) for shape in ((128, 64), (128,), (64, 64)))
for tile in map(int, sys.argv[2:]):
    torch._dynamo.reset()
    counters.clear()
    gpu = FakeGpu(Path(sys.argv[1]))
    config = find_space("gemm", H200.arch).default(problem).replace(tile_shape_mn=(64, tile))
    cutegen.use(gpu.dispatcher(Table(Fingerprint.of(H200), [Entry(problem, config)]) if tile else None))
    run = torch.compile(
        lambda x: torch.relu(torch.nn.functional.linear(x, w, bias)), backend=inductor.compile_with_cutegen
    )
    with torch.no_grad():
        result = run(x)
    hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    print(hits, len(gpu.calls), result.float().mean().item(), gpu.compiled[-1].config["tile_shape_mn"])
"""


def test_a_warm_cache_calls_kernels_and_a_new_table_answers_at_once(tmp_path: Path) -> None:
    """A second process does not run the pass, and its kernel is what its own table says; so without one."""
    here = Path(__file__).parent
    code = WARM.format(paths=[str(here), str(here.parent)])

    def said(forked: ForkedTorch, *tiles: int) -> list[list[str]]:
        words = [str(tmp_path / "kernels"), *map(str, tiles)]
        done = forked.run(code, *words, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "inductor"))
        assert done.returncode == 0, done.stderr
        return [line.split(maxsplit=3) for line in done.stdout.strip().splitlines()]

    with ForkedTorch(tmp_path, ["torch._inductor.compile_fx"]) as forked:
        cold, warm, other, none = *said(forked, 64), *said(forked, 64, 128, 0)
    assert cold[0] == "0" and all(int(each[0]) >= 1 for each in (warm, other, none))
    assert {(each[1], each[2]) for each in (cold, warm, other, none)} == {("1", "16.5")}
    assert [each[3] for each in (cold, warm, other)] == ["(64, 64)", "(64, 64)", "(64, 128)"]


class Packed(torch.nn.Module):
    """A gated MLP whose first layer is gate and up."""

    def __init__(self) -> None:
        super().__init__()
        self.both = torch.nn.Linear(32, 96, bias=False, dtype=BF16)
        self.down = torch.nn.Linear(48, 32, bias=False, dtype=BF16)

    def forward(self, x: Any) -> Any:
        gate, up = self.both(x).chunk(2, -1)
        return self.down(SILU(gate) * up)


class Apart(torch.nn.Module):
    """One of three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(32, 48, bias=False, dtype=BF16) for _ in range(2))
        self.down = torch.nn.Linear(48, 32, bias=False, dtype=BF16)

    def forward(self, x: Any) -> Any:
        return self.down(self.up(x) * GELU(self.gate(x), approximate="tanh"))


@pytest.mark.parametrize("shape", [(16, 32), (2, 8, 32)])
@pytest.mark.parametrize("mlp", [Packed, Apart])
def test_a_gate_is_part_of_the_product_before_it(all_families: AllFamilies, mlp: Any, shape: Any) -> None:
    """Nothing is left between the two kernels of an MLP."""
    from torch._inductor.utils import run_and_get_code

    torch.manual_seed(0)
    model, x = mlp(), rand(*shape)
    with torch.no_grad():
        found, code = run_and_get_code(compiled(model), x)
        same(found, model(x))
        assert all_families.families == ["gated_gemm", "gemm"]
        assert not any("cpp_fused" in text for text in code)
        torch._dynamo.reset()
        same(torch.compile(model, options=cutegen.inductor_options(gates=False))(x), model(x))
    assert "gated_gemm" not in all_families.families[2:]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("mlp", [Packed, Apart])
def test_training_keeps_what_was_gated(all_families: AllFamilies, mlp: Any, dynamic: bool) -> None:
    """The product is written too where a backward pass reads it; two products stay with their gate apart."""
    torch.manual_seed(0)
    model = mlp()
    twin, run = copy.deepcopy(model), compiled(model, dynamic=dynamic)
    for rows in (16, 40) if dynamic else (16,):
        x = rand(rows, 32).requires_grad_()
        y = x.detach().clone().requires_grad_()
        run(x).float().square().mean().backward()
        twin(y).float().square().mean().backward()
        same(x.grad, y.grad)
        for own, other in zip(model.parameters(), twin.parameters(), strict=True):
            same(own.grad, other.grad)
    assert ("gated_gemm" in all_families.families) == (mlp is Packed)
    assert counters["stats"]["unique_graphs"] == 1


def test_operators_of_families_leave_rows_to_vary(all_families: AllFamilies) -> None:
    """One graph serves all numbers of rows, of operators that a model calls itself, too."""
    run = compiled(
        lambda x, w: cutegen.gated_gemm(x, w).relu() + cutegen.swiglu(x[:, :32]).sum(), dynamic=True
    )
    w = rand(48, 64)
    with torch.no_grad():
        for rows in (8, 24, 40):
            run(rand(rows, 64), w)
    assert counters["stats"]["unique_graphs"] == 1


def _other_half(x: Any, w: Any) -> Any:
    gate, up = LINEAR(x, w).chunk(2, -1)
    return SILU(up) * gate


def _other_rows(x: Any, w: Any) -> Any:
    return SILU(LINEAR(x, w[:48])) * LINEAR(x + 1, w[48:])


def _read_twice(x: Any, w: Any) -> Any:
    gate, up = LINEAR(x, w).chunk(2, -1)
    activated = SILU(gate)
    return activated * up + activated


def _three(x: Any, w: Any) -> Any:
    gate, up, _ = LINEAR(x, w).chunk(3, -1)
    return SILU(gate) * up


@pytest.mark.parametrize("function", [_other_half, _other_rows, _read_twice, _three])
def test_what_is_no_gated_product_is_computed_as_it_is(all_families: AllFamilies, function: Any) -> None:
    x, w = rand(16, 32), rand(96, 32)
    with torch.no_grad():
        same(compiled(function)(x, w), function(x, w))
    assert "gemm" in all_families.families and "gated_gemm" not in all_families.families


def test_gpus_without_gated_products_compute_them_in_two(
    all_families: AllFamilies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inductor, "has_kernels", lambda device: False)
    with torch.no_grad():
        compiled(Packed())(rand(16, 32))
    assert all_families.families == ["gemm", "gemm"]


def test_a_gradient_that_two_products_read_is_written_once(gpu: FakeGpu) -> None:
    """Both gradients of a layer read it, one of them transposed; heads are put together once."""
    from torch._inductor.utils import run_fw_bw_and_get_code

    w = rand(32, 64).requires_grad_()

    def heads(x: Any) -> Any:
        q, k = (x @ w).unflatten(-1, (4, 16)).transpose(1, 2).split([2, 2], 1)
        return torch.cat([q * 2, k * 3], 1)

    x = rand(2, 8, 32).requires_grad_()
    _, code = run_fw_bw_and_get_code(lambda: compiled(heads)(x))
    calls = [line for line in code[-1].splitlines() if "cutegen.gemm.default(" in line and "#" not in line]
    assert len(calls) == 2
    ours = [line.split("(", 1)[1] for line in calls]
    buffers = [set(re.findall(r"buf[0-9]+", line)) for line in ours]
    assert len(buffers[0] & buffers[1]) == 1, ours


def test_the_key_of_the_cache_depends_on_versions_only() -> None:
    """What the pass does depends on the graph alone, so a new table needs no new compilation."""
    for gates in (True, False):
        key = ("cutegen", cutegen.__version__, inductor._VERSION, gates)
        assert inductor.inductor_options(gates=gates)["post_grad_custom_pre_pass"].uuid() == key


def test_torch_finds_the_backend_by_its_name() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'cutegen = "cutegen.torch_ops.inductor:compile_with_cutegen"' in text
    assert callable(inductor.compile_with_cutegen)
