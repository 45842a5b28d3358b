"""Measure what a user waits for: tuning a new shape from an empty cache, again, compiling, importing.

The shape is tuned by ``python -m cutegen.tune`` as a process of its own, in a cache folder that did not
exist; then the same command runs again. Wall-clock seconds include starting Python. Without a GPU,
``--arch`` measures the same command compiling and predicting. What the command imports is byte-compiled
first, as pip leaves it: folders that were copied lack that, and then each process compiles all sources. A
process that imports PyTorch and the DSL runs before any that is timed, so that their files are in memory and
are not read from disk; the file says how long it took.

    python tools/bench_cold.py --shape 4096x2112x7168 --out docs/results/cold.json
    python tools/bench_cold.py --shape 4096x2112x7168 --arch sm_90a --workers 2 --out RESULTS.json

exit codes: 0 measured (limits kept or not, the file says); 1 a command failed; 2 bad usage; 3 environment
"""

from __future__ import annotations

import argparse
import compileall
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutegen.arch import Arch, find_arch
from cutegen.build import Artifact, Builder
from cutegen.build.parallelism import default_workers
from cutegen.build.render import Source, render
from cutegen.cli.args import add_workers_argument, positive_int
from cutegen.cli.exit_codes import run_command
from cutegen.digest import Json
from cutegen.errors import BuildError
from cutegen.families.gemm.family import GEMM
from cutegen.families.registry import find_space
from cutegen.family import Problem
from cutegen.measure.device import Device, present_device
from cutegen.search.strategies import rank
from cutegen.system.temporary import TemporaryFolder
from cutegen.tuning import EFFORTS
from tools.benchmark.arguments import add_commit_argument, add_out_argument
from tools.benchmark.cold_table import COLD_START
from tools.benchmark.environment import ROOT, git_commit, session_facts, software
from tools.benchmark.kernel_store import kernel_store
from tools.benchmark.results import write_json

#: What is promised, in seconds: the first two for 16 cores and a GPU, the import on any machine.
LIMITS: Mapping[str, float] = {"cold_s": 20.0, "again_s": 3.0, "import_s": 0.1}
#: What a cold command takes at most at quick effort.
QUICK_COLD_S = 6.0
LEAST_COMPILED_PER_S = 2.0
_COMMAND_LIMIT_S = 580.0
#: What the command imports.
_PACKAGES = ("cutegen", "spaces", "cutlass", "tvm_ffi", "cuda", "torch", "jinja2")
#: What reads their files: libraries of CUDA when a GPU is opened, too.
_FIRST_IMPORTS = (
    "import cutlass, cutlass.cute, torch; torch.cuda.is_available() and torch.zeros(1, device='cuda')"
)
_IMPORTS = 7
_IMPORT = """
import sys, time
start = time.perf_counter()
import cutegen
took = time.perf_counter() - start
print(took, *sorted({"torch", "cutlass", "cuda"} & sys.modules.keys()))
"""


@dataclass(frozen=True)
class Timed:
    """One run of a command: wall-clock seconds, exit code, and what it printed last."""

    seconds: float
    code: int
    output: str

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON data; the output only where the command failed."""
        shown: dict[str, Json] = {} if self.code == 0 else {"output": self.output[-4000:]}
        return {"seconds": round(self.seconds, 3), "exit_code": self.code, **shown}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = parse(argv)
    return run_command(lambda: run(args))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", required=True, metavar="MxNxK", help="a shape that was never tuned here")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--layout", default="kk")
    parser.add_argument("--arch", metavar="NAME", help="do not measure on a GPU: compile for this target")
    parser.add_argument("--effort", choices=EFFORTS, default="standard", help="of the tuning (standard)")
    add_workers_argument(parser)
    parser.add_argument(
        "--compile", type=positive_int, default=48, metavar="N", help="kernels for the rate (48)"
    )
    add_out_argument(parser, required=True)
    add_commit_argument(parser)
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> int:
    """Measure everything, write the file, say what it holds."""
    device = None if args.arch else present_device()
    arch = device.arch if device else find_arch(args.arch)
    problem = GEMM.problem(GEMM.parse_shape(args.shape), {"dtype": args.dtype, "layout": args.layout})
    ready, first_s = byte_compile(_PACKAGES), first_imports()
    imported = time_imports()
    cold, again, tuned = time_tuning(args, arch)
    compiled = time_compiling(args, problem, arch, device)
    import_s = imported["median_s"]
    assert isinstance(import_s, float)
    values = {"cold_s": cold.seconds, "again_s": again.seconds, "import_s": import_s}
    limits = {**LIMITS, **({"cold_s": QUICK_COLD_S} if args.effort == "quick" else {})}
    document: dict[str, Json] = {
        "kind": COLD_START,
        "schema": 1,
        "measured_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": args.commit or git_commit(),
        "problem": str(problem),
        "target": arch.name,
        "effort": args.effort,
        "gpu": device.name if device else "",
        "software": software(),
        "machine": {**session_facts(device), "workers": args.workers or default_workers()},
        "byte_compiled": ready,
        "first_imports_s": first_s,
        "cold": cold.to_json(),
        "again": again.to_json(),
        "tuned": tuned,
        "compile": compiled,
        "import": imported,
        "within": {
            name: values[name] <= limit for name, limit in limits.items() if device or name == "import_s"
        },
        "limits": {**limits, "compiled_per_s": LEAST_COMPILED_PER_S},
    }
    write_json(args.out, document)
    for sentence in sentences(document):
        print(sentence)
    return 0 if cold.code == 0 and again.code == 0 else 1


def byte_compile(packages: Sequence[str]) -> dict[str, Json]:
    """Compile what is installed of these to bytecode, without importing it; return whether all of it is."""
    found: dict[str, Json] = {}
    for name in packages:
        spec = importlib.util.find_spec(name)
        folders = list(spec.submodule_search_locations or ()) if spec is not None else []
        if folders:
            done = [compileall.compile_dir(folder, quiet=2, workers=0) for folder in folders]
            found[name] = all(done)
    return found


def first_imports() -> float:
    """Return the seconds of the first process that imports PyTorch and the DSL, and opens the GPU if any."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", _FIRST_IMPORTS], capture_output=True, check=True)
    return round(time.perf_counter() - started, 3)


def time_imports() -> dict[str, Json]:
    """Return the seconds that ``import cutegen`` takes in a new process, and the GPU libraries it brings."""
    times: list[float] = []
    brought: set[str] = set()
    for _ in range(_IMPORTS):
        done = subprocess.run(
            [sys.executable, "-c", _IMPORT], cwd=ROOT, capture_output=True, text=True, check=True
        )
        took, *names = done.stdout.split()
        times.append(float(took))
        brought.update(names)
    return {"median_s": median(times), "worst_s": max(times), "gpu_libraries": sorted(brought)}


def time_tuning(args: argparse.Namespace, arch: Arch) -> tuple[Timed, Timed, Json]:
    """Tune in an empty cache folder, twice; return both runs and what the first one found."""
    with TemporaryFolder() as folder:
        command = tune_command(args, arch, folder.path / "cache")
        environment = {**os.environ, "CUTEGEN_CACHE_DIR": str(folder.path / "cache")}
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
        )
        cold, again = (timed(command, environment) for _ in range(2))
    return cold, again, what_won(cold.output)


def tune_command(args: argparse.Namespace, arch: Arch, cache: Path) -> list[str]:
    """Return the command that tunes the shape."""
    command = [sys.executable, "-m", "cutegen.tune", "gemm", "--shape", args.shape, "--dtype", args.dtype]
    command += ["--layout", args.layout, "--cache-dir", str(cache), "--json", "--quiet"]
    command += ["--effort", args.effort]
    command += ["--arch", arch.name] if args.arch else []
    return command + (["--workers", str(args.workers)] if args.workers else [])


def timed(command: Sequence[str], environment: Mapping[str, str]) -> Timed:
    """Run a command in the checkout and time it."""
    started = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_COMMAND_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Timed(time.perf_counter() - started, -1, f"took longer than {_COMMAND_LIMIT_S:g} s")
    seconds = time.perf_counter() - started
    return Timed(seconds, done.returncode, done.stdout if done.returncode == 0 else done.stdout + done.stderr)


def what_won(output: str) -> Json:
    """Return the result in what ``cutegen.tune --json`` printed, without its list of candidates."""
    try:
        result = json.loads(output)["results"][0]
    except (ValueError, KeyError, IndexError, TypeError):
        return None
    candidates = result.pop("candidates", [])
    best: Json = next((row for row in candidates if row.get("chosen")), None)
    return {**result, "best": best, "candidates": len(candidates)}


def time_compiling(
    args: argparse.Namespace, problem: Problem, arch: Arch, device: Device | None
) -> dict[str, Json]:
    """Return how many kernels per second are compiled into an empty store, and how that came about."""
    sources = some_sources(problem, arch, device, args.compile)
    with kernel_store() as store, Builder(store, workers=args.workers) as builder:
        started = time.perf_counter()
        first, failed = 0.0, 0
        for _, result in builder.build(sources):
            first = first or time.perf_counter() - started
            failed += not isinstance(result, Artifact)
        seconds = time.perf_counter() - started
        workers = builder.workers
    return {
        "kernels": len(sources),
        "failed": failed,
        "workers": workers,
        "seconds": round(seconds, 3),
        "first_s": round(first, 3),
        "per_s": round(len(sources) / seconds, 3),
        "per_s_once_started": round((len(sources) - 1) / (seconds - first), 3) if len(sources) > 1 else None,
    }


def some_sources(problem: Problem, arch: Arch, device: Device | None, count: int) -> list[Source]:
    """Return the first ``count`` different kernels that a search would try.

    Raises:
        BuildError: It proposes none.
    """
    space = find_space(problem.family, arch)
    sm_count = device.sm_count if device else arch.nominal_sm_count
    configs = rank(space, problem, sm_count, count)
    found = {source.digest: source for source in (render(problem, config, arch) for config in configs)}
    if not found:
        raise BuildError(f"the search proposes nothing for {problem}")
    return list(found.values())[:count]


def sentences(document: Mapping[str, Json]) -> list[str]:
    """Return what was measured, for people."""
    cold, again, compiled, imported = (document[key] for key in ("cold", "again", "compile", "import"))
    limits = document["limits"]
    assert isinstance(cold, Mapping) and isinstance(again, Mapping) and isinstance(limits, Mapping)
    assert isinstance(compiled, Mapping) and isinstance(imported, Mapping)
    brought = imported["gpu_libraries"]
    lines = [
        f"{document['problem']} on {document['gpu'] or document['target']}",
        f"cold cache: {cold['seconds']} s (exit code {cold['exit_code']}; limit {limits['cold_s']} s)",
        f"again:      {again['seconds']} s (exit code {again['exit_code']}; limit {limits['again_s']} s)",
        f"compiled:   {compiled['kernels']} kernels in {compiled['seconds']} s with {compiled['workers']} "
        f"workers: {compiled['per_s']}/s, {compiled['per_s_once_started']}/s once started; "
        f"{compiled['failed']} failed",
        f"import:     {imported['median_s']:.3f} s, bringing {brought or 'no GPU library'}",
    ]
    for run in (cold, again):
        lines += [str(run["output"])] if "output" in run else []
    return lines


if __name__ == "__main__":
    sys.exit(main())
