"""Tensors of the caller's that kernels write: autograd is told, since it sees no write by an address."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from own_kernels import write_kernel
from own_registry import without_user_families

torch = pytest.importorskip("torch")

from fake_family import AllFamilies  # noqa: E402
from fake_kernels import operators_ask  # noqa: E402

import cutegen  # noqa: E402
from cutegen.errors import OperandError  # noqa: E402
from cutegen.torch_ops import user_kernels  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Unseen(AllFamilies):
    """A GPU whose kernels write as real ones do: torch does not notice."""

    def load(self, library: Path, symbol: str) -> Callable[..., Any]:
        function = super().load(library, symbol)

        def unseen(*arguments: Any) -> None:
            function(*[a.data if isinstance(a, torch.Tensor) else a for a in arguments])

        return unseen


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Unseen]:
    with operators_ask(Unseen(tmp_path / "cache"), monkeypatch) as gpu:
        yield gpu  # type: ignore[misc]


def rows(*shape: int, dtype: Any = torch.bfloat16) -> Any:
    return torch.randn(shape or (64, 128), dtype=dtype)


def gemm_into(out: Any) -> None:
    cutegen.gemm(rows(64, 256), rows(128, 256).t(), out=out)


def linear_into(out: Any) -> None:
    cutegen.linear(rows(64, 256), rows(128, 256), out=out)


def registered_into(out: Any) -> None:
    more = (None, None, None, None, "", 1.0, 1.0, "", None, None, False, False)
    torch.ops.cutegen.gemm_into(out, rows(64, 256), rows(256, 128), *more)


def norm_into(out: Any) -> None:
    cutegen.rms_norm(rows(), rows(128), out=out)


def sum_into(out: Any) -> None:
    cutegen.rms_norm(rows(), rows(128), residual=rows(), residual_out=out)


def gate_into(out: Any) -> None:
    cutegen.swiglu(rows(64, 256), out=out)


def activate_into(out: Any) -> None:
    cutegen.activate(out, "silu", out=out)


def rotate(out: Any) -> None:
    angles = torch.randn(64, 32)
    cutegen.rope_(out[:, :64].view(64, 1, 64), out[:, 64:].view(64, 1, 64), angles, angles)


@pytest.mark.parametrize("again", [False, True], ids=["first", "again"])
@pytest.mark.parametrize(
    "write",
    [
        gemm_into,
        linear_into,
        registered_into,
        norm_into,
        sum_into,
        gate_into,
        activate_into,
        rotate,
    ],
)
def test_no_gradient_is_computed_from_what_a_kernel_wrote_over(
    gpu: Unseen, write: Callable[[Any], None], again: bool
) -> None:
    """Multiplying saves the other factor; a kernel that writes into it must not change the gradient."""
    if again:
        write(rows())
    leaf, saved = rows().requires_grad_(), rows()
    product = leaf * saved
    with torch.no_grad():
        write(saved)
    assert gpu.calls
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_a_gradient_in_the_place_of_logits_is_seen(gpu: Unseen) -> None:
    """tanh, a soft cap, saves its result, which the gradient of the loss replaces."""
    leaf = rows(8, 64, dtype=torch.float32).requires_grad_()
    logits = torch.tanh(leaf)
    loss = cutegen.cross_entropy(logits, torch.arange(8), inplace_backward=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_results_of_inference_mode_are_written(gpu: Unseen) -> None:
    """They count no writes, inside of the mode and outside."""
    with torch.inference_mode():
        out = rows()
        gemm_into(out)
        norm_into(out)
    gemm_into(out)
    assert len(gpu.calls) == 3


FILES = {
    "moving.py": """
import cutlass.cute as cute


@cute.jit
def launch(x: cute.Tensor, mean: cute.Tensor, y: cute.Tensor, threads, stream):
    pass
""",
    "declaration.py": '''
"""Rows, and the sum of all rows so far."""

from cutegen.kernel import Kernel, fixed, free, read, update, write

kernel = Kernel(
    "moving",
    "x + mean, where mean grows by the sum of x",
    entry="moving:launch",
    sizes={"m": free, "n": fixed},
    options={"dtype": ("bf16", "fp32")},
    arguments=(
        read("x", "dtype", ("m", "n")),
        update("mean", "dtype", ("n",)),
        write("y", "dtype", ("m", "n")),
    ),
    knobs={"threads": (64, 128)},
    repeat="idempotent",
)


@kernel.reference
def reference(x, mean):
    return {"mean": mean + x.sum(0), "y": x + mean}
''',
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """The kernel, which is a family in no other test of the process."""
    with pytest.MonkeyPatch.context() as patch:
        without_user_families(patch)
        patch.setattr(user_kernels, "_loaded", {})
        yield cutegen.load(write_kernel(tmp_path_factory.mktemp("own"), FILES))


@pytest.fixture
def moving(gpu: Unseen, loaded: Callable[..., Any]) -> Callable[..., Any]:
    return loaded


@pytest.mark.parametrize("again", [False, True], ids=["first", "again"])
@pytest.mark.parametrize("written", ["mean", "y"])
def test_writes_of_loaded_kernels_are_seen(moving: Callable[..., Any], written: str, again: bool) -> None:
    given = {"x": rows(), "mean": rows(128), "y": rows()}
    if again:
        moving(**given)
    product = torch.ones_like(given[written]).requires_grad_() * given[written]
    moving(**given)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.parametrize("again", [False, True], ids=["first", "again"])
def test_loaded_kernels_refuse_outputs_that_require_grad_in_every_call(
    moving: Callable[..., Any], again: bool
) -> None:
    x, mean, y = rows(), rows(128), rows()
    if again:
        moving(x, mean, y=y)
    with pytest.raises(OperandError, match="y requires grad"):
        moving(x, mean, y=y.requires_grad_())
