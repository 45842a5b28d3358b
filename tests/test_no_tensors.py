"""What is no tensor, no config or no activation is refused by name, whichever way the call would go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore")

from fake_family import AllFamilies  # noqa: E402
from fake_kernels import operators_ask  # noqa: E402

import cutegen  # noqa: E402
from cutegen.errors import ConfigError, OperandError  # noqa: E402

ROWS, K, N = 8, 16, 32


@pytest.fixture(autouse=True)
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AllFamilies]:
    with operators_ask(AllFamilies(tmp_path), monkeypatch) as fake:
        yield fake


def of(*shape: int) -> Any:
    return torch.ones(shape, dtype=torch.bfloat16)


def in_8_bits(*shape: int) -> Any:
    return torch.ones(shape).to(torch.float8_e4m3fn)


def calls() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Of each operator the tensors of a call, and tensors that go with it and are not in the plain call."""
    x, row, one = of(ROWS, K), of(K), torch.ones(1)
    heads, table = of(ROWS, 2, K), torch.ones(ROWS, K // 2)
    counts = torch.tensor([4, 8], dtype=torch.int32)
    turned = (
        {"q": heads, "k": heads.clone(), "cos": table, "sin": table},
        {"positions": 0, "q_weight": 0, "k_weight": 0},
    )
    return {
        "gemm": ({"a": x, "b": of(K, N)}, {"out": 0, "c": 0, "bias": 0}),
        "linear": ({"x": x, "w": of(N, K)}, {"bias": 0, "out": 0}),
        "scaled_gemm": (
            {"a": in_8_bits(K, K), "b": in_8_bits(K, K).t(), "scale_a": one, "scale_b": one},
            {"out": 0, "bias": 0},
        ),
        "gated_gemm": ({"x": x, "w": of(N, K)}, {"up": 0, "out": 0}),
        "grouped_gemm": ({"a": x, "b": of(2, N, K), "offs": counts}, {"out": 0}),
        "gated": ({"x": x}, {"up": 0, "out": 0}),
        "swiglu": ({"x": x}, {"up": 0}),
        "activate": ({"x": x, "activation": "silu"}, {"out": 0}),
        "rms_norm": ({"x": x}, {"weight": 0, "residual": 0, "out": 0, "residual_out": 0}),
        "layer_norm": ({"x": x}, {"weight": row, "bias": row, "out": 0}),
        "softmax": ({"x": x}, {"out": 0}),
        "cross_entropy": ({"x": x, "target": torch.zeros(ROWS, dtype=torch.int64)}, {}),
        "rope": turned,
        "rope_": turned,
    }


@pytest.mark.parametrize("wrong", [7, "seven", [[1.0, 2.0]], object()], ids=["int", "str", "list", "object"])
@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("name", calls())
def test_every_operand_that_is_no_tensor_is_refused_by_name(name: str, records: bool, wrong: Any) -> None:
    """With autograd and without, in 2 dimensions and where a call takes more, in 3."""
    tensors, others = calls()[name]
    if records:
        tensors = {
            key: value.requires_grad_() if getattr(value, "dtype", None) is torch.bfloat16 else value
            for key, value in tensors.items()
        }
    operands = [key for key in (*tensors, *others) if key != "activation"]
    for operand in operands:
        if (name, operand, type(wrong)) == ("grouped_gemm", "offs", list):
            continue  # counts may be a list
        with pytest.raises(OperandError) as refused:
            getattr(cutegen, name)(**{**tensors, operand: wrong})
        said = str(refused.value)
        gradients = records and "requires grad" in said  # out= and grouped products have none
        assert gradients or operand in said, (operand, said)


@pytest.mark.parametrize("name", ["gemm", "linear", "rms_norm", "softmax"])
def test_operands_that_are_missing_are_refused_by_name(name: str) -> None:
    tensors, _ = calls()[name]
    for operand in tensors:
        with pytest.raises(OperandError, match=f"{operand} is a NoneType; it must be a torch.Tensor"):
            getattr(cutegen, name)(**{**tensors, operand: None})


@pytest.mark.parametrize("operand", ["bias", "out"])
def test_layers_over_more_dimensions_refuse_what_is_no_tensor(operand: str) -> None:
    with pytest.raises(OperandError, match=f"{operand} is a int; it must be a torch.Tensor"):
        cutegen.linear(of(2, ROWS, K), of(N, K), **{operand: 7})


def test_transforms_of_torch_refuse_what_is_no_tensor() -> None:
    """Their tensors go another way, which once came back to where it started."""
    for options in ({"out": 7}, {"c": 7}, {"bias": 7}):
        with pytest.raises(OperandError, match=r"(out|c|bias) is a int; it must be a torch\.Tensor"):
            torch.func.vmap(lambda x, given=options: cutegen.gemm(x, of(K, N), **given))(of(2, ROWS, K))


@pytest.mark.parametrize("wrong", ["swish", 7, ["relu"]])
def test_an_unknown_activation_is_refused_before_anything_runs(gpu: AllFamilies, wrong: Any) -> None:
    """While autograd records, activations are torch's: one that it lacks was a KeyError behind the kernel."""
    x, w = of(ROWS, K).requires_grad_(), of(N, K).requires_grad_()
    for call in (lambda: cutegen.gemm(x, w.t(), activation=wrong), lambda: cutegen.linear(x, w, None, wrong)):
        with pytest.raises(OperandError, match=r"unknown activation .*; valid: 'relu'"):
            call()
    assert not gpu.calls


@pytest.mark.parametrize("name", [name for name in calls() if name != "linear"])
def test_what_is_no_config_is_said(name: str) -> None:
    tensors, _ = calls()[name]
    for wrong in (7, ["split_k=2"], object()):
        with pytest.raises(ConfigError, match=r"config is a \w+; it must be a Config, a mapping"):
            getattr(cutegen, name)(**tensors, config=wrong)
