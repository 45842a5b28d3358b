"""Families and ranges of sizes on a real GPU: tuned, pinned, and run from their folder without cutegen."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hopper import NEEDS_HOPPER

from cutegen.cli.main import main
from cutegen.families import registry

pytestmark = [*NEEDS_HOPPER, pytest.mark.dsl]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "new_family.md"
NORMS = (
    ("4096x4096", "bf16", ""),
    ("64x7168", "bf16", "residual residual_out rstd"),
    ("5x4097", "fp16", "weight=fp32"),
)

#: Run by a new interpreter that finds torch and the folder, and neither cutegen nor a compiler.
CALLS = """
import sys
for name in ("cutegen", "cutlass", "jinja2", "nvidia_cutlass_dsl"):
    sys.modules[name] = None
import torch
sys.path.insert(0, {folder!r})
import pinned

torch.manual_seed(0)
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

def rows(m, n, dtype):
    return torch.randn(m, n, device="cuda").to(dtype)

def norm(h, w, eps):
    return h * (h.square().mean(-1, keepdim=True) + eps).rsqrt() * w.double()

def near(got, want, digits, what):
    error = ((got.double() - want).abs() / (want.abs() + 1e-3)).max().item()
    print(what, error)
    assert error <= 1.01 * 2.0 ** -digits, (what, error)

for dtype, m, n in ((torch.bfloat16, 4096, 4096), (torch.float16, 5, 4097)):
    x, w = rows(m, n, dtype), rows(1, n, dtype if n == 4096 else torch.float32)[0]
    for eps in (1e-6, 0.25):
        near(pinned.rms_norm(x, w, eps), norm(x.double(), w, eps), 8, f"norm {{m}}x{{n}} {{eps}}")
    kept = x.clone()
    assert pinned.call("rmsnorm", x=x, weight=w, eps=1e-6, out=x) is x
    near(x, norm(kept.double(), w, 1e-6), 8, "in place")

x, r, w = rows(64, 7168, torch.bfloat16), rows(64, 7168, torch.bfloat16), rows(1, 7168, torch.bfloat16)[0]
h = x.double() + r.double()
y, total, rstd = pinned.rms_norm(x, w, 1e-5, residual=r, residual_out=r, return_rstd=True)
assert total is r and torch.equal(r, h.bfloat16())
near(y, norm(h, w, 1e-5), 8, "norm of a sum")
near(rstd, (h.square().mean(-1) + 1e-5).rsqrt(), 18, "rstd")

x, z = rows(1024, 4096, torch.bfloat16), rows(1024, 4096, torch.bfloat16)
for alpha in (1.5, -0.5):
    y = pinned.call("scaled_add", x=x, z=z, alpha=alpha)
    want = alpha * x.double() + z.double()
    assert ((y.double() - want).abs() <= want.abs() * 2.0**-8 + 2.0**-20).all()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    pinned.call("scaled_add", x=x, z=z, y=y, alpha=2.0)
y.zero_()
graph.replay()
torch.cuda.synchronize()
want = 2 * x.double() + z.double()
assert ((y.double() - want).abs() <= want.abs() * 2.0**-8 + 2.0**-20).all()

def product(m):
    a, b = rows(m, 1024, torch.bfloat16), rows(512, 1024, torch.bfloat16).t()
    near_product(pinned.gemm(a, b), a, b, m)
    return a, b

def near_product(c, a, b, m):
    want, most = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    assert ((c.double() - want).abs() <= want.abs() * 2.0**-8 + most * 2.0**-20).all(), m

for m in (1, 2, 3, 7, 16, 17, 64, 65, 100, 255, 256, 511, 512):
    product(m)
product(513)  # torch's
for m in (1, 64, 200):
    x, w = rows(m, 4096, torch.bfloat16), rows(1, 4096, torch.bfloat16)[0]
    near(pinned.rms_norm(x, w), norm(x.double(), w, 1e-6), 8, f"norm of a range {{m}}")

x, z = rows(1024, 4096, torch.bfloat16), rows(1024, 4096, torch.bfloat16)
for call, said in (
    (lambda: pinned.rms_norm(rows(201, 4096, torch.bfloat16)), "no kernel of rmsnorm is pinned for m=201"),
    (lambda: pinned.call("scaled_add", x=x, z=z, y=x[:, :], alpha="2"), "alpha is '2'"),
    (lambda: pinned.call("scaled_add", x=x.cpu(), z=z, alpha=1), "must be on one GPU"),
    (lambda: pinned.gemm(x, z.t(), activation="relu"), "no kernel is pinned for m=1024"),
):
    try:
        call()
    except pinned.PinnedError as error:
        assert said in str(error), error
    else:
        raise AssertionError(said)
assert sys.modules["cutegen"] is None and "tvm_ffi" not in sys.modules
print("all right")
"""


@pytest.fixture
def families(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that docs/new_family.md describes."""
    folder = tmp_path / "families" / "scaled_add"
    folder.mkdir(parents=True)
    for name, text in re.findall(r"```\w+ title=(\S+)\n(.*?)```", PAGE.read_text(), re.DOTALL):
        (folder / name).write_text(text)
    monkeypatch.setattr(registry, "_registered", dict(registry._all()))
    monkeypatch.setenv("CUTEGEN_CACHE_DIR", str(tmp_path / "cache"))
    return folder.parent


def test_families_are_tuned_pinned_and_run_alone(families: Path, tmp_path: Path) -> None:
    """Results agree with fp64, in place and in a CUDA graph; what is not pinned is refused."""
    table, out = tmp_path / "table.json", tmp_path / "deploy"
    usual = ["--quiet", "--candidates", "4", "--budget", "40", "--busy", "warn", "--table", str(table)]
    for shape, dtype, options in NORMS:
        words = ["--shape", shape, "--dtype", dtype, *(["--options", options] if options else [])]
        assert main(["tune", "rmsnorm", *words, *usual]) == 0
    words = ["--families", str(families), "--shape", "1024x4096", *usual]
    assert main(["tune", "scaled_add", *words]) == 0
    for m in (16, 512):
        assert main(["tune", "gemm", "--shape", f"{m}x512x1024", *usual]) == 0
    ranges = ["gemm 1..512x512x1024 bf16 kk", "rmsnorm 1..200x4096 bf16"]
    more = [word for line in ranges for word in ("--problem", line)] + ["--outside", "torch"]
    words = ["--families", str(families), "--table", str(table), "--out", str(out), *more]
    assert main(["pin", *words]) == 0
    code = CALLS.format(folder=str(out))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "all right", done.stdout + done.stderr
