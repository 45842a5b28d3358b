"""What the text of a Blackwell kernel makes of work units: executed as Python, on integers."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from kernel_text import Text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("gemm 512x512x4096 bf16 kk", "mma_tiler_mn=128x64 use_tma_store=false split_k=2"),
        ("gemm 2x512x512x4096 bf16 kk", "mma_tiler_mn=64x24 use_tma_store=false split_k=2 use_clc=true"),
        (
            "gemm 3x512x512x4096 bf16 kk out=fp32",
            "mma_tiler_mn=256x96 use_2cta_instrs=true cluster_shape_mn=2x1 use_tma_store=false split_k=2",
        ),
    ],
)
@pytest.mark.parametrize("splits", [2, 3, 7])
def test_partial_sums_are_read_where_they_were_written(line: str, words: str, splits: int) -> None:
    """The second kernel reads each of them once, those of a tile in the order of the parts."""
    text = Text(line, words, "sm_100a")
    known, batch, blocks_m, blocks_n = text.known, text.problem.batch, 4, 3
    blocks = batch * blocks_m * blocks_n
    pieces, chunks, per_unit = known["PIECES"], known["CHUNKS"], known["REDUCED"] // 4
    written: dict[int, tuple[int, ...]] = {}
    for part, at, m, n in product(range(splits), range(batch), range(blocks_m), range(blocks_n)):
        places = {"n": n, "blocks_m": blocks_m, "m_block": m, "batch": at, "blocks_mn": blocks_m * blocks_n}
        block = text.value("kernel", "block", **places)
        slot = text.value("kernel", "slot", part=part, blocks=blocks, block=block)
        for i in range(pieces * chunks):
            assert slot + i not in written
            written[slot + i] = (part, at, m, n, i)
    read = []
    part_slots = text.value("reduce_kernel", "part_slots", blocks=blocks)
    for block, unit in product(range(blocks), range(pieces * known["SHARES"])):
        rest, at = block % (blocks_m * blocks_n), block // (blocks_m * blocks_n)
        for chunk in range(per_unit):
            found = []
            for adder in range(known["ADDERS"]):
                low, high = text.value("reduce_kernel", "first, end", adder=adder, splits=splits)
                values = {"block": block, "unit": unit, "first": low, "part_slots": part_slots}
                slot = text.value("reduce_kernel", "slot", **values) + chunk
                found += [slot + i * part_slots for i in range(high - low)]
            here = (at, rest % blocks_m, rest // blocks_m, unit * per_unit + chunk)
            assert [written[slot] for slot in found] == [(part, *here) for part in range(splits)]
            read += found
    assert sorted(read) == sorted(written)


@pytest.mark.parametrize("along_m", [0, 1])
@pytest.mark.parametrize("swizzle", [1, 2, 8])
@pytest.mark.parametrize(
    ("line", "words", "splits"),
    [
        ("gemm 1000x520x1032 bf16 kk", "mma_tiler_mn=128x48 cluster_shape_mn=1x2", 1),
        ("gemm 3x1000x520x1032 bf16 kk", "mma_tiler_mn=256x64 use_2cta_instrs=true cluster_shape_mn=4x2", 1),
        ("gemm 1000x520x1032 bf16 kk", "mma_tiler_mn=64x24 use_tma_store=false split_k=3 use_clc=true", 3),
        (
            "gemm 2x1000x520x1032 bf16 kk",
            "mma_tiler_mn=128x64 cluster_shape_mn=2x2 use_tma_store=false split_k=4",
            4,
        ),
    ],
)
def test_every_tile_is_worked_on_once(line: str, words: str, splits: int, swizzle: int, along_m: int) -> None:
    """Whatever the order: each block of D in each batch, and each of its k tiles in one of the parts."""
    text = Text(line, words, "sm_100a")
    p, known = text.problem, text.known
    shape = SimpleNamespace(shape=(p.m, p.n, p.batch))
    names: dict[str, Any] = {"m_d": shape, "swizzle": swizzle, "along_m": along_m, "splits": splits}
    for name in ("tiles_m", "tiles_n"):
        names[name] = text.value("launch", name, **names)
    order = ("tiles_m", "tiles_n") if along_m else ("tiles_n", "tiles_m")
    names["major"], names["minor"] = (names[name] for name in order)
    for name in ("band", "bands", "tiles", "total"):
        names[name] = text.value("launch", name, **names)
    divisors = [names["band"] * names["major"], names["band"]]
    divisors.append(names["minor"] - (names["bands"] - 1) * names["band"])
    if p.batch > 1 or splits > 1:
        divisors.insert(0, names["tiles"])
    locate, found = text.function("locate"), []
    k_all = -(-p.k // known["TILE_K"])
    for work in range(names["total"]):
        *rest, cm, cn = locate(work, *divisors, names["band"], names["bands"] - 1, along_m)
        batch, part = divmod(rest[0], splits) if rest else (0, 0)
        steps = range(k_all)
        if splits > 1:
            count, _ = text.value(
                "kernel", "k_tiles, _", k_all=k_all, part=part, splits=splits, div_splits=splits
            )
            steps = range(part, part + count * splits, splits)
        for x, by in product(range(known["CLUSTER_M"]), range(known["CLUSTER_N"])):
            m, n = text.value("kernel", "m_block, n", cm=cm, cn=cn, x=x, by=by)
            found += [(batch, m, n, k) for k in steps]
    blocks_m, blocks_n = -(-p.m // known["TILE_M"]), -(-p.n // known["MMA_N"])
    padded = names["tiles_m"] * known["CLUSTER_M"], names["tiles_n"] * known["CLUSTER_N"]
    assert blocks_m <= padded[0] < blocks_m + known["CLUSTER_M"]
    assert blocks_n <= padded[1] < blocks_n + known["CLUSTER_N"]
    assert sorted(found) == sorted(product(range(p.batch), *map(range, padded), range(k_all)))
