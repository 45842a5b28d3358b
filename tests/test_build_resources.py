"""Reading resources: right numbers from what the compiler leaves behind, and a clear no to anything else."""

from __future__ import annotations

import struct

import pytest

from cutegen.build.cubin import kernels_in
from cutegen.build.kernel_resources import KernelResources, Resources
from cutegen.build.remarks import add_remarks

REMARKS = """--- !Analysis
Pass:            ptxas info
Name:            RemarkPTXAS
Function:        <unknown>
Args:
  - Remark:      'ptxas output: ptxas info    : (C7508) Potential Performance Loss: ''setmaxnreg'' ignored;
unable to determine register count at entry.
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function ''first_k0'' for ''sm_90a''
ptxas info    : Function properties for first_k0
ptxas         .     592 bytes stack frame, 24 bytes spill stores, 36 bytes spill loads
ptxas info    : Used 168 registers, used 2 barriers
ptxas info    : Compiling entry function ''second_k1'' for ''sm_90a''
ptxas info    : Function properties for second_k1
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0
bytes spill loads
ptxas info    : Used 10 registers, 480 bytes smem
'
...
--- !Analysis
Name:            RemarkMemorySmemBreakdown
Function:        first_k0
Args:
  - Remark:      Shared memory breakdown (4 allocations)
...
--- !Analysis
Name:            RemarkMemorySmemAllocated
DebugLoc:        { File: 'kernel.py', Line: 69, Column: 0 }
Function:        first_k0
Args:
  - Remark:      'Shared memory allocated: 230400 bytes'
...
"""


def cubin(name: str, registers: int, stack: int, block: tuple[int, int, int]) -> bytes:
    """A minimal device image: symbol table, global and per-kernel attributes."""
    own = struct.pack("<BBH3I", 4, 0x10, 12, *block) + struct.pack("<BBH", 3, 0x1B, 255)
    common = struct.pack("<BBHII", 4, 0x2F, 8, 1, registers) + struct.pack("<BBHII", 4, 0x11, 8, 1, stack)
    names = b"\0" + name.encode() + b"\0"
    symbols = bytes(24) + struct.pack("<IBBHQQ", 1, 0x12, 0, 1, 0, 0)
    parts = [
        ("", 0, b""),
        (".nv.info", 0x70000000, common),
        (f".nv.info.{name}", 0x70000000, own),
        (".symtab", 2, symbols),
        (".strtab", 3, names),
    ]
    table = b"\0".join(part[0].encode() for part in parts) + b"\0.shstrtab\0"
    parts.append((".shstrtab", 3, table))
    body, headers, at = b"", b"", 64
    for title, kind, data in parts:
        where = table.index(title.encode() + b"\0")
        headers += struct.pack(
            "<IIQQQQIIQQ", where, kind, 0, 0, at, len(data), 4 if kind == 2 else 0, 0, 0, 0
        )
        body += data
        at += len(data)
    head = b"\x7fELF\x02".ljust(0x28, b"\0") + struct.pack("<Q", at)
    return head.ljust(0x3A, b"\0") + struct.pack("<HHH", 64, len(parts), len(parts) - 1) + body + headers


def fatbin(*images: bytes) -> bytes:
    entries = b"".join(struct.pack("<HHIQ", 2, 0, 0x48, len(i)).ljust(0x48, b"\0") + i for i in images)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries


def test_kernels_are_found_wherever_the_device_code_lies() -> None:
    image = cubin("one", 168, 592, (384, 1, 1))
    want = KernelResources(registers=168, stack_bytes=592, threads=384, name="one")
    other = cubin("two", 10, 0, (32, 4, 2))
    for compiled in (image, fatbin(image), b"\x7fELFhost" + fatbin(image) + b"more"):
        assert kernels_in(compiled) == (want,)
    assert [k.name for k in kernels_in(fatbin(other, image))] == ["one", "two"]
    assert kernels_in(fatbin(other))[0].threads == 256
    assert kernels_in(b"no device code") == ()


@pytest.mark.parametrize("cut", [40, 70, 200])
def test_device_code_that_is_cut_short_is_refused(cut: int) -> None:
    with pytest.raises(ValueError, match="unknown form"):
        kernels_in(cubin("one", 168, 592, (384, 1, 1))[:cut])


def test_remarks_add_spills_shared_memory_and_notes() -> None:
    kernels, notes = add_remarks((KernelResources(threads=384, name="first_k0"),), REMARKS + REMARKS)
    assert kernels == (
        KernelResources(168, 592, 24, 36, 230400, 2, 384, name="first_k0"),
        KernelResources(10, name="second_k1"),
    )
    reason = "'setmaxnreg' ignored; unable to determine register count at entry."
    assert notes == (f"C7508 Potential Performance Loss: {reason}",)


def test_remarks_without_content_change_nothing() -> None:
    kernels = (KernelResources(8, threads=32, name="k"),)
    assert add_remarks(kernels, "") == (kernels, ())


def test_totals_are_the_worst_of_each_number() -> None:
    worst = Resources.of(
        (KernelResources(168, threads=384, name="a"), KernelResources(32, 16, threads=512, name="b")),
        ("C7510",),
    )
    assert (worst.registers, worst.stack_bytes, worst.threads, worst.notes) == (168, 16, 512, ("C7510",))
    assert Resources.from_json(worst.to_json()) == worst
    assert Resources.of(()) == Resources()
