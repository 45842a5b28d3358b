"""Rotary embeddings of models call cutegen: what is known by trial, what is left alone, how it is undone."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fake_family import AllFamilies  # noqa: E402
from fake_kernels import operators_ask  # noqa: E402
from source_module import module_of  # noqa: E402

import cutegen  # noqa: E402

TEXT = Path(__file__).with_name("model_of_others.py").read_text(encoding="utf-8")
TEXTS, TOKENS = 2, 6


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AllFamilies]:
    """Every call of the test goes to kernels on the CPU."""
    with operators_ask(AllFamilies(tmp_path), monkeypatch) as fake:
        assert isinstance(fake, AllFamilies)
        yield fake


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The code of a model, in a namespace of its own."""
    return module_of(monkeypatch, TEXT)


def pair(others: Any, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = others.Model(**options).bfloat16()
    return model, copy.deepcopy(model)


def inputs(others: Any, texts: int = TEXTS) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(texts, TOKENS, others.HEADS * others.EXTENT, generator=generator)
    return x.bfloat16(), torch.arange(TOKENS)[None]


def near(found: Any, want: Any) -> None:
    torch.testing.assert_close(found.float(), want.float(), rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("texts", [1, TEXTS])
def test_a_model_turns_by_one_kernel_and_has_gradients(
    gpu: AllFamilies, others: ModuleType, texts: int
) -> None:
    model, twin = pair(others)
    found = cutegen.optimize(model)
    assert found.ropes == ("rotary_emb",) and len(found.layers) == 4 and not found.skipped
    assert list(model.state_dict()) == list(twin.state_dict())
    x, at = inputs(others, texts)
    want = twin(x, at)
    assert "rope" not in gpu.families  # the tables of another model are not marked
    near(model(x, at), want)
    assert gpu.families.count("rope") == 2 and cutegen.counters()["fallbacks"] == {}
    model(x, at).float().square().sum().backward()
    twin(x, at).float().square().sum().backward()
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert (own.grad - other.grad).norm() <= 3e-2 * other.grad.norm()
    assert cutegen.restore(model) == 5 and type(model.rotary_emb) is others.Rotary
    del gpu.families[:]
    near(model(x, at), want)
    assert not gpu.families


def test_tables_of_each_text_and_heads_on_the_other_axis(gpu: AllFamilies, others: ModuleType) -> None:
    """And positions that the function takes without using them."""
    model, _ = pair(others)
    cutegen.optimize(model)
    generator = torch.Generator().manual_seed(2)
    q, k = (torch.randn(TEXTS, TOKENS, heads, 16, generator=generator).bfloat16() for heads in (4, 2))
    tables = model.rotary_emb(q, torch.tensor([[0, 1, 2, 3, 4, 5], [7, 9, 11, 13, 15, 17]]))
    original = others.apply_rotary_pos_emb._cutegen_original
    for given, options in (((q, k), {"unsqueeze_dim": 2}), ((q.transpose(1, 2), k.transpose(1, 2)), {})):
        before = gpu.families.count("rope")
        found, want = (
            others.apply_rotary_pos_emb(*given, *tables, **options),
            original(*given, *tables, **options),
        )
        for own, other in zip(found, want, strict=True):
            assert own.shape == other.shape and own.stride() == other.stride()
            near(own, other)
        assert gpu.families.count("rope") == before + 1


def test_what_is_not_as_it_was_tried_is_left_to_torch(gpu: AllFamilies, others: ModuleType) -> None:
    model, _ = pair(others)
    cutegen.optimize(model)
    q, k = (torch.randn(TEXTS, heads, TOKENS, 16) for heads in (4, 2))
    at = torch.arange(TOKENS)[None]
    turn, original = others.apply_rotary_pos_emb, others.apply_rotary_pos_emb._cutegen_original

    def same(q: Any, k: Any, cos: Any, sin: Any, *more: Any, reason: str = "") -> None:
        cutegen.reset_counters()
        for own, other in zip(turn(q, k, cos, sin, *more), original(q, k, cos, sin, *more), strict=True):
            assert torch.equal(own, other)
        assert [*cutegen.counters()["fallbacks"]] == ([f"a rotary embedding: {reason}"] if reason else [])
        assert "rope" not in gpu.families

    cos, sin = model.rotary_emb(q, at)
    same(q, k, cos.clone(), sin.clone())  # not marked
    same(q, k, cos, sin, at, reason="its function was given position_ids")
    dtypes = ", ".join(["torch.float64", *["torch.float32"] * 3])
    same(q.double(), k, cos, sin, reason=f"q, k, cos and sin differ in dtype: {dtypes}")
    one = "tables of shape (1, 6, 16) are not for q of shape (2, 4, 1, 16)"
    same(q[:, :, :1], k[:, :, :1], cos, sin, reason=one)
    same(q[:0], k[:0], cos, sin, reason="q or k is empty")
    with torch.no_grad():
        cos[..., 0] *= 2
    same(q, k, cos, sin)  # somebody wrote to the table since


def test_inference_mode_has_no_versions(gpu: AllFamilies, others: ModuleType) -> None:
    model, twin = pair(others)
    cutegen.optimize(model)
    with torch.inference_mode():
        near(model(*inputs(others)), twin(*inputs(others)))
    assert gpu.families.count("rope") == 2


def test_compilers_get_what_they_fuse(gpu: AllFamilies, others: ModuleType) -> None:
    model, twin = pair(others)
    cutegen.optimize(model)
    near(torch.compile(model, backend="aot_eager")(*inputs(others)), twin(*inputs(others)))
    assert "rope" not in gpu.families


def test_copies_and_pickles_turn_as_their_model_does(gpu: AllFamilies, others: ModuleType) -> None:
    model, twin = pair(others)
    cutegen.optimize(model)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        before = gpu.families.count("rope")
        near(made(*inputs(others)), twin(*inputs(others)))
        assert gpu.families.count("rope") == before + 2
    again = cutegen.optimize(model)
    assert not again.ropes and not hasattr(others.apply_rotary_pos_emb._cutegen_original, "_cutegen_original")


def test_a_pickled_model_turns_in_another_process_once_it_is_optimized(
    gpu: AllFamilies, others: ModuleType
) -> None:
    """The function that turns is not in the pickle; no process but the one of ``optimize`` has ours."""
    model, twin = pair(others)
    cutegen.optimize(model)
    text = pickle.dumps(model)
    others.apply_rotary_pos_emb = others.apply_rotary_pos_emb._cutegen_original
    made = pickle.loads(text)
    near(made(*inputs(others)), twin(*inputs(others)))
    assert "rope" not in gpu.families
    assert not cutegen.optimize(made).skipped
    near(made(*inputs(others)), twin(*inputs(others)))
    assert gpu.families.count("rope") == 2


def test_other_tables_are_left_alone(gpu: AllFamilies, others: ModuleType) -> None:
    model, _ = pair(others, rotary=others.Uneven)
    found = cutegen.optimize(model)
    assert not found.ropes and not hasattr(others.apply_rotary_pos_emb, "_cutegen_original")
    assert found.skipped == {"rotary_emb": "both halves of its tables are not the same"}
    with torch.device("meta"):
        model = others.Model()
    assert cutegen.optimize(model).skipped["rotary_emb"] == "its frequencies are not there yet"


PAIRS = "torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)"
TAKEN = "cos: Any, sin: Any, position_ids"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("+ rotate_half(k) * sin", "- rotate_half(k) * sin"),
        ("torch.cat([-second, first], -1)", PAIRS),
        ("position_ids: Any = None, unsqueeze_dim", "position_ids: Any, unsqueeze_dim"),
        (f"q: Any, k: Any, {TAKEN}", f"k: Any, q: Any, {TAKEN}"),
    ],
    ids=["sign", "interleaved", "positions are needed", "keys first"],
)
def test_other_functions_are_left_alone(
    gpu: AllFamilies, monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    assert TEXT.count(old) == 1
    others = module_of(monkeypatch, TEXT.replace(old, new))
    model, _ = pair(others)
    before = others.apply_rotary_pos_emb
    found = cutegen.optimize(model)
    assert not found.ropes and type(model.rotary_emb) is others.Rotary
    assert found.skipped["rotary_emb"].startswith("no function beside the classes of the model")
    assert others.apply_rotary_pos_emb is before


def test_a_function_that_looks_alike_is_itself(gpu: AllFamilies, others: ModuleType) -> None:
    before = others.turn_back
    cutegen.optimize(pair(others)[0])
    assert others.turn_back is before


def test_a_filter_says_no(gpu: AllFamilies, others: ModuleType) -> None:
    model, _ = pair(others)
    found = cutegen.optimize(model, lambda module, name: name != "rotary_emb")
    assert not found.ropes and found.skipped == {"rotary_emb": "filter_fn said no"}
