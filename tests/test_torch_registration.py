"""Laws of the operators as ``torch.compile`` and the dispatcher of torch see them."""

from __future__ import annotations

import gc
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fake_kernels import FakeGpu  # noqa: E402
from torch import library as registry  # noqa: E402
from torch._dynamo import config as dynamo_config  # noqa: E402
from torch._functorch import config as aot_config  # noqa: E402
from torch._inductor import config as inductor_config  # noqa: E402

import cutegen  # noqa: E402
from cutegen.arch import find_arch  # noqa: E402
from cutegen.errors import OperandError  # noqa: E402
from cutegen.families.gemm.problem import Problem  # noqa: E402
from cutegen.families.registry import find_space  # noqa: E402
from cutegen.runtime.workspace import Workspaces  # noqa: E402
from cutegen.space import Config  # noqa: E402
from cutegen.torch_ops import gemm as ops  # noqa: E402
from cutegen.torch_ops.registration import pack, unpack  # noqa: E402

BF16 = torch.bfloat16
PLAIN = pack((None, 1.0, 1.0, None, "", None, None, None))
OPS = torch.ops.cutegen
# torch's own tracer uses deprecated parts of Python and of itself.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[FakeGpu]:
    fake = FakeGpu(tmp_path)
    cutegen.gemm  # noqa: B018  prepares the operators
    before = ops.default_dispatcher()
    cutegen.use(fake.dispatcher())
    # Code that Inductor wrote in an earlier run, for other operators, must not answer.
    with inductor_config.patch(fx_graph_cache=False), aot_config.patch(enable_autograd_cache=False):
        yield fake
    cutegen.use(before)
    torch._dynamo.reset()


class Allocator:
    """New workspaces on the CPU, and what is left of them."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, bool]] = []
        self.made: list[weakref.ref[Any]] = []

    def __call__(self, device: int, elements: int, zeroed: bool) -> Any:
        buffer = torch.zeros(elements)
        self.asked.append((elements, zeroed))
        self.made.append(weakref.ref(buffer))
        return buffer

    def alive(self) -> int:
        gc.collect()
        return sum(buffer() is not None for buffer in self.made)


@pytest.fixture
def workspaces(monkeypatch: pytest.MonkeyPatch) -> tuple[Allocator, Allocator]:
    """The allocators behind eager calls and behind the registered operators."""
    eager, operators = Allocator(), Allocator()
    monkeypatch.setattr(ops, "_workspaces", Workspaces(eager, lambda _: 0, lambda _: False))
    monkeypatch.setattr(ops, "_new_workspace", operators)
    return eager, operators


def rand(*shape: int) -> Any:
    return torch.rand(shape).to(BF16)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_whole_functions_compile(gpu: FakeGpu, backend: str) -> None:
    """gemm and linear stay opaque operators, so nothing breaks the graph."""

    @torch.compile(backend=backend, fullgraph=True)
    def block(x: Any, w1: Any, w2: Any, bias: Any) -> Any:
        hidden = cutegen.linear(x, w1, bias, activation="relu")
        return cutegen.gemm(hidden.view(-1, 24), w2, alpha=2.0, out_dtype=torch.float32) + 1

    x, w1, w2, bias = rand(2, 8, 32), rand(24, 32), rand(24, 16), rand(24)
    hidden = torch.relu(x.float() @ w1.float().t() + bias.float()).to(BF16)
    want = 2 * hidden.view(-1, 24).float() @ w2.float() + 1
    torch.testing.assert_close(block(x, w1, w2, bias), want, rtol=1e-2, atol=1e-1)
    assert len(gpu.calls) == 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_output_argument_compiles(gpu: FakeGpu, backend: str) -> None:
    """Writing into ``out`` is a declared mutation: it happens, and the caller's tensor comes back."""

    @torch.compile(backend=backend, fullgraph=True)
    def into(a: Any, b: Any, out: Any) -> Any:
        return cutegen.gemm(a, b, out=out) * 2

    a, b, out = rand(16, 32), rand(32, 24), torch.zeros(16, 24, dtype=BF16)
    twice = into(a, b, out)
    want = a.float() @ b.float()
    torch.testing.assert_close(out.float(), want, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(twice.float(), 2 * want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("form", [Config, dict, str])
def test_config_survives_tracing(gpu: FakeGpu, form: Callable[[Any], Any]) -> None:
    """A config is a constant of the graph, whichever form it has."""
    problem = cutegen.Problem(64, 64, 128, layout="kn")
    config = ops.default_dispatcher().explain(problem).config
    assert config is not None
    config = form(config.replace(swizzle_size=4))
    re.purge()  # nor may it matter which patterns Python has compiled before

    @torch.compile(backend="eager", fullgraph=True)
    def run(a: Any, b: Any) -> Any:
        return cutegen.gemm(a, b, config=config)

    run(rand(64, 128), rand(128, 64))
    assert gpu.calls[-1][4] == 4


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_dynamic_shapes_compile_once(gpu: FakeGpu, backend: str) -> None:
    """Sizes may be symbols while tracing; each real size then gets its own plan."""

    @torch.compile(backend=backend, fullgraph=True, dynamic=True)
    def run(a: Any, b: Any, out: Any, bias: Any) -> Any:
        cutegen.gemm(a, b, out=out)
        return cutegen.gemm(a, b, bias=bias) + 1

    b, bias = rand(32, 24), rand(24)
    with dynamo_config.patch(error_on_recompile=True):
        for m in (8, 16, 40):
            a, out = rand(m, 32), torch.empty(m, 24, dtype=BF16)
            want = a.float() @ b.float()
            found = run(a, b, out, bias)
            torch.testing.assert_close(out.float(), want, rtol=1e-2, atol=1e-2)
            torch.testing.assert_close(found.float(), want + bias.float() + 1, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["plain", "fused", "scaled"])
def test_operators_pass_torch_checks(gpu: FakeGpu, name: str) -> None:
    """torch's own battery for custom operators, all of it: schema, registration, fakes, symbolic shapes."""
    a, b, c, bias = rand(16, 32), rand(32, 24), rand(16, 24), rand(24)
    arguments: tuple[Any, ...] = (a, b, *PLAIN)
    if name == "fused":
        arguments = (a, b, *pack((c, 2.0, 0.5, bias, "silu", BF16, None, (None, None, False, True))))
    if name == "scaled":
        # The check of schemas compares operands, which torch cannot do with fp8 on the CPU.
        a8, b8 = (a * 4).to(torch.int8), (rand(24, 32) * 4).to(torch.int8).t()
        more = (torch.tensor(2.0), torch.tensor(0.5), False, False)
        arguments = (a8, b8, *pack((None, 1.0, 1.0, bias, "", BF16, None, more)))
    out = torch.empty(16, 24, dtype=BF16)
    battery = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    # Without the tag torch cannot functionalize an operator that returns what it wrote.
    for_out = battery if is_tagged_out() else battery[:3]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        registry.opcheck(OPS.gemm.default, arguments, test_utils=battery)
        registry.opcheck(OPS.gemm.out, arguments, {"out": out}, test_utils=for_out)
        registry.opcheck(OPS.gemm_into.default, (out, *arguments), test_utils=battery)


def is_tagged_out() -> bool:
    return "out" in {tag.name for tag in OPS.gemm.out.tags}


def test_the_out_overload_has_the_form_that_inductor_looks_for() -> None:
    """The tag is there from torch 2.14 on; the schema is what the tag asks for in any case."""
    cutegen.gemm  # noqa: B018  registers the operators
    assert is_tagged_out() == (torch.__version__ >= "2.14")
    if is_tagged_out():
        from torch._library._out_variant import check_out_variant

        check_out_variant(OPS.gemm.default, OPS.gemm.out)
    schema = OPS.gemm.out._schema
    written = [a.name for a in schema.arguments if a.kwarg_only and a.alias_info and a.alias_info.is_write]
    assert written == ["out"] and schema.returns[0].alias_info.is_write
    assert str(schema).replace("gemm.out", "gemm").startswith(str(OPS.gemm.default._schema).split(")")[0])


@pytest.mark.parametrize("given", [(), ("c",), ("bias",), ("c", "bias"), ("bias", "scale_a", "scale_b")])
def test_tensors_come_first_whichever_are_given(given: tuple[str, ...]) -> None:
    """What is missing is behind them, so that Inductor keeps the order; and unpacking undoes packing."""
    c, bias, scale_a, scale_b = (
        torch.tensor(1.0) if name in given else None for name in ("c", "bias", "scale_a", "scale_b")
    )
    more = (scale_a, scale_b, True, False)
    packed = pack((c, 2.0, 1.0, bias, "relu", BF16, {"tile_k": 64}, more))
    assert [x is not None for x in packed[:4]] == [True] * len(given) + [False] * (4 - len(given))
    assert packed[4] == " ".join(given)
    found = unpack(packed)
    for x, y in zip(found, (c, 2.0, 1.0, bias, "relu", BF16, "tile_k=64", more), strict=True):
        assert x is y or x == y
    assert unpack(PLAIN)[-1] is None


@pytest.mark.filterwarnings("ignore")
def test_inductor_code_is_right_for_every_set_of_extras(gpu: FakeGpu) -> None:
    """What Inductor generates passes each tensor as what it is, whichever are missing."""

    @torch.compile(fullgraph=True)
    def run(a: Any, b: Any, c: Any, bias: Any, a8: Any, b8: Any, scale: Any) -> Any:
        return (
            cutegen.gemm(a, b),
            cutegen.gemm(a, b, c=c, beta=0.5),
            cutegen.gemm(a, b, bias=bias, activation="relu"),
            cutegen.gemm(a, b, c=c, bias=bias),
            cutegen.scaled_gemm(a8, b8, scale, scale + 1),
            cutegen.scaled_gemm(a8, b8, scale, scale, bias=bias),
        )

    a, b, c, bias, scale = rand(16, 32), rand(32, 24), rand(16, 24), rand(24), torch.tensor(2.0)
    a8, b8 = rand(16, 32).to(torch.float8_e4m3fn), rand(24, 32).to(torch.float8_e4m3fn).t()
    product, product8 = a.float() @ b.float(), a8.float() @ b8.float()
    wants = (
        product,
        product + 0.5 * c.float(),
        torch.relu(product + bias.float()),
        product + c.float() + bias.float(),
        6 * product8,
        4 * product8 + bias.float(),
    )
    for found, want in zip(run(a, b, c, bias, a8, b8, scale), wants, strict=True):
        torch.testing.assert_close(found.float(), want, rtol=2e-2, atol=2e-2)
    assert len(gpu.calls) == len(wants)


@pytest.mark.filterwarnings("ignore")
def test_inductor_writes_into_the_callers_output(gpu: FakeGpu) -> None:
    """``out=`` stays in place under Inductor: an argument, a part of one, a new tensor, and C itself."""

    @torch.compile(fullgraph=True)
    def run(a: Any, b: Any, out: Any, rows: Any, c: Any) -> Any:
        new = torch.empty(16, 24, dtype=BF16)
        for target in (out, rows[16:], new):
            cutegen.gemm(a, b, out=target)
        cutegen.gemm(a, b, c=c, out=c)
        return new * 2

    a, b, out, rows, c = rand(16, 32), rand(32, 24), rand(16, 24), rand(32, 24), rand(16, 24)
    product, sums = a.float() @ b.float(), a.float() @ b.float() + c.float()
    kept = rows[:16].clone()
    twice = run(a, b, out, rows, c)
    for found, want in ((out, product), (rows[16:], product), (twice / 2, product), (c, sums)):
        torch.testing.assert_close(found.float(), want, rtol=2e-2, atol=2e-2)
    assert torch.equal(rows[:16], kept)
    written = {call[2].data_ptr() for call in gpu.calls}
    assert {out.data_ptr(), rows[16:].data_ptr(), c.data_ptr()} <= written and len(gpu.calls) == 4


KINDS = {
    "split_k": (Problem(64, 64, 1024), {"split_k": 2, "use_tma_store": False}),
    "arrival": (
        Problem(64, 64, 1024, any_order=True),
        {"split_k": 2, "use_tma_store": False, "reduction": "arrival"},
    ),
    "stream_k": (Problem(1536, 1536, 512), {"stream_k": True, "tile_shape_mn": (128, 128)}),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_operators_keep_no_workspace(
    gpu: FakeGpu, workspaces: tuple[Allocator, Allocator], kind: str
) -> None:
    """A traced call gets a new workspace, of zeros where the kernel relies on them, and lets go of it.

    CUDA graph trees refuse memory of their pool that lives on without being a result. Eager calls keep one.
    """
    problem, knobs = KINDS[kind]
    space = find_space("gemm", find_arch("sm_90a"))
    fixed = {knob: (value,) for knob, value in {**knobs, "cluster_shape_mn": (1, 1)}.items()}
    config = next(space.configs(problem, fixed))
    elements, zeroed = -(-space.launch(config, problem, 132).workspace_bytes // 4), kind == "arrival"
    a, b = rand(problem.m, problem.k), rand(problem.n, problem.k).t()
    out = torch.empty(problem.m, problem.n, dtype=BF16)

    def run(out: Any) -> Any:
        return cutegen.gemm(a, b, out=out, config=config, any_order=problem.any_order)

    eager, operators = workspaces
    traced = torch.compile(run, backend="aot_eager", fullgraph=True)
    for call in (run, traced, run, traced, traced):
        assert torch.equal(call(None), call(out))
        gpu.calls.clear()
    assert eager.asked == [(elements, zeroed)] and eager.alive() == 1
    assert operators.asked == [(elements, zeroed)] * 6 and operators.alive() == 0


def test_a_new_dispatcher_is_asked_by_operators_too(gpu: FakeGpu, tmp_path: Path) -> None:
    """Plans of both ways to call end with the dispatcher that they came from."""
    a, b = rand(16, 32), rand(32, 24)
    for call in (cutegen.gemm, lambda a, b: OPS.gemm.default(a, b, *PLAIN)):
        call(a, b)
        before = len(gpu.calls)
        other = FakeGpu(tmp_path / "other")
        cutegen.use(other.dispatcher())
        call(a, b)
        assert len(gpu.calls) == before and len(other.calls) == 1
        cutegen.use(gpu.dispatcher())


def test_fake_tensors_launch_nothing(gpu: FakeGpu) -> None:
    """A fake tensor has no memory; it gets a fake result of the right shape, even if a plan is warm."""
    from torch._subclasses import FakeTensorMode

    cutegen.gemm(rand(16, 32), rand(32, 24))
    launched = len(gpu.calls)
    with FakeTensorMode():
        a, b = torch.empty(16, 32, dtype=BF16), torch.empty(32, 24, dtype=BF16)
        found = cutegen.gemm(a, b, out_dtype=torch.float32)
        assert found.shape == (16, 24) and found.dtype == torch.float32
        with pytest.raises(OperandError, match="its 16 rows must be the 32 columns of a"):
            cutegen.gemm(a, torch.empty(16, 24, dtype=BF16))
    real = rand(16, 32), rand(32, 24)
    for at in (0, 1):
        with FakeTensorMode(allow_non_fake_inputs=True):
            mixed = [torch.empty(t.shape, dtype=BF16) if at == i else t for i, t in enumerate(real)]
            assert type(cutegen.gemm(*mixed)) is not torch.Tensor
    assert len(gpu.calls) == launched
