"""NVIDIA's CUTLASS Operator API as a contestant: the best of the operators it offers for Hopper.

Which operators there are, and for how many clusters at a time they are compiled, comes from the API itself.
Their kernels are compiled by cutegen's compile daemon, in parallel, from the kernel class that the package
ships and with the arguments that its operators pass; so they load and launch as cutegen's own do. A captured
launch is the kernel alone, so nothing of the API is lost in that.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from cutegen.arch import Arch
from cutegen.build import Artifact, Builder
from cutegen.digest import Json
from cutegen.errors import BuildError, MeasureError
from cutegen.measure import Candidate
from cutegen.policy import Policy
from cutegen.problem import LAYOUTS, Epilogue, Problem
from cutegen.render import Source
from cutegen.space import Config, Launch
from cutegen.store import Store
from tools.benchmark.contest import Arena, Entrant, Finalist, UnsupportedError, require_ok
from tools.benchmark.environment import ROOT
from tools.benchmark.results import Entry

__all__ = ["Operators", "Point", "ask_space", "kernel_source"]

PACKAGE = "nvidia-cutlass-operators"
_KERNEL = "cutlass/operators/providers/cutedsl/gemm/implementations/sm90_static_persistent_impl.py"
_CLASS = "Sm90StaticPersistentGemmKernel"
#: How long listing the operators may take; it imports torch and the API.
_LIST_LIMIT_S = 180.0
_DTYPES = {"bf16": "BFloat16", "fp16": "Float16", "fp32": "Float32"}

#: What is added to the package's own kernel file: entry point and compile-time arguments, as in its operator.
_ENTRY_POINT = """

GEMM = {kernel}(cutlass.Float32, {tile}, {cluster})
KERNELS = ({kernel}.kernel,)


@cute.jit
def launch(a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, stream):
    GEMM(a, b, out, {clusters}, stream)


def fake_arguments():
    def matrix(dtype, major):
        shape = [cute.sym_int(), cute.sym_int()]
        shape[major] = cute.sym_int(divisibility=128 // dtype.width)
        order = (1, 0) if major == 1 else (0, 1)
        return cute.runtime.make_fake_compact_tensor(
            dtype, tuple(shape), stride_order=order, assumed_align=16
        )

    a, b = matrix(cutlass.{ab}, {a_major}), matrix(cutlass.{ab}, {b_major})
    return a, b, matrix(cutlass.{out}, 1), cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
"""


@dataclass(frozen=True)
class Point:
    """One operator: tile and cluster shape (M, N), and how many clusters run at a time."""

    tile: tuple[int, int]
    cluster: tuple[int, int]
    max_active_clusters: int

    def __str__(self) -> str:
        return f"{self.tile[0]}x{self.tile[1]} {self.cluster[0]}x{self.cluster[1]}"

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON data."""
        clusters = self.max_active_clusters
        return {"tile": list(self.tile), "cluster": list(self.cluster), "max_active_clusters": clusters}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Point:
        """Return the point that :meth:`to_json` described."""
        (tile_m, tile_n), (cluster_m, cluster_n) = data["tile"], data["cluster"]
        return cls((tile_m, tile_n), (cluster_m, cluster_n), data["max_active_clusters"])


def kernel_source(kernel_text: str, point: Point, problem: Problem, arch: Arch) -> Source:
    """Return the source of one operator's kernel, for problems of the same signature as ``problem``."""
    a_axis, b_axis = LAYOUTS[problem.layout]
    text = kernel_text.rstrip() + _ENTRY_POINT.format(
        kernel=_CLASS,
        tile=point.tile,
        cluster=point.cluster,
        clusters=point.max_active_clusters,
        ab=_DTYPES[problem.ab_dtype],
        out=_DTYPES[problem.out_dtype],
        a_major=int(a_axis == "k"),
        b_major=int(b_axis == "n"),
    )
    config = Config({"tile_shape_mn": point.tile, "cluster_shape_mn": point.cluster})
    return Source(text, arch.name, problem.signature, config)


def ask_space(problems: Iterable[Problem], arch: Arch, *, gpu: bool = True) -> dict[str, tuple[Point, ...]]:
    """Return the operators of each kind of product, by :func:`_kind`, as the API lists them.

    Args:
        problems: What is to be computed.
        arch: The target.
        gpu: Ask the driver how many clusters run at a time; without, the number is that of all SMs.

    Raises:
        MeasureError: The API could not be asked; the message holds its last words.
    """
    kinds = sorted({_kind(problem) for problem in problems})
    command = [sys.executable, str(ROOT / "tools/benchmark/operators_space.py")]
    command += ["--target", arch.name.removeprefix("sm_"), *(f"--kind={kind}" for kind in kinds)]
    try:
        done = subprocess.run(
            [*command, *([] if gpu else ["--no-gpu"])],
            capture_output=True,
            text=True,
            timeout=_LIST_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise MeasureError(f"listing the operators took longer than {_LIST_LIMIT_S:g} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise MeasureError(f"the operators cannot be listed: {last}")
    answer = json.loads(done.stdout[done.stdout.index("{") :])
    return {
        kind: tuple(
            _point(tile, cluster, answer["clusters"], arch) for tile, cluster in answer["kinds"][kind]
        )
        for kind in kinds
    }


def _point(tile: Sequence[int], cluster: Sequence[int], clusters: Mapping[str, int], arch: Arch) -> Point:
    size = cluster[0] * cluster[1]
    return Point(
        (tile[0], tile[1]), (cluster[0], cluster[1]), clusters.get(str(size), arch.nominal_sm_count // size)
    )


def _kind(problem: Problem) -> str:
    return ",".join([problem.ab_dtype, problem.out_dtype, *LAYOUTS[problem.layout]])


class Operators:
    """The fastest of NVIDIA's Hopper operators, found by timing all of them on each shape.

    Args:
        store: Where their compiled kernels are kept.
        arch: The target.
        keep: How many go from the short rounds into the common ones.
        workers: Compilations at a time.
        known: Entries of an earlier contest, whose finalists are run without timing all again.
        known_from: What to call that contest in the record.
    """

    name = "operators"

    def __init__(
        self,
        store: Store,
        arch: Arch,
        *,
        keep: int = 3,
        workers: int | None = None,
        known: Mapping[Problem, Entry] | None = None,
        known_from: str = "",
    ) -> None:
        self._store = store
        self._arch = arch
        self._keep = keep
        self._workers = workers
        self._known = known or {}
        self._known_from = known_from
        self._space: Mapping[str, tuple[Point, ...]] = {}
        self._artifacts: dict[tuple[str, Point], Artifact] = {}
        self._failures: dict[str, str] = {}
        self._compile_s: dict[str, float] = {}

    @property
    def settings(self) -> dict[str, Json]:
        """What decides its choice, for the conditions of the record."""
        return {"finalists": self._keep}

    def knows(self, problem: Problem) -> bool:
        """Whether an earlier contest says which kernels to run."""
        return problem in self._known

    def prepare(self, problems: Sequence[Problem]) -> None:
        """List and compile all operators that some problem can use.

        Raises:
            UnsupportedError: The API is not installed.
            MeasureError: Its operators cannot be listed.
            BuildError: The compiler does not work at all.
        """
        text = _kernel_text()
        possible = [problem for problem in problems if not _why_not(problem)]
        unknown = [problem for problem in possible if problem not in self._known]
        if unknown:
            self._space = ask_space(unknown, self._arch)
        for kind, of_kind in _by_kind(possible).items():
            points = dict.fromkeys(point for problem in of_kind for point in self._points(problem))
            self._compile(kind, {kernel_source(text, p, of_kind[0], self._arch): p for p in points})

    def _points(self, problem: Problem) -> tuple[Point, ...]:
        known = self._known.get(problem)
        if known is None:
            return self._space[_kind(problem)]
        finalists: Any = known.details.get("finalists", [known.choice])
        return tuple(Point.from_json(data) for data in finalists)

    def _compile(self, kind: str, sources: Mapping[Source, Point]) -> None:
        started = time.monotonic()
        with Builder(self._store, workers=self._workers) as builder:
            for source, result in builder.build(sources):
                if isinstance(result, Artifact):
                    self._artifacts[kind, sources[source]] = result
                else:
                    self._failures[f"{kind} {sources[source]}"] = result.message
        self._compile_s[kind] = time.monotonic() - started

    def enter(self, arena: Arena, problem: Problem) -> Entrant:
        """Time every operator shortly, and check the fastest few."""
        reason = _why_not(problem)
        if reason:
            raise UnsupportedError(reason)
        kind = _kind(problem)
        points = [point for point in self._points(problem) if (kind, point) in self._artifacts]
        if not points:
            raise BuildError(
                f"none of the operators compiled: {next(iter(self._failures.values()), 'none listed')}"
            )
        candidates = {point: self._candidate(problem, point) for point in points}
        known = self._known.get(problem)
        started = time.monotonic()
        best = points if known else self._screen(arena, candidates)
        screen_s = time.monotonic() - started
        best = self._right_ones(arena, {point: candidates[point] for point in best})
        finalists = tuple(Finalist(candidates[p], str(p), p.to_json()) for p in best)
        details: dict[str, Json] = {"finalists": [point.to_json() for point in best]}
        if known:
            return Entrant(finalists, known.tuning_s, {**known.details, "tuned_in": self._known_from})
        details |= {"candidates": len(points), "compile_s": round(self._compile_s[kind], 2)}
        details |= {
            "screen_s": round(screen_s, 2),
            "failed_to_compile": len(self._points(problem)) - len(points),
        }
        return Entrant(finalists, round(self._compile_s[kind] + screen_s, 2), details)

    def _screen(self, arena: Arena, candidates: Mapping[Point, Candidate]) -> list[Point]:
        run = arena.time(list(candidates.values()), Policy.screen())
        timed = [point for point, candidate in candidates.items() if candidate.name in run]
        if not timed:
            reason = next(iter(run.failures.values())).error
            raise MeasureError(f"none of the operators could be timed: {reason}")
        return sorted(timed, key=lambda point: run[candidates[point].name].paired.mid)[: self._keep]

    def _right_ones(self, arena: Arena, candidates: Mapping[Point, Candidate]) -> list[Point]:
        checks = {point: arena.check(candidate) for point, candidate in candidates.items()}
        right = [point for point, check in checks.items() if check.ok]
        if not right:
            require_ok(next(iter(checks.values())))
        return right

    def _candidate(self, problem: Problem, point: Point) -> Candidate:
        artifact = self._artifacts[_kind(problem), point]
        return Candidate(f"{self.name} {point}", artifact.library, artifact.symbol, Launch((), 0), problem)


def _by_kind(problems: Iterable[Problem]) -> dict[str, list[Problem]]:
    found: dict[str, list[Problem]] = {}
    for problem in problems:
        found.setdefault(_kind(problem), []).append(problem)
    return found


def _why_not(problem: Problem) -> str:
    """Why the operators do not do a problem; empty when they do."""
    if problem.epilogue != Epilogue():
        return "only plain products are compared"
    if problem.batch > 1:
        return "only matrices are compared, not batches of them"
    return "operators need rows of D at multiples of 16 bytes" if problem.unaligned_out else ""


def _kernel_text() -> str:
    """Return the package's file that holds the kernel class.

    Raises:
        UnsupportedError: The package is not installed, or holds no such file.
    """
    try:
        path = Path(str(distribution(PACKAGE).locate_file(_KERNEL)))
        return path.read_text(encoding="utf-8")
    except PackageNotFoundError:
        raise UnsupportedError(f"{PACKAGE} is not installed") from None
    except OSError as error:
        raise UnsupportedError(f"{PACKAGE} has no {_KERNEL}: {error.strerror or error}") from error
