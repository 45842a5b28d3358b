"""The operators in every mode of ``torch.compile`` and in CUDA graphs: right results, flat memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hopper import GPU, NEEDS_HOPPER

torch = pytest.importorskip("torch")

from torch import library as registry  # noqa: E402
from torch._dynamo import config as dynamo_config  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402
from torch._functorch import config as aot_config  # noqa: E402
from torch._inductor import config as inductor_config  # noqa: E402

import cutegen  # noqa: E402
from cutegen.arch import find_arch  # noqa: E402
from cutegen.build.store import Store  # noqa: E402
from cutegen.families.gemm.problem import Problem  # noqa: E402
from cutegen.families.registry import find_space  # noqa: E402
from cutegen.records.entry import Entry, Fingerprint  # noqa: E402
from cutegen.records.table import Table  # noqa: E402
from cutegen.runtime.dispatch import Dispatcher  # noqa: E402
from cutegen.runtime.kernel_cache import Kernels  # noqa: E402
from cutegen.space import Config, Launch  # noqa: E402
from cutegen.torch_ops import gemm as ops  # noqa: E402
from cutegen.torch_ops.registration import pack  # noqa: E402

# Inductor and Triton warn about many things that are not ours.
pytestmark = [*NEEDS_HOPPER, pytest.mark.filterwarnings("ignore")]

BF16 = torch.bfloat16
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
GRAPH_MODES = ("reduce-overhead", "max-autotune")
SPACE = find_space("gemm", find_arch("sm_90a"))
STEPS = 20

#: Problem and knobs by what they need beside the operands.
KINDS: dict[str, tuple[Problem, dict[str, Any]]] = {
    "plain": (Problem(64, 512, 1024), {}),
    "split_k": (Problem(64, 2112, 7168), {"split_k": 2, "use_tma_store": False}),
    "arrival": (
        Problem(64, 2112, 7168, any_order=True),
        {"split_k": 2, "use_tma_store": False, "reduction": "arrival"},
    ),
    "stream_k": (
        Problem(1536, 1536, 1024),
        {"stream_k": True, "tile_shape_mn": (128, 128), "cluster_shape_mn": (1, 1)},
    ),
}


def config_of(kind: str) -> Config:
    """The default with the knobs of ``kind``; where that is not legal, the first config that has them."""
    problem, knobs = KINDS[kind]
    config = SPACE.default(problem).replace(**knobs)
    if SPACE.explain(problem, config):
        config = next(SPACE.configs(problem, {knob: (value,) for knob, value in knobs.items()}))
    return config


def launch_of(kind: str) -> Launch:
    assert GPU is not None
    return SPACE.launch(config_of(kind), KINDS[kind][0], GPU.sm_count)


@pytest.fixture(scope="module")
def dispatcher(store: Store) -> Iterator[Dispatcher]:
    """One cache for the file, and a table that names a split product."""
    assert GPU is not None
    cutegen.gemm  # noqa: B018  prepares the operators
    before = ops.default_dispatcher()
    problem, _ = KINDS["split_k"]
    table = Table(Fingerprint.of(GPU), [Entry(problem, config_of("split_k"))])
    yield cutegen.use(Dispatcher(table, kernels=Kernels(store, build="allow")))
    cutegen.use(before)


@pytest.fixture(autouse=True)
def _use(dispatcher: Dispatcher) -> Iterator[None]:
    """Begin each test without plans, graphs or code of another, and leave none behind."""
    cutegen.use(dispatcher)
    torch._dynamo.reset()
    counters.clear()
    with inductor_config.patch(fx_graph_cache=False), aot_config.patch(enable_autograd_cache=False):
        yield
    torch._dynamo.reset()
    torch.cuda.synchronize()


def rand(*shape: int, seed: int = 0) -> Any:
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return (torch.rand(shape, generator=generator, device="cuda") * 2 - 1).to(BF16)


def operands(kind: str, seed: int = 0) -> tuple[Any, Any]:
    problem, _ = KINDS[kind]
    return rand(problem.m, problem.k, seed=seed), rand(problem.n, problem.k, seed=seed + 1).t()


def product(kind: str) -> Callable[..., Any]:
    """A function that calls the kernel of ``kind`` with work of torch around it."""
    problem, config = KINDS[kind][0], str(config_of(kind))

    def run(a: Any, b: Any) -> Any:
        return cutegen.gemm(a * 2, b, config=config, any_order=problem.any_order) + 1

    return run


def near(found: Any, a: Any, b: Any) -> None:
    """``2 * a @ b + 1`` in fp64, within the rounding of bf16 and of fp32 sums of values in [-1, 1]."""
    want = 2 * (a.double() @ b.double()) + 1
    assert not found.isnan().any()
    torch.testing.assert_close(found.double(), want, rtol=2e-2, atol=1e-2 * max(1.0, a.shape[1] ** 0.5))


def require_flat(step: Callable[[int], Any], warm_up: int = 6) -> None:
    """Run ``step`` until it is warm, then 20 times more: torch's memory must not grow."""
    for at in range(warm_up):
        step(at)
    torch.cuda.synchronize()
    reserved, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    for at in range(STEPS):
        step(at)
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() == reserved
    assert torch.cuda.memory_allocated() == allocated


def require_graphs(mode: str) -> None:
    """In the modes that capture CUDA graphs, there are some, and nothing was left out of them."""
    if mode in GRAPH_MODES:
        # Importing it warns, which fails the collection of tests elsewhere.
        from torch._inductor.cudagraph_trees import get_container

        manager = get_container(torch.cuda.current_device()).tree_manager
        assert manager is not None and any(True for _ in manager.get_roots())
        assert not counters["inductor"]["cudagraph_skips"]


def test_kinds_need_what_they_say() -> None:
    """One without a workspace, two with, and one whose workspace must hold zeros."""
    needs = {kind: (launch_of(kind).workspace_bytes > 0, launch_of(kind).zeroed) for kind in KINDS}
    assert needs == {
        "plain": (False, False),
        "split_k": (True, False),
        "arrival": (True, True),
        "stream_k": (True, False),
    }


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("mode", MODES)
def test_every_kernel_in_every_mode(mode: str, kind: str) -> None:
    """Results agree with fp64 from the first call to the last, and no memory is lost on the way."""
    run = torch.compile(product(kind), mode=mode, fullgraph=True, dynamic=False)
    _, b = operands(kind)
    inputs = [operands(kind, seed)[0] for seed in (10, 20, 30)]

    def step(at: int) -> None:
        a = inputs[at % len(inputs)]
        near(run(a, b), a, b)

    require_flat(step)
    require_graphs(mode)


@pytest.mark.parametrize("mode", GRAPH_MODES)
def test_graphs_take_turns(mode: str) -> None:
    """Several compiled functions share one pool of graphs without disturbing each other, or eager calls."""
    runs = {kind: torch.compile(product(kind), mode=mode, fullgraph=True, dynamic=False) for kind in KINDS}
    pairs = {kind: operands(kind) for kind in KINDS}

    def step(at: int) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        for kind, run in runs.items():
            near(run(*pairs[kind]), *pairs[kind])
            near(product(kind)(*pairs[kind]), *pairs[kind])

    require_flat(step)
    require_graphs(mode)


@pytest.mark.parametrize("mode", GRAPH_MODES)
def test_results_feed_the_next_graph(mode: str) -> None:
    """A chain of graphs: what one returns is alive while the next is captured, and its workspace is not."""
    config = str(config_of("split_k"))
    first = torch.compile(
        lambda a, w: cutegen.gemm(a, w, config=config), mode=mode, fullgraph=True, dynamic=False
    )
    second = torch.compile(
        lambda h, w: cutegen.gemm(torch.relu(h), w) * 2, mode=mode, fullgraph=True, dynamic=False
    )
    a, w = operands("split_k")
    w2 = rand(256, w.shape[1]).t()
    hidden = cutegen.gemm(a, w, config=config)
    want = 2 * (torch.relu(hidden).double() @ w2.double())

    def step(at: int) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        found = second(first(a, w), w2)
        torch.testing.assert_close(found.double(), want, rtol=2e-2, atol=2.0)

    require_flat(step)
    require_graphs(mode)


@pytest.mark.parametrize("mode", MODES)
def test_shapes_take_turns(mode: str) -> None:
    """One function, three shapes: split by the table, by hand and not at all, each with graphs of its own."""
    config = str(config_of("split_k"))
    problem, _ = KINDS["split_k"]
    weights = [rand(n, problem.k).t() for n in (problem.n, 1024, 512)]
    inputs = [rand(m, problem.k) for m in (problem.m, 128, 192)]

    def run(x: Any, w: Any, given: str | None) -> Any:
        return cutegen.gemm(x * 2, w, config=given) + 1

    compiled = torch.compile(run, mode=mode, fullgraph=True, dynamic=False)

    def step(at: int) -> None:
        for x, w, given in zip(inputs, weights, (None, config, None), strict=True):
            near(compiled(x, w, given), x, w)

    require_flat(step)
    require_graphs(mode)


@pytest.mark.parametrize("mode", MODES)
def test_rows_may_be_a_symbol(mode: str) -> None:
    """One compilation for every m; modes with graphs capture one for each."""
    problem, config = KINDS["split_k"][0], str(config_of("split_k"))
    w, bias = rand(problem.n, problem.k).t(), rand(problem.n)
    inputs = [rand(m, problem.k) for m in (problem.m, 72, 128)]

    def run(x: Any, w: Any, bias: Any) -> Any:
        return cutegen.gemm(x * 2, w, bias=bias, config=config) + 1

    compiled = torch.compile(run, mode=mode, fullgraph=True, dynamic=True)

    def step(at: int) -> None:
        x = inputs[at % len(inputs)]
        found = compiled(x, w, bias)
        near(found - bias, x, w)

    with dynamo_config.patch(error_on_recompile=True):
        require_flat(step, warm_up=9)
    require_graphs(mode)


@pytest.mark.parametrize("mode", MODES)
def test_linear_with_a_bias(mode: str) -> None:
    """A fused kernel with a workspace: the table splits this one, and the bias is added once."""
    problem, _ = KINDS["split_k"]
    x, bias = rand(2, problem.m // 2, problem.k), rand(problem.n)
    w = rand(problem.n, problem.k)
    run = torch.compile(
        lambda x, w, bias: cutegen.linear(x, w, bias, activation="relu"),
        mode=mode,
        fullgraph=True,
        dynamic=False,
    )
    want = torch.relu(x.double() @ w.double().t() + bias.double())

    def step(at: int) -> None:
        torch.testing.assert_close(run(x, w, bias).double(), want, rtol=2e-2, atol=1.0)

    require_flat(step)
    require_graphs(mode)


@pytest.mark.parametrize("mode", MODES)
def test_output_arguments_are_written(mode: str) -> None:
    """``out=`` writes into the caller's tensor in every mode, beside a workspace; C may be the output."""
    config = str(config_of("split_k"))
    a, b = operands("split_k")
    out, c = (torch.zeros(a.shape[0], b.shape[1], device="cuda", dtype=BF16) for _ in range(2))

    def run(a: Any, b: Any, out: Any, c: Any) -> Any:
        cutegen.gemm(a, b, out=out, config=config)
        cutegen.gemm(a, b, c=c, out=c)
        return out + 1

    compiled = torch.compile(run, mode=mode, fullgraph=True, dynamic=False)
    want = a.double() @ b.double()

    def step(at: int) -> None:
        out.fill_(float("nan"))
        c.fill_(1.0)
        more = compiled(a, b, out, c)
        for found, expected in ((out, want), (more, want + 1), (c, want + 1)):
            torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=1.0)

    require_flat(step)


@pytest.mark.parametrize("kind", list(KINDS))
def test_eager_calls_keep_their_workspace(kind: str) -> None:
    """A warm eager call into a given output allocates nothing; the operator gives back what it took."""
    a, b = operands(kind)
    out = torch.empty(a.shape[0], b.shape[1], device="cuda", dtype=BF16)
    config, any_order = config_of(kind), KINDS[kind][0].any_order
    options = pack((None, 1.0, 1.0, None, "", None, config, (None, None, False, any_order)))

    def eager() -> None:
        cutegen.gemm(a, b, out=out, config=config, any_order=any_order)

    def operator() -> None:
        torch.ops.cutegen.gemm.out(a, b, *options, out=out)

    def allocations(call: Callable[[], None]) -> tuple[int, int]:
        call()
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()
        for _ in range(STEPS):
            call()
        after = torch.cuda.memory_stats()
        names = "allocation.all.allocated", "allocated_bytes.all.current"
        return tuple(after[name] - before[name] for name in names)  # type: ignore[return-value]

    assert allocations(eager) == (0, 0)
    assert allocations(operator) == (STEPS if launch_of(kind).workspace_bytes else 0, 0)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("way", ["eager", "operator"])
def test_own_graphs_replay(way: str, kind: str) -> None:
    """In the user's own ``torch.cuda.graph`` both ways of calling own their workspace, and replay alike."""
    a, b = operands(kind)
    out = torch.empty(a.shape[0], b.shape[1], device="cuda", dtype=BF16)
    config, any_order = config_of(kind), KINDS[kind][0].any_order
    options = pack((None, 1.0, 1.0, None, "", None, config, (None, None, False, any_order)))

    def call() -> None:
        if way == "eager":
            cutegen.gemm(a, b, out=out, config=config, any_order=any_order)
        else:
            torch.ops.cutegen.gemm.out(a, b, *options, out=out)

    call()
    torch.cuda.synchronize()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        call()
        call()
    want = a.double() @ b.double()

    def step(at: int) -> None:
        out.fill_(float("nan"))
        torch.cuda.synchronize()
        graph.replay()
        with torch.cuda.stream(side):
            beside = cutegen.gemm(a, b, config=config, any_order=any_order)
        torch.cuda.synchronize()
        for found in (out, beside):
            torch.testing.assert_close(found.double(), want, rtol=2e-2, atol=1.0)

    require_flat(step)


@pytest.mark.parametrize("kind", ["plain", "split_k", "stream_k"])
def test_operators_pass_torch_checks_on_the_gpu(kind: str) -> None:
    """The battery of tests/test_torch_library.py with kernels that need a workspace."""
    a, b = operands(kind)
    bias, out = rand(b.shape[1]), torch.empty(a.shape[0], b.shape[1], device="cuda", dtype=BF16)
    arguments = (a, b, *pack((None, 1.0, 1.0, bias, "relu", None, config_of(kind), None)))
    battery = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    gemm = torch.ops.cutegen.gemm
    for_out = battery if "out" in {tag.name for tag in gemm.out.tags} else battery[:3]
    registry.opcheck(gemm.default, arguments, test_utils=battery)
    registry.opcheck(gemm.out, arguments, {"out": out}, test_utils=for_out)
    registry.opcheck(torch.ops.cutegen.gemm_into.default, (out, *arguments), test_utils=battery)
