"""Integers that calls of declared kernels pass: nothing is rounded, and no bits are dropped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from own_kernels import write_kernel
from own_registry import without_user_families

torch = pytest.importorskip("torch")

from fake_kernels import calls_go_to  # noqa: E402
from test_user_kernels import FakeUserGpu  # noqa: E402

import cutegen  # noqa: E402
from cutegen.errors import OperandError  # noqa: E402
from cutegen.torch_ops import user_kernels  # noqa: E402

#: Rows times a number of steps; the kernel is never compiled.
STEPS = {
    "steps.py": "def launch(*a, **k): ...\n",
    "declaration.py": """
from cutegen.kernel import Kernel, fixed, free, read, scalar, write

kernel = Kernel(
    "own_steps",
    entry="steps:launch",
    sizes={"m": free, "n": fixed},
    options={"dtype": ("fp32",)},
    arguments=(
        read("x", "dtype", ("m", "n")),
        scalar("step", "int32", (1, 3)),
        scalar("seed", "int64", (1, 3)),
        write("y", "dtype", ("m", "n")),
    ),
    knobs={"threads": (32, 64)},
    rows="m",
)


@kernel.reference
def reference(x, step, seed):
    return x * step
""",
}
X = torch.ones(4, 8)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The kernel as a function, whose family no other module of tests sees."""
    with pytest.MonkeyPatch.context() as patch:
        without_user_families(patch)
        patch.setattr(user_kernels, "_loaded", {})
        yield cutegen.load(write_kernel(tmp_path_factory.mktemp("own"), STEPS))


@pytest.fixture
def steps(loaded: Any, tmp_path: Path) -> Iterator[Any]:
    """The kernel, of which no call is known yet."""
    with calls_go_to(FakeUserGpu(tmp_path / "cache")):
        loaded.operator.forget()
        yield loaded


@pytest.mark.parametrize("known", [False, True], ids=["a first call", "a call of a known shape"])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"step": 2.5}, r"step is 2\.5; it must be an integer"),
        ({"step": 2.0}, r"step is 2\.0; it must be an integer"),
        ({"step": torch.tensor(2.0)}, r"step is tensor\(2\.\); it must be an integer"),
        ({"step": 2**31}, r"step is 2147483648; it must be from -2147483648 to 2147483647"),
        ({"seed": -(2**63) - 1}, r"seed is -9223372036854775809; it must be from"),
    ],
)
def test_what_is_no_such_integer_is_refused(
    steps: Any, known: bool, given: dict[str, Any], said: str
) -> None:
    if known:
        steps(X, 2)
    with pytest.raises(OperandError, match=said):
        steps(X, **given)


def test_integers_of_other_types_are_taken(steps: Any) -> None:
    for step in (3, torch.tensor(3), True + 2):
        assert torch.equal(steps(X, step), 3 * X)
    assert torch.equal(steps(X, 3, 2**40), 3 * X)


def test_compiled_code_passes_them_and_is_compiled_once_for_all(steps: Any) -> None:
    compiled = torch.compile(
        lambda x, step: steps(x, step), backend="aot_eager", fullgraph=True, dynamic=True
    )
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in (5, 6, -7):
            assert torch.equal(compiled(X, step), step * X)
    with pytest.raises(OperandError, match="step is 2147483648"):
        compiled(X, 2**31)
