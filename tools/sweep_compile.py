"""Compile every kernel that a space can make, and list those that fail, spill or take what was not predicted.

Needs the compiler but no GPU. Results are appended to a JSON-lines file and never compiled again, so an
interrupted sweep continues; a new template or compiler starts new ones.

    python tools/sweep_compile.py --out sweep.jsonl --dtype bf16 --layout kk,kn --sample 600
    python tools/sweep_compile.py --out sweep.jsonl --words "out=fp32 beta bias=n" --set pingpong=true
    python tools/sweep_compile.py --out sweep.jsonl --arch sm_100a --dtype bf16,tf32 --pairs --summary S.json
    python tools/sweep_compile.py --out sweep.jsonl --arch sm_103a --family softmax,gated,rope --pairs

With ``--family`` kernels are those of the problems that families declare as examples. Options of problems
then count as knobs do: the set of ``--pairs`` holds every two values that meet.

exit codes: 0 all as predicted; 1 some kernel failed, spilled without a fused epilogue, or is not as
predicted; 2 bad usage
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutegen.arch import find_arch
from cutegen.build import Artifact, Builder, Failure, Toolchain
from cutegen.build.render import Source, render
from cutegen.cli.args import parse_fixed
from cutegen.digest import Json, digest
from cutegen.errors import CutegenError, ProblemError
from cutegen.families.declared import DeclaredProblem
from cutegen.families.gemm.problem import Epilogue, Problem
from cutegen.families.registry import find_family, find_space
from cutegen.family import Problem as AnyProblem
from cutegen.space import Config, Space, Value, as_integer
from tools.benchmark.arguments import add_commit_argument
from tools.benchmark.environment import check_facts
from tools.benchmark.kernel_store import kernel_store
from tools.benchmark.results import write_json
from tools.benchmark.sweep_table import SWEEP

#: Together these make every kernel: rules that look at the sizes let each kernel pass for one of them.
SIZES = ("4096x4096x4096", "512x4096x4096", "512x512x8192", "64x4096x4096", "640x4096x4096", "8x512x4096")
#: Kernels compiled into one temporary store before it is deleted.
CHUNK = 512
BAD = ("failed", "spilled", "smem", "registers")
#: Knobs to spread a sample over: those of them that a space has.
SPREAD = ("tile_shape_mn", "mma_tiler_mn", "mma_warpgroups", "pingpong", "use_2cta_instrs", "use_clc")


@dataclass(frozen=True)
class Case:
    """One kernel to compile and what the space says about it."""

    id: str
    problem: AnyProblem
    config: Config
    source: Source
    smem_bytes: int
    max_registers: int
    plain: bool


@dataclass(frozen=True)
class Pace:
    """How fast kernels were compiled: how many, how many at a time, wall-clock and CPU seconds."""

    kernels: int
    workers: int
    seconds: float
    cpu_s: float

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON data; there is no rate of nothing."""
        per_s = round(self.kernels / self.seconds, 3) if self.kernels else None
        return {
            "kernels": self.kernels,
            "workers": self.workers,
            "seconds": round(self.seconds, 1),
            "cpu_s": round(self.cpu_s, 1),
            "per_s": per_s,
        }


def run_time_values(space: Space, problem: AnyProblem) -> dict[str, list[Value]]:
    """Return, for every run-time knob, one value for each kind of kernel it makes."""
    default = space.default(problem)
    found: dict[str, list[Value]] = {}
    for knob in space.run_time_knobs:
        kinds = {space.compile_view(default.replace(**{knob: v})): v for v in reversed(space.domains[knob])}
        found[knob] = sorted(kinds.values(), key=space.domains[knob].index)
    return found


def problems_of(dtypes: Sequence[str], layouts: Sequence[str], words: str, batch: int) -> Iterator[Problem]:
    """Yield the problems whose kernels are wanted, leaving out sizes that a layout does not allow."""
    for dtype in dtypes:
        for layout in layouts:
            for sizes in SIZES:
                try:
                    yield Problem.parse(
                        f"gemm {f'{batch}x' if batch > 1 else ''}{sizes} {dtype} {layout} {words}"
                    )
                except ProblemError as error:
                    if "multiple of" not in str(error):
                        raise


def problems_asked(args: argparse.Namespace) -> list[Problem]:
    """Return the problems that the command line names."""
    return list(problems_of(args.dtype.split(","), args.layout.split(","), args.words, args.batch))


def legal(
    space: Space, problems: Iterable[Problem], fixed: Mapping[str, Sequence[Value]]
) -> Iterator[dict[str, Json]]:
    """Yield how many configs each problem of the first sizes has, and how many kernels these come to."""
    for problem in problems:
        if "x".join(map(str, (problem.m, problem.n, problem.k))) == SIZES[0]:
            views = Counter(space.compile_view(config) for config in space.configs(problem, fixed))
            yield {"problem": str(problem), "legal": views.total(), "kernels": len(views)}


def classes(
    space: Space, problems: Iterable[AnyProblem], fixed: Mapping[str, Sequence[Value]]
) -> list[tuple[AnyProblem, Config]]:
    """Return one (problem, config) for every kernel: those that differ in run-time knobs only are one."""
    found: dict[tuple[object, Config], tuple[AnyProblem, Config]] = {}
    for problem in problems:
        for config in space.configs(problem, {**run_time_values(space, problem), **fixed}):
            found.setdefault((problem.signature, space.compile_view(config)), (problem, config))
    return list(found.values())


def stratified(
    pairs: Sequence[tuple[AnyProblem, Config]], by: Sequence[str], count: int, seed: int
) -> list[tuple[AnyProblem, Config]]:
    """Return ``count`` pairs, taken in turn from groups that agree in signature and in the knobs ``by``."""
    generator = random.Random(seed)
    groups: dict[object, list[tuple[AnyProblem, Config]]] = {}
    for problem, config in pairs:
        group = problem.signature, tuple(config[knob] for knob in by)
        groups.setdefault(group, []).append((problem, config))
    piles = list(groups.values())
    for pile in piles:
        generator.shuffle(pile)
    generator.shuffle(piles)
    rounds = (pile[i] for i in range(max(map(len, piles), default=0)) for pile in piles if i < len(pile))
    return list(islice(rounds, count))


def kinds(problem: AnyProblem) -> list[tuple[object, ...]]:
    """Return what counts beside knobs: operand dtype and layout of a GEMM, the options of other families."""
    if isinstance(problem, DeclaredProblem):
        return [
            *(("option", *option) for option in problem.options),
            ("option", "unaligned", problem.unaligned),
        ]
    assert isinstance(problem, Problem)
    return [("", problem.ab_dtype, problem.layout)]


def pairwise(
    space: Space, pairs: Sequence[tuple[AnyProblem, Config]], seed: int
) -> list[tuple[AnyProblem, Config]]:
    """Return some of ``pairs`` that together hold every two values of knobs (dtype and layout too) that meet.

    Greedy, in rounds that ask for ever less: the first take those that add most.
    """
    order = list(pairs)
    random.Random(seed).shuffle(order)
    held: set[object] = set()
    chosen: list[tuple[AnyProblem, Config]] = []
    twos = [list(combinations([*kinds(p), *space.compile_view(config).items()], 2)) for p, config in order]
    for least in range(max(map(len, twos), default=0), 0, -1):
        for pair, two in zip(order, twos, strict=True):
            if sum(both not in held for both in two) >= least:
                held.update(two)
                chosen.append(pair)
    return chosen


def make_case(space: Space, problem: AnyProblem, config: Config, toolchain: Toolchain) -> Case:
    """Render one kernel."""
    derived = space.derive(config, problem, space.arch)
    plain = not isinstance(problem, Problem) or problem.epilogue == Epilogue()
    smem_bytes = as_integer(derived["smem_bytes"])
    max_registers = as_integer(derived.get("max_registers", space.arch.registers_per_thread))
    source = render(problem, config, space.arch)
    name = digest([source.digest, source.arch, toolchain.digest])
    return Case(name, problem, config, source, smem_bytes, max_registers, plain)


def describe(case: Case, result: Artifact | Failure) -> dict[str, Json]:
    """Return the line of the results file."""
    line: dict[str, Json] = {
        "id": case.id,
        "problem": str(case.problem),
        "config": str(case.config),
        "plain": case.plain,
        "predicted_smem_bytes": case.smem_bytes,
        "max_registers": case.max_registers,
    }
    if isinstance(result, Failure):
        return {**line, "outcome": result.outcome, "message": result.message, "log": result.log[-4000:]}
    return {**line, "outcome": "ok", "build_s": result.build_s, **result.resources.to_json()}


def verdict(line: Mapping[str, Json]) -> str:
    """Return what is wrong: ``failed``, ``spilled``, ``smem``, ``registers``, ``noted`` or ``""``."""
    if line["outcome"] != "ok":
        return "failed"
    if line["spill_store_bytes"] or line["spill_load_bytes"]:
        return "spilled" if line["plain"] else "spilled (fused)"
    if line["smem_bytes"] != line["predicted_smem_bytes"]:
        return "smem"
    if int(str(line["registers"])) > int(str(line["max_registers"])):
        return "registers"
    return "noted" if line["notes"] else ""


def sweep(cases: Sequence[Case], out: Path, workers: int | None, timeout_s: float) -> Pace:
    """Compile ``cases``, append their results to ``out`` and return how fast that went."""
    if out.exists() and not out.read_bytes().endswith(b"\n"):
        with out.open("a", encoding="utf-8") as lines:
            lines.write("\n")  # after the half line of a killed run
    started, used, done, at_a_time = time.monotonic(), cpu_seconds(), 0, 0
    for first in range(0, len(cases), CHUNK):
        chunk = {case.source: case for case in cases[first : first + CHUNK]}
        with (
            kernel_store() as store,
            Builder(store, workers=workers, timeout_s=timeout_s) as builder,
            out.open("a", encoding="utf-8") as lines,
        ):
            at_a_time = builder.workers
            for source, result in builder.build(chunk):
                line = describe(chunk[source], result)
                lines.write(json.dumps(line) + "\n")
                lines.flush()
                done += 1
                wrong = verdict(line)
                if wrong:
                    print(f"\n{wrong}: {line['problem']} | {line['config']} | {detail(line)}")
                if sys.stderr.isatty():
                    rate = done / (time.monotonic() - started)
                    print(f"\r{done}/{len(cases)}  {rate:.1f}/s ", end="", file=sys.stderr, flush=True)
    pace = Pace(done, at_a_time, time.monotonic() - started, cpu_seconds() - used)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    if done:
        print(f"{pace.cpu_s / done:.2f} CPU seconds per kernel, {done / pace.seconds:.1f}/s", file=sys.stderr)
    return pace


def cpu_seconds() -> float:
    """Return the CPU time of child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def detail(line: Mapping[str, Json]) -> str:
    """Return the numbers or words behind a verdict."""
    if line["outcome"] != "ok":
        return f"{line['outcome']}: {line['message']}"
    notes = line["notes"]
    assert isinstance(notes, list)
    codes = ",".join(sorted({str(note).split()[0] for note in notes}))
    return (
        f"registers {line['registers']}, spills {line['spill_store_bytes']}+{line['spill_load_bytes']} B, "
        f"smem {line['smem_bytes']} (predicted {line['predicted_smem_bytes']}) {codes}"
    )


def read_results(out: Path) -> dict[str, Mapping[str, Json]]:
    """Return the results that are there already, by id; the half-written last line of a killed run is not."""
    found: dict[str, Mapping[str, Json]] = {}
    for text in out.read_text(encoding="utf-8").splitlines() if out.exists() else []:
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        found[line["id"]] = line
    return found


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="results, one JSON object per line")
    parser.add_argument("--summary", type=Path, metavar="FILE.json", help="what all of them come to")
    add_commit_argument(parser)
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument(
        "--family", default="gemm", help="several with commas; what the next four say is of gemm alone"
    )
    parser.add_argument("--dtype", default="bf16", help="of A and B; several with commas")
    parser.add_argument("--layout", default="kk", help="several with commas")
    parser.add_argument("--words", default="", help="rest of the problem line: out=, beta, bias=, act=...")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="KNOB=V1,V2", help="restrict a knob")
    parser.add_argument("--sample", type=int, default=0, help="compile only so many, spread over --by")
    parser.add_argument("--by", default="", help=f"knobs to spread over (default: {', '.join(SPREAD)})")
    parser.add_argument(
        "--pairs", action="store_true", help="compile a set with every two values that can meet"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds per kernel")
    return parser.parse_args(words)


def main() -> int:
    """Sweep; return 1 if a kernel failed, spilled without a fused epilogue, or missed its prediction."""
    args = arguments()
    try:
        parts = [choose(family, args) for family in args.family.split(",")]
    except CutegenError as error:
        print(error, file=sys.stderr)
        return 2
    by_id = {name: case for part in parts for name, case in part.by_id.items()}
    total = sum(part.total for part in parts)
    known = read_results(args.out)
    missing = [case for name, case in by_id.items() if name not in known]
    print(f"{total} kernels, {len(by_id)} chosen, {len(by_id) - len(missing)} known", file=sys.stderr)
    pace = sweep(missing, args.out, args.workers, args.timeout)
    results = read_results(args.out)
    counts = count_verdicts([results[name] for name in by_id])
    print(", ".join(f"{count} {name}" for name, count in counts.most_common()))
    if args.summary is not None:
        write_json(args.summary, summary(args, parts, results, pace))
    return 1 if any(counts[name] for name in BAD) else 0


@dataclass(frozen=True)
class Part:
    """What a sweep takes of one family: of ``total`` kernels those chosen, by id, and its problems."""

    space: Space
    problems: Sequence[AnyProblem]
    total: int
    by_id: Mapping[str, Case]


def choose(family: str, args: argparse.Namespace) -> Part:
    """Return the part of one family.

    Raises:
        CutegenError: There is no such family, knob or value.
    """
    space = find_space(family, find_arch(args.arch))
    problems = problems_asked(args) if family == "gemm" else list(find_family(family).typical())
    pairs = classes(space, problems, parse_fixed(args.set))
    total = len(pairs)
    if args.pairs:
        pairs = pairwise(space, pairs, args.seed)
    by = args.by.split(",") if args.by else [knob for knob in SPREAD if knob in space.domains]
    pairs = stratified(pairs, by, args.sample or total, args.seed)
    toolchain = Toolchain.current()
    cases = (make_case(space, *pair, toolchain) for pair in pairs)
    return Part(space, problems, total, {case.id: case for case in cases})


def count_verdicts(lines: Sequence[Mapping[str, Json]]) -> Counter[str]:
    """Return how many lines there are of each verdict; those without one are ``good``."""
    return Counter(verdict(line) or "good" for line in lines)


def summary(
    args: argparse.Namespace,
    parts: Sequence[Part],
    results: Mapping[str, Mapping[str, Json]],
    pace: Pace,
) -> dict[str, Json]:
    """Return what a sweep comes to: what was asked, how much of the spaces that is, what was wrong."""
    asked = ("dtype", "layout", "words", "batch", "set", "sample", "by", "pairs", "seed")
    lines = [results[name] for part in parts for name in part.by_id]
    wrong = [
        {"verdict": what, "problem": line["problem"], "config": line["config"], "detail": detail(line)}
        for line in lines
        if (what := verdict(line))
    ]
    found: dict[str, Json] = {
        **check_facts(SWEEP, None, args.commit),
        "arch": args.arch,
        "asked": {name: getattr(args, name) for name in asked},
        "kernels": {"of_the_space": sum(p.total for p in parts), "chosen": len(lines)},
        "verdicts": dict(count_verdicts(lines)),
        "wrong": wrong,
        "compiled_now": pace.to_json(),
    }
    if args.family == "gemm":
        configs = list(legal(parts[0].space, problems_asked(args), parse_fixed(args.set)))
        return {**found, "configs": configs, "values": values(parts[0])}
    return {**found, "families": [of_family(part, results) for part in parts]}


def values(part: Part) -> dict[str, Json]:
    """Return how many values of each compiled knob the chosen kernels have, and how many there are."""
    return {
        knob: {"seen": len({case.config[knob] for case in part.by_id.values()}), "of": len(domain)}
        for knob, domain in part.space.domains.items()
        if knob not in part.space.run_time_knobs
    }


def of_family(part: Part, results: Mapping[str, Mapping[str, Json]]) -> dict[str, Json]:
    """Return what a sweep comes to in one family."""
    lines = [results[name] for name in part.by_id]
    good = [line for line in lines if line["outcome"] == "ok"]
    return {
        "family": part.space.family,
        "problems": [str(problem) for problem in part.problems],
        "kernels": {"of_the_space": part.total, "chosen": len(lines)},
        "values": values(part),
        "most": {
            what: max((int(str(line[what])) for line in good), default=0)
            for what in ("registers", "smem_bytes")
        },
        "verdicts": dict(count_verdicts(lines)),
    }


if __name__ == "__main__":
    sys.exit(main())
