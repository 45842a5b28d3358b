"""Where the tiles of a Hopper kernel begin: the last ones end with the output."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from kernel_text import Text

SIZES = (1, 63, 64, 127, 128, 129, 136, 191, 192, 250, 256, 257, 383, 385, 1000)


def begins(text: Text, m: int, n: int) -> list[tuple[int, int]]:
    """Rows and columns, as the kernel names them, of the tiles along its m and along its n."""
    known, shape = text.known, SimpleNamespace(shape=(m, n))
    last_m, last_n = text.value("kernel", "last_m, last_n", m_d=shape)
    tiles = max(-(-m // known["TILE_M"]), -(-n // known["TILE_N"])) + known["CLUSTER_M"] * known["CLUSTER_N"]
    return [
        text.value("kernel", "m_0, n_0", m=tile, n=tile, last_m=last_m, last_n=last_n)
        for tile in range(tiles)
    ]


@pytest.mark.parametrize("words", ["tile_shape_mn=128x64", "tile_shape_mn=64x136 cluster_shape_mn=2x1"])
def test_tiles_cover_the_output_and_do_not_reach_beyond_it(words: str) -> None:
    """An output that is smaller than a tile is covered by one that begins with it."""
    text = Text("gemm 512x512x512 bf16 kk", words, "sm_90a")
    for size in SIZES:
        found = begins(text, size, size)
        for axis, tile in enumerate((text.known["TILE_M"], text.known["TILE_N"])):
            starts = [place[axis] for place in found]
            covered = {start + i for start in starts for i in range(tile)}
            assert set(range(size)) <= covered
            assert covered <= set(range(max(size, tile)))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("gemm 1536x1024x4096 bf16 kk", "tile_shape_mn=128x64 stream_k=true"),
        ("gemm 512x512x4096 bf16 kk beta", "tile_shape_mn=128x64 use_tma_store=false split_k=3"),
    ],
)
def test_no_row_is_written_twice_where_that_could_show(line: str, words: str) -> None:
    """Rows of tiles that are cut along k differently, or that replace a C which is D."""
    text = Text(line, words, "sm_90a")
    for size in SIZES:
        for at, place in enumerate(begins(text, size, size)):
            assert place[0] >= min(at * 128, size) and place[1] >= min(at * 64, size)


def test_both_kernels_of_split_k_agree() -> None:
    """The second one finishes sums where the first one's tiles begin."""
    words = "tile_shape_mn=128x64 use_tma_store=false split_k=3"
    for line in ("gemm 512x512x4096 bf16 kk", "gemm 512x512x4096 bf16 kk beta"):
        text = Text(line, words, "sm_90a")
        shape = SimpleNamespace(shape=(200, 200))
        last = text.value("kernel", "last_m, last_n", m_d=shape)
        assert last == text.value("reduce_kernel", "last_m, last_n", m_d=shape)
        for at in range(4):
            values = {"m": at, "n": at, "last_m": last[0], "last_n": last[1]}
            begin = text.value("kernel", "m_0, n_0", **values)
            assert begin == text.value("reduce_kernel", "row, col", **values)
