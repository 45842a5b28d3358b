"""The instructions of compiled kernels."""

from __future__ import annotations

import importlib.metadata
import re
import struct
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from joined_image import code_in, joined, target_of

from cutegen.build import Artifact

EM_CUDA = 190
"""ELF machine number of device code."""


def disassembled(artifacts: Iterable[Artifact], folder: Path) -> list[str]:
    """Return the instructions of each artifact; skips the test where nothing can list them.

    Args:
        artifacts: Of one image each.
        folder: For files that the disassembler reads.
    """
    tool = nvdisasm()
    if tool is None:
        pytest.skip("needs nvidia-cuda-nvdisasm")
    path = folder / "kernels.cubin"
    images = [cubin_of(artifact) for artifact in artifacts]
    found: dict[str, str] = {}
    for target in set(map(target_of, images)):
        path.write_bytes(joined([image for image in images if target_of(image) == target]))
        # Labels of branches come from what the assembler wrote, so no flow of data need be followed.
        done = subprocess.run([tool, "-c", "-ndf", path], capture_output=True, text=True, check=True)
        parts = re.split(r"^(?=\s*\.section\s+\.text\.)", done.stdout, flags=re.MULTILINE)[1:]
        found |= {re.findall(r"\.text\.[^\s,\"]+", part)[0]: part for part in parts}
    return ["".join(found[name] for name, _, _ in code_in(image)) for image in images]


def cubin_of(artifact: Artifact) -> bytes:
    """The one image that an artifact holds."""
    [image] = cubins(artifact.object.read_bytes())
    return image


def nvdisasm() -> Path | None:
    """The disassembler of the nvidia-cuda-nvdisasm package, if it is installed."""
    try:
        files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(f.locate())) for f in files if f.name in {"nvdisasm", "nvdisasm.exe"}), None)


def cubins(data: bytes) -> Iterator[bytes]:
    """The device code inside an object file."""
    for match in re.finditer(rb"\x7fELF\x02", data):
        at = match.start()
        machine = struct.unpack_from("<H", data, at + 18)[0]
        if machine == EM_CUDA:
            programs, sections = struct.unpack_from("<QQ", data, at + 32)
            program_size, programs_n, section_size, sections_n = struct.unpack_from("<HHHH", data, at + 54)
            end = max(programs + program_size * programs_n, sections + section_size * sections_n)
            yield data[at : at + end]
