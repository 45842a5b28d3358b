"""Many images of device code as one: a disassembler takes longer to start than to list dozens of kernels."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

__all__ = ["code_in", "joined", "target_of"]

HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
SECTION, SYMBOL = struct.Struct("<IIQQQQIIQQ"), struct.Struct("<IBBHQQ")
CODE, SYMBOLS, STRINGS = 1, 2, 3
"""Types of sections."""
GLOBAL_FUNCTION, ENTRY = 0x12, 0x10
TEXT = ".text."
Section = tuple[int, ...]


def target_of(image: bytes) -> int:
    """Return the flags of an image, which name the GPUs that it is for."""
    return int(HEADER.unpack_from(image)[7])


def code_in(image: bytes) -> Iterator[tuple[str, Section, bytes]]:
    """Yield name, header and content of each section of instructions."""
    header = HEADER.unpack_from(image)
    sections = [SECTION.unpack_from(image, header[6] + i * SECTION.size) for i in range(header[12])]
    names_at = sections[header[13]][4]
    for section in sections:
        start = names_at + section[0]
        name = image[start : image.index(b"\0", start)].decode()
        if section[1] == CODE and name.startswith(TEXT):
            yield name, section, image[section[4] : section[4] + section[5]]


def joined(images: Sequence[bytes]) -> bytes:
    """Return an image with the instructions of all ``images``, and with nothing that running them takes.

    Args:
        images: For the same GPUs. No two kernels have the same name.
    """
    codes = [found for image in images for found in code_in(image)]
    assert len({name for name, _, _ in codes}) == len(codes)
    assert len(set(map(target_of, images))) == 1
    names, symbols = b"\0.names\0.symtab\0", bytes(SYMBOL.size)
    body, sections = b"", []
    for number, (name, (_, kind, flags, _, _, size, _, info, alignment, _), data) in enumerate(codes, 1):
        body += bytes(-(HEADER.size + len(body)) % alignment)
        about = info & 0xFF000000 | number  # registers, and which symbol it is
        at = HEADER.size + len(body)
        sections.append((len(names), kind, flags, 0, at, size, len(codes) + 2, about, alignment, 0))
        symbols += SYMBOL.pack(len(names) + len(TEXT), GLOBAL_FUNCTION, ENTRY, number, 0, size)
        names += name.encode() + b"\0"
        body += data
    at = HEADER.size + len(body)
    sections.append((1, STRINGS, 0, 0, at, len(names), 0, 0, 1, 0))
    at += len(names)
    sections.append((8, SYMBOLS, 0, 0, at, len(symbols), len(codes) + 1, 1, 1, SYMBOL.size))
    at += len(symbols)
    header = list(HEADER.unpack_from(images[0]))
    header[5], header[6], header[10], header[12], header[13] = 0, at, 0, len(sections) + 1, len(codes) + 1
    table = b"".join(SECTION.pack(*section) for section in [(0,) * 10, *sections])
    return HEADER.pack(*header) + body + names + symbols + table
