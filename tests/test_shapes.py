"""Shapes as users write them: words and TOML files, with errors that name the place."""

from __future__ import annotations

from pathlib import Path

import pytest

from cutegen.arch import ARCHES
from cutegen.errors import UsageError
from cutegen.families.gemm.family import GEMM
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import families, find_family, find_space
from cutegen.families.shapes import read_shapes


def _file(folder: Path, text: str) -> Path:
    path = folder / "shapes.toml"
    path.write_text(text)
    return path


def test_a_word_gives_sizes_and_batch() -> None:
    """A shape word is MxNxK, or BATCHxMxNxK with the batch first."""
    assert GEMM.parse_shape("64x7168x2048") == {"m": 64, "n": 7168, "k": 2048, "batch": 1}
    assert GEMM.parse_shape("8x64X7168x2048 ") == {"m": 64, "n": 7168, "k": 2048, "batch": 8}


@pytest.mark.parametrize("word", ["", "4096", "4096x4096", "1x2x3x4x5", "axbxc", "-1x2x3", "1.5x2x3"])
def test_a_malformed_word_is_named(word: str) -> None:
    """A word of another form is refused, quoted, with the form that would be valid."""
    with pytest.raises(UsageError, match="MxNxK"):
        GEMM.parse_shape(word)


def test_a_word_of_thousands_of_digits_is_refused_in_a_line() -> None:
    """Python itself would refuse to convert it."""
    with pytest.raises(UsageError, match="a size has 5000 digits; valid: integers from 1 to") as caught:
        GEMM.parse_shape(f"{'9' * 5000}x8x8")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", families())
def test_the_shape_of_a_message_is_one_that_kernels_compute(name: str) -> None:
    """On some architecture: sizes may depend on one another, as those of a rotary embedding do."""
    family = find_family(name)
    with pytest.raises(UsageError, match="write for example ") as caught:
        family.parse_shape("1x1x1x1x1x1x1x1")
    word = str(caught.value).split("write for example ")[1]
    problem = family.problem(family.parse_shape(word), {})
    space = find_space(name, ARCHES["sm_100a" if name == "gemm_blockscaled" else "sm_90a"])
    space.require(problem, space.default(problem))


def test_a_file_gives_its_shapes_in_order(tmp_path: Path) -> None:
    """Every table becomes a problem under its id, with documented defaults."""
    path = _file(
        tmp_path,
        '[[shape]]\nid = "A"\nm = 64\nn = 128\nk = 256\n'
        '[[shape]]\nm = 64\nn = 128\nk = 256\nbatch = 3\ndtype = "fp16"\nout = "fp32"\nlayout = "kn"\n'
        'bias = "n"\nact = "relu"\nalpha = true\nnote = "x"\n',
    )
    first, second = read_shapes(path)
    assert first.name == "A"
    assert first.problem == Problem(64, 128, 256)
    assert second.name == "3x64x128x256"
    assert str(second.problem) == "gemm 3x64x128x256 fp16 kn out=fp32 alpha bias=n act=relu"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no"),
        ("[[shape", "is not TOML"),
        ("shape = 3", "holds no"),
        (
            "dtype = 'fp16'\n[[shape]]\nm = 64\nn = 64\nk = 64\n",
            "unknown key 'dtype' beside the shapes; known",
        ),
        ("[[shapes]]\nm = 64\nn = 64\nk = 64\n", r"unknown key 'shapes' \(did you mean shape\?\)"),
        ("shape = [1]", "shape 1 is 1"),
        ('[[shape]]\nid = "A"\nm = 64\nn = 64\n', r"shape 1 \(A\) lacks k"),
        ("[[shape]]\nm = 64\nn = 64\nk = '64'\n", "k is '64'; it must be an integer"),
        ("[[shape]]\nm = true\nn = 64\nk = 64\n", "m is True; it must be an integer"),
        ("[[shape]]\nm = 64\nn = 64\nk = 64\ntype = 'bf16'\n", "unknown key 'type'"),
        ("[[shape]]\nm = 64\nn = 64\nk = 65\n", "must be a multiple of 8"),
        ("[[shape]]\nm = 0\nn = 64\nk = 64\n", "m=0"),
        ("[[shape]]\nm = 64\nn = 64\nk = 64\ndtype = 'int4'\n", "unsupported input dtype 'int4'"),
        (2 * "[[shape]]\nid = 'A'\nm = 64\nn = 64\nk = 64\n", "two shapes are called 'A'"),
        (f"[[shape]]\nm = {'9' * 5000}\n", r"shapes\.toml is refused: line 2 column 5: 9.* has 5000 digits"),
        (f"[[shape]]\nm = {'9' * 4000}\nn = 64\nk = 64", r"shape 1: m=an integer of 13288 bits must be"),
        (f"[[shape]]\nid = 'A'\nm = 0x{'f' * 5000}\nn = 64\nk = 64", r"shape 1 \(A\): m=an integer of 20000"),
        (f"[[shape]]\nm = 64\nn = 64\nk = 64\nbatch = 0x{'f' * 5000}", "shape 1: batch=an integer of 20000"),
        ("[[shape]]\nm = 1e999\n", r"line 2 column 5: 1e999 is no finite number"),
        ("shape = [" + "[" * 400 + "]" * 400 + "]", r"shape 1 is \[\[\[\[\.\.\.\]\]\]\]; write it as"),
        ("shape = " + "[" * 100_000, "is nested too deeply"),
        ("[[shape]]\nid = [1]\nm = 64\nn = 64\nk = 64\n", r"shape 1: id is \[1\]; it must be a string"),
        ("[[shape]]\nid = 1e3\nm = 64\nn = 64\nk = 64\n", r"shape 1: id is 1000\.0; it must be a string"),
        ("[[shape]]\nm = 64\nn = 64\nk = 64\ndtype = 'bf16 kn'\n", "unsupported input dtype 'bf16 kn'"),
        ("[[shape]]\nm = 64\nn = 64\nk = 64\nact = 'relu beta'\n", "unknown activation 'relu beta'"),
    ],
    ids=lambda text: text[:60],
)
def test_a_malformed_file_is_refused_where_it_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    """The message names the shape, the key and what would be valid."""
    with pytest.raises(UsageError, match=message):
        read_shapes(_file(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A shapes file that is not there, or whose name or content no file of shapes has, is a usage error."""
    with pytest.raises(UsageError, match=r"shapes file .*none\.toml does not exist"):
        read_shapes(tmp_path / "none.toml")
    with pytest.raises(UsageError, match=r"a\\x00b' cannot be read"):
        read_shapes(tmp_path / "a\0b")
    (tmp_path / "latin.toml").write_bytes(b"[[shape]]\nid = '\xe4'\n")
    with pytest.raises(UsageError, match=r"latin\.toml is not UTF-8 text: line 2 has the byte 0xe4"):
        read_shapes(tmp_path / "latin.toml")


def test_an_id_may_be_a_number_and_may_be_empty(tmp_path: Path) -> None:
    """A number is its digits; an empty id counts as none."""
    shapes = "[[shape]]\nid = 7\nm = 64\nn = 64\nk = 64\n[[shape]]\nid = ''\nm = 8\nn = 64\nk = 64\n"
    assert [shape.name for shape in read_shapes(_file(tmp_path, shapes))] == ["7", "8x64x64"]
