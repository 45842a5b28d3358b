"""FLOPs that ``torch.utils.flop_counter`` counts: of our operators as many as of torch's."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore")

from fake_family import AllFamilies  # noqa: E402
from fake_kernels import operators_ask  # noqa: E402
from test_fake_operands import CALLS, some  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import cutegen  # noqa: E402

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AllFamilies]:
    with operators_ask(AllFamilies(tmp_path), monkeypatch) as fake:
        yield fake


def counted(call: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())


#: Of the calls of another test; what is not here counts nothing.
PRODUCTS = {
    "gemm": 2 * 16 * 24 * 64,
    "gemm and more": 2 * 16 * 24 * 64,
    "linear": 2 * 16 * 24 * 64,
    "gated_gemm": 2 * 16 * 32 * 64,
    "grouped_gemm": 2 * 16 * 32 * 64,
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_count_two_operations_for_each_product(name: str) -> None:
    """When the kind of call is known, too."""
    call, operands = CALLS[name]
    for _ in range(2):
        assert counted(lambda: call(**operands)) == PRODUCTS.get(name, 0)


def ends(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int32)


OTHERS: dict[str, tuple[int, Callable[[], Any]]] = {
    "batched": (
        2 * 3 * 16 * 24 * 64,
        lambda: cutegen.gemm(some(3, 16, 64, dtype=BF16), some(3, 64, 24, dtype=BF16)),
    ),
    "out": (
        2 * 16 * 24 * 64,
        lambda: cutegen.gemm(
            some(16, 64, dtype=BF16), some(64, 24, dtype=BF16), out=torch.empty(16, 24, dtype=BF16)
        ),
    ),
    "gated, two weights": (
        2 * 16 * 32 * 64,
        lambda: cutegen.gated_gemm(some(16, 64, dtype=BF16), *weights()[:1], up=weights()[1]),
    ),
    "counts": (
        2 * 2 * 16 * 32 * 64,
        lambda: cutegen.grouped_gemm(
            some(2, 16, 64, dtype=BF16), some(2, 32, 64, dtype=BF16), counts=ends(9, 16)
        ),
    ),
    "gated groups": (
        2 * 16 * 32 * 64,
        lambda: cutegen.grouped_gemm(
            some(16, 64, dtype=BF16), some(2, 32, 64, dtype=BF16), ends(9, 16), activation="silu"
        ),
    ),
    "scaled": (
        2 * 16 * 32 * 64,
        lambda: cutegen.scaled_gemm(eighth(16, 64), eighth(32, 64).t(), some(1)[0], some(1)[0]),
    ),
    "scaled groups": (
        2 * 16 * 128 * 256,
        lambda: cutegen.scaled_grouped_gemm(
            eighth(16, 256), eighth(2, 128, 256), some(2, 16).t(), some(2, 1, 2), ends(9, 16)
        ),
    ),
}


def weights() -> Any:
    return some(2, 16, 64, dtype=BF16).unbind()


def eighth(*shape: int) -> Any:
    return some(*shape).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("name", OTHERS)
def test_other_forms_count_their_products(name: str) -> None:
    wanted, call = OTHERS[name]
    assert counted(call) == wanted


class Mlp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(64, 32, bias=False)
        self.up = torch.nn.Linear(64, 32, bias=False)
        self.down = torch.nn.Linear(32, 64, bias=False)

    def forward(self, x: Any) -> Any:
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


def network() -> Any:
    torch.manual_seed(0)
    norm = torch.nn.RMSNorm(64, eps=1e-6)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), norm, Mlp(), torch.nn.Linear(64, 16)).to(BF16)


@pytest.mark.parametrize("training", [False, True])
def test_an_optimized_model_counts_what_it_counted_before(gpu: AllFamilies, training: bool) -> None:
    model = network().requires_grad_(training)
    swapped = copy.deepcopy(model)
    found = cutegen.optimize(swapped)
    assert len(found.layers) == 5 and found.gates
    x = some(2, 8, 64, dtype=BF16)

    def step(of: Any) -> None:
        y = of(x)
        if training:
            y.float().sum().backward()

    wanted = counted(lambda: step(model))
    assert wanted == 2 * 16 * 64 * (64 + 3 * 32 + 16) * (3 if training else 1) - training * 2 * 16 * 64 * 64
    for known in (False, True):
        launched = len(gpu.calls)
        assert counted(lambda: step(swapped)) == wanted, known
        assert len(gpu.calls) > launched


IMPORT, USE = "from torch.utils.flop_counter import FlopCounterMode", "cutegen.wait_for_kernels()"
ORDERS = {
    "counter first": f"{IMPORT}\n{USE}",
    "cutegen first": f"{USE}\nassert 'torch.utils.flop_counter' not in sys.modules\n{IMPORT}",
    "first use while it counts": IMPORT,
}
PROGRAM = """
import sys
import torch
import cutegen

{order}
with torch._subclasses.FakeTensorMode(), FlopCounterMode(display=False) as counter:
    a = torch.empty(16, 64, dtype=torch.bfloat16, device="cuda")
    cutegen.gemm(a, a.t())
assert counter.get_total_flops() == 2 * 16 * 16 * 64, counter.get_flop_counts()
"""


@pytest.mark.parametrize("order", ORDERS)
def test_it_does_not_matter_which_is_imported_first(order: str) -> None:
    program = PROGRAM.format(order=ORDERS[order])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
