"""Which configs of gates exist, which are legal, and what follows from each of them, on every target.

Each element is computed by itself, so that a config says only how many threads and loads run at a time. ``n``
is compiled in, which turns divisions by it into multiplications; ``m`` is free. Forward and backward share
all of it but their names, and so do activations without a gate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cutegen.arch import Arch
from cutegen.space import Config, Launch, Rule, Space, Value

from ..row.left_in_l2 import left_in_l2

ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
ACCESS_BYTES = 16
"""The widest access of a thread to memory. Source: PTX ISA, ld.global.v4.b32."""
SM_THREADS = 2048
"""Threads that a multiprocessor holds. Source: CUDA C++ Programming Guide, technical specifications."""
OTHER_REGISTERS = 40
"""Registers of a thread beside those for what it loads: addresses, values in fp32 on their way."""
BUSY = SM_THREADS // 2
"""Accesses of 16 bytes for each multiprocessor, from which on it has enough to do."""
FILLED = 3
"""CTAs of 256 threads for each multiprocessor, below which too few threads wait for memory at a time. Source:
an H200, where 238 rows of 1215 elements took 1.77 us in 1.8 CTAs, and 1.42 in 5.4."""

PARTLY_LEFT = {"activation": (66_000_000, 200_000_000), "gated": (48_000_000, 200_000_000)}
"""Bytes of all tensors of rows that are not aligned, between which the kernel before has left some of them in
L2, but not all. Source: an H200 with 50 MiB of L2 (untuned_gates_467.json)."""

DOMAINS: Mapping[str, tuple[Value, ...]] = {
    "access_bytes": (16, 8),
    "threads": (128, 256, 512),
    "vectors_per_thread": (1, 2, 4, 8),
    "ctas_per_sm": (0, 2, 4, 8),
    "pdl": ("off", "early"),
}


def access_elements(problem: Any, access_bytes: int = ACCESS_BYTES) -> int:
    """Return the elements of one access: a single one where rows are not aligned to the widest."""
    return 1 if problem.signature.unaligned else access_bytes // ELEMENT_BYTES[problem.signature.dtype]


def first_elements(problem: Any) -> int:
    """Return the elements in a row of the first input: of a gate and what it gates, unless they are apart."""
    is_packed = problem.family == "gated" and problem.signature.layout != "split"
    return int(problem.n) * (2 if is_packed else 1)


def by_row(problem: Any) -> bool:
    """Return whether a tile is part of one row: rows are not aligned, and long."""
    return bool(problem.signature.unaligned and problem.n >= LONG)


def vectors(problem: Any, access_bytes: int = ACCESS_BYTES) -> int:
    """Return the accesses that all rows of the narrowest tensor take."""
    return int(problem.m * (problem.n // access_elements(problem, access_bytes)))


def ctas(problem: Any, tile: int) -> int:
    """Return the CTAs that take ``tile`` accesses each, of 16 bytes or of single elements."""
    if by_row(problem):
        return int(problem.m * -(-problem.n // tile))
    return -(-vectors(problem) // tile)


def has_whole_tiles(problem: Any, config: Config) -> bool:
    """Return whether each tile lies in one row, and has an access for each place of each thread."""
    row = problem.n // access_elements(problem, config.integer("access_bytes"))
    tile = config.integer("threads") * config.integer("vectors_per_thread")
    return bool(not problem.signature.unaligned and row % tile == 0)


LONG = 512
"""Elements of a row from which its tiles are its own, where rows are not aligned: that takes no division, and
offsets that the compiler knows. Shorter rows would leave threads idle. Source: counted instructions."""
LOADS = {"activation": 1, "activation_backward": 2, "gated": 2, "gated_backward": 3}
"""Accesses for one vector of results: gate, or what is activated; up; backward the gradient."""
STORES = {"activation": 1, "activation_backward": 1, "gated": 1, "gated_backward": 2}
"""Accesses that write one vector of each result."""
FEW = 0.65
"""Share of a row's tiles that has elements, up to which half as many of twice the length are taken; and up to
which forward kernels of one tile to a row are persistent, if each CTA has TURNS of them: it goes on with the
next row while it waits for one. Of rows that L2 holds in part, half that share. Source: an H100
(untuned_gates_unaligned_h100.json)."""
TURNS = 6
BYTES_OF_A_START = 5000
"""What memory moves in the time in which a CTA starts. Source: an H200, where 8173 rows of 3287 elements took
1.2 ns for each CTA of 128 or 256 elements, at 4.2 TB/s."""


# --- rules: parameters name the knobs a rule looks at, docstrings are the reasons users read ---


def accesses_are_numbered_with_31_bits(problem: Any) -> bool:
    """Accesses are numbered with 31 bits, so m * n must stay below 2147483648 accesses of 16 bytes; of single
    elements, where rows are not aligned, below 64 times as many."""
    return vectors(problem) < 2**31 * (64 if problem.signature.unaligned else 1)


def narrow_accesses_are_numbered_with_31_bits(access_bytes: int, problem: Any) -> bool:
    """Of accesses of 8 bytes there must be fewer than 2147483648, too."""
    return problem.signature.unaligned or vectors(problem, access_bytes) < 2**31


def accesses_of_single_elements_have_no_width(access_bytes: int, problem: Any) -> bool:
    """Where rows are not aligned, an access is a single element; access_bytes is 16 then."""
    return access_bytes == ACCESS_BYTES or not problem.signature.unaligned


def loads_fit_registers(
    access_bytes: int, threads: int, vectors_per_thread: int, problem: Any, arch: Arch
) -> bool:
    """What a thread loads at a time stays in registers, and so many are left that a multiprocessor holds a
    quarter of its threads, or one CTA."""
    elements = access_elements(problem, access_bytes)
    packed = max(1, elements * ELEMENT_BYTES[problem.signature.dtype] // 4)
    taken = vectors_per_thread * LOADS[problem.family] * packed + OTHER_REGISTERS
    return taken <= min(arch.registers // max(threads, SM_THREADS // 4), arch.registers_per_thread)


def threads_have_work(
    access_bytes: int, threads: int, vectors_per_thread: int, problem: Any, arch: Arch
) -> bool:
    """More than one vector per thread needs a CTA for every multiprocessor; with fewer, half of them idle."""
    least = threads * vectors_per_thread * arch.nominal_sm_count
    return vectors_per_thread == 1 or vectors(problem, access_bytes) >= least


def persistent_ctas_fit(threads: int, ctas_per_sm: int) -> bool:
    """CTAs that take one tile after another must all be resident: a multiprocessor holds 2048 threads."""
    return threads * ctas_per_sm <= SM_THREADS


def persistent_ctas_have_several_tiles(
    access_bytes: int, threads: int, vectors_per_thread: int, ctas_per_sm: int, problem: Any, arch: Arch
) -> bool:
    """With ctas_per_sm, each CTA must have at least two tiles of threads * vectors_per_thread accesses."""
    tile = threads * vectors_per_thread
    least = 2 * tile * ctas_per_sm * arch.nominal_sm_count
    return ctas_per_sm == 0 or vectors(problem, access_bytes) >= least


RULES = tuple(
    Rule.of(function)
    for function in (
        accesses_are_numbered_with_31_bits,
        narrow_accesses_are_numbered_with_31_bits,
        accesses_of_single_elements_have_no_width,
        loads_fit_registers,
        threads_have_work,
        persistent_ctas_fit,
        persistent_ctas_have_several_tiles,
    )
)


# --- what follows from a config ---


def derive(config: Config, problem: Any, arch: Arch) -> dict[str, Value]:
    """Return elements per access, and the CTAs that run at a time where they take one tile after another."""
    return {
        "access_elements": access_elements(problem, config.integer("access_bytes")),
        "by_row": by_row(problem),
        "whole_tiles": has_whole_tiles(problem, config),
        "ctas": config.integer("ctas_per_sm") * arch.nominal_sm_count,
        **left_in_l2(problem, arch, first_elements(problem) * ELEMENT_BYTES[problem.signature.dtype]),
        "smem_bytes": 0,
    }


def choose_default(space: Space, problem: Any) -> Config:
    """Return the config for what each multiprocessor has to do; where accesses are single elements, threads
    have so many that CTAs start no slower than memory moves what they ask for.

    Accesses of 8 bytes halve what a thread computes before its first result leaves, but take more
    instructions. Most of these find rows, so that tiles that lie in one row do not mind. Source: an H200,
    behind a kernel that writes what is read: of 142 sizes, defaults take 0.6 % more than the best of
    up to fourteen configs in the geometric mean, 4.3 % at worst (untuned_gates_1901.json).
    """
    if problem.signature.unaligned:
        return _unaligned(space, problem)
    busy = vectors(problem) / space.arch.nominal_sm_count / BUSY
    config = _CHOICES[problem.family](problem, busy)
    is_counted = narrow_accesses_are_numbered_with_31_bits(config.integer("access_bytes"), problem)
    return config if is_counted else config.replace(access_bytes=ACCESS_BYTES)


def _gated(problem: Any, busy: float) -> Config:
    if problem.signature.activation == "gelu" and busy >= 2:
        return _base(16, 128)
    return _base(16 if busy >= 8 else 8, 128 if busy < 0.5 else 256)


def _gated_backward(problem: Any, busy: float) -> Config:
    narrow = _base(8, 128 if busy < 0.25 else 256)
    return narrow if not 2 <= busy < 8 or has_whole_tiles(problem, narrow) else _base(16, 128)


def _activation(problem: Any, busy: float) -> Config:
    if busy < 0.5:
        return _base(8, 256)
    if problem.signature.activation != "gelu" or busy < 4:
        return _base(16, 128, 2 if busy >= 2 else 1)
    narrow = _base(8, 128, 4)
    return narrow if has_whole_tiles(problem, narrow) else _base(16, 128, 4)


def _activation_backward(problem: Any, busy: float) -> Config:
    narrow = _base(8, 128, 2 if busy >= 2 else 1)
    return narrow if busy < 4 or has_whole_tiles(problem, narrow) else _base(16, 128, 2)


_CHOICES: Mapping[str, Callable[[Any, float], Config]] = {
    "activation": _activation,
    "activation_backward": _activation_backward,
    "gated": _gated,
    "gated_backward": _gated_backward,
}


def _base(access_bytes: int, threads: int, vectors_per_thread: int = 1) -> Config:
    return Config(
        {
            "access_bytes": access_bytes,
            "threads": threads,
            "vectors_per_thread": vectors_per_thread,
            "ctas_per_sm": 0,
            "pdl": "off",
        }
    )


def _unaligned(space: Space, problem: Any) -> Config:
    """Return the default where accesses are single elements.

    Source: an H100, behind a kernel that writes what is read (untuned_gates_unaligned_h100.json), and an
    H200 (untuned_gates_577.json): of rows of 551 to 1751 elements persistent kernels take 13 to 23 % less
    time for 11780 rows of 551.
    """
    config = _with_long_tiles(space, problem, _base(ACCESS_BYTES, 256))
    tile = config.integer("threads") * config.integer("vectors_per_thread")
    at_a_time = SM_THREADS // config.integer("threads")
    turns = problem.m / (at_a_time * space.arch.nominal_sm_count)
    least, most = PARTLY_LEFT.get(problem.family, (0, 0))
    share = FEW / 2 if least <= problem.min_bytes < most else FEW
    persistent = config.replace(ctas_per_sm=at_a_time)
    is_short = problem.family in PARTLY_LEFT and by_row(problem) and problem.n <= share * tile
    if is_short and turns >= TURNS and not space.explain(problem, persistent):
        return persistent
    return _with_full_tiles(space, problem, config)


def _with_long_tiles(space: Space, problem: Any, base: Config) -> Config:
    """Return ``base`` with as many single elements per thread as keep memory busy while the next CTA starts,
    or fewer where these leave multiprocessors with few CTAs."""
    moved = (LOADS[problem.family] + STORES[problem.family]) * ELEMENT_BYTES[problem.signature.dtype]
    config = base
    for count in (1, 2, 4, 8):
        longer = base.replace(vectors_per_thread=count)
        tile = base.integer("threads") * count
        few = ctas(problem, tile) < FILLED * space.arch.nominal_sm_count
        if space.explain(problem, longer) or (count > 1 and few):
            break
        config = longer
        if tile * moved >= BYTES_OF_A_START:
            break
    return config


def _with_full_tiles(space: Space, problem: Any, config: Config) -> Config:
    """Return ``config``, or half as many tiles, twice as long, where a row leaves much of them empty."""
    count = config.integer("vectors_per_thread")
    tile = config.integer("threads") * count
    tiles = -(-problem.n // tile)
    few = ctas(problem, 2 * tile) < FILLED * space.arch.nominal_sm_count
    if not by_row(problem) or tiles % 2 or problem.n > FEW * tiles * tile or 2 * count > 8 or few:
        return config
    longer = config.replace(vectors_per_thread=2 * count)
    return config if space.explain(problem, longer) else longer


def build(family: str, arch: Arch) -> Space:
    """Return the space of gates or activations, forward or backward, bound to ``arch``."""
    return Space(
        family=family,
        arch=arch,
        domains=DOMAINS,
        rules=RULES,
        derive=derive,
        choose_default=choose_default,
        launch=lambda config, problem, sm_count: Launch((), 0),
        compile_view=lambda config: config,
    )


def build_space(arch: Arch) -> Space:
    """Return the space of the forward kernels bound to ``arch``."""
    return build("gated", arch)
