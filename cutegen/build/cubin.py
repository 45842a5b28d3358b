"""Facts about device functions read from a compiled object: names, registers, stack, threads.

Source: the ELF specification for the container; the attribute numbers of ``.nv.info`` are those that
``cuobjdump -elf`` prints by name.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from cutegen.build.kernel_resources import KernelResources

__all__ = ["kernels_in"]

_FATBIN_MAGIC = struct.pack("<I", 0xBA55ED50)
_FATBIN_HEADER = struct.Struct("<IHHQ")  # magic, version, header bytes, payload bytes
_FATBIN_ENTRY = struct.Struct("<HHIQ")  # kind, attributes, header bytes, payload bytes
_KIND_ELF = 2
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SYMTAB = 2
_FORMAT_SIZED = 4
_REQNTID, _FRAME_SIZE, _REGCOUNT = 0x10, 0x11, 0x2F


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    data: bytes
    link: int


def kernels_in(compiled: bytes) -> tuple[KernelResources, ...]:
    """Return the device functions in an object file, a library, a fat binary or a cubin, by name.

    What is recorded there is filled in; spills, barriers and dynamic shared memory are not.

    Raises:
        ValueError: The device code is not of the known form.
    """
    try:
        found = {kernel.name: kernel for image in _images(compiled) for kernel in _kernels(image)}
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise ValueError(f"device code of unknown form: {error}") from error
    return tuple(found[name] for name in sorted(found))


def _images(data: bytes) -> Iterator[bytes]:
    at = data.find(_FATBIN_MAGIC)
    if at < 0 and data[:4] == b"\x7fELF":
        yield data
    while at >= 0:
        _, _, header, size = _FATBIN_HEADER.unpack_from(data, at)
        end = at + header + size
        yield from _entries(data, at + header, end)
        at = data.find(_FATBIN_MAGIC, end)


def _entries(data: bytes, at: int, end: int) -> Iterator[bytes]:
    while at + _FATBIN_ENTRY.size <= end:
        kind, _, header, size = _FATBIN_ENTRY.unpack_from(data, at)
        if header == 0:
            return
        payload = data[at + header : at + header + size]
        if kind == _KIND_ELF and payload[:4] == b"\x7fELF":
            yield payload
        at += header + size


def _sections(image: bytes) -> list[_Section]:
    (offset,) = struct.unpack_from("<Q", image, 0x28)
    stride, count, names_at = struct.unpack_from("<HHH", image, 0x3A)
    headers = [_SECTION.unpack_from(image, offset + i * stride) for i in range(count)]
    names = image[headers[names_at][4] :]
    return [_Section(_text(names, h[0]), h[1], image[h[4] : h[4] + h[5]], h[6]) for h in headers]


def _text(table: bytes, at: int) -> str:
    return table[at : table.index(b"\0", at)].decode()


def _kernels(image: bytes) -> Iterator[KernelResources]:
    sections = _sections(image)
    totals = _per_symbol(sections)
    for section in sections:
        if not section.name.startswith(".nv.info."):
            continue
        name = section.name.removeprefix(".nv.info.")
        block = dict(_attributes(section.data)).get(_REQNTID, b"")
        x, y, z = struct.unpack("<III", block) if isinstance(block, bytes) and len(block) == 12 else (0, 0, 0)
        yield KernelResources(
            name=name,
            registers=totals.get((name, _REGCOUNT), 0),
            stack_bytes=totals.get((name, _FRAME_SIZE), 0),
            threads=x * y * z,
        )


def _per_symbol(sections: list[_Section]) -> dict[tuple[str, int], int]:
    """The values of the global ``.nv.info``, which are listed by symbol number."""
    table = next((s for s in sections if s.kind == _SYMTAB), None)
    common = next((s for s in sections if s.name == ".nv.info"), None)
    if table is None or common is None:
        return {}
    names = sections[table.link].data
    values: dict[tuple[str, int], int] = {}
    for number, value in _attributes(common.data):
        if isinstance(value, bytes) and len(value) == 8:
            symbol, amount = struct.unpack("<II", value)
            at = _SYMBOL.unpack_from(table.data, symbol * _SYMBOL.size)[0]
            values[_text(names, at), number] = amount
    return values


def _attributes(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    at = 0
    while at + 4 <= len(data):
        form, number, value = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _FORMAT_SIZED:
            yield number, data[at : at + value]
            at += value
        else:
            yield number, value
