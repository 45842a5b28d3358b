"""Which configs of rotary embeddings exist, which are legal, and what follows from each, on every target.

The numbers of heads and the extents of a head are compiled in; the number of tokens is free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cutegen.arch import Arch
from cutegen.space import Config, Launch, Rule, Space, Value

from ..row.left_in_l2 import left_in_l2

ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
ACCESS_BYTES = 16
"""The widest access of a thread to memory. Source: PTX ISA, ld.global.v4.b32."""
WARP = 32
BUSY = 1024
"""Threads for each multiprocessor that keep it busy."""
SECOND_WAVE = (1536, 2304)
"""Threads for each multiprocessor, a head each, between which a second wave of CTAs is mostly empty; with two
heads each one wave does. Source: an H200, behind another kernel (untuned_gates_569.json): 197 tokens of
64x8x256x128x1 and 1607 of 20x4x96x48x1 take 16 % less time so, 2060 tokens 2 %. Back to back, where the next
launch fills the wave, and where part of a head is not rotated, one head is 3 to 5 % faster."""

DOMAINS: Mapping[str, tuple[Value, ...]] = {
    "threads": (128, 256, 512),
    "heads_per_thread": (1, 2, 4, 8),
    "pdl": ("off", "early"),
}


def tail(problem: Any) -> int:
    """Return the elements of a head that are not rotated."""
    return int(problem.d - 2 * problem.pairs)


def access_elements(problem: Any) -> int:
    """Return the elements of one access, up to 16 bytes: they divide what is rotated, and twice they divide
    the rest; a single one where heads are not aligned to 16 bytes, or the rest is odd."""
    if problem.signature.unaligned:
        return 1
    found = ACCESS_BYTES // ELEMENT_BYTES[problem.signature.dtype]
    while found > 1 and (problem.pairs % found or tail(problem) % (2 * found)):
        found //= 2
    return found


def units(problem: Any) -> int:
    """Return the pairs of vectors of a head that threads have: a norm reads what is not rotated, too."""
    elements = access_elements(problem)
    return int((problem.d // 2 if problem.signature.norm else problem.pairs) // elements)


def lanes(problem: Any) -> int:
    """Return the threads that share a head: to exchange their sums they are a power of two."""
    count = units(problem)
    return 1 << (count - 1).bit_length() if problem.signature.norm else count


def threads_in_all(problem: Any, heads_per_thread: int) -> int:
    """Return the threads of all CTAs."""
    groups = -(-problem.hq // heads_per_thread) + -(-problem.hk // heads_per_thread)
    return int(problem.m * groups * lanes(problem))


# --- rules: parameters name the knobs a rule looks at, docstrings are the reasons users read ---


def rotated_elements_are_of_a_head(problem: Any) -> bool:
    """A head has at least the two elements of every pair: 2 * pairs is at most d."""
    return tail(problem) >= 0


def heads_to_norm_are_even(problem: Any) -> bool:
    """A norm reads a head in pairs of vectors: d must be even."""
    return not problem.signature.norm or problem.d % 2 == 0


def a_warp_holds_a_head_to_norm(problem: Any) -> bool:
    """The threads of a warp share a head whose norm is taken: at most 32 pairs of accesses, which are 512
    elements of 16 bits, and 64 where heads do not start at multiples of 16 bytes."""
    return not problem.signature.norm or lanes(problem) <= WARP


def threads_are_numbered_with_31_bits(problem: Any) -> bool:
    """Threads are numbered with 31 bits, so accesses to all queries and keys must stay below 2147483648."""
    accesses = max(2 * lanes(problem), tail(problem) // access_elements(problem))
    return bool(problem.m * (problem.hq + problem.hk) * accesses < 2**31)


def heads_fill_threads(heads_per_thread: int, problem: Any) -> bool:
    """A thread has at most as many heads as there are of queries, or of keys."""
    return bool(heads_per_thread <= max(problem.hq, problem.hk, 1))


def several_heads_leave_threads(heads_per_thread: int, problem: Any, arch: Arch) -> bool:
    """More than one head per thread needs 128 threads for every multiprocessor; with fewer, some idle."""
    busy = threads_in_all(problem, heads_per_thread) >= 128 * arch.nominal_sm_count
    return heads_per_thread == 1 or busy


RULES = tuple(
    Rule.of(function)
    for function in (
        rotated_elements_are_of_a_head,
        heads_to_norm_are_even,
        a_warp_holds_a_head_to_norm,
        threads_are_numbered_with_31_bits,
        heads_fill_threads,
        several_heads_leave_threads,
    )
)


# --- what follows from a config ---


def derive(config: Config, problem: Any, arch: Arch) -> dict[str, Value]:
    """Return elements per access, units and threads of a head, and its vectors that are not rotated."""
    token_bytes = max(1, problem.hq) * problem.d * ELEMENT_BYTES[problem.signature.dtype]
    return {
        "access_elements": access_elements(problem),
        "units": units(problem),
        "lanes": lanes(problem),
        "tail_vectors": tail(problem) // access_elements(problem),
        **left_in_l2(problem, arch, token_bytes),
        "smem_bytes": 0,
    }


def choose_default(space: Space, problem: Any) -> Config:
    """Return the config with one head per thread, or two where a second wave would be mostly empty, or where
    a thread waits for more than the head: for its position, or for the sum of the others; with CTAs of 256
    threads where there are many, and no norm.

    Source: an H200, where no config of 13 problems was more than 1 % faster (docs/results/rope.json), and the
    best of 12 took 0.6 % less in the geometric mean of 49 sizes (docs/results/untuned_gates_before.json).
    """
    many = threads_in_all(problem, 1) >= BUSY * space.arch.nominal_sm_count
    threads = 256 if many and not problem.signature.norm else 128
    base = Config({"threads": threads, "heads_per_thread": 1, "pdl": "off"})
    least, most = SECOND_WAVE
    each = threads_in_all(problem, 1) / space.arch.nominal_sm_count
    alone = tail(problem) == 0 and least < each < most
    config = base.replace(heads_per_thread=2, threads=128 if alone else threads)
    waits = problem.signature.table == "positions" or problem.signature.norm
    busy = threads_in_all(problem, 2) >= BUSY * space.arch.nominal_sm_count
    return config if (alone or (waits and busy)) and not space.explain(problem, config) else base


def build_space(arch: Arch) -> Space:
    """Return the space of rotary embeddings bound to ``arch``."""
    return Space(
        family="rope",
        arch=arch,
        domains=DOMAINS,
        rules=RULES,
        derive=derive,
        choose_default=choose_default,
        launch=lambda config, problem, sm_count: Launch((), 0),
        compile_view=lambda config: config,
    )
