"""``cutegen.load``: a declared kernel as a function of tensors, with kernels that compute on the CPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_kernels import H200, FakeGpu
from own_kernels import write_kernel
from own_registry import without_user_families

torch = pytest.importorskip("torch")

from torch import library  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402

import cutegen  # noqa: E402
from cutegen.build.toolchain import Toolchain  # noqa: E402
from cutegen.errors import LaunchError, OperandError  # noqa: E402
from cutegen.families import registry  # noqa: E402
from cutegen.records.entry import Entry, Fingerprint  # noqa: E402
from cutegen.records.table import Table  # noqa: E402
from cutegen.runtime.call_plan import call_by_name  # noqa: E402
from cutegen.runtime.dispatch import Dispatcher  # noqa: E402
from cutegen.space import Config  # noqa: E402
from cutegen.torch_ops import gemm as operators  # noqa: E402
from cutegen.torch_ops import user_kernels  # noqa: E402

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "own_kernel" / "my_norm_kernel.py"
N = 256

#: A kernel with everything that may be absent, or is updated in place.
MIXED = """
from cutegen.kernel import Kernel, fixed, free, read, scalar, update, write

kernel = Kernel(
    "mixed_{name}",
    entry="mixed_entry:launch",
    sizes={{"m": free, "n": fixed}},
    options={{"dtype": ("bf16", "fp32"), "residual": False, "sums": False, "mode": ("fast", "exact")}},
    arguments=(
        read("x", "dtype", ("m", "n")),
        read("residual", "dtype", ("m", "n"), when="residual"),
        update("state", "fp32", ("m", "n")),
        scalar("factor", "fp32", (2.0, -0.5)),
        write("y", "dtype", ("m", "n"), may_alias=("x",)),
        write("sums", "fp32", ("m",), when="sums"),
    ),
    knobs={{"threads": (32, 64)}},
    rows="m",
)

@kernel.reference
def reference(x, residual, state, factor):
    h = x if residual is None else x + residual
    return {{"y": factor * h, "state": state + h, "sums": h.sum(-1)}}
"""


class FakeUserGpu(FakeGpu):
    """Kernels that compute the reference of their family."""

    refuse_unaligned = True

    def load(self, library: Path, symbol: str) -> Callable[..., Any]:
        self.loaded.append(symbol)
        source = self._signatures[symbol]
        family: Any = registry.find_family(source.signature.family)
        sizes = dict.fromkeys(family.kernel.sizes, 1)
        sizes.update(source.signature.fixed)
        options = {k: "none" if v == "" else v for k, v in source.signature.options}

        def function(*arguments: Any) -> None:
            self.calls.append(arguments)
            tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
            if self.refuse_unaligned and any(t.data_ptr() % 16 for t in tensors):
                raise ValueError("Misaligned pointer")
            problem = family.problem({**sizes, "m": tensors[0].shape[0]}, options)
            call_by_name(family.stand_in(problem), family.arguments(problem))(*arguments)

        return function


@pytest.fixture(scope="module", autouse=True)
def own_families() -> Iterator[None]:
    """Kernels that these tests load are families in no other test of the process."""
    with pytest.MonkeyPatch.context() as patch:
        without_user_families(patch)
        patch.setattr(user_kernels, "_loaded", {})
        yield


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeUserGpu]:
    """Every call of the test goes to kernels on the CPU."""
    fake = FakeUserGpu(tmp_path / "cache")
    before = operators._dispatcher
    operators.use(fake.dispatcher())
    yield fake
    operators._dispatcher = before


def tensor(*shape: int, dtype: Any = None) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype or torch.bfloat16)


def norm(x: Any, w: Any, eps: float) -> Any:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * w.double()


def close(got: Any, wanted: Any) -> bool:
    return bool(torch.allclose(got.double(), wanted, rtol=2**-8, atol=1e-6))


def declared(folder: Path, declaration: str, entry: str = "mixed_entry.py") -> Any:
    """Return a kernel whose code is never compiled: the fake GPU computes its reference."""
    return cutegen.load(
        write_kernel(folder, {entry: "def launch(*a, **k): ...\n", "declaration.py": declaration})
    )


def mixed(tmp_path: Path, name: str) -> Any:
    return declared(tmp_path, MIXED.format(name=name))


def test_it_has_the_declared_names(gpu: FakeUserGpu, tmp_path: Path) -> None:
    kernel = cutegen.load(EXAMPLE)
    assert str(inspect.signature(kernel)) == "(x, w, eps=1e-06, *, y=None, config=None)"
    assert cutegen.load(str(EXAMPLE)) is kernel and kernel.__name__ == "my_rmsnorm"
    signature = inspect.signature(mixed(tmp_path, "names"))
    assert (
        str(signature)
        == "(x, residual=None, factor=2.0, *, state, y=None, sums=None, mode='fast', config=None)"
    )


def test_calls_compute_the_reference(gpu: FakeUserGpu) -> None:
    kernel = cutegen.load(EXAMPLE)
    w = tensor(N)
    for m in (3, 3, 5):  # the second call is one of known shapes
        x = tensor(m, N)
        assert close(kernel(x, w), norm(x, w, 1e-6))
        assert close(kernel(x=x, w=w, eps=0.5), norm(x, w, 0.5))
        out = torch.empty_like(x)
        assert kernel(x, w, 0.5, y=out) is out and close(out, norm(x, w, 0.5))
    assert len(gpu.compiled) == 1 and len(gpu.calls) == 9


def test_an_output_may_be_its_input_and_nothing_else(gpu: FakeUserGpu) -> None:
    kernel = cutegen.load(EXAMPLE)
    w = tensor(N)
    for _ in range(2):
        x = tensor(4, N)
        wanted = norm(x, w, 1e-6)
        assert kernel(x, w, y=x) is x and close(x, wanted)
        whole = tensor(8, N)
        with pytest.raises(OperandError, match="y shares memory with x; it may only be x itself"):
            kernel(whole[:4], w, y=whole[2:6])


def test_what_is_absent_and_what_is_updated(gpu: FakeUserGpu, tmp_path: Path) -> None:
    kernel = mixed(tmp_path, "absent")
    for _ in range(2):
        x, residual = tensor(4, N), tensor(4, N)
        state = torch.zeros(4, N)
        y = kernel(x, state=state)
        assert close(y, 2 * x.double()) and close(state, x.double())
        y, sums = kernel(x, residual, state=state, sums=True)
        assert close(sums, (x.double() + residual.double()).sum(-1)) and close(y, 2 * (x.double() + residual))
        y, given = kernel(x, state=state, factor=3, sums=sums)
        assert given is sums and close(y, 3 * x.double())
    assert len(gpu.compiled) == 3


#: A kernel that updates two tensors, as rotary embeddings do, one of which may be absent.
IN_PLACE = """
from cutegen.kernel import Kernel, fixed, free, read, update

kernel = Kernel(
    "in_place_{name}",
    entry="in_place_entry:launch",
    sizes={{"m": free, "n": fixed}},
    options={{"dtype": ("bf16", "fp32"), "k": False}},
    arguments=(
        update("q", "dtype", ("m", "n")),
        read("w", "dtype", ("n",)),
        update("k", "dtype", ("m", "n"), when="k"),
    ),
    knobs={{"threads": (32, 64)}},
    rows="m",
)

@kernel.reference
def reference(q, w, k):
    return {{"q": q * w, "k": None if k is None else k * w}}
"""


def in_place(tmp_path: Path, name: str) -> Any:
    return declared(tmp_path, IN_PLACE.format(name=name), "in_place_entry.py")


def test_what_is_updated_shares_no_memory(gpu: FakeUserGpu, tmp_path: Path) -> None:
    kernel = in_place(tmp_path, "apart")
    w = torch.full((N,), 2.0)
    for _ in range(2):  # the second calls are of known shapes
        q, k = torch.ones(4, N), torch.ones(4, N)
        kernel(q, w, k)
        kernel(q, w)
        assert (q == 4).all() and (k == 2).all()
        whole = torch.ones(7, N)
        launched = len(gpu.calls)
        with pytest.raises(OperandError, match="q shares memory with k; pass another"):
            kernel(whole[:4], w, whole[3:])
        with pytest.raises(OperandError, match="q shares memory with w; pass another"):
            kernel(whole[:4], whole[2])
        with pytest.raises(OperandError, match="k shares memory with w; pass another"):
            kernel(torch.ones(3, N), whole[6], whole[4:])
        assert len(gpu.calls) == launched


def test_parts_of_one_tensor_are_updated(
    gpu: FakeUserGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their address ranges meet. Calls with the same distances take the short path all the same."""
    kernel = in_place(tmp_path, "parts")
    w, both = torch.full((N,), 2.0), torch.ones(4, 2 * N + 8)
    q, k = both[:, :N], both[:, N : 2 * N]
    kernel(q, w, k)
    monkeypatch.setattr(user_kernels._Slow, "answer", None)
    kernel(q, w, k)
    assert (both[:, : 2 * N] == 4).all() and (both[:, 2 * N :] == 1).all()


def test_what_cannot_be_an_operand_is_named(gpu: FakeUserGpu) -> None:
    kernel = cutegen.load(EXAMPLE)
    x, w = tensor(4, N), tensor(N)
    kernel(x, w)
    cases = {
        "x has shape .*; it must be \\(m, n\\)": (x[0], w),
        "w has shape .*makes n": (x, tensor(2 * N)),
        "x has dtype torch.float32; valid": (x.float(), w),
        "dtype torch.float16 but others": (x, w.half()),
        "x has strides": (tensor(N, 4).t()[:, ::2], tensor(2)),
        "x is a list": ([1.0], w),
    }
    for said, operands in cases.items():
        with pytest.raises(OperandError, match=said):
            kernel(*operands)
    with pytest.raises(OperandError, match="x requires grad"):
        kernel(x.clone().requires_grad_(), w)
    with pytest.raises(OperandError, match="eps is 'small'; it must be a number"):
        kernel(tensor(9, N), w, "small")
    with pytest.raises(TypeError, match="wight"):
        kernel(x, wight=w)


def test_what_is_missing_or_no_truth_value_is_named(gpu: FakeUserGpu, tmp_path: Path) -> None:
    """``None`` for a tensor that must be there, and words such as ``"no"``, which Python takes for true."""
    kernel = declared(
        tmp_path, MIXED.format(name="flags").replace('"sums": False', '"sums": False, "loud": False')
    )
    x, state = tensor(4, 16), torch.zeros(4, 16)
    for known in (False, True):
        with pytest.raises(OperandError, match=r"state is a NoneType; it must be a torch\.Tensor"):
            kernel(x, state=None)
        with pytest.raises(OperandError, match="loud is 'no'; it must be True or False"):
            kernel(x, state=state, loud="no")
        if not known:
            kernel(x, state=state, loud=True)
            kernel(x, state=state, loud=1)


def test_an_address_that_is_not_aligned_is_refused_also_with_known_shapes(gpu: FakeUserGpu) -> None:
    kernel = cutegen.load(EXAMPLE)
    w, whole = tensor(N), tensor(5 * N)
    kernel(whole[: 4 * N].view(4, N), w)
    with pytest.raises((OperandError, LaunchError, cutegen.CutegenError), match="16 bytes"):
        kernel(whole[1 : 4 * N + 1].view(4, N), w)


def test_fake_tensors_and_modes_reach_no_kernel(gpu: FakeUserGpu) -> None:
    """Neither at first, nor when the kind of call is known; afterwards calls compute again."""
    kernel, x, w = cutegen.load(EXAMPLE), tensor(5, N), tensor(N)
    for _ in range(2):
        launched = len(gpu.calls)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            for faked in (kernel(x, w), kernel(x, mode.from_tensor(w)), kernel(mode.from_tensor(x), w)):
                assert type(faked) is FakeTensor and faked.shape == x.shape and faked.dtype == x.dtype
        assert len(gpu.calls) == launched
        assert close(kernel(x, w), norm(x, w, 1e-6))


def test_no_rows_launch_nothing(gpu: FakeUserGpu) -> None:
    kernel = cutegen.load(EXAMPLE)
    y = kernel(tensor(0, N), tensor(N))
    assert y.shape == (0, N) and y.dtype == torch.bfloat16 and not gpu.calls
    with pytest.raises(OperandError, match=r"w has shape .* makes n 5, but x makes it 256"):
        kernel(tensor(0, N), tensor(5))


def test_no_rows_launch_nothing_with_options_and_updates(gpu: FakeUserGpu, tmp_path: Path) -> None:
    kernel = mixed(tmp_path, "without_rows")
    state = torch.zeros(0, N)
    y = kernel(tensor(0, N), state=state, mode="exact")
    assert y.shape == (0, N) and not gpu.calls
    with pytest.raises(OperandError, match=r"state has shape .* makes m 3, but x makes it 0"):
        kernel(tensor(0, N), state=torch.zeros(3, N))


def test_another_dispatcher_is_asked_at_once(gpu: FakeUserGpu, tmp_path: Path) -> None:
    kernel = cutegen.load(EXAMPLE)
    x, w = tensor(4, N), tensor(N)
    kernel(x, w), kernel(x, w)
    other = FakeUserGpu(tmp_path / "other")
    operators.use(other.dispatcher())
    kernel(x, w)
    assert len(gpu.calls) == 2 and len(other.calls) == 1


def test_a_config_of_the_callers_is_used(gpu: FakeUserGpu) -> None:
    kernel = cutegen.load(EXAMPLE)
    kernel(tensor(4, N), tensor(N), config="threads=256 threads_per_row=64")
    assert dict(gpu.compiled[-1].config) == {"threads": 256, "threads_per_row": 64}
    with pytest.raises(cutegen.CutegenError, match="not in its domain"):
        kernel(tensor(4, N), tensor(N), config="threads=96 threads_per_row=64")


def test_compiled_graphs_see_one_operator(gpu: FakeUserGpu) -> None:
    """With another number of rows nothing is compiled again, and outputs of the caller's are filled."""
    kernel = cutegen.load(EXAMPLE)
    w = tensor(N)

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def doubled(x: Any) -> Any:
        return 2 * kernel(x, w, 0.5)

    for m in (4, 7):
        x = tensor(m, N)
        assert close(doubled(x), 2 * norm(x, w, 0.5))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def into(x: Any, out: Any) -> Any:
        kernel(x, w, 0.5, y=out)
        return out + 0

    x, out = tensor(4, N), torch.empty(4, N, dtype=torch.bfloat16)
    assert close(into(x, out), norm(x, w, 0.5)) and close(out, norm(x, w, 0.5))
    schema = str(torch.ops.cutegen.my_rmsnorm.default._schema)
    assert (
        schema == "cutegen::my_rmsnorm(Tensor x, Tensor w, float eps, str[] outputs, str? config) -> Tensor[]"
    )


def test_the_operator_passes_the_checks_of_torch(gpu: FakeUserGpu) -> None:
    cutegen.load(EXAMPLE)
    library.opcheck(torch.ops.cutegen.my_rmsnorm.default, (tensor(4, N), tensor(N), 1e-6, ["y"], None))


def test_updates_in_place_are_seen_by_a_compiler(gpu: FakeUserGpu, tmp_path: Path) -> None:
    kernel = mixed(tmp_path, "updates")

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x: Any, state: Any) -> Any:
        y = kernel(x, state=state, mode="exact")
        return y + state.sum()

    x, state = tensor(4, N), torch.zeros(4, N)
    got = step(x, state)
    assert close(state, x.double()) and torch.allclose(got.float(), 2 * x.float() + state.sum(), rtol=2**-6)
    assert "Tensor(a2!) state" in str(torch.ops.cutegen.mixed_updates.default._schema)


def test_a_module_with_it_is_prepared_again(gpu: FakeUserGpu) -> None:
    user_kernels.prepare()
    assert cutegen.load(EXAMPLE)(tensor(1, N), tensor(N)).shape == (1, N)


def test_a_kernel_that_was_told_another_gpu_is_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeUserGpu(tmp_path / "cache")
    kernel = cutegen.load(EXAMPLE)
    kernels = fake.kernels(compile=lambda source, store: replace(fake.compile(source, store), sm_count=114))
    before = operators._dispatcher
    operators.use(Dispatcher(kernels=kernels, device=lambda index: H200, device_type="cpu"))
    with pytest.raises(LaunchError, match=r"compiled for a GPU of 114 multiprocessors.*this one has 132"):
        kernel(tensor(4, N), tensor(N))
    operators._dispatcher = before


@pytest.mark.parametrize(
    ("m", "n", "found"),
    [
        (64, 256, "of the table"),
        (200, 256, "of the table"),
        (64, 512, "the default"),
        (64, 8, "the default"),
    ],
)
def test_unseen_rows_have_the_config_of_their_neighbours_and_other_lengths_the_default(
    gpu: FakeUserGpu, m: int, n: int, found: str
) -> None:
    """A length of rows is compiled in, and what is best for one says little of another."""
    kernel = cutegen.load(EXAMPLE)
    problem = registry.parse_problem("my_rmsnorm 64x256 bf16")
    config = Config({"threads": 256, "threads_per_row": 32})
    fingerprint = Fingerprint.of(H200, Toolchain.current())
    dispatcher = gpu.dispatcher(Table(fingerprint, [Entry(problem, config)]))
    operators.use(dispatcher)
    x, w = tensor(m, n), tensor(n)
    assert close(kernel(x, w), norm(x, w, 1e-6))
    answer = dispatcher.explain(problem.with_sizes(m=m, n=n))
    assert (answer.config == config) == (found == "of the table"), str(answer)


class Remembers:
    """A tuner that notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[Config, ...]]] = []
        self.setting: Any = SimpleNamespace(table=None)

    def tune_problem(self, problem: Any, *, candidates: Any) -> str:
        self.asked.append((str(problem), tuple(candidates)))
        return "the result"


def test_listed_configs_are_tried_on_the_problem_of_a_call(gpu: FakeUserGpu) -> None:
    kernel, tuner = cutegen.load(EXAMPLE), Remembers()
    x, w = tensor(4, N), tensor(N)
    one = {"threads": 128, "threads_per_row": 32}
    search: Any = cutegen.exhaustive_search
    assert search(kernel, [one], x, w, tuner=tuner) == "the result"
    search(kernel, lambda problem: [one] if problem.m == 4 else [], x, w=w, y=x, tuner=tuner)
    assert tuner.asked == [("my_rmsnorm 4x256 bf16", (Config(one),))] * 2 and not gpu.calls
    with pytest.raises(cutegen.CutegenError, match="there are no configs for my_rmsnorm 5x256"):
        search(kernel, lambda problem: [], tensor(5, N), w, tuner=tuner)
    with pytest.raises(cutegen.CutegenError, match=r"is no kernel that cutegen\.load returned"):
        search(print, [one], x, tuner=tuner)
    with pytest.raises(TypeError, match="w"):
        search(kernel, [one], x, tuner=tuner)


def test_as_many_kinds_of_call_are_remembered_as_there_may_be_plans(
    gpu: FakeUserGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cutegen.torch_ops.family_operator.MAX_PLANS", 2)
    kernel, w = cutegen.load(EXAMPLE), tensor(N)
    operator: Any = vars(kernel)["operator"]
    for m in (1, 2, 3, 1, 2, 3):
        x = tensor(m, N)
        assert close(kernel(x, w), norm(x, w, 1e-6))
        assert 1 <= len(operator.fast) <= 2


#: What no input tells: the dtype of an output, how many columns are kept, and groups that no tensor has.
UNTOLD = """
from cutegen.kernel import Kernel, fixed, free, read, write

kernel = Kernel(
    "untold_{name}",
    entry="mixed_entry:launch",
    sizes={{"m": free, "n": fixed, "k": fixed, "groups": fixed}},
    options={{"dtype": ("bf16", "fp32"), "out": ("bf16", "fp32")}},
    arguments=(
        read("x", "dtype", ("m", "n")),
        write("y", "out", ("m", "k")),
    ),
    knobs={{"threads": (32, 64)}},
    rows="m",
)

@kernel.reference
def reference(x, k, groups):
    return x[:, :k] * groups
"""


def untold(tmp_path: Path, name: str) -> Any:
    return declared(tmp_path, UNTOLD.format(name=name))


def test_what_no_input_tells_is_named(gpu: FakeUserGpu, tmp_path: Path) -> None:
    kernel = untold(tmp_path, "named")
    x = tensor(8, 64)
    wanted = (3 * x[:, :16].double()).bfloat16()
    for _ in range(2):
        assert torch.equal(kernel(x, k=16, groups=3), wanted)
        assert kernel(x, k=16, groups=3, out="fp32").dtype == torch.float32
        assert kernel(x, k=16, groups=3, out=torch.float32).dtype == torch.float32
        y = torch.empty(8, 16, dtype=torch.float32)
        assert kernel(x, groups=3, y=y) is y and torch.equal(y, 3 * x[:, :16].float())
    assert kernel(x[:0], k=16, groups=3, out="fp32").shape == (0, 16)


def test_what_is_named_must_be_right(gpu: FakeUserGpu, tmp_path: Path) -> None:
    kernel = untold(tmp_path, "wrong")
    x, y = tensor(8, 64), torch.empty(8, 16, dtype=torch.float32)
    for named, said in (
        ({"groups": 3}, "no tensor tells the size k; pass k= with the call"),
        ({"k": 16}, "no tensor tells the size groups; pass groups= with the call"),
        ({"k": 16, "groups": 3, "out": "fp16"}, "out='fp16' is not valid; valid: bf16, fp32"),
        ({"k": 16, "groups": 3, "out": "bf16", "y": y}, "y has dtype torch.float32 but others torch.bf"),
        ({"k": 32, "groups": 3, "y": y}, "which makes k 16, but the call makes it 32"),
        ({"k": 1.5, "groups": 3}, "k=1.5 must be an integer"),
        ({"k": 0, "groups": 3}, "k=0 must be an integer from 1"),
    ):
        with pytest.raises(OperandError, match=said):
            kernel(x, **named)


def test_a_compiler_sees_what_is_named(gpu: FakeUserGpu, tmp_path: Path) -> None:
    kernel = untold(tmp_path, "traced")
    x = tensor(8, 64)

    def twice(x: Any, y: Any) -> Any:
        kernel(x, groups=2, y=y)
        return kernel(x, k=16, groups=3, out="fp32")

    y = torch.empty(8, 8)
    compiled = torch.compile(twice, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, y), 3 * x[:, :16].float())
    assert torch.equal(y, 2 * x[:, :8].float())
    with FakeTensorMode():
        assert kernel(torch.empty(8, 64), k=16, groups=3).dtype == torch.bfloat16
        with pytest.raises(OperandError, match="no tensor tells the size k"):
            kernel(torch.empty(8, 64), groups=3)


def test_a_compiler_is_told_of_wrong_operands(gpu: FakeUserGpu, tmp_path: Path) -> None:
    """As eager calls are: what is traced runs much later, and elsewhere."""
    kernel = cutegen.load(EXAMPLE)
    with FakeTensorMode():
        x, w = torch.empty(8, N, dtype=torch.bfloat16), torch.empty(N, dtype=torch.bfloat16)
        assert kernel(x, w).shape == (8, N)
        for tensors, said in (
            ((x.double(), w.double()), "x has dtype torch.float64; valid: torch.bfloat16, torch.float16"),
            ((x, w[:-1]), "which makes n 255, but x makes it 256"),
            ((x[None], w), r"it must be \(m, n\)"),
            ((x, w.half()), "w has dtype torch.float16 but others torch.bfloat16"),
        ):
            with pytest.raises(OperandError, match=said):
                kernel(*tensors)
