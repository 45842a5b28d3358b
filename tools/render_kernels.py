"""Keep the kernels of docs/kernels current: what the templates render for a few problems and configs.

They are there to be read: a rendered kernel is plain Python, without the conditions of its template.

    python tools/render_kernels.py --check       compare them with what the templates render now
    python tools/render_kernels.py --write       render them again

exit codes: 0 all current, or written; 1 some differ; 2 bad usage
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cutegen.arch import find_arch
from cutegen.build.render import render
from cutegen.cli.exit_codes import run_command
from cutegen.families.registry import find_space, parse_problem
from cutegen.space import Config

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "kernels"


class Copy(NamedTuple):
    """A kernel to read.

    Attributes:
        name: Of its file.
        arch: The target.
        problem: What it computes.
        config: The knobs in which it differs from the default config of its space.
    """

    name: str
    arch: str
    problem: str
    config: str


COPIES = (
    Copy(
        "hopper_pingpong",
        "sm_90a",
        "gemm 8192x8192x8192 bf16 kk",
        "tile_shape_mn=128x192 cluster_shape_mn=2x1 mma_warpgroups=1 pingpong=true",
    ),
    Copy(
        "hopper_split_k",
        "sm_90a",
        "gemm 64x2112x7168 bf16 kk bias=n act=relu",
        "tile_shape_mn=64x64 tile_k=128 swap_ab=false use_tma_store=false split_k=4",
    ),
    Copy("hopper_few_rows", "sm_90a", "gemm 1x6144x4096 bf16 kk", "algorithm=few_rows"),
    Copy(
        "blackwell_2cta",
        "sm_100a",
        "gemm 8192x8192x8192 bf16 kk",
        "mma_tiler_mn=256x256 use_2cta_instrs=true cluster_shape_mn=2x1",
    ),
    Copy("grouped_gemm", "sm_90a", "grouped_gemm 65536x1536x2048x128 bf16", ""),
    Copy("rmsnorm", "sm_90a", "rmsnorm 16384x4096 bf16 residual residual_out", ""),
    Copy("gated", "sm_90a", "gated 8192x14336 bf16", ""),
    Copy("gated_gemm", "sm_90a", "gated_gemm 8192x14336x4096 bf16", "tile_shape_mn=128x256"),
    Copy("rope", "sm_90a", "rope 8192x32x8x128x64x1 bf16", ""),
    Copy("gated_backward", "sm_90a", "gated_backward 8192x14336 bf16", ""),
    Copy("activation", "sm_90a", "activation 8192x16384 bf16", ""),
    Copy("softmax", "sm_90a", "softmax 1024x131072 bf16", ""),
    Copy("rmsnorm_quantized", "sm_90a", "rmsnorm_quantized 16384x4096 bf16 residual residual_out", ""),
    Copy("cross_entropy", "sm_90a", "cross_entropy 8192x128256 bf16 lse gradient", ""),
    Copy("layernorm", "sm_90a", "layernorm 16384x5120 bf16 stats", ""),
)


def rendered(copy: Copy) -> str:
    """Return the text of a copy: two lines that say where it comes from, and the kernel.

    Raises:
        ConfigError: The config is not valid for the problem.
    """
    arch, problem = find_arch(copy.arch), parse_problem(copy.problem)
    words = Config.parse(copy.config)
    space = find_space(problem.family, arch, algorithm=words.algorithm)
    config = space.default(problem).replace(**words)
    origin = f"# Rendered by tools/render_kernels.py for {problem} on {arch}."
    return f"{origin}\n# Do not edit: change the template.\n{render(problem, config, arch).text}"


def path_of(copy: Copy) -> Path:
    """Return the file of a copy."""
    return FOLDER / f"{copy.name}.py"


def outdated() -> list[str]:
    """Return what is wrong in the folder: files that are missing, differ, or are copies of nothing."""
    wanted = {path_of(copy): rendered(copy) for copy in COPIES}
    there = {path: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.py")}
    return [path.name for path in sorted({*wanted, *there}) if wanted.get(path) != there.get(path)]


def run(options: argparse.Namespace) -> int:
    """Compare or write, and return the exit code."""
    wrong = outdated()
    if options.check:
        for name in wrong:
            print(f"docs/kernels/{name} is not current; run tools/render_kernels.py --write")
        return 1 if wrong else 0
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.py"):
        path.unlink()
    for copy in COPIES:
        path_of(copy).write_text(rendered(copy), encoding="utf-8")
    print(f"{len(wrong)} of {len(COPIES)} files changed")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true", help="compare the files with what is rendered now")
    what.add_argument("--write", action="store_true", help="render the files again")
    options = parser.parse_args(arguments)
    return run_command(lambda: run(options))


if __name__ == "__main__":
    raise SystemExit(main())
