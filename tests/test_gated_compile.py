"""Kernels of gates through the real compiler, on every target.

Needs the compiler but no GPU; takes some seconds.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from disassembly import disassembled
from row_compile import Compiled, build, texts_of_targets

from cutegen.build import Builder
from cutegen.families.registry import parse_problem

pytestmark = [
    pytest.mark.dsl,
    pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs the CuTe DSL"),
]
#: The target, a problem, and knobs that differ from its default config.
KERNELS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("sm_90a", "gated 8192x14336 bf16", {}),
    ("sm_90a", "gated 8192x14336 bf16 layout=split", {"ctas_per_sm": 4, "vectors_per_thread": 2}),
    ("sm_90a", "gated 8192x14336 fp32 layout=interleaved activation=gelu", {"threads": 512}),
    ("sm_90a", "gated 4096x4099 fp16 activation=gelu_tanh", {"pdl": "off"}),
    ("sm_90a", "gated 4096x4099 bf16", {"ctas_per_sm": 4}),
    ("sm_90a", "gated_backward 8192x14336 bf16", {"ctas_per_sm": 8, "vectors_per_thread": 1}),
    ("sm_90a", "gated_backward 8192x14336 bf16 layout=interleaved", {"threads": 512}),
    ("sm_90a", "gated_backward 77x1001 fp16 layout=split activation=relu", {}),
    ("sm_90a", "activation 8192x16384 bf16", {"vectors_per_thread": 8}),
    ("sm_90a", "activation 77x1001 fp16 activation=relu_squared", {"threads": 512}),
    ("sm_90a", "activation_backward 8192x16384 bf16", {"ctas_per_sm": 4}),
    ("sm_100a", "activation 8192x16384 fp32 activation=gelu_tanh", {"vectors_per_thread": 4}),
    ("sm_103a", "activation_backward 8192x14336 bf16 activation=silu", {"vectors_per_thread": 4}),
    ("sm_100a", "gated 8192x14336 bf16 layout=interleaved", {"vectors_per_thread": 8}),
    ("sm_100a", "gated_backward 8192x14336 bf16 layout=split activation=gelu", {}),
    ("sm_103a", "gated_backward 8192x14336 fp16 activation=gelu_tanh", {"ctas_per_sm": 2}),
)


@pytest.fixture(scope="module")
def built(compiler: Builder) -> list[Compiled]:
    return build("", KERNELS, compiler)


def test_a_kernel_spills_nothing_and_leaves_room_for_others(built: list[Compiled]) -> None:
    """A multiprocessor holds at least a quarter of its threads."""
    assert len(built) == len(KERNELS)
    for artifact, _, config, _ in built:
        found = artifact.resources
        assert (found.smem_bytes, found.stack_bytes, found.spill_store_bytes, found.notes) == (0, 0, 0, ())
        assert found.threads == config["threads"]
        assert found.registers <= 65536 // max(512, found.threads), config


def test_a_knob_is_what_is_rendered(built: list[Compiled]) -> None:
    """All loads of a thread come before its arithmetic; hints, grids and launches follow the knobs."""
    for _, _, config, text in built:
        assert ("for turn in" in text) == ("CTAS = " in text) == (config["ctas_per_sm"] != 0)
        assert ("use_pdl=True" in text) == ("griddepcontrol_wait" in text) == (config["pdl"] != "off")
        assert (
            text.index("loaded.append")
            < text.index("= loaded[step]")
            < text.index("store(", text.index("= loaded"))
        )


def test_blackwell_runs_the_text_of_hopper() -> None:
    """But for the number of its multiprocessors, and the size of L2."""
    assert len(texts_of_targets(parse_problem("gated 8192x14336 bf16"))) == 1


#: Where arguments begin on Hopper, and where the first line of the constant cache ends that holds some.
ARGUMENTS, LINE_END = 0x210, 0x240


def test_what_loads_need_is_in_one_line_of_the_constant_cache(compiler: Builder, tmp_path: Path) -> None:
    """Another line would cost every CTA a miss before its first load."""
    problems = ("gated 8x14336 bf16", "gated 8x1000 fp32 layout=interleaved", "activation 8x14336 fp16")
    built = build("", [("sm_90a", problem, {}) for problem in problems], compiler)
    for text in disassembled([artifact for artifact, *_ in built], tmp_path):
        before, _, _ = text.partition("LDG")
        read = [int(at, 16) for at in re.findall(r"c\[0x0\]\[(0x[0-9a-f]+)\]", before)]
        arguments = [at for at in read if at >= ARGUMENTS]
        assert len(arguments) >= 3 and max(arguments) < LINE_END
