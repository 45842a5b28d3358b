"""The best of cuBLASLt: its C interface, played by a library that multiplies on the CPU; the contestant."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="products of torch tensors")

from cutegen.errors import LaunchError, MeasureError  # noqa: E402
from cutegen.families.gemm.problem import Epilogue, Problem  # noqa: E402
from cutegen.measure import Candidate, CheckResult, TimingRun  # noqa: E402
from cutegen.measure.check import Verdict  # noqa: E402
from cutegen.measure.policy import Policy  # noqa: E402
from cutegen.measure.timing import Timing  # noqa: E402
from tools.bench_gemm import plans  # noqa: E402
from tools.benchmark.contest import UnsupportedError  # noqa: E402
from tools.benchmark.cublaslt import Algorithm, CublasLt, LtCall, LtOrder, loaded_library  # noqa: E402
from tools.benchmark.max_autotune import MaxAutotune  # noqa: E402
from tools.benchmark.vendor import Vendor  # noqa: E402

#: Matrices of floats that go down columns, as ``cublasLt.h`` has them. The algorithm's first word is its
#: number; 3 is offered but not supported, 2 is offered twice.
LIBRARY = """
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
typedef struct { int ta, tb; } Operation;
typedef struct { int type; uint64_t rows, cols; int64_t ld; } Layout;
typedef struct { uint64_t data[8]; size_t workspace; int state; float waves; int reserved[4]; } Result;
static uint64_t most;
int cublasLtCreate(void **h) { *h = malloc(1); return 0; }
int cublasLtMatmulDescCreate(void **d, int compute, int scale) {
    if (compute != 68 || scale != 0) return 7;
    *d = calloc(1, sizeof(Operation)); return 0; }
int cublasLtMatmulDescSetAttribute(void *d, int attribute, const void *value, size_t size) {
    if (size != 4) return 7;
    Operation *o = d; int *to = attribute == 3 ? &o->ta : attribute == 4 ? &o->tb : NULL;
    if (!to) return 7;
    *to = *(const int *)value; return 0; }
int cublasLtMatrixLayoutCreate(void **l, int type, uint64_t rows, uint64_t cols, int64_t ld) {
    Layout *made = malloc(sizeof(Layout));
    *made = (Layout){type, rows, cols, ld}; *l = made; return ld < (int64_t)rows ? 7 : 0; }
int cublasLtMatmulPreferenceCreate(void **p) { *p = malloc(1); return 0; }
int cublasLtMatmulPreferenceSetAttribute(void *p, int attribute, const void *value, size_t size) {
    if (attribute != 1 || size != 8) return 7;
    most = *(const uint64_t *)value; return 0; }
int cublasLtMatmulAlgoGetHeuristic(void *h, void *op, void *a, void *b, void *c, void *d, void *p,
                                   int wanted, Result *found, int *count) {
    if (((Layout *)d)->rows == 13) { *count = 0; return 0; }
    if (((Layout *)d)->rows == 17) return 15;
    int ids[] = {1, 2, 2, 3, 4}; *count = 5;
    for (int i = 0; i < 5; i++) {
        found[i] = (Result){.data = {ids[i], most}, .workspace = 100 * ids[i], .state = ids[i] == 3 ? 15 : 0};
    }
    return wanted < 5 || c != d; }
static float at(const float *x, const Layout *l, int t, uint64_t i, uint64_t j) {
    return t ? x[j + i * l->ld] : x[i + j * l->ld]; }
int cublasLtMatmul(void *h, void *op, const float *alpha, const float *A, Layout *la, const float *B,
                   Layout *lb, const float *beta, const float *C, Layout *lc, float *D, Layout *ld,
                   const uint64_t *algorithm, void *workspace, size_t size, void *stream) {
    Operation *o = op;
    if (algorithm[0] == 4) return 13;
    if (size != 100 * algorithm[0] || !workspace || *alpha != 1 || *beta != 0 || C != D) return 7;
    uint64_t k = o->ta ? la->rows : la->cols;
    if (k != (o->tb ? lb->cols : lb->rows)) return 7;
    for (uint64_t i = 0; i < ld->rows; i++)
        for (uint64_t j = 0; j < ld->cols; j++) {
            float sum = 0;
            for (uint64_t x = 0; x < k; x++) sum += at(A, la, o->ta, i, x) * at(B, lb, o->tb, x, j);
            D[i + j * ld->ld] = sum;
        }
    return 0; }
"""


@pytest.fixture(scope="module")
def lt(tmp_path_factory: pytest.TempPathFactory) -> CublasLt:
    """The library above."""
    folder = tmp_path_factory.mktemp("lt")
    source, library = folder / "lt.c", folder / "libcublasLt.so.13"
    source.write_text(LIBRARY)
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    return CublasLt(str(library))


def matrix(rows: int, columns: int, along: str, pitch: int = 0) -> torch.Tensor:
    """Small whole numbers, contiguous along the rows' index (``r``) or the columns' (``c``), rows apart."""
    outer, inner = (rows, columns) if along == "c" else (columns, rows)
    whole = torch.arange(outer * (inner + pitch), dtype=torch.float32).remainder(7).view(outer, -1)
    part = whole[:, :inner]
    return part if along == "c" else part.t()


@pytest.mark.parametrize("along_a", ["r", "c"])
@pytest.mark.parametrize("along_b", ["r", "c"])
@pytest.mark.parametrize(("m", "n", "k"), [(5, 4, 6), (1, 3, 8), (3, 1, 2), (2, 3, 1)])
@pytest.mark.parametrize("pitch", [0, 3])
def test_every_layout_is_multiplied(
    lt: CublasLt, along_a: str, along_b: str, m: int, n: int, k: int, pitch: int
) -> None:
    """Contiguous along either index, with or without space between rows."""
    a, b = matrix(m, k, along_a, pitch), matrix(k, n, along_b, pitch)
    d = torch.full((m, n + pitch), -1.0)[:, :n]
    first = lt.algorithms(a, b, d)[0]
    LtCall(LtOrder(algorithm=first), lt)(a, b, d)
    assert torch.equal(d, a @ b)


def test_algorithms_are_listed_once_without_those_that_do_not_work(lt: CublasLt) -> None:
    """In the order of the heuristics, with what they need; the limit of workspace reaches them."""
    a, b, d = matrix(5, 6, "c"), matrix(6, 4, "r"), torch.empty(5, 4)
    found = lt.algorithms(a, b, d)
    assert [(int.from_bytes(bytes.fromhex(x.words)[:8], "little"), x.workspace_bytes) for x in found] == [
        (1, 100),
        (2, 200),
        (4, 400),
    ]
    assert int.from_bytes(bytes.fromhex(found[0].words)[8:16], "little") == 32 * 2**20


@pytest.mark.parametrize(
    ("rows", "words"), [(17, "GetHeuristic failed: not supported"), (13, "offers no algorithm")]
)
def test_refusals_are_launch_errors(lt: CublasLt, tmp_path: Path, rows: int, words: str) -> None:
    """With what cuBLASLt says."""
    a, b, d = matrix(5, 6, "c"), matrix(6, rows, "r"), torch.empty(5, rows)
    with pytest.raises(LaunchError, match=words):
        LtCall(LtOrder(note=str(tmp_path / "note")), lt)(a, b, d)
    a, b, d = matrix(5, 6, "c"), matrix(6, 4, "r"), torch.empty(5, 4)
    with pytest.raises(LaunchError, match="cublasLtMatmul failed: execution failed"):
        LtCall(LtOrder(algorithm=lt.algorithms(a, b, d)[2]), lt)(a, b, d)


def test_what_it_cannot_take_is_said(lt: CublasLt) -> None:
    """Strides, outputs, dtypes, orders and libraries."""
    a, b, d = matrix(6, 6, "c"), matrix(6, 4, "r"), torch.empty(6, 4)
    with pytest.raises(LaunchError, match="strides 2 and 24 are contiguous along neither"):
        lt.algorithms(torch.empty(12, 12)[::2, ::2], b, d)
    with pytest.raises(LaunchError, match="output must be contiguous along its rows"):
        lt.algorithms(a, b, torch.empty(4, 6).t())
    with pytest.raises(LaunchError, match=r"products of torch\.int8"):
        lt.algorithms(a.to(torch.int8), b.to(torch.int8), d.to(torch.int8))
    with pytest.raises(LaunchError, match="which algorithm"):
        LtCall(LtOrder(), lt)
    with pytest.raises(LaunchError, match="cuBLASLt cannot be used"):
        CublasLt("libnothing.so")


def test_a_note_lists_all_and_the_first_is_run(lt: CublasLt, tmp_path: Path) -> None:
    """Later calls do not list again."""
    a, b, d = matrix(5, 6, "c"), matrix(6, 4, "r"), torch.empty(5, 4)
    order = LtOrder.from_json(json.loads(json.dumps(LtOrder(note=str(tmp_path / "n.json")).to_json())))
    call = LtCall(order, lt)
    call(a, b, d)
    noted = json.loads((tmp_path / "n.json").read_text())
    assert torch.equal(d, a @ b) and noted == [asdict(x) for x in lt.algorithms(a, b, d)]
    (tmp_path / "n.json").unlink()
    call(a, b, d)
    assert not (tmp_path / "n.json").exists()
    again = LtOrder(algorithm=Algorithm(**noted[1]))
    assert LtOrder.from_json(json.loads(json.dumps(again.to_json()))) == again


def test_the_library_is_the_one_that_torch_has_loaded(tmp_path: Path) -> None:
    """As the kernel lists what a process has mapped."""
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r--p 00000000 08:01 12  /usr/lib/libc.so.6\n"
        "7f02-7f03 r-xp 00000000 08:01 13  /some where/nvidia/cu13/lib/libcublasLt.so.13\n"
    )
    assert loaded_library(maps) == "/some where/nvidia/cu13/lib/libcublasLt.so.13"
    maps.write_text("7f00-7f01 rw-p 00000000 00:00 0\n")
    with pytest.raises(LaunchError, match="no libcublasLt is loaded"):
        loaded_library(maps)


# --- the contestant ---

PROBLEM = Problem(256, 512, 1024)


class Arena:
    """Lists three algorithms, of which some may be wrong, and times them by their place."""

    def __init__(self, times: Sequence[float], wrong: Sequence[int] = (), note: bool = True) -> None:
        self.times = times
        self.wrong = wrong
        self.note = note
        self.policies: list[Policy] = []

    def open(self, problem: Problem, seed: int = 0) -> Any:
        """Nothing to make."""

    def check(self, candidate: Candidate) -> CheckResult:
        place = candidate.name.split()[1]
        if place == "list":
            if self.note:
                offered = [asdict(Algorithm(f"{at:02x}" * 64, at)) for at in range(len(self.times))]
                Path(json.loads(candidate.symbol)["note"]).write_text(json.dumps(offered))
            return CheckResult("ok" if self.note else "launch_failed", "" if self.note else "not supported")
        right = int(place) not in self.wrong
        return CheckResult("ok" if right else "wrong_result", "" if right else "nan", Verdict(right))

    def time(self, candidates: Sequence[Candidate], policy: Policy, keep: Sequence[str] = ()) -> TimingRun:
        self.policies.append(policy)
        times = {c.name: self.times[int(c.name.split()[1]) - 1] for c in candidates}
        timings = {name: Timing.of([us] * 3, [10.0] * 3) for name, us in times.items() if us}
        failures = {n: CheckResult("launch_failed", "refused") for n in times if n not in timings}
        return TimingRun(timings, Timing.of([10.0] * 3), failures)


def test_the_fastest_right_algorithms_go_on() -> None:
    """Three of them, with their place in the heuristics' order, which torch.mm takes the first of."""
    arena = Arena([9.0, 7.0, 5.0, 8.0, 6.0], wrong=[3])
    entrant = Vendor("behind").enter(arena, PROBLEM)
    assert [f.config for f in entrant.finalists] == ["5 of 5", "2 of 5", "4 of 5"]
    assert entrant.finalists[0].choice == {"algorithm": "04" * 64, "place": 5}
    order = LtOrder.from_json(json.loads(entrant.finalists[1].candidate.symbol))
    assert order == LtOrder(algorithm=Algorithm("01" * 64, 1))
    assert entrant.details == {"algorithms": 5, "timed": 5} and arena.policies == [Policy.screen()]


def test_a_vendor_without_a_right_algorithm_has_failed() -> None:
    """With the reason of the first; likewise if nothing can be timed or listed."""
    for arena, words in (
        (Arena([9.0, 8.0], wrong=[1, 2]), "nan"),
        (Arena([0.0, 0.0]), "no algorithm could be timed: refused"),
        (Arena([1.0], note=False), "not supported"),
    ):
        with pytest.raises(Exception, match=words):
            Vendor("behind").enter(arena, PROBLEM)
    silent = Arena([1.0], note=False)
    silent.check = lambda candidate: CheckResult("ok")  # type: ignore[method-assign]
    with pytest.raises(MeasureError, match="left no note"):
        Vendor("behind").enter(silent, PROBLEM)


@pytest.mark.parametrize(
    "problem",
    [
        Problem(256, 512, 1024, batch=2),
        Problem(256, 512, 1024, ab_dtype="int8"),
        Problem(256, 512, 1024, epilogue=Epilogue(bias="n")),
    ],
    ids=str,
)
def test_other_products_are_not_compared(problem: Problem) -> None:
    """The reason is recorded instead of a time."""
    with pytest.raises(UnsupportedError, match="compared"):
        Vendor("behind").enter(Arena([]), problem)


def test_a_dry_run_says_who_tries_what() -> None:
    """Libraries that choose for themselves are listed, with the reason where they are left out."""
    both = (Vendor("behind"), MaxAutotune())
    assert list(plans(both, Problem(64, 64, 64))) == [
        f"{each.name} tries all that it offers" for each in both
    ]
    fused, batched = Problem(64, 64, 64, epilogue=Epilogue(activation="relu")), Problem(64, 64, 64, batch=2)
    left_out = "is left out: only p"
    assert [left_out in text for text in plans(both, fused)] == [True, False]
    assert [left_out in text for text in plans(both, batched)] == [True, True]
