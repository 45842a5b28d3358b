"""A family whose kernels take every kind of argument, and calls of pinned families with stand-in tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fake_torch import Torch

from cutegen.dtypes import TORCH_DTYPES
from cutegen.families.registry import parse_problem

FAMILY = '''
"""Something with every kind of argument."""
from cutegen.families.declared import DeclaredFamily, integers, read, scalar, scratch, update, write
from cutegen.family import Option, Size

FAMILY = DeclaredFamily(
    "mixed",
    "every kind of argument",
    sizes=(Size("m", "rows"), Size("n", "columns", free=False), Size("window", "width", default=3)),
    options=(
        Option("dtype", "of x", ("bf16", "fp32"), "bf16"),
        Option("sums", "dtype of total", ("fp32", "bf16"), "fp32"),
        Option("mode", "how", ("fast", "exact"), "fast"),
        Option("causal", "whether"),
        Option("shift", "add an integer"),
        Option("again", "a second output"),
    ),
    arguments=(
        integers(),
        scalar("shift", "int32", (1, -7), when="shift"),
        read("x", "dtype", ("m", "n")),
        update("state", "fp32", ("n",)),
        scratch(),
        scalar("factor", "fp32", (1.0, -0.5)),
        write("total", "sums", ("m",)),
        write("copy", "dtype", ("m", "n"), when="again", may_alias=("x",)),
    ),
    reference=lambda **given: {},
)
'''
SPACE = '''
"""The configs of mixed."""
from cutegen.space import Config, Launch, Space


def build_space(arch):
    return Space(
        family="mixed",
        arch=arch,
        domains={"threads": (64, 128)},
        rules=(),
        derive=lambda config, problem, arch: {},
        choose_default=lambda space, problem: Config({"threads": 64}),
        launch=lambda config, problem, sm_count: Launch((problem.m, problem.window), problem.m * 4, True),
        compile_view=lambda config: config,
    )
'''
LINES = (
    "rmsnorm 64x4096 bf16",
    "rmsnorm 64x4096 bf16 residual residual_out rstd",
    "rmsnorm 5x4097 fp16 weight=fp32",
    "rmsnorm 1x64 fp32 weight=none",
    "rmsnorm 7x2880 bf16 unaligned",
    "mixed 8x64x3 bf16",
    "mixed 8x64x5 bf16 mode=exact causal shift again",
    "mixed 8x64x3 fp32 sums=bf16",
    "activation 9x4096 bf16",
    "gated 64x4096 bf16",
    "gated 9x4096 bf16 activation=gelu layout=interleaved",
    "gated_backward 7x1001 bf16 layout=split",
    "gated_gemm 64x1024x512 bf16 pre",
    "softmax 64x4096 bf16",
    "layernorm 64x4096 bf16 bias=none stats",
    "rmsnorm_quantized 64x4096 bf16",
    "rmsnorm_quantized 7x1000 bf16",
    "cross_entropy 64x32000 bf16 lse",
    "cross_entropy 64x32000 bf16 gradient smoothing",
    "rope 64x32x8x128x64x1 bf16",
    "rope 64x32x8x128x64x4096 bf16 style=interleaved table=positions norm",
    "grouped_gemm 64x512x256x4 bf16 tokens=zipf",
    "grouped_gemm_masked 64x511x256x4 fp16 mean=20",
    "grouped_gemm_blocks 301x256x384x4 e4m3",
    "grouped_gated_gemm 300x72x64x5 bf16 layout=interleaved",
)


def write_family(root: Path) -> Path:
    """Write the family ``mixed`` into a folder of families and return that."""
    folder = root / "families" / "mixed"
    folder.mkdir(parents=True)
    (folder / "family.py").write_text(FAMILY)
    (folder / "space.py").write_text(SPACE)
    (folder / "kernel.py.j2").write_text("THREADS = {{ threads }}\\nSIG = {{ sig.n }}, '{{ sig.mode }}'\\n")
    return folder.parent


def values_of(line: str, torch: Torch) -> dict[str, Any]:
    """Stand-ins for everything that a call of the problem ``line`` may be given, outputs too."""
    problem: Any = parse_problem(line)
    found: dict[str, Any] = {}
    for argument in problem.declared.arguments(problem):
        if argument.kind == "scalar":
            found[argument.name] = -7 if argument.dtype == "int32" else 0.25
        elif argument.shape:
            pitch = argument.shape[-1] + (3 if problem.unaligned else 0)
            strides = {"strides": (pitch, 1)} if len(argument.shape) == 2 else {}
            dtype = TORCH_DTYPES[argument.dtype]
            found[argument.name] = torch.tensor(*argument.shape, dtype=dtype, **strides)
    found |= {option.name: getattr(problem, option.name) for option in problem.declared.named_options}
    return found | ({"window": problem.window} if problem.family == "mixed" else {})
