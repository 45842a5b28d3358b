"""``cutegen.gated_gemm``, its problems and its space, with kernels that compute on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_family import AllFamilies, FakeFamilies
from fake_kernels import calls_go_to

torch = pytest.importorskip("torch")

from torch import library as registry  # noqa: E402

import cutegen  # noqa: E402
from cutegen.arch import find_arch  # noqa: E402
from cutegen.errors import ConfigError, OperandError, ProblemError  # noqa: E402
from cutegen.families.gated_gemm.family import GATED_GEMM  # noqa: E402
from cutegen.families.gated_gemm.plain_gemm import plain_gemm  # noqa: E402
from cutegen.families.registry import find_space, is_legal, parse_problem  # noqa: E402
from cutegen.search.defaults import default_config  # noqa: E402
from cutegen.space import Query  # noqa: E402
from cutegen.torch_ops import gated_gemm as operator  # noqa: E402

SPACE = find_space("gated_gemm", find_arch("sm_90a"))
N, K = 24, 64


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[FakeFamilies]:
    """Every call of the test goes to kernels on the CPU."""
    with calls_go_to(FakeFamilies(tmp_path)) as fake:
        yield fake


@pytest.fixture
def families(tmp_path: Path) -> Iterator[AllFamilies]:
    """The same for kernels of all families."""
    with calls_go_to(AllFamilies(tmp_path)) as fake:
        yield fake


def tensor(*shape: int, dtype: Any = None) -> Any:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) / 8).to(dtype or torch.bfloat16)


def wanted(x: Any, w: Any, activation: str, layout: str) -> tuple[Any, Any]:
    f, both = torch.nn.functional, x.double() @ w.double().T
    gate, up = (both[..., ::2], both[..., 1::2]) if layout == "interleaved" else both.chunk(2, -1)
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    acts = {"silu": f.silu, "relu": f.relu}
    act = acts.get(activation, lambda x: f.gelu(x, approximate=approximate))
    return act(gate) * up, both


def called(w: Any, layout: str) -> tuple[Any, dict[str, Any]]:
    """Return weights as a call takes them, and the arguments that say how they lie."""
    if layout != "split":
        return w, {"layout": layout}
    gate, up = w.chunk(2)
    return gate, {"up": up.clone()}


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("layout", ["halves", "interleaved", "split"])
@pytest.mark.parametrize("shape", [(K,), (3, K), (2, 3, K)])
def test_products_of_any_rank(
    gpu: FakeFamilies, shape: tuple[int, ...], layout: str, activation: str
) -> None:
    x, w = tensor(*shape, dtype=torch.float16), tensor(2 * N, K, dtype=torch.float16)
    want, both = wanted(x, w, activation, layout)
    weights, how = called(w, layout)
    got, pre = cutegen.gated_gemm(x, weights, activation, return_pre=True, **how)
    assert got.shape == (*shape[:-1], N) and pre.shape == (*shape[:-1], 2 * N) and got.dtype == x.dtype
    assert torch.allclose(got.double(), want, rtol=2**-10, atol=1e-5)
    assert torch.allclose(pre.double(), both, rtol=2**-10, atol=1e-5)
    out = torch.empty_like(got)
    assert cutegen.gated_gemm(x, weights, activation, out=out, **how) is out and torch.equal(out, got)
    first = gpu.compiled[0].signature.options
    assert dict(first) == {"dtype": "fp16", "activation": activation, "layout": layout, "pre": True}
    assert len(gpu.compiled) == 2  # with the second output and without


def test_one_kernel_serves_sizes_that_no_rule_tells_apart(gpu: FakeFamilies) -> None:
    for n in (7 * N, 8 * N):
        cutegen.gated_gemm(tensor(3, K), tensor(2 * n, K))
    assert len(gpu.calls) == 2 and len(gpu.compiled) == 1
    cutegen.gated_gemm(tensor(3, K), tensor(2 * 25, K))
    assert gpu.compiled[-1].signature.unaligned  # of the output; x and w are aligned


def test_nothing_to_do_is_done(gpu: FakeFamilies) -> None:
    got, pre = cutegen.gated_gemm(tensor(0, K), tensor(2 * N, K), return_pre=True)
    assert (got.shape, pre.shape) == ((0, N), (0, 2 * N)) and not gpu.calls


def test_a_config_overrides_the_choice(gpu: FakeFamilies) -> None:
    x, w = tensor(3, K), tensor(2 * N, K)
    config = SPACE.default(parse_problem("gated_gemm 3x24x64 bf16")).replace(use_pdl=True)
    cutegen.gated_gemm(x, w, config=config)
    assert gpu.compiled[-1].config["use_pdl"] is True
    with pytest.raises(ConfigError):
        cutegen.gated_gemm(x, w, config="tile_shape_mn=3x3")


BAD: list[tuple[str, Callable[[Any, Any], Any], str]] = [
    (
        "fp32",
        lambda x, w: cutegen.gated_gemm(x.float(), w.float()),
        "x has dtype torch.float32; valid: torch.bf",
    ),
    ("no tensor", lambda x, w: cutegen.gated_gemm([1.0], w), "x is a list; it must be a torch.Tensor"),
    ("no weight", lambda x, w: cutegen.gated_gemm(x, [1.0]), "w is a list; it must be a torch.Tensor"),
    ("no up", lambda x, w: cutegen.gated_gemm(x, w, up=1.0), "up is a float; it must be a torch.Tensor"),
    (
        "up elsewhere",
        lambda x, w: cutegen.gated_gemm(x, w, up=torch.empty_like(w, device="meta")),
        "up is on meta; it must be on a cpu device",
    ),
    ("odd w", lambda x, w: cutegen.gated_gemm(x, w[1:]), r"w has shape \(47, 64\); it must be \(2 \* n, k\)"),
    (
        "activation",
        lambda x, w: cutegen.gated_gemm(x, w, "tanh"),
        "activation='tanh' .* silu, gelu, gelu_tanh",
    ),
    (
        "layout",
        lambda x, w: cutegen.gated_gemm(x, w, layout="split"),
        "layout='split' .* halves, interleaved",
    ),
    ("shape of up", lambda x, w: cutegen.gated_gemm(x, w, up=w[:9]), r"up has shape \(9, 64\); it must have"),
    ("up itself", lambda x, w: cutegen.gated_gemm(x, w, up=w), "w and up lie 0 bytes apart"),
    ("strides", lambda x, w: cutegen.gated_gemm(x, w, up=tensor(48, 2 * K)[:, :K]), "up has strides"),
    ("other k", lambda x, w: cutegen.gated_gemm(x[:, :56], w), "which makes k 64, but x makes it 56"),
    (
        "k",
        lambda x, w: cutegen.gated_gemm(tensor(3, 60), tensor(48, 60)),
        "x has strides .* multiple of 16 bytes",
    ),
    ("shifted x", lambda x, w: cutegen.gated_gemm(tensor(3, K + 8)[:, 1 : K + 1], w), "x .* byte 2 of 16"),
    ("columns", lambda x, w: cutegen.gated_gemm(x, tensor(K, 2 * N).T), "w has strides"),
    (
        "out of x",
        lambda x, w: cutegen.gated_gemm(x, w, out=x[:, :N]),
        "out shares memory with x; pass another",
    ),
    (
        "gradients of a given result",
        lambda x, w: cutegen.gated_gemm(x, w.requires_grad_(), out=tensor(3, N)),
        "w requires grad",
    ),
]


@pytest.mark.parametrize(("call", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_what_cannot_be_an_operand_is_named(
    gpu: FakeFamilies, call: Callable[[Any, Any], Any], message: str
) -> None:
    with pytest.raises(OperandError, match=message):
        call(tensor(3, K), tensor(2 * N, K))
    assert not gpu.calls


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("layout", ["halves", "interleaved", "split"])
def test_gradients_are_those_of_autograd(families: AllFamilies, layout: str, activation: str) -> None:
    """Of the result, of pre-activations, of both, and of one operand alone; kernels compute all of them."""
    x, w = tensor(2, 3, K, dtype=torch.float16), tensor(2 * N, K, dtype=torch.float16)
    for factors in ((1.0, 0.0), (0.0, 1.0), (1.0, 0.5)):
        found = []
        for ours in (True, False):
            dtype = x.dtype if ours else torch.float64
            leaves = [t.to(dtype).detach().requires_grad_() for t in (x, w)]
            if ours:
                weights, how = called(leaves[1], layout)
                outputs = cutegen.gated_gemm(leaves[0], weights, activation, return_pre=True, **how)
            else:
                outputs = wanted(*leaves, activation, layout)
            sum(o.square().sum() * c for o, c in zip(outputs, factors, strict=True)).backward()
            found.append([leaf.grad for leaf in leaves])
        for got, want in zip(*found, strict=True):
            scale = float(want.abs().max())
            assert torch.allclose(got.double(), want, rtol=2**-7, atol=scale * 2**-8)
    families.families.clear()
    one = w.detach().clone().requires_grad_()
    weights, how = called(one, layout)
    cutegen.gated_gemm(x, weights, activation, **how).sum().backward()
    products = ["gemm"] * (2 if layout == "split" else 1)
    assert one.grad.shape == w.shape and families.families == ["gated_gemm", "gated_backward", *products]
    with torch.no_grad():
        assert not cutegen.gated_gemm(x, one).requires_grad


def test_gradients_of_traced_calls(families: AllFamilies) -> None:
    """Forward and backward are one graph each; the operator alone computes again what it did not return."""
    x, w = tensor(3, K), tensor(2 * N, K).requires_grad_()
    run = torch.compile(lambda x: cutegen.gated_gemm(x, w).float(), fullgraph=True, backend="aot_eager")
    operator.prepare()
    alone = lambda x: torch.ops.cutegen.gated_gemm(x, w, None, None, "silu", "halves", ["out"], None)[0]  # noqa: E731
    want = wanted(x.double(), wide := w.detach().double().requires_grad_(), "silu", "halves")[0]
    want.sum().backward()
    for call in (run, alone):
        w.grad = None
        call(x).sum().backward()
        assert torch.allclose(w.grad.double(), wide.grad, rtol=2**-5, atol=2**-6)


def test_torch_traces_the_operator(gpu: FakeFamilies) -> None:
    """One graph, right shapes for symbols, and torch's own tests of an operator."""
    w = tensor(2 * N, K)
    run = torch.compile(
        lambda x: cutegen.gated_gemm(x * 2, w) + 1, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for rows in (3, 5):
        want = wanted(tensor(rows, K) * 2, w, "silu", "halves")[0] + 1
        assert torch.allclose(run(tensor(rows, K)).double(), want, rtol=2**-6, atol=2**-6)
    operator.prepare()
    arguments = (tensor(3, K), w, None, None, "silu", "halves", ["out", "pre"], None)
    registry.opcheck(torch.ops.cutegen.gated_gemm.default, arguments)


# --- problems and space ---


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("gated_gemm 8x8x12 bf16", "k=12 must be a multiple of 8, .*; pad k to 16"),
        (
            "gated_gemm 8x8x2147483645 bf16",
            "k=2147483645 must be a multiple of 8, .*; k may be 2147479552 at most$",
        ),
        ("gated_gemm 8x8x16 fp32", "dtype='fp32' is not valid; valid: bf16, fp16"),
        ("gated_gemm 8x2000000000x16 bf16", "n=4000000000 must be an integer"),
    ],
)
def test_a_problem_that_no_kernel_computes_is_refused(line: str, message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        parse_problem(line)


def test_it_costs_what_a_gemm_of_all_rows_of_w_costs() -> None:
    problem = parse_problem("gated_gemm 100x2048x512 bf16 activation=gelu pre")
    product = plain_gemm(problem)
    assert (product.m, product.n, product.k) == (100, 4096, 512) and product.flops == problem.flops
    strategy = GATED_GEMM.strategy(SPACE.arch)
    assert strategy is not None and plain_gemm(product) is product
    config = strategy.default(SPACE, problem, 132).config
    assert strategy.predictor(SPACE, problem, 132)(config) > 1.0  # type: ignore[operator]
    columns = config.pair("tile_shape_mn")[config.flag("swap_ab") is False]
    assert strategy.tile(config, "n") * 2 == columns


#: Microseconds on an H200, launches back to back, by tile, cluster and kind of some kernels of a problem.
MEASURED: dict[str, dict[str, float]] = {
    "40x4240x1472": {
        "64x80 1x4": 8.1,
        "64x80 1x1": 9.4,
        "64x96 1x1": 10.1,
        "128x40 1x1 swapped": 11.4,
        "128x48 1x1 swapped": 11.5,
    },
    "129x11783x5632": {
        "128x72 1x2 swapped pingpong": 72.7,
        "128x72 1x2 swapped": 80.9,
        "128x80 1x2 swapped": 82.5,
    },
    "1308x576x1024": {"128x96 1x2": 7.7, "128x104 2x1 swapped pingpong": 8.3, "64x192 2x1 pingpong": 8.4},
    "1466x720x960": {
        "128x136 2x1 swapped pingpong": 8.9,
        "192x96 1x1 pingpong": 9.0,
        "128x136 1x1 swapped pingpong": 9.1,
    },
}


@pytest.mark.parametrize("sizes", MEASURED)
def test_the_default_is_near_the_fastest_that_was_measured(sizes: str) -> None:
    config, known = default_config(SPACE, parse_problem(f"gated_gemm {sizes} bf16"), 132), MEASURED[sizes]
    kind = [word for word, knob in (("swapped", "swap_ab"), ("pingpong", "pingpong")) if config.flag(knob)]
    (rows, columns), (along_m, along_n) = config.pair("tile_shape_mn"), config.pair("cluster_shape_mn")
    assert known[" ".join([f"{rows}x{columns}", f"{along_m}x{along_n}", *kind])] < 1.06 * min(known.values())


def test_every_problem_has_a_default_and_it_is_checked_on_a_tail() -> None:
    for m in (1, 64, 65, 100_000):
        for n in (1, 17, 2880):
            for k in (8, 4096):
                for layout in ("halves", "interleaved"):
                    options: dict[str, Any] = {"layout": layout, "pre": layout == "halves"}
                    problem = GATED_GEMM.problem({"m": m, "n": n, "k": k}, options)
                    for config in (SPACE.default(problem), default_config(SPACE, problem, 132)):
                        assert is_legal(config, problem, SPACE.arch), problem
                        tails = GATED_GEMM.tails(problem)
                        assert any(is_legal(config, tail, SPACE.arch) for tail in tails), (problem, config)


def test_few_rows_have_kernels_without_tensor_cores() -> None:
    """Whose model says when they answer; a warp has both rows of the weights that an output needs."""
    few = find_space("gated_gemm", SPACE.arch, algorithm="few_rows")
    small = [(f"{sizes} bf16", "few_rows") for sizes in ("2x528x640", "3x640x768", "4x624x1152")]
    for line, answers in (("1x14336x4096 bf16", "few_rows"), ("8x14336x4096 bf16", ""), *small):
        problem = parse_problem(f"gated_gemm {line}")
        assert default_config(SPACE, problem, 132).algorithm == answers
        assert bool(few.explain(problem, {})) == (not answers)
    problem = parse_problem("gated_gemm 2x512x4096 bf16")
    strategy = GATED_GEMM.strategy(SPACE.arch, "few_rows")
    assert strategy is not None
    ranked = strategy.rank(Query(few, problem, 132), 6)
    assert len(set(ranked)) == 6 and all(few.is_valid(problem, config) for config in ranked)
    assert all(config.integer("columns_per_warp") % 2 == 0 for config in few.configs(problem))
    assert {strategy.tile(ranked[0], size) for size in "mn"} == {1}
    kernels = strategy.default_set(few, problem, 132)
    assert kernels and all(few.is_valid(kin, config) for kin, config in kernels)
    assert {kin.signature for kin, _ in kernels} == {problem.signature}


LARGE = "gated_gemm 4096x14336x4096 bf16"
FEW = "gated_gemm 16x14336x4096 bf16"
#: A problem, knobs that differ from its default config, and the one rule that they break.
REJECTED: tuple[tuple[str, dict[str, Any], str], ...] = (
    (LARGE, {"tile_shape_mn": (128, 200)}, "halves_fit_the_tile"),
    (FEW, {"tile_shape_mn": (64, 16)}, "halves_fit_the_tile"),
    (FEW, {"tile_shape_mn": (128, 16), "mma_warpgroups": 2}, "halves_fit_the_tile"),
    (
        "gated_gemm 4096x14335x4096 bf16",
        {"tile_shape_mn": (128, 192), "mma_warpgroups": 1},
        "single_stores_leave_registers",
    ),
    (LARGE, {"pingpong": True}, "pingpong_has_one_warpgroup_per_tile"),
)


@pytest.mark.parametrize(("line", "changes", "rule"), REJECTED, ids=lambda value: str(value)[:40])
def test_a_rule_alone_rejects_its_example(line: str, changes: dict[str, Any], rule: str) -> None:
    problem = parse_problem(line)
    config = SPACE.default(problem).replace(**changes)
    assert {violation.rule for violation in SPACE.explain(problem, config)} == {rule}
