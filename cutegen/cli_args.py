"""Command-line arguments that several commands share, and what they mean."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from cutegen.arch import ARCHES
from cutegen.errors import UsageError
from cutegen.problem import ACTIVATIONS, BLOCK_SCALED, LAYOUTS, OUT_DTYPES, Problem, default_dtype
from cutegen.shapes import NamedProblem, parse_shape, read_shapes
from cutegen.space import Space, Value, parse_value
from cutegen.text import printable, shown

__all__ = [
    "EXIT_CODES",
    "Parser",
    "add_problem_arguments",
    "file_path",
    "integer",
    "named_problems",
    "parse_fixed",
    "parse_set",
    "positive_float",
    "positive_int",
]

EXIT_CODES = """exit codes:
  0    every shape has a winner (or: the question was answered)
  1    some shape has no winner
  2    bad usage: an argument, a shape, a shapes file, a knob
  3    the environment: no GPU, no compiler, an unusable cache, table or database
  130  interrupted; everything measured is kept and the same command continues
"""


#: Largest count and number of seconds that an argument may give; more would overflow what waits and counts.
_MOST = 2**31 - 1


class Parser(argparse.ArgumentParser):
    """A parser whose messages about the arguments cannot control the terminal."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and ``message``, then exit with status 2."""
        super().error(printable(message))


def integer(text: str) -> int:
    """Return the integer that ``text`` is, from -2147483647 to 2147483647; for ``argparse``."""
    if not re.fullmatch(r"-?[0-9]{1,10}", text) or abs(int(text)) > _MOST:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not an integer from -{_MOST} to {_MOST}")
    return int(text)


def positive_int(text: str) -> int:
    """Return the positive integer that ``text`` is, 2147483647 at most; for ``argparse``."""
    if not re.fullmatch(r"[0-9]{1,10}", text) or not 1 <= int(text) <= _MOST:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a positive integer up to {_MOST}")
    return int(text)


def positive_float(text: str) -> float:
    """Return the positive number that ``text`` is, 2147483647 at most; for ``argparse``."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= _MOST:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a positive number up to {_MOST}")
    return value


def file_path(text: str) -> Path:
    """Return the path that ``text`` is; for ``argparse``."""
    try:
        valid = b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        valid = False
    if not valid:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a valid file name")
    return Path(text)


def add_problem_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say what is to be computed."""
    group = parser.add_argument_group("problem")
    group.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="MxNxK",
        help="extents, BATCHxMxNxK for batches; repeatable",
    )
    group.add_argument(
        "--shapes",
        type=file_path,
        metavar="FILE.toml",
        help="[[shape]] tables: id m n k dtype layout [batch out ...]",
    )
    dtypes = ", ".join((*OUT_DTYPES, *BLOCK_SCALED))
    group.add_argument("--dtype", help=f"of A and B: {dtypes} (default: the family's first)")
    group.add_argument(
        "--out-dtype", help="of D: bf16, fp16, fp32, int32 (default: as --dtype where it can be)"
    )
    group.add_argument("--layout", help=f"of A and B: {', '.join(LAYOUTS)} (default tn, torch's x @ w.T)")
    group.add_argument(
        "--options",
        metavar="WORDS",
        help="what else a problem may say, such as 'beta bias=n act=relu any_order'; "
        f"activations: {', '.join(filter(None, ACTIVATIONS))}",
    )
    parser.add_argument(
        "--arch", metavar="NAME", help=f"target: {', '.join(ARCHES)} (default: the present GPU's)"
    )


def named_problems(args: argparse.Namespace) -> tuple[NamedProblem, ...]:
    """Return the problems that the arguments ask for, without repeats.

    Raises:
        UsageError: There is none, or a shape or shapes file is malformed.
        ProblemError: A shape is not one that the family computes.
    """
    if not args.shape and args.shapes is None:
        raise UsageError("no shape given; use --shape MxNxK or --shapes FILE.toml")
    options = {"--dtype": args.dtype, "--out-dtype": args.out_dtype, "--layout": args.layout}
    options["--options"] = args.options
    given = [name for name, value in options.items() if value is not None]
    if given and not args.shape:
        raise UsageError(f"{given[0]} goes with --shape; {args.shapes} states it for each shape")
    found = [_from_word(word, args) for word in args.shape]
    if args.shapes is not None:
        found += read_shapes(args.shapes, args.family)
    return tuple({item.problem: item for item in reversed(found)}.values())[::-1]


def _from_word(word: str, args: argparse.Namespace) -> NamedProblem:
    m, n, k, batch = parse_shape(word)
    out = f"out={args.out_dtype}" if args.out_dtype else ""
    dtype = args.dtype or default_dtype(args.family)
    line = f"{args.family} {batch}x{m}x{n}x{k} {dtype} {args.layout or 'tn'} {out} "
    line += args.options or ""
    return NamedProblem(word.strip().lower(), Problem.parse(line))


def parse_set(words: Sequence[str], space: Space, problem: Problem) -> Mapping[str, tuple[Value, ...]]:
    """Return the knobs that ``knob=v1,v2`` words restrict, with their values.

    Raises:
        UsageError: A word is not of that form or a knob is named twice.
        ConfigError: A knob or a value does not exist.
    """
    fixed = parse_fixed(words)
    for knob, values in fixed.items():
        for value in values:
            space.explain(problem, {knob: value})
    return fixed


def parse_fixed(words: Sequence[str]) -> dict[str, tuple[Value, ...]]:
    """Return what ``knob=v1,v2`` words say, whether or not there are such knobs and values.

    Raises:
        UsageError: A word is not of that form or a knob is named twice.
    """
    fixed: dict[str, tuple[Value, ...]] = {}
    for word in words:
        knob, equals, values = word.partition("=")
        if not equals or not knob or not all(values.split(",")):
            raise UsageError(f"--set {shown(word)} is not of the form knob=v1,v2")
        if knob in fixed:
            raise UsageError(f"--set names {knob} twice; write {knob}=v1,v2")
        fixed[knob] = tuple(dict.fromkeys(parse_value(value) for value in values.split(",")))
    return fixed
