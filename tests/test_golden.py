"""Names and texts that old databases, tables and caches rely on: problems, configs, kernels, launches.

``python tests/test_golden.py`` writes the expected values anew; a change of them voids what users have. Those
of Hopper GEMMs are as they are since the last tiles end with the output; all else is as version 0.1 had it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from cutegen.arch import find_arch
from cutegen.build.render import render
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.space import Config

GOLDEN = Path(__file__).parent / "data" / "golden.json"
LINES = {
    "sm_90a": (
        "gemm 4096x4096x4096 bf16 tn",
        "gemm 1x6144x4096 bf16 tn",
        "gemm 64x2112x7168 bf16 tn",
        "gemm 256x256x65536 fp16 nn",
        "gemm 336x392x264 bf16 nt",
        "gemm 8x512x512x64 bf16 tt",
        "gemm 1024x1024x1024 e4m3 tn out=fp16 scale promote",
        "gemm 1024x1024x1024 e5m2 tn bias=n act=gelu_tanh scale",
        "gemm 512x768x1024 bf16 tn out=fp32 alpha beta bias=m act=silu",
        "gemm 512x768x1024 bf16 tn unaligned bias=n act=relu",
        "gemm 512x768x8192 bf16 tn any_order",
        "gemm 256x256x512 int8 tn",
    ),
    "sm_100a": (
        "gemm 4096x4096x4096 bf16 tn",
        "gemm 64x2112x7168 fp16 nt bias=n act=gelu",
        "gemm 512x512x512 tf32 nn",
        "gemm 1024x1024x1024 e4m3 tn alpha beta",
        "gemm 256x256x512 int8 tn",
        "gemm_blockscaled 4096x4096x4096 nvfp4 tn alpha",
        "gemm_blockscaled 256x512x1024 mxfp8_e4m3 tn",
    ),
    "sm_103a": ("gemm 2048x2048x2048 bf16 tn", "gemm_blockscaled 256x512x1024 mxfp8_e5m2 tn out=fp32"),
}


def some_configs(arch_name: str, line: str) -> list[Config]:
    """Return the space's own default for ``line``, and others from all over the space."""
    problem = Problem.parse(line)
    space = find_space(problem.family, find_arch(arch_name))
    some = [space.default(problem), *islice(space.configs(problem), 0, 20_000, 4_999)]
    return list(dict.fromkeys(some))


def observed(arch_name: str, line: str, known: Iterable[Config]) -> dict[str, Any]:
    """Return what is kept on disk about ``line`` and some of its configs, which must still be valid."""
    arch = find_arch(arch_name)
    problem = Problem.parse(line)
    space = find_space(problem.family, arch)
    configs = {}
    for config in known:
        space.require(problem, config)
        source = render(problem, config, arch)
        launch = space.launch(config, problem, arch.nominal_sm_count)
        configs[str(config)] = [
            config.digest,
            source.digest,
            list(launch.scalars),
            launch.workspace_bytes,
            launch.zeroed,
        ]
    return {"line": str(problem), "configs": configs}


CASES = [(arch, line) for arch, lines in LINES.items() for line in lines]


@pytest.mark.parametrize(("arch", "line"), CASES)
def test_names_and_texts_stay_as_they_are(arch: str, line: str) -> None:
    wanted = json.loads(GOLDEN.read_text())[arch][line]
    known = [Config.parse(text) for text in wanted["configs"]]
    assert observed(arch, line, known) == wanted
    assert some_configs(arch, line)[0] == known[0]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    found = {
        arch: {line: observed(arch, line, some_configs(arch, line)) for line in lines}
        for arch, lines in LINES.items()
    }
    GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
