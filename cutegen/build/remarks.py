"""Facts about device functions read from the compiler's remark file: spills, shared memory, notes."""

from __future__ import annotations

import re
from dataclasses import replace

from cutegen.build.kernel_resources import KernelResources

__all__ = ["add_remarks"]

_ENTRY = re.compile(r"Compiling\s+entry\s+function\s+'([^']+)'")
_SPILLS = re.compile(
    r"(\d+)\s+bytes\s+stack\s+frame,\s+(\d+)\s+bytes\s+spill\s+stores,\s+(\d+)\s+bytes\s+spill\s+loads"
)
_USED = re.compile(r"Used\s+(\d+)\s+registers(?:,\s+used\s+(\d+)\s+barriers)?")
_SMEM = re.compile(
    r"Function:\s+(\S+)(?:(?!\n\.\.\.).)*?Shared\s+memory\s+allocated:\s+(\d+)\s+bytes", re.DOTALL
)
_NOTE = re.compile(r"\((C7\d{3})\)\s*:?\s*([^\n]+(?:\n(?!ptxas|'|\.\.\.|\s*$)[^\n]+)*)")


def add_remarks(
    kernels: tuple[KernelResources, ...], text: str
) -> tuple[tuple[KernelResources, ...], tuple[str, ...]]:
    """Return ``kernels`` with what the remark file says about them, and the assembler's performance notes.

    A kernel that only the file names is added, so the result stands even without the device code.
    """
    text = text.replace("''", "'")  # YAML's escape of a quote
    known = {kernel.name: kernel for kernel in kernels}
    parts = _ENTRY.split(text)
    for name, part in zip(parts[1::2], parts[2::2], strict=True):
        known[name] = _with_log(known.get(name, KernelResources(name=name)), part)
    for match in _SMEM.finditer(text):
        name = match[1].strip("'\"")
        known[name] = replace(known.get(name, KernelResources(name=name)), smem_bytes=int(match[2]))
    # The file repeats its documents; a dictionary keeps the order and drops the repeats.
    notes = dict.fromkeys(f"{code} {' '.join(note.split())}" for code, note in _NOTE.findall(text))
    return tuple(known[name] for name in sorted(known)), tuple(notes)


def _with_log(kernel: KernelResources, log: str) -> KernelResources:
    spills, used = _SPILLS.search(log), _USED.search(log)
    if spills:
        stack, stores, loads = (int(number) for number in spills.groups())
        kernel = replace(kernel, stack_bytes=stack, spill_store_bytes=stores, spill_load_bytes=loads)
    if used:
        kernel = replace(kernel, registers=int(used[1]), barriers=int(used[2] or kernel.barriers))
    return kernel
