"""Trace rendered block-scaled kernels to learn where they look for scale factors and put sums.

``python scales.py ROWS K KERNEL.py ...`` writes a JSON list with one entry per kernel: ``scales``, the place
in memory of the scale factors of every seventh row of ROWS, one for each block of K; ``begins``, the place of
the first scale factor of B that is loaded for each tile of columns inside ROWS; ``columns``, how many columns
of tensor memory further its own begin; ``tile`` and, of the first kernel, ``places`` as ``ways_out.py`` has
them. No GPU, no torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ways_out
from cutlass import cute
from ways_out import Places, as_read, load

ways_out.PROBE = """

@cute.jit
def probe(scale: cute.Tensor):
    kind = AB, AB, OperandMajorMode.K, OperandMajorMode.K, SCALE, BLOCK
    group = tcgen05.CtaGroup.TWO if PAIR == 2 else tcgen05.CtaGroup.ONE
    RECORD(sm100.make_blockscaled_trivial_tiled_mma(*kind, group, (MMA_M, MMA_N)), scale)
"""


def trace(path: Path, rows: int, k: int, *, sums: bool) -> dict[str, object]:
    """Return what one kernel says."""
    found: dict[str, Any] = {}
    read = Places()

    def record(mma: Any, scale: Any) -> None:
        operand = cute.make_identity_tensor((rows, k))
        layout = kernel.scales_of(scale, operand).layout
        blocks = range(0, k, kernel.BLOCK)
        found["scales"] = [[layout((row, at)) for at in blocks] for row in range(0, rows, 7)]
        found["shared"] = all(
            layout((row, at + i)) == layout((row, at))
            for row, at in ((0, 0), (rows - 1, kernel.BLOCK))
            for i in range(kernel.BLOCK)
        )
        found["begins"] = [begin(layout, tile) for tile in range(rows // kernel.MMA_N)]
        if hasattr(kernel, "scale_column"):
            found["columns"] = [kernel.scale_column(tile) for tile in range(len(found["begins"]))]
        found["places"] = []
        for half in range(kernel.PAIR if sums else 0):
            for thread in range(128):
                held = kernel.ways_out(mma, kernel.sums_in_tmem(mma), thread, half)[2]
                for piece in range(kernel.MMA_N // kernel.EPI_N):
                    at = as_read(kernel, held[(None, None, None, piece)], read)
                    found["places"].extend(at)

    def begin(layout: Any, tile: int) -> int:
        scales = cute.make_tensor(0, layout)
        if hasattr(kernel, "overlap"):
            scales = kernel.overlap(scales)
        if hasattr(kernel, "scale_tile"):
            tile = kernel.scale_tile(tile)
        tiles = cute.local_tile(scales, (kernel.SCALE_N, kernel.TILE_K), (None, None))
        return tiles.layout((0, 0, tile, 0))

    kernel: Any = load(path, record)
    fake = cute.runtime.make_fake_tensor(kernel.SCALE, (cute.sym_int(),), stride=(1,), assumed_align=16)
    cute.compile[(cute.GPUArch("sm_100a"),)](kernel.probe, fake, no_jit_engine=True)
    return {"tile": (kernel.MMA_M, kernel.MMA_N), "block": kernel.BLOCK, **found}


if __name__ == "__main__":
    rows, k, *names = sys.argv[1:]
    sys.stdout.write(
        json.dumps([trace(Path(name), int(rows), int(k), sums=not at) for at, name in enumerate(names)])
    )
