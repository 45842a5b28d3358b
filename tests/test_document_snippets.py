"""Python that the documents show runs, on a GPU that only pretends: what computes there is PyTorch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore")

from deployments import write_table  # noqa: E402
from fake_family import AllFamilies  # noqa: E402
from fake_kernels import operators_ask  # noqa: E402
from test_documents import DOCUMENTS, snippets  # noqa: E402
from torch import nn  # noqa: E402

import cutegen  # noqa: E402

BF16 = torch.bfloat16
#: Snippets that run here, by their document and a line of theirs.
RUN = [
    ("README.md", "any GEMM: batched"),
    ("pytorch.md", "into a tensor that exists"),
    ("pytorch.md", "cutegen.wait_for_kernels()"),
    ("pytorch.md", "cutegen.record("),
    ("pytorch.md", "cutegen.grouped_gemm(rows"),
    ("pytorch.md", "cutegen.scaled_gemm("),
    ("tuning.md", "cutegen.load_table("),
    ("troubleshooting.md", "cutegen.counters()"),
]


class GatedMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(64, 96, bias=False), nn.Linear(64, 96, bias=False)
        self.act, self.down = nn.SiLU(), nn.Linear(96, 64, bias=False)

    def forward(self, x: Any) -> Any:
        return self.down(self.act(self.gate(x)) * self.up(x))


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AllFamilies]:
    """Where snippets run: a folder with the files that they name."""
    monkeypatch.chdir(tmp_path)
    write_table(tmp_path / "mine.json", ("gemm 64x128x256 bf16 kk",))
    (tmp_path / "TABLE.json").write_bytes((tmp_path / "mine.json").read_bytes())
    with operators_ask(AllFamilies(tmp_path / "cache"), monkeypatch) as fake:
        assert isinstance(fake, AllFamilies)
        yield fake


def draw(*shape: int, dtype: Any = BF16) -> Any:
    return torch.randn(*shape).to(dtype)


def code_of(document: str, line: str) -> str:
    [found] = [code for where, code in snippets() if where == document and line in code]
    return found.replace('device="cuda"', 'device="cpu"')


@pytest.mark.parametrize(("document", "line"), RUN)
def test_a_snippet_runs(gpu: AllFamilies, document: str, line: str) -> None:
    e4m3 = torch.float8_e4m3fn
    names = {"torch": torch, "cutegen": cutegen, "x": draw(8, 64)}
    names["model"] = nn.Sequential(nn.RMSNorm(64, eps=1e-6), GatedMlp()).to(BF16)
    names |= {"rows": draw(12, 64), "experts": draw(3, 32, 64), "padded": draw(3, 6, 64)}
    names |= {name: torch.tensor(of, dtype=torch.int32) for name, of in _ENDS.items()}
    names |= {"a": draw(64, 256, dtype=e4m3), "b": draw(128, 256, dtype=e4m3).t()}
    names |= {"scale_a": torch.rand(2, 64).t(), "scale_b": torch.rand(1, 2).t()}
    exec(code_of(document, line), names)
    if "model(x)" in code_of(document, line):
        assert "gated_gemm 8x96x64 bf16" in names["recording"].report()
    elif "load_table" not in code_of(document, line):
        assert gpu.calls


_ENDS = {"offs": [4, 4, 12], "counts": [1, 0, 6]}


def linear(x: Any, w: Any) -> Any:
    return x.double() @ w.double().mT


def gate(x: Any, up: Any) -> Any:
    return nn.functional.silu(x.double()) * up.double()


def normed(x: Any, eps: float) -> Any:
    return x.double() * (x.double().square().mean(-1, keepdim=True) + eps).rsqrt()


X, UP, W, A, B, C = (draw(8, 64) for _ in range(6))
ROWS, EXPERTS, BIAS = draw(12, 64), draw(3, 32, 64), draw(64)
#: Calls in the table of operators, what their names stand for, and what they compute in fp64.
CALLS: dict[str, tuple[dict[str, Any], Any]] = {
    'gemm(a, b, out=d, c=c, alpha=0.5, beta=2.0, bias=bias, activation="gelu")': (
        {"a": A, "b": W.mT, "c": C[:, :8], "bias": BIAS[:8], "d": draw(8, 8)},
        lambda: nn.functional.gelu(0.5 * linear(A, W) + 2.0 * C[:, :8].double() + BIAS[:8].double()),
    ),
    "linear(x, w, bias)": ({"x": X, "w": W, "bias": BIAS[:8]}, lambda: linear(X, W) + BIAS[:8].double()),
    "gated_gemm(x, w)": ({"x": X, "w": EXPERTS[0]}, lambda: gate(*linear(X, EXPERTS[0]).chunk(2, -1))),
    "gated_gemm(x, w_gate, up=w_up)": (
        {"x": X, "w_gate": EXPERTS[1], "w_up": EXPERTS[2]},
        lambda: gate(linear(X, EXPERTS[1]), linear(X, EXPERTS[2])),
    ),
    "grouped_gemm(rows, experts, offs)": (
        {"rows": ROWS, "experts": EXPERTS, "offs": torch.tensor(_ENDS["offs"], dtype=torch.int32)},
        lambda: torch.cat([linear(ROWS[:4], EXPERTS[0]), linear(ROWS[4:], EXPERTS[2])]),
    ),
    "swiglu(gate_and_up)": ({"gate_and_up": X}, lambda: gate(*X.chunk(2, -1))),
    "swiglu(gate, up)": ({"gate": X, "up": UP}, lambda: gate(X, UP)),
    'activate(x, "relu_squared")': ({"x": X}, lambda: X.double().relu().square()),
    "rms_norm(x, weight, 1e-6, residual=residual)": (
        {"x": X, "weight": BIAS, "residual": UP},
        lambda: normed(X.double() + UP.double(), 1e-6) * BIAS.double(),
    ),
    "layer_norm(x, weight, bias, 1e-5)": (
        {"x": X, "weight": UP[0], "bias": BIAS},
        lambda: nn.functional.layer_norm(X.double(), (64,), UP[0].double(), BIAS.double(), 1e-5),
    ),
    "softmax(x)": ({"x": X}, lambda: X.double().softmax(-1)),
}
#: Calls of the table that are not run here; tests of their operators run them.
OTHERS = {"scaled_gemm", "scaled_grouped_gemm", "q, scale = rms_norm", "rope", "rope_", "cross_entropy"}


def test_the_table_of_operators_has_the_calls_that_run() -> None:
    table = DOCUMENTS["pytorch.md"].split("## Operators", 1)[1].split("###", 1)[0]
    cells = [row.split(" | ")[0] for row in table.splitlines() if row.startswith("| `")]
    shown = {call for cell in cells for call in re.findall(r"`([^`]+)`", cell)}
    assert {call for call in shown if call.split("(")[0] not in OTHERS} == set(CALLS)


@pytest.mark.parametrize("call", CALLS)
def test_a_call_in_the_table_of_operators_computes_what_is_said(gpu: AllFamilies, call: str) -> None:
    names, want = CALLS[call]
    found = eval(call, {**{name: getattr(cutegen, name) for name in cutegen.__all__}, **names})
    assert (found.double() - want()).norm() <= 2**-7 * want().norm() and gpu.calls
