"""Tune kernels that others wrote, as examples/own_kernel/ declares them, beside what their authors run.

    python tools/fetch_foreign.py foreign && export PYTHONPATH=foreign
    python tools/bench_foreign.py --out docs/results/foreign_kernels.json

Each kernel is tuned over its shapes file in tools/shapes/foreign/ by tools/bench_family.py, which then times
its author's default, cutegen's winner and the declared baselines in the same interleaved rounds. The file of
each kernel lies in the folder of --parts, and is kept if the next kernel fails; all that are there are joined
in --out, beside the kernels of which --out has rows and --parts has none.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutegen.arch import Arch, find_arch
from cutegen.build.store import file_digest
from cutegen.cli.args import add_cache_argument, positive_int
from cutegen.cli.exit_codes import EXIT_NO_WINNER, EXIT_OK, run_command
from cutegen.digest import Json
from cutegen.errors import StoreError, UsageError
from cutegen.families.registry import find_space, load_kernel, parse_problem
from tools import bench_family
from tools.benchmark.arguments import add_commit_argument, add_out_argument
from tools.benchmark.results import FOREIGN, write_json

_ROOT = Path(__file__).resolve().parent.parent
DECLARATIONS = _ROOT / "examples" / "own_kernel"
SHAPES = Path(__file__).resolve().parent / "shapes" / "foreign"
#: The kernels by the name of their declaration, and how many configs of each shape are tried: fewer of those
#: that take seconds to compile.
KERNELS = {
    "quack_rmsnorm": 64,
    "quack_softmax": 104,
    "nvidia_gemm": 96,
    "nvidia_fmha": 24,
    "flash_attention": 24,
    "flash_attention_varlen": 16,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_out_argument(parser, required=True)
    parser.add_argument("--parts", type=Path, metavar="DIR", help="one file for each kernel (beside --out)")
    parser.add_argument("--kernels", default=",".join(KERNELS), help="which of them, with commas between")
    parser.add_argument(
        "--candidates", type=positive_int, help="configs of each shape, those most like the default"
    )
    add_cache_argument(parser, "compiled kernels, database and table")
    add_commit_argument(parser)
    args = parser.parse_args(argv)
    return run_command(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Tune, compare and join."""
    wanted = args.kernels.split(",")
    unknown = [name for name in wanted if name not in KERNELS]
    if unknown:
        raise UsageError(f"unknown kernel {unknown[0]!r}; valid: {', '.join(KERNELS)}")
    parts = args.parts or args.out.parent / f"{args.out.stem}_parts"
    before = _kernels_of(args.out)
    try:
        failed = [name for name in wanted if bench_family.main(_command(args, parts, name)) != EXIT_OK]
    finally:  # also of those that an interrupt ends
        write_json(args.out, joined(parts, before))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return EXIT_NO_WINNER if failed else EXIT_OK


def _command(args: argparse.Namespace, parts: Path, name: str) -> list[str]:
    """Return the arguments of tools/bench_family.py for one kernel."""
    words = ["--kernel", str(DECLARATIONS / f"{name}.py"), "--shapes", str(SHAPES / f"{name}.toml")]
    words += ["--out", str(parts / f"{name}.json"), "--candidates", str(args.candidates or KERNELS[name])]
    words += ["--rounds", "15", "--settle", "0.3", "--peers", "none", "--warm", "0"]
    words += ["--commit", args.commit] if args.commit else []
    return words + (["--cache-dir", str(args.cache_dir)] if args.cache_dir else [])


def _kernels_of(path: Path) -> Mapping[str, Json]:
    """Return the kernels of a results file, by name; none if it is not there.

    Raises:
        StoreError: It cannot be read, or is another kind of file.
    """
    if not path.exists():
        return {}
    document = _read(path)
    if not isinstance(document, dict) or document.get("kind") != FOREIGN:
        raise StoreError(f"results file {path} is not of kernels of others; name another one")
    kernels: Mapping[str, Json] = document["kernels"]
    return kernels


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StoreError(f"results file {path} cannot be read: {error}") from error


def joined(parts: Path, before: Mapping[str, Json] = MappingProxyType({})) -> dict[str, Json]:
    """Return the document of all kernels of which something was measured.

    Args:
        parts: The folder with the file of each.
        before: Kernels that stay if they have no file there, as an earlier document has them.

    Raises:
        StoreError: The file of one cannot be read.
    """
    kernels: dict[str, Json] = {}
    for name in KERNELS:
        declaration, path = DECLARATIONS / f"{name}.py", parts / f"{name}.json"
        part: Any = _read(path) if path.is_file() else {"rows": []}
        if not part["rows"]:
            if name in before:
                kernels[name] = before[name]
            continue
        family = load_kernel(declaration)
        arch = find_arch(f"sm_{part['conditions']['gpu']['compute_capability']}")
        kernels[name] = {
            **part,
            "entry": family.kernel.entry,
            "declaration_sha256": file_digest(declaration),
            "rows": [{**row, "configs": _count(row["problem"], arch)} for row in part["rows"]],
        }
    return {"kind": FOREIGN, "kernels": kernels}


def _count(line: str, arch: Arch) -> int:
    """Return how many configs are valid for a problem: all were tried if as many were candidates."""
    problem = parse_problem(line)
    return sum(1 for _ in find_space(problem.family, arch).configs(problem))


if __name__ == "__main__":
    sys.exit(main())
