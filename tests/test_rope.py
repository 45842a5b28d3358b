"""``cutegen.rope`` and ``cutegen.rope_``, with kernels that compute on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_family import FakeFamilies
from fake_kernels import calls_go_to

torch = pytest.importorskip("torch")

from torch import library as registry  # noqa: E402

import cutegen  # noqa: E402
from cutegen.errors import ConfigError, OperandError  # noqa: E402
from cutegen.families.registry import parse_problem  # noqa: E402
from cutegen.torch_ops import rope as ropes  # noqa: E402

HQ, HK, D, PAIRS = 4, 2, 32, 8


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[FakeFamilies]:
    """Every call of the test goes to kernels on the CPU."""
    with calls_go_to(FakeFamilies(tmp_path)) as fake:
        yield fake


def tensor(*shape: int, dtype: Any = None) -> Any:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype or torch.float32)


def tables(rows: int, pairs: int = PAIRS) -> tuple[Any, Any]:
    """Cosines and sines of the usual angles."""
    angles = torch.arange(rows)[:, None] * 10000.0 ** (-torch.arange(pairs) / pairs)
    return angles.cos(), angles.sin()


def turned(x: Any, cos: Any, sin: Any, style: str) -> Any:
    """By complex numbers, unlike the reference."""
    pairs = cos.shape[-1]
    wide = x.double()
    at = (
        torch.arange(2 * pairs).view(-1, 2)
        if style == "interleaved"
        else torch.arange(2 * pairs).view(2, -1).T
    )
    numbers = torch.view_as_complex(wide[..., at].contiguous())
    found = numbers * torch.complex(cos.double(), sin.double()).unsqueeze(-2)
    wide[..., at] = torch.view_as_real(found)
    return wide


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("pairs", [PAIRS, D // 2])
@pytest.mark.parametrize("places", [(5,), (3, 5)])
def test_heads_are_turned(gpu: FakeFamilies, places: tuple[int, ...], pairs: int, style: str) -> None:
    """With a row for each token, for each of a sequence, and by position; new tensors and in place."""
    q, k = tensor(*places, HQ, D), tensor(*places, HK, D)
    cos, sin = tables(5, pairs)
    want = turned(q, cos, sin, style), turned(k, cos, sin, style)
    full = [t.expand(*places, pairs).contiguous() for t in (cos, sin)]
    long = tables(64, pairs)
    places_of = torch.arange(5)
    for given in ((cos, sin), tuple(full), (*long, places_of), (*long, places_of.expand(places).int())):
        got = cutegen.rope(q, k, *given, style=style)
        for found, wanted, x in zip(got, want, (q, k), strict=True):
            assert found.shape == x.shape and torch.allclose(found.double(), wanted, atol=1e-6)
    mine = q.clone(), k.clone()
    got = cutegen.rope_(*mine, cos, sin, style=style)
    assert got[0] is mine[0] and got[1] is mine[1]
    for found, wanted in zip(mine, want, strict=True):
        assert torch.allclose(found.double(), wanted, atol=1e-6)


def test_parts_of_a_packed_projection_are_turned_in_place(gpu: FakeFamilies) -> None:
    """The values, and what is not turned, stay what they are, to the bit."""
    packed = tensor(2, 5, (HQ + 2 * HK) * D, dtype=torch.bfloat16)
    before = packed.clone()
    heads = packed.view(2, 5, HQ + 2 * HK, D)
    q, k = heads[:, :, :HQ], heads[:, :, HQ : HQ + HK]
    cos, sin = tables(5)
    want = turned(q, cos, sin, "half"), turned(k, cos, sin, "half")
    cutegen.rope_(q, k, cos, sin)
    for found, wanted in zip((q, k), want, strict=True):
        assert torch.allclose(found.double(), wanted, rtol=2**-8, atol=1e-6)
    was = before.view(2, 5, HQ + 2 * HK, D)
    assert torch.equal(heads[:, :, HQ + HK :], was[:, :, HQ + HK :])
    assert torch.equal(heads[..., 2 * PAIRS :], was[..., 2 * PAIRS :])
    assert not torch.equal(packed, before)


def test_heads_are_normed_first(gpu: FakeFamilies) -> None:
    q, k = tensor(5, HQ, D), tensor(5, HK, D)
    wq, wk = tensor(D), tensor(D) + 1
    cos, sin = tables(5)
    norm = torch.nn.functional.rms_norm
    want = [turned(norm(x.double(), (D,), w.double(), 1e-5), cos, sin, "half") for x, w in ((q, wq), (k, wk))]
    got = cutegen.rope(q, k, cos, sin, q_weight=wq, k_weight=wk, eps=1e-5)
    assert all(torch.allclose(g.double(), w, atol=1e-5) for g, w in zip(got, want, strict=True))
    [source] = gpu.compiled
    assert dict(source.signature.options)["norm"] is True


def test_one_position_may_be_for_all_tokens(gpu: FakeFamilies) -> None:
    q, k = tensor(3, HQ, D), tensor(3, HK, D)
    cos, sin = tables(64)
    want = cutegen.rope(q, k, cos, sin, torch.full((3,), 5))
    for positions in (torch.tensor(5), torch.tensor([5]), torch.tensor([5]).expand(3)):
        got = cutegen.rope(q, k, cos, sin, positions)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_positions_beyond_the_tables_take_their_ends(gpu: FakeFamilies) -> None:
    q, k = tensor(3, HQ, D), tensor(3, HK, D)
    cos, sin = tables(64)
    far = cutegen.rope(q, k, cos, sin, torch.tensor([-7, 5, 1000]))
    near = cutegen.rope(q, k, cos, sin, torch.tensor([0, 5, 63]))
    assert torch.equal(far[0], near[0]) and torch.equal(far[1], near[1])


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_gradients_are_those_of_autograd(gpu: FakeFamilies, style: str) -> None:
    """Of both, of one alone, and of a gradient that is expanded."""
    cos, sin = tables(5)
    q, k = (tensor(5, heads, D).requires_grad_() for heads in (HQ, HK))
    wide = [x.detach().double().requires_grad_() for x in (q, k)]
    a, b = cutegen.rope(q, k, cos, sin, style=style)
    (a.square().sum() + b.sum()).backward()
    want = [torch.zeros_like(x) for x in wide]
    at = (
        torch.arange(2 * PAIRS).view(-1, 2)
        if style == "interleaved"
        else torch.arange(2 * PAIRS).view(2, -1).T
    )
    one = torch.ones(5, HK, D).double()
    turn = torch.complex(cos.double(), -sin.double()).unsqueeze(-2)
    one[..., at] = torch.view_as_real(torch.view_as_complex(one[..., at].contiguous()) * turn)
    want = [2 * wide[0].detach(), one]
    for x, grad in zip((q, k), want, strict=True):
        assert x.grad is not None and torch.allclose(x.grad.double(), grad, atol=1e-5)
    alone = tensor(5, HQ, D).requires_grad_()
    cutegen.rope(alone, k.detach(), cos, sin, style=style)[0].square().sum().backward()
    assert torch.allclose(alone.grad.double(), 2 * alone.detach().double(), atol=1e-5)


def test_one_kernel_serves_any_number_of_tokens(gpu: FakeFamilies) -> None:
    for tokens in (3, 3, 5):
        cutegen.rope(tensor(tokens, HQ, D), tensor(tokens, HK, D), *tables(tokens))
    assert len(gpu.calls) == 3 and len(gpu.compiled) == 1
    cutegen.rope(tensor(3, HQ + 1, D), tensor(3, HK, D), *tables(3))
    assert len(gpu.compiled) == 2


def test_nothing_to_do_is_done(gpu: FakeFamilies) -> None:
    q, k = tensor(0, HQ, D), tensor(0, HK, D)
    assert cutegen.rope(q, k, *tables(0))[1].shape == k.shape
    assert cutegen.rope_(q, k, *tables(0))[0] is q and not gpu.calls


def test_a_config_overrides_the_choice(gpu: FakeFamilies) -> None:
    q, k = tensor(3, HQ, D), tensor(3, HK, D)
    cutegen.rope(q, k, *tables(3), config="threads=256 heads_per_thread=1 pdl=off")
    assert gpu.compiled[-1].config["threads"] == 256
    with pytest.raises(ConfigError):
        cutegen.rope(q, k, *tables(3), config="threads=3")


T = tables(3)
BAD: list[tuple[str, Callable[[Any, Any], Any], str]] = [
    ("no tensor", lambda q, k: cutegen.rope(q, [1], *T), "k is a list; it must be a torch.Tensor"),
    (
        "list",
        lambda q, k: cutegen.rope(q, k, *T, [0, 1, 2]),
        "positions is a list; it must be a torch.Tensor",
    ),
    (
        "weights",
        lambda q, k: cutegen.rope(q, k, *T, q_weight=tensor(D), k_weight=1.0),
        "k_weight is a float; it must be a torch.Tensor",
    ),
    (
        "no queries",
        lambda q, k: cutegen.rope(q[:, :0], k, *T),
        r"q has shape \(3, 0, 32\); hq must be at least",
    ),
    (
        "no keys",
        lambda q, k: cutegen.rope_(q, k[:, :0], *T),
        r"k has shape \(3, 0, 32\); hk must be at least",
    ),
    ("no queries in place", lambda q, k: cutegen.rope_(q[:, :0], k, *T), "hq must be at least 1"),
    (
        "elements over each other",
        lambda q, k: cutegen.rope_(q[:, :1].expand(3, HQ, D), k, *T),
        "q has strides .* under which elements overlap",
    ),
    ("matrix", lambda q, k: cutegen.rope(q[0], k, *T), r"must be \(..., heads, d\) with the same tokens"),
    ("tokens", lambda q, k: cutegen.rope(q, k[:2], *T), "with the same tokens and the same d"),
    ("other d", lambda q, k: cutegen.rope(q, k[..., :8], *T), "with the same tokens and the same d"),
    ("style", lambda q, k: cutegen.rope(q, k, *T, style="neox"), "style='neox' .* valid: half, interleaved"),
    ("pairs", lambda q, k: cutegen.rope(q, k, *tables(3, 17)), "at most 16 pairs fit. .* pass one half"),
    ("sines", lambda q, k: cutegen.rope(q, k, T[0], T[1][:, :4]), "cos has shape .* and sin"),
    ("rows", lambda q, k: cutegen.rope(q, k, *tables(7)), "cos has 7 rows but q has 3 tokens"),
    ("dtype", lambda q, k: cutegen.rope(q.double(), k.double(), *T), "q has dtype torch.float64; valid"),
    ("dtypes", lambda q, k: cutegen.rope(q, k.half(), *T), "k has dtype torch.float16 but others"),
    (
        "two tables",
        lambda q, k: cutegen.rope(q.half(), k.half(), T[0].half(), T[1]),
        "sin has dtype torch.float32 but others torch.float16; they must agree",
    ),
    ("eps", lambda q, k: cutegen.rope(q, k, *T, eps="a"), "eps='a' must be a number"),
    ("table", lambda q, k: cutegen.rope(q, k, T[0].half(), T[1].half()), "cos has dtype torch.float16"),
    (
        "positions",
        lambda q, k: cutegen.rope(q, k, *T, torch.arange(4)),
        r"positions has shape \(4,\); it must expand to that of the tokens, \(3,\)",
    ),
    ("fractions", lambda q, k: cutegen.rope(q, k, *T, torch.rand(3)), "positions has dtype torch.float32"),
    ("one weight", lambda q, k: cutegen.rope(q, k, *T, q_weight=tensor(D)), "only one of q_weight and"),
    (
        "short weight",
        lambda q, k: cutegen.rope(q, k, *T, q_weight=tensor(8), k_weight=tensor(8)),
        "q_weight has shape .* makes d 8",
    ),
    ("in place twice", lambda q, k: cutegen.rope_(q, q, *T), "q_out shares memory with k"),
    ("overlapping", lambda q, k: cutegen.rope_(q[:, :3], q[:, 2:], *T), "q_out shares memory with k"),
    (
        "head strides",
        lambda q, k: cutegen.rope(q.transpose(1, 2), k, *T),
        "with the same tokens and the same d",
    ),
    (
        "columns",
        lambda q, k: cutegen.rope(q.mT.contiguous().mT, k, *T),
        "q has strides .* rows must be contiguous",
    ),
    (
        "gradients in place",
        lambda q, k: cutegen.rope_(q.requires_grad_(), k, *T),
        "works in place .* use rope",
    ),
    (
        "gradients of norms",
        lambda q, k: cutegen.rope(q.requires_grad_(), k, *T, q_weight=tensor(D), k_weight=tensor(D)),
        "a norm in rope has no gradients",
    ),
    (
        "gradients of tables",
        lambda q, k: cutegen.rope(q, k, T[0].clone().requires_grad_(), T[1]),
        "cos or sin requires grad",
    ),
]


@pytest.mark.parametrize(("call", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_what_cannot_be_an_operand_is_named(
    gpu: FakeFamilies, call: Callable[[Any, Any], Any], message: str
) -> None:
    with pytest.raises(OperandError, match=message):
        call(tensor(3, HQ, D), tensor(3, HK, D))
    assert not gpu.calls


def test_torch_traces_the_operator(gpu: FakeFamilies) -> None:
    """One graph forward and backward and in place, right shapes for symbols, and torch's own tests."""
    cos, sin = tables(64)

    def step(q: Any, k: Any) -> Any:
        a, b = cutegen.rope(q * 2, k, cos, sin, torch.arange(q.shape[0]))
        return a.sum(1) + b.sum(1)

    def in_place(q: Any, k: Any) -> Any:
        q, k = q * 2, k + 0
        cutegen.rope_(q, k, cos, sin, torch.arange(q.shape[0]))
        return q.sum(1) + k.sum(1)

    for function in (step, in_place):
        run = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
        for tokens in (3, 5):
            q, k = tensor(tokens, HQ, D), tensor(tokens, HK, D)
            assert torch.allclose(run(q, k), step(q, k), atol=1e-6)
    ours, theirs = ([tensor(5, h, D).requires_grad_() for h in (HQ, HK)] for _ in range(2))
    torch.compile(step, fullgraph=True, backend="aot_eager")(*ours).square().sum().backward()
    step(*theirs).square().sum().backward()
    assert all(torch.allclose(a.grad, b.grad, atol=1e-5) for a, b in zip(ours, theirs, strict=True))
    ropes.prepare()
    given = (*ours, None, None, cos, sin, torch.arange(5), None, None)
    registry.opcheck(
        torch.ops.cutegen.rope.default,
        (
            *[t.detach() if t is not None else None for t in given],
            1e-6,
            "half",
            "positions",
            False,
            ["q_out", "k_out"],
            None,
        ),
    )


def test_bytes_count_of_a_table_what_is_read() -> None:
    short: Any = parse_problem("rope 8x4x2x32x8x8 bf16 table=positions")
    long: Any = parse_problem("rope 8x4x2x32x8x4096 bf16 table=positions")
    tokens: Any = parse_problem("rope 8x4x2x32x8x1 bf16")
    heads, rows = 2 * 8 * 6 * 32 * 2, 2 * 8 * 8 * 4
    assert short.min_bytes == long.min_bytes == heads + rows + 8 * 8
    assert tokens.min_bytes == heads + rows
