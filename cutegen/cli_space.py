"""``python -m cutegen.space``: list, count, explain and lint the configs of a kernel family."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, product

from cutegen.arch import Arch, find_arch
from cutegen.catalog import SOURCES, families, find_space
from cutegen.cli_args import (
    EXIT_CODES,
    Parser,
    add_problem_arguments,
    named_problems,
    parse_set,
    positive_int,
)
from cutegen.cli_run import run_command
from cutegen.cli_text import say, say_json
from cutegen.digest import Json
from cutegen.errors import UsageError
from cutegen.problem import BLOCK_SCALED, BLOCK_SCALED_FAMILY, LAYOUTS, Problem
from cutegen.space import Config, Space, Value, Violation, format_value
from cutegen.space.census import Census, blockers, take_census
from cutegen.untuned import default_config

__all__ = ["main", "refuse"]

_EXAMPLES = """examples:
  python -m cutegen.space gemm --arch sm_90a --shape 4096x4096x4096
  python -m cutegen.space gemm --arch sm_90a --shape 4096x4096x4096 --explain tile_shape_mn=256x256
  python -m cutegen.space gemm --arch sm_90a --shape 4096x4096x4096 --set tile_shape_mn=128x256 --list 10
  python -m cutegen.space gemm --arch sm_90a --lint

"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = _parser().parse_args(argv)
    return run_command(lambda: _run(args))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m cutegen.space",
        description="Say which configs of a kernel family are legal for a problem, and why others are not.",
        epilog=_EXAMPLES + EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("family", metavar="FAMILY", help=f"kernel family: {', '.join(families())}")
    add_problem_arguments(parser)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KNOB=V1,V2",
        help="look only at these values; repeatable",
    )
    parser.add_argument(
        "--source", choices=SOURCES, default="cutegen", help="whose kernels: ours, or NVIDIA's operators"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--explain",
        nargs="+",
        metavar="KNOB=VALUE",
        help="say which rules a (partial) config breaks, with reasons",
    )
    what.add_argument(
        "--list",
        nargs="?",
        type=positive_int,
        const=20,
        metavar="N",
        help="print the first N legal configs (20)",
    )
    what.add_argument("--lint", action="store_true", help="report knob values that no legal config uses")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    return parser


def _run(args: argparse.Namespace) -> int:
    space = find_space(args.family, _arch(args.arch), args.source)
    if args.lint:
        return _lint(space, args)
    documents = [_answer(space, item.problem, args) for item in named_problems(args)]
    if args.json:
        say_json(documents)
    return 0


def _arch(name: str | None) -> Arch:
    if name is not None:
        return find_arch(name)
    from cutegen.device import present_device

    return present_device().arch


def _answer(space: Space, problem: Problem, args: argparse.Namespace) -> Json:
    fixed = parse_set(args.set, space, problem)
    if not args.json:
        say(f"{problem} on {space.arch}")
    if args.explain:
        return _explain(space, problem, Config.parse(" ".join(args.explain)), args.json)
    if args.list:
        return _list(space, problem, fixed, args)
    return _summary(space, problem, fixed, args.json)


def _explain(space: Space, problem: Problem, config: Config, quiet: bool) -> Json:
    violations = space.explain(problem, config)
    missing = [knob for knob in space.domains if knob not in config]
    fixed = {knob: (value,) for knob, value in config.items()}
    document: dict[str, Json] = {"problem": str(problem), "config": config.to_json()}
    document["violations"] = [{"rule": v.rule, "reason": v.reason} for v in violations]
    example = None if violations else next(space.configs(problem, fixed), None)
    document["legal"] = example is not None
    document["example"] = example.to_json() if example else None
    stuck = blockers(space, problem, fixed) if not violations and example is None else ()
    document["blockers"] = [
        {"rule": v.rule, "reason": v.reason, "rejects": hits, "of": total} for v, hits, total in stuck
    ]
    if not quiet:
        _print_explanation(config, violations, example, stuck, bool(missing))
    return document


def _print_explanation(
    config: Config,
    violations: Sequence[Violation],
    example: Config | None,
    stuck: Sequence[tuple[Violation, int, int]],
    partial: bool,
) -> None:
    if violations:
        say(f"{config} is not legal:")
        _print_rules((v, "") for v in violations)
    elif example is None:
        say(f"{config} is not legal: each way to complete it breaks a rule:")
        _print_rules((v, f" (rejects {hits} of {total} completions)") for v, hits, total in stuck)
    elif partial:
        say(f"{config} is legal; for example\n  {example}")
    else:
        say(f"{config} is legal")


def _print_rules(rules: Iterable[tuple[Violation, str]]) -> None:
    for violation, note in rules:
        say(f"  {violation.rule}{note}: {violation.reason}")


def _list(
    space: Space, problem: Problem, fixed: Mapping[str, tuple[Value, ...]], args: argparse.Namespace
) -> Json:
    configs = list(islice(space.configs(problem, fixed), args.list))
    if not configs:
        refuse(space, problem, fixed)
    if not args.json:
        for config in configs:
            say(f"  {config}")
    return {"problem": str(problem), "configs": [config.to_json() for config in configs]}


def _summary(space: Space, problem: Problem, fixed: Mapping[str, tuple[Value, ...]], quiet: bool) -> Json:
    census = take_census(space, problem, fixed)
    if not census.legal:
        refuse(space, problem, fixed)
    default = default_config(space, problem)
    derived = space.derive(default, problem, space.arch)
    if not quiet:
        _print_summary(space, census, default, derived)
    return {
        "problem": str(problem),
        "arch": space.arch.name,
        "legal": census.legal,
        "classes": census.classes,
        "raw": census.raw,
        "default": default.to_json(),
        "derived": Config(derived).to_json(),
        "used": {
            knob: {format_value(value): counts.get(value, 0) for value in space.domains[knob]}
            for knob, counts in census.used.items()
        },
    }


def _print_summary(space: Space, census: Census, default: Config, derived: Mapping[str, Value]) -> None:
    say(f"{census.legal} legal configs of {census.raw} combinations; {census.classes} kernels to compile")
    say("knobs (value:legal configs, simplest first; * = argument of the compiled kernel):")
    for knob, domain in space.domains.items():
        words = " ".join(f"{format_value(v)}:{census.used[knob].get(v, 0)}" for v in domain)
        say(f"  {knob}{'*' if knob in space.run_time_knobs else ''}  {words}")
    say(f"default: {default}")
    say(f"derived: {Config(derived)}")
    say("rules:")
    _print_rules((Violation(rule.name, rule.reason), "") for rule in space.rules)


def refuse(space: Space, problem: Problem, fixed: Mapping[str, tuple[Value, ...]]) -> None:
    """Raise because nothing is legal, naming the rules that the first choice of values meets.

    Raises:
        UsageError: Always.
        ProblemError: No config computes the problem, whatever is fixed.
    """
    names = [f"{v.rule}: {v.reason}" for v, _, _ in blockers(space, problem, fixed)]
    lines = "\n  ".join(names) or "the family does not accept this problem"
    words = " ".join(f"{knob}={','.join(map(format_value, values))}" for knob, values in fixed.items())
    raise UsageError(f"no legal config for {problem} on {space.arch} with {words or 'any knobs'}:\n  {lines}")


def _lint(space: Space, args: argparse.Namespace) -> int:
    asked = bool(args.shape or args.shapes)
    problems = [item.problem for item in named_problems(args)] if asked else list(_typical(space.family))
    unused = space.unreachable(problems)
    if args.json:
        rows: list[Json] = [{"knob": knob, "value": format_value(value)} for knob, value in unused]
        say_json({"arch": space.arch.name, "problems": [str(p) for p in problems], "unused": rows})
        return 0
    for knob, value in unused:
        say(f"{knob}={format_value(value)}: no legal config uses it")
    say(f"{len(unused)} unused knob values over {len(problems)} problems on {space.arch}", error=True)
    return 0


def _typical(family: str) -> Sequence[Problem]:
    """Problems that between them should reach every knob value: extreme sizes, layouts and dtypes."""
    sizes = ("4096x4096x4096", "16x8192x8192", "256x256x65536", "4x512x512x512")
    if family == BLOCK_SCALED_FAMILY:
        return [Problem.parse(f"{family} {size} {dtype} tn") for size, dtype in product(sizes, BLOCK_SCALED)]
    kinds = [
        *(f"bf16 {layout}" for layout in LAYOUTS),
        "bf16 tn out=fp32",
        "e4m3 tn",
        "e4m3 tn promote",
        "int8 tn",
    ]
    kinds.append("bf16 tn any_order")
    return [Problem.parse(f"{family} {size} {kind}") for size, kind in product(sizes, kinds)]
