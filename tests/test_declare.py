"""``python -m cutegen.declare``: drafts that can be finished, and mistakes that are named."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from own_kernels import SPLIT, SUMS
from own_registry import without_user_families

from cutegen.cli.main import main
from cutegen.families.user.stores import find_uses

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "own_kernel"


def test_a_draft_needs_only_what_it_marks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With values of knobs and a reference in the places that it marks, it is a declaration."""
    without_user_families(monkeypatch)
    (tmp_path / "my_norm.py").write_text((EXAMPLE / "my_norm.py").read_text())
    out = tmp_path / "draft.py"
    assert main(["declare", "my_norm:RMSNorm", "--folder", str(tmp_path), "--out", str(out)]) == 0
    assert "finish what is marked TODO" in capsys.readouterr().out
    words = ["space", "--kernel", str(out), "--arch", "sm_90a", "--shape", "8x256"]
    assert main(words) != 0
    assert "a TODO of the draft is left" in capsys.readouterr().err
    text = out.read_text()
    text = text.replace('"threads": (TODO,)', '"threads": (128, 256)')
    text = text.replace('"threads_per_row": (TODO,)', '"threads_per_row": (32, 64)')
    out.write_text(text.replace('("m", "n")),\n        write', '("n",)),\n        write'))
    assert main(words) == 0
    assert "4 valid configs of 4" in capsys.readouterr().out


def test_it_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["declare", "my_norm:RMSNorm", "--folder", str(EXAMPLE)]) == 0
    said = capsys.readouterr().out
    assert 'read("w", "dtype"' in said and 'write("y", "dtype"' in said and 'scalar("eps", "fp32"' in said


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("my_norm", "not of the form MODULE:NAME"),
        ("my_nrom:RMSNorm", "module my_nrom is not there; it is looked for in"),
        ("my_norm:Norm", "has no Norm (did you mean RMSNorm?)"),
    ],
)
def test_mistakes_are_named(entry: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["declare", entry, "--folder", str(EXAMPLE)]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_the_working_directory_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is where modules are looked for, unless another folder is named."""
    monkeypatch.chdir(tmp_path)
    for words, elsewhere in (([], False), (["--folder", str(EXAMPLE)], True)):
        assert main(["declare", "my_nrom:RMSNorm", *words]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert ("but not in the working directory" in said) is elsewhere
        assert ("installed packages)" in said) and (str(tmp_path) in said) is not elsewhere


def test_what_may_be_absent_gets_an_option_and_what_is_left_to_do_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_user_families(monkeypatch)
    (tmp_path / "own.py").write_text(
        "class Norm:\n"
        "    def __init__(self, dtype, n, threads=None): ...\n"
        "    def __call__(self, x: Tensor, w: Optional[Tensor], y: Tensor, stream): ...\n"
    )
    out = tmp_path / "norm_kernel.py"
    assert main(["declare", "own:Norm", "--folder", str(tmp_path), "--out", str(out)]) == 0
    text = out.read_text()
    assert 'read("w", "dtype", ("m", "n"), when="w")' in text and '"w": False' in text
    assert 'knobs={"threads": (TODO,)}' in text
    assert main(["space", "--kernel", str(out), "--arch", "sm_90a", "--shape", "4x64"]) != 0
    said = " ".join(capsys.readouterr().err.split())
    assert "norm_kernel.py, line 19 cannot be read: a TODO of the draft is left; fill it in" in said
    out.write_text(text.replace("(TODO,)", "(32, 64)"))
    assert main(["space", "--kernel", str(out), "--arch", "sm_90a", "--shape", "4x64"]) == 0


def test_names_and_types_say_what_is_written_and_what_may_be_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a launch as attention and norms of others have it."""
    (tmp_path / "own.py").write_text(
        "class Attention:\n"
        "    def __init__(self, dtype, d, tile): ...\n"
        "    def __call__(self, mQ: Tensor, mRes: Tensor, offsets: Tensor, mO: Tensor, lse: Tensor,\n"
        "        mResO: Tensor, softmax_scale: Float32, count: cutlass.Int32,\n"
        "        window: Int32 | int | None = None, extra: AuxData = AuxData(),\n"
        "        eps: Optional[Float32] = 1e-6, shift: Int32 = 0, stream: CUstream = None): ...\n"
    )
    assert main(["declare", "own:Attention", "--folder", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    for name in ("mQ", "mRes", "offsets"):
        assert f'read("{name}"' in said
    for name in ("mO", "lse", "mResO"):
        assert f'write("{name}"' in said
    assert 'scalar("softmax_scale", "fp32"' in said
    assert 'scalar("count", "int32"' in said and 'scalar("shift", "int32"' in said
    assert "# Left at what they are by default: window, extra, eps." in said


def test_no_file_is_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "there.py"
    out.write_text("mine")
    assert main(["declare", "my_norm:RMSNorm", "--folder", str(EXAMPLE), "--out", str(out)]) == 2
    assert "exists already" in capsys.readouterr().err and out.read_text() == "mine"


def uses(source: str, entry: str) -> tuple[str, str]:
    """Return the parameters of a function or class that are read, and those that are written."""
    tree = ast.parse(source)
    [node] = [n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name == entry]
    found = find_uses(tree, node)
    return " ".join(sorted(found.read)), " ".join(sorted(found.written))


#: Tiles that are copied through registers, as NVIDIA's example of an element-wise kernel has them.
TILED = """
class Add:
    @cute.jit
    def __call__(self, mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, mCount: cute.Tensor, stream):
        gA, gB, gC = [cute.zipped_divide(t, self.tiler) for t in (mA, mB, mC)]
        self.kernel(gA, gB, gC, mCount).launch(grid=[1, 1, 1], block=[128, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, gA, gB, gC, count):
        bidx, _, _ = cute.arch.block_idx()
        coord = ((None, None), bidx)
        blkA, blkB, blkC = gA[coord], gB[coord], gC[coord]
        copy = cute.make_tiled_copy_tv(atom, thr, val)
        thrA = copy.get_slice(0).partition_S(blkA)
        thrC = copy.get_slice(0).partition_D(blkC)
        frgA = cute.make_fragment_like(thrA)
        frgC = cute.make_fragment_like(thrC)
        cute.copy(atom, thrA, frgA, pred=None)
        frgC.store(frgA.load() + blkB.load())
        cute.copy(atom, frgC, thrC)
        cute.arch.atomic_add(count.iterator + bidx, 1)
"""
#: Tiles that are loaded and stored by TMA.
BY_TMA = """
@cute.kernel
def kernel(tma_x, x_tma, tma_y, y_tma, smem):
    gX = cute.local_tile(x_tma, (64, 64), (0, 0))
    tXsX, tXgX = cpasync.tma_partition(tma_x, 0, cute.make_layout(1), smem, gX)
    gY = cute.local_tile(y_tma, (64, 64), (0, 0))
    tYsY, tYgY = cpasync.tma_partition(tma_y, 0, cute.make_layout(1), smem, gY)
    cute.copy(tma_x, tXgX[None, 0], tXsX[None, 0])
    cute.copy(tma_y, tYsY[None, 0], tYgY[None, 0])

@cute.jit
def launch(x: cute.Tensor, y: cute.Tensor):
    tma_x, x_tma = cpasync.make_tiled_tma_atom(load, x, layout, tile)
    tma_y, y_tma = cpasync.make_tiled_tma_atom(store, y, layout, tile)
    kernel(tma_x, x_tma, tma_y, y_tma, smem=None).launch(grid=[1, 1, 1], block=[128, 1, 1])
"""


@pytest.mark.parametrize(
    ("source", "entry", "read", "written"),
    [
        (TILED, "Add", "mA mB mCount", "mC mCount"),
        (BY_TMA, "launch", "x", "y"),
        (SUMS["sums.py"], "launch", "x", "rstd y"),
        (SPLIT["split_sum.py"], "launch", "partial x", "partial y"),
        ("def f(x, y):\n    y[0] += x[0]\n", "f", "x y", "y"),
        ("def f(x, y):\n    f(y, x)\n    x[0] = 1\n", "f", "", "x y"),
        ("def f(x, y):\n    fragment = cute.make_fragment_like(x)\n    fragment[0] = y[0]\n", "f", "y", ""),
    ],
)
def test_the_text_shows_what_is_read_and_what_is_written(
    source: str, entry: str, read: str, written: str
) -> None:
    assert uses(source, entry) == (read, written)


def test_outputs_are_what_the_text_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names do not tell: d_out is an input here, and of three outputs none is called as one."""
    (tmp_path / "own.py").write_text(
        "@cute.jit\n"
        "def backward(d_out: cute.Tensor, best: cute.Tensor, state: cute.Tensor, where: cute.Tensor):\n"
        "    state[0] += d_out[0]\n"
        "    best[0] = d_out[0]\n"
        "    where[0] = 1\n"
    )
    assert main(["declare", "own:backward", "--folder", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    for line in ('read("d_out"', 'write("best"', 'update("state"', 'write("where"'):
        assert line in said
    assert "def reference(d_out, state):" in said and "what is right: best, state, where" in said


def test_what_has_no_annotation_is_a_tensor_where_the_text_uses_it_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that is compared with None may be absent; and arguments may be called as sizes usually are."""
    without_user_families(monkeypatch)
    (tmp_path / "own.py").write_text(
        "class Step:\n"
        "    def __init__(self, threads=128): ...\n"
        "    @cute.jit\n"
        "    def __call__(self, p: cute.Tensor, m: cute.Tensor, n: cute.Tensor, bias, rate, stream):\n"
        "        self.kernel(p, m, n, bias, rate).launch(stream=stream)\n"
        "    @cute.kernel\n"
        "    def kernel(self, p: cute.Tensor, m: cute.Tensor, n: cute.Tensor, shift, rate):\n"
        "        m[0] = p[0]\n"
        "        if cutlass.const_expr(shift is not None):\n"
        "            n[0] = shift[0] * rate\n"
    )
    out = tmp_path / "draft.py"
    assert main(["declare", "own:Step", "--folder", str(tmp_path), "--out", str(out)]) == 0
    text = out.read_text()
    assert 'read("bias", "dtype", ("rows", "columns"), when="bias")' in text and '"bias": False' in text
    assert 'scalar("rate", "fp32"' in text and 'write("m", "dtype", ("rows", "columns"))' in text
    out.write_text(text.replace("(128,)", "(128, 256)"))
    assert main(["space", "--kernel", str(out), "--arch", "sm_90a", "--shape", "4x64"]) == 0
    assert "2 valid configs of 2" in capsys.readouterr().out
