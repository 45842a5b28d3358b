"""``python -m cutegen.declare``: drafts that can be finished, and mistakes that are named."""

from __future__ import annotations

from pathlib import Path

import pytest
from own_registry import without_user_families

from cutegen.cli.main import main

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
