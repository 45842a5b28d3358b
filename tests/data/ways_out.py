"""Trace rendered Blackwell kernels to learn where the sums of each thread lie inside a tile.

``python ways_out.py KERNEL.py ...`` writes a JSON list with one entry per kernel: the rows and columns of its
tile, and for every half of a pair, thread, piece and register the row and column it holds. Where a kernel
stages its output in shared memory, also where every register of the first piece comes to lie there: row and
column that it holds, then those of the staging buffer. No GPU, no torch.
"""

from __future__ import annotations

import json
import linecache
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

sys.modules["torch"] = None  # type: ignore[assignment]

import cutlass  # noqa: E402
from cutlass import cute  # noqa: E402

PROBE = """

@cute.jit
def probe(_: cute.Tensor):
    group = tcgen05.CtaGroup.TWO if PAIR == 2 else tcgen05.CtaGroup.ONE
    mma = sm100.make_trivial_tiled_mma(AB, AB, A_MAJOR, B_MAJOR, ACC, group, (MMA_M, MMA_N))
    RECORD(mma)
"""


def load(path: Path, record: Any) -> ModuleType:
    """Execute a kernel's source with a function behind it that calls ``record`` with the MMA."""
    name = f"{path}.probe"
    text = path.read_text() + PROBE
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    module = ModuleType(path.stem)
    module.__dict__.update(__file__=name, RECORD=record)
    sys.modules[path.stem] = module
    exec(compile(text, name, "exec"), module.__dict__)
    return module


class Places:
    """Reads coordinates: threads differ in where theirs begin, so what a layout adds is traced once."""

    def __init__(self) -> None:
        self._added: dict[str, list[tuple[int, int]]] = {}

    def __call__(self, held: Any, count: int) -> list[tuple[int, int]]:
        layout, (m, n) = f"{held.layout} {count}", held[0]
        if layout not in self._added:
            self._added[layout] = [(held[v][0] - m, held[v][1] - n) for v in range(count)]
        return [(m + more_m, n + more_n) for more_m, more_n in self._added[layout]]


def as_read(kernel: Any, held: Any, read: Places) -> list[tuple[int, int]]:
    """Return the places of one piece in the order of its registers, as the kernel that stores them counts."""
    if not hasattr(kernel, "REDUCED"):
        return read(held, kernel.FRAGMENT)
    shares = [kernel.share_of(held, share) for share in range(kernel.SHARES)]
    found = [place for places in shares for place in read(places, kernel.REDUCED)]
    assert found == read(held, kernel.FRAGMENT)  # the order in which they were written
    return found


def as_staged(kernel: Any, t2r: Any, held: Any, thread: int, read: Places) -> list[tuple[int, int, int, int]]:
    """Return row and column of each value of the first piece in the tile, and in the staging buffer."""
    out = cute.make_rmem_tensor(held.shape, kernel.OUT)
    store = kernel.sm100.get_smem_store_op(kernel.D_LAYOUT, kernel.OUT, kernel.ACC, t2r)
    copy = cute.make_tiled_copy_D(store, t2r)  # as the kernel's text says, to which the test sees
    # What a thread gives, not where it writes: in a matrix store it writes what others hold.
    given = copy.get_slice(thread).partition_S(cute.make_identity_tensor((kernel.TILE_M, kernel.EPI_N)))
    registers = copy.retile(out).layout
    count = cute.size(registers)
    of_register = read(held, cute.size(held))
    return [(*of_register[registers(i)], *place) for i, place in enumerate(read(given, count))]


def places(path: Path) -> dict[str, object]:
    """Return the places of one kernel."""
    found: list[tuple[int, int, int, int, int, int]] = []
    staged: list[tuple[int, int, int, int, int]] = []
    read = Places()

    def record(mma: Any) -> None:
        for half in range(kernel.PAIR):
            for thread in range(128):
                t2r, _, held = kernel.ways_out(mma, kernel.sums_in_tmem(mma), thread, half)
                pieces = [held[(None, None, None, i)] for i in range(kernel.MMA_N // kernel.EPI_N)]
                for number, piece in enumerate(pieces):
                    at = as_read(kernel, piece, read)
                    found.extend((half, thread, number, v, *place) for v, place in enumerate(at))
                if hasattr(kernel, "EPI_STAGES"):
                    staged.extend((half, *at) for at in as_staged(kernel, t2r, pieces[0], thread, read))

    kernel: Any = load(path, record)
    fake = cute.runtime.make_fake_tensor(cutlass.Float32, (cute.sym_int(),), stride=(1,), assumed_align=16)
    cute.compile[(cute.GPUArch("sm_100a"),)](kernel.probe, fake, no_jit_engine=True)
    return {"tile": (kernel.MMA_M, kernel.MMA_N), "places": found, "staged": staged}


if __name__ == "__main__":
    sys.stdout.write(json.dumps([places(Path(name)) for name in sys.argv[1:]]))
