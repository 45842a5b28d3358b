"""Shapes as users write them: words and TOML files, with errors that name the place."""

from __future__ import annotations

from pathlib import Path

import pytest

from cutegen.errors import UsageError
from cutegen.problem import Problem
from cutegen.shapes import parse_shape, read_shapes


def _file(folder: Path, text: str) -> Path:
    path = folder / "shapes.toml"
    path.write_text(text)
    return path


def test_a_word_gives_extents_and_batch() -> None:
    """A shape word is MxNxK, or BATCHxMxNxK with the batch first."""
    assert parse_shape("64x7168x2048") == (64, 7168, 2048, 1)
    assert parse_shape("8x64x7168x2048") == (64, 7168, 2048, 8)


@pytest.mark.parametrize("word", ["", "4096", "4096x4096", "1x2x3x4x5", "axbxc", "-1x2x3", "1.5x2x3"])
def test_a_malformed_word_is_named(word: str) -> None:
    """A word of another form is refused, quoted, with the form that would be valid."""
    with pytest.raises(UsageError, match="MxNxK"):
        parse_shape(word)


def test_a_file_gives_its_shapes_in_order(tmp_path: Path) -> None:
    """Every table becomes a problem under its id, with documented defaults."""
    path = _file(
        tmp_path,
        '[[shape]]\nid = "A"\nm = 64\nn = 128\nk = 256\n'
        '[[shape]]\nm = 64\nn = 128\nk = 256\nbatch = 3\ndtype = "fp16"\nout = "fp32"\nlayout = "nn"\n'
        'bias = "n"\nact = "relu"\nalpha = true\nnote = "x"\n',
    )
    first, second = read_shapes(path)
    assert first.name == "A"
    assert first.problem == Problem(64, 128, 256)
    assert second.name == "3x64x128x256"
    assert str(second.problem) == "gemm 3x64x128x256 fp16 nn out=fp32 alpha bias=n act=relu"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no"),
        ("[[shape", "is not TOML"),
        ("shape = 3", "holds no"),
        ("shape = [1]", "shape 1 is 1"),
        ('[[shape]]\nid = "A"\nm = 64\nn = 64\n', r"shape 1 \(A\) lacks k"),
        ("[[shape]]\nm = 64\nn = 64\nk = '64'\n", "k is '64'; it must be an integer"),
        ("[[shape]]\nm = true\nn = 64\nk = 64\n", "m is True; it must be an integer"),
        ("[[shape]]\nm = 64\nn = 64\nk = 64\ntype = 'bf16'\n", "unknown key 'type'"),
        ("[[shape]]\nm = 64\nn = 64\nk = 65\n", "must be a multiple of 8"),
        ("[[shape]]\nm = 0\nn = 64\nk = 64\n", "m=0"),
        ("[[shape]]\nm = 64\nn = 64\nk = 64\ndtype = 'int4'\n", "unsupported input dtype 'int4'"),
        (2 * "[[shape]]\nid = 'A'\nm = 64\nn = 64\nk = 64\n", "two shapes are called 'A'"),
    ],
)
def test_a_malformed_file_is_refused_where_it_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    """The message names the shape, the key and what would be valid."""
    with pytest.raises(UsageError, match=message):
        read_shapes(_file(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A shapes file that is not there is a usage error with its path."""
    with pytest.raises(UsageError, match="does not exist"):
        read_shapes(tmp_path / "none.toml")
