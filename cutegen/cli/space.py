"""``python -m cutegen.space``: list, count, explain and lint the configs of a kernel family."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from cutegen.arch import Arch, find_arch
from cutegen.cli.args import (
    EXIT_CODES,
    Parser,
    add_family_argument,
    add_json_argument,
    add_problem_arguments,
    load_given_families,
    named_problems,
    parse_set,
    positive_int,
)
from cutegen.cli.exit_codes import run_command
from cutegen.cli.wrapped_text import fold, line_width, say, say_json
from cutegen.digest import Json
from cutegen.errors import UsageError
from cutegen.families.registry import SOURCES, find_family, find_space, space_of
from cutegen.family import Problem
from cutegen.search.defaults import default_config
from cutegen.search.strategies import spread
from cutegen.space import Config, Space, Value, Violation, format_value
from cutegen.space.census import MOST_COMPLETIONS, Census, blockers, take_census

__all__ = ["main", "refuse"]

_EXAMPLES = """examples:
  python -m cutegen.space gemm --arch sm_90a --shape 4096x4096x4096             # count, knobs, rules
  python -m cutegen.space gemm --arch sm_90a --shape 4096x4096x4096 --explain tile_shape_mn=256x256
  python -m cutegen.space gemm --arch sm_90a --shape 4096x4096x4096 --set tile_shape_mn=128x256 --list 10
  python -m cutegen.space gemm --arch sm_90a --lint
  python -m cutegen.space --kernel my_norm_kernel.py --arch sm_90a --shape 4096x4096

Nothing is compiled or measured. docs/knobs.md describes every knob.

"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = _parser().parse_args(argv)
    return run_command(lambda: _run(args))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m cutegen.space",
        description="Show which configs of a kernel family are valid for a problem, and why others are not.",
        epilog=_EXAMPLES + EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_family_argument(parser)
    add_problem_arguments(parser)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KNOB=V1,V2",
        help="consider only these values of a knob; repeatable",
    )
    parser.add_argument(
        "--source",
        choices=SOURCES,
        default="cutegen",
        help="provider of the kernels: cutegen, or NVIDIA's Operator API (default cutegen)",
    )
    parser.add_argument(
        "--algorithm",
        default="",
        metavar="NAME",
        help="a special algorithm of the family, such as few_rows of gemm (default: the general one)",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--explain",
        nargs="+",
        metavar="KNOB=VALUE",
        help="show which rules a config breaks, and why; the config may be partial",
    )
    what.add_argument(
        "--list",
        nargs="?",
        type=positive_int,
        const=20,
        metavar="N",
        help="print N valid configs, spread over the space (default 20)",
    )
    what.add_argument("--lint", action="store_true", help="report knob values that no valid config uses")
    add_json_argument(parser)
    return parser


def _run(args: argparse.Namespace) -> int:
    load_given_families(args)
    space = find_space(args.family, _arch(args.arch), args.source, args.algorithm)
    if args.lint:
        return _lint(space, args)
    documents = [_answer(space, item.problem, args) for item in named_problems(args)]
    if args.json:
        say_json(documents)
    return 0


def _arch(name: str | None) -> Arch:
    if name is not None:
        return find_arch(name)
    from cutegen.cli.target import device_at_hand

    return device_at_hand().arch


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
        _say_folded(f"{config} is not valid; it breaks:")
        _print_rules((v, "") for v in violations)
    elif example is None:
        _say_folded(f"{config} is not valid: each way to complete it breaks a rule:")
        _print_rules((v, f" ({_share(hits, total)})") for v, hits, total in stuck)
    elif partial:
        _say_folded(f"{config} is valid; for example")
        _say_folded(f"  {example}")
    else:
        _say_folded(f"{config} is valid")


def _share(hits: int, total: int) -> str:
    """Say how many completions a rule rejects, and whether all were tried."""
    what = "a sample of completions" if total >= MOST_COMPLETIONS else "the completions"
    return f"rejects {100 * hits / total:.0f} % of {what}, {hits} of {total}"


def _say_folded(text: str) -> None:
    say("\n".join(fold(text, line_width())))


def _print_rules(rules: Iterable[tuple[Violation, str]]) -> None:
    for violation, note in rules:
        _say_folded(f"  {violation.rule}{note}: {violation.reason}")


def _list(
    space: Space, problem: Problem, fixed: Mapping[str, tuple[Value, ...]], args: argparse.Namespace
) -> Json:
    configs = _spread_out(space, problem, fixed, args.list)
    if not configs:
        refuse(space, problem, fixed)
    if not args.json:
        for config in configs:
            _say_folded(f"  {config}")
    return {"problem": str(problem), "configs": [config.to_json() for config in configs]}


def _spread_out(
    space: Space, problem: Problem, fixed: Mapping[str, tuple[Value, ...]], count: int
) -> list[Config]:
    """Return ``count`` valid configs at even distances, in the order of the space."""
    if count == 1:
        return list(islice(space.configs(problem, fixed), 1))
    total = sum(1 for _ in space.configs(problem, fixed))
    places = set(spread(range(total), count))
    return [config for at, config in enumerate(space.configs(problem, fixed)) if at in places]


def _summary(space: Space, problem: Problem, fixed: Mapping[str, tuple[Value, ...]], quiet: bool) -> Json:
    census = take_census(space, problem, fixed)
    if not census.legal:
        refuse(space, problem, fixed)
    default = default_config(space, problem)
    derived = space_of(default, space.family, space.arch).derive(default, problem, space.arch)
    if not quiet:
        _print_summary(space, fixed, census, default, derived)
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


def _print_summary(
    space: Space,
    fixed: Mapping[str, tuple[Value, ...]],
    census: Census,
    default: Config,
    derived: Mapping[str, Value],
) -> None:
    _say_folded(
        f"{census.legal} valid configs of {census.raw} combinations; {census.classes} kernels to compile"
    )
    _say_folded(
        "knobs (value:valid configs, simplest first; * = run-time knob, changing it compiles nothing):"
    )
    for knob, domain in space.domains.items():
        counts = census.used[knob]
        words = " ".join(f"{format_value(v)}:{counts[v]}" for v in domain if counts.get(v))
        unused = sum(not counts.get(v) for v in fixed.get(knob, domain))
        words += f" ({unused} more, not valid here)" if unused else ""
        _say_folded(f"  {knob}{'*' if knob in space.run_time_knobs else ''}  {words}")
    _say_folded(f"default: {default}")
    if derived:
        _say_folded(f"derived: {Config(derived)}")
    say("rules:")
    _print_rules((Violation(rule.name, rule.reason), "") for rule in space.rules)


def refuse(space: Space, problem: Problem, fixed: Mapping[str, tuple[Value, ...]]) -> None:
    """Raise because nothing is valid, naming the rules that the first choice of values meets.

    Raises:
        UsageError: Always.
        ProblemError: No config computes the problem, whatever is fixed.
    """
    names = [f"{v.rule}: {v.reason}" for v, _, _ in blockers(space, problem, fixed)]
    lines = "\n  ".join(names) or "the family does not accept this problem"
    words = " ".join(f"{knob}={','.join(map(format_value, values))}" for knob, values in fixed.items())
    given = f" with {words}" if words else ""
    raise UsageError(f"no config is valid for {problem} on {space.arch}{given}:\n  {lines}")


def _lint(space: Space, args: argparse.Namespace) -> int:
    asked = bool(args.shape or args.shapes)
    named = [item.problem for item in named_problems(args)] if asked else []
    problems = named or list(find_family(space.family).typical())
    if not problems:
        raise UsageError(
            f"{space.family} names no problems to look at; give --shape, or examples= in the declaration"
        )
    unused = space.unreachable(problems)
    if args.json:
        rows: list[Json] = [{"knob": knob, "value": format_value(value)} for knob, value in unused]
        say_json({"arch": space.arch.name, "problems": [str(p) for p in problems], "unused": rows})
        return 0
    for knob, value in unused:
        say(f"{knob}={format_value(value)}: no valid config uses it")
    say(f"{len(unused)} unused knob values over {len(problems)} problems on {space.arch}", error=True)
    return 0
