"""Command-line arguments that several commands share, and what they mean."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from cutegen.arch import ARCHES
from cutegen.errors import ResourceError, UsageError
from cutegen.families.options import read_options
from cutegen.families.ranges import Range, is_range, overlapping, range_ends
from cutegen.families.registry import families, find_family, load_families, load_kernel
from cutegen.families.shapes import NamedProblem, NamedRange, Shape, read_shapes_and_ranges
from cutegen.family import Family, Problem
from cutegen.measure.contention import BUSY_MODES
from cutegen.space import Space, Value, parse_value
from cutegen.system.publish import is_file_name
from cutegen.text import did_you_mean, printable, shown

__all__ = [
    "EXIT_CODES",
    "Parser",
    "add_busy_argument",
    "add_cache_argument",
    "add_family_argument",
    "add_json_argument",
    "add_kernel_arguments",
    "add_problem_arguments",
    "add_quiet_argument",
    "add_workers_argument",
    "file_path",
    "integer",
    "load_given_families",
    "named_problems",
    "named_shapes",
    "parse_fixed",
    "parse_set",
    "positive_float",
    "positive_int",
    "refuse_options",
    "word",
    "words",
]

EXIT_CODES = """exit codes:
  0    success
  2    bad usage: an argument, a shape, a shapes file, a knob
  3    the environment: no GPU, no compiler, an unusable cache, table or database
  130  interrupted
"""


#: Largest count and number of seconds that an argument may give; more would overflow what waits and counts.
_MOST = 2**31 - 1


class Parser(argparse.ArgumentParser):
    """A parser whose messages about the arguments cannot control the terminal."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # A word such as -1x64x64 is no option: whoever reads sizes and numbers says what is wrong with it.
        self._negative_number_matcher = re.compile(r"-\d")

    def error(self, message: str) -> NoReturn:
        """Print ``message`` and how to see the usage, then exit with status 2."""
        for word in message.removeprefix("unrecognized arguments: ").split():
            name = word.partition("=")[0].rstrip(":")
            if name.startswith("--") and name not in self._option_string_actions:
                message += did_you_mean(name, self._option_string_actions)
                break
        self.exit(
            2,
            printable(f"{self.prog}: error: {message}\n{self.prog} --help shows all options", keep="\n")
            + "\n",
        )


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
    if not is_file_name(text):
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a valid file name")
    return Path(text)


def word(text: str) -> str:
    """Return ``text``, which must not be empty; for ``argparse``."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{shown(text)} is empty; give a value, or leave the argument out")
    return text


def words(text: str) -> tuple[str, ...]:
    """Return the words of ``text``, which commas part, none of them empty; for ``argparse``."""
    found = tuple(word.strip() for word in text.split(","))
    if not all(found):
        raise argparse.ArgumentTypeError(f"{shown(text)} has an empty word; write one word, or several: A,B")
    return found


def add_problem_arguments(parser: argparse.ArgumentParser, *, ranges: bool = False) -> None:
    """Add the arguments that say what is to be computed; ``ranges``: a size may be a range."""
    group = parser.add_argument_group("problem")
    group.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="MxNxK",
        help="sizes of a problem as in its problem line: MxNxK for a GEMM, ROWSxCOLUMNS for a norm; "
        + ("one may be a range, such as 1..8192x7168x2048; repeatable" if ranges else "repeatable"),
    )
    group.add_argument(
        "--shapes",
        type=file_path,
        metavar="FILE.toml",
        help="file of problems: [[shape]] tables with id, sizes and options (docs/tuning.md)",
    )
    group.add_argument(
        "--dtype",
        type=word,
        help=f"dtype of the operands: {_values('dtype')}, or PyTorch's names (default: the first of the "
        "family; tf32, mxfp8 and nvfp4 are for Blackwell)",
    )
    group.add_argument(
        "--out-dtype",
        type=word,
        metavar="DTYPE",
        help="dtype of the output of a GEMM (default: --dtype if possible)",
    )
    group.add_argument(
        "--layout",
        type=word,
        help=f"GEMM: contiguous axis of A, then of B: {_values('layout', 'gemm')} (default kk, torch's "
        f"x @ w.T). Gated families: how gate and up are stored: {_values('layout', 'gated_gemm')} "
        "(default halves)",
    )
    group.add_argument(
        "--options",
        metavar="WORDS",
        help="further options of the problem, such as 'beta bias=n activation=relu any_order'",
    )
    add_kernel_arguments(group)
    parser.add_argument(
        "--arch", metavar="NAME", help=f"compile target: {', '.join(ARCHES)} (default: that of the local GPU)"
    )


def add_cache_argument(
    parser: argparse._ActionsContainer,
    holds: str,
    default: str = "CUTEGEN_CACHE_DIR, else XDG_CACHE_HOME/cutegen, else ~/.cache/cutegen",
) -> None:
    """Add the argument that names the cache folder.

    Args:
        parser: Where it is added.
        holds: What the command reads or writes there.
        default: What the help calls the folder that is used without it.
    """
    parser.add_argument(
        "--cache-dir",
        type=file_path,
        metavar="DIR",
        help=f"cache folder: {holds} (default: {default})",
    )


def add_busy_argument(parser: argparse._ActionsContainer) -> None:
    """Add the argument that says what becomes of a measurement while another process uses the GPU."""
    parser.add_argument(
        "--busy",
        choices=BUSY_MODES,
        default="wait",
        help="if another process uses the GPU: wait up to 10 minutes, warn and continue, or refuse to run "
        "(default wait)",
    )


def add_json_argument(parser: argparse._ActionsContainer, instead_of: str = "text") -> None:
    """Add the argument that asks for a document that programs read."""
    parser.add_argument(
        "--json", action="store_true", help=f"print one JSON document instead of {instead_of}"
    )


def add_quiet_argument(parser: argparse._ActionsContainer) -> None:
    """Add the argument that asks for no progress."""
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def add_workers_argument(parser: argparse._ActionsContainer) -> None:
    """Add the argument that says how many compilations run at a time."""
    parser.add_argument(
        "--workers",
        type=positive_int,
        metavar="N",
        help="compilations in parallel (default: one per core, fewer where memory is short)",
    )


def add_family_argument(parser: argparse.ArgumentParser, besides: str = "--kernel") -> None:
    """Add the argument that names the family, which is not needed with ``besides``."""
    parser.add_argument(
        "family",
        metavar="FAMILY",
        nargs="?",
        help=f"kernel family: {', '.join(families())}; not needed with {besides}",
    )


def add_kernel_arguments(parser: argparse._ActionsContainer) -> None:
    """Add the arguments that say which kernels there are beside those of the package."""
    parser.add_argument(
        "--families",
        type=file_path,
        metavar="DIR",
        help="folder with further kernel families, one folder each (docs/new_family.md)",
    )
    parser.add_argument(
        "--kernel",
        type=file_path,
        action="append",
        metavar="FILE.py",
        help="declaration file of your own kernel (docs/own_kernel.md); repeatable",
    )


def load_given_families(args: argparse.Namespace, *, needed: bool = True) -> None:
    """Make the families of ``--families`` and ``--kernel`` known, and see that the one asked for exists.

    The family is that of ``--kernel`` if none is named and there is one such file.

    Args:
        args: Of the command.
        needed: Whether there must be a family.

    Raises:
        FamilyError: A family is declared wrongly.
        UsageError: There is no such family, or the folder holds none, or none is named.
    """
    try:
        if args.families is not None:
            load_families(args.families)
        if args.kernel is not None:
            _take_kernels(args, [load_kernel(path).name for path in args.kernel], needed=needed)
        if args.family is not None:
            try:
                find_family(args.family)
            except ResourceError as error:
                hint = "; --families DIR adds families of your own, --kernel FILE.py a kernel"
                hint *= args.families is None
                raise UsageError(f"{error}{hint}") from error
        elif needed:
            raise UsageError(f"no FAMILY given; known: {', '.join(families())}; or --kernel FILE.py")
    except ResourceError as error:
        raise UsageError(str(error)) from error


def _take_kernels(args: argparse.Namespace, declared: list[str], *, needed: bool) -> None:
    """Set the family of the only declared kernel; of several the family is named, where one is needed."""
    if len(declared) == 1:
        args.family = args.family or declared[0]
    if args.family is None:
        if needed:
            raise UsageError(f"--kernel is given {len(declared)} times; name one of {', '.join(declared)}")
    elif args.family not in declared:
        files = ", ".join(map(str, args.kernel))
        raise UsageError(
            f"{files} declares {', '.join(declared)}, not {args.family}; leave out {args.family}"
        )


def named_problems(args: argparse.Namespace) -> tuple[NamedProblem, ...]:
    """Return the problems that the arguments ask for, without repeats.

    Raises:
        UsageError: There is none, a shape or shapes file is malformed, or a shape is a range.
        ProblemError: A shape is not one that the family computes.
    """
    found = named_shapes(args)
    for item in found:
        if isinstance(item, NamedRange):
            raise UsageError(
                f"{item.range} is a range of sizes, which tune, warm and explain take; valid here: single "
                "sizes"
            )
    return tuple(item for item in found if isinstance(item, NamedProblem))


def named_shapes(args: argparse.Namespace) -> tuple[Shape, ...]:
    """Return the problems and ranges of problems that the arguments ask for, without repeats.

    Raises:
        UsageError: There is none, a shape or shapes file is malformed, or two ranges overlap.
        ProblemError: A shape is not one that the family computes, or no kernel serves a range of that size.
    """
    family = find_family(args.family)
    if not args.shape and args.shapes is None:
        raise UsageError(
            f"no shape given; use --shape, such as --shape {family.example_shape}, or --shapes FILE.toml"
        )
    if not args.shape:
        refuse_options(args, args.shapes)
    given_options = _options(args, family)
    found = [_from_word(word, family, given_options) for word in args.shape]
    if args.shapes is not None:
        found += read_shapes_and_ranges(args.shapes, args.family)
    asked = [item.problem if isinstance(item, NamedProblem) else item.range for item in found]
    unique = dict(zip(reversed(asked), reversed(found), strict=True))
    if twice := overlapping(item for item in unique if isinstance(item, Range)):
        raise UsageError(f"ranges {twice[0]} and {twice[1]} overlap; join them or set them apart")
    return tuple(unique.values())[::-1]


def refuse_options(args: argparse.Namespace, *files: Path) -> None:
    """Refuse options of a problem where ``files`` say them.

    Raises:
        UsageError: One is given.
    """
    options = {"--dtype": args.dtype, "--out-dtype": args.out_dtype, "--layout": args.layout}
    options["--options"] = args.options
    given = [name for name, value in options.items() if value is not None]
    if given:
        states = "states" if len(files) == 1 else "state"
        names = ", ".join(map(str, files))
        raise UsageError(f"{given[0]} goes with --shape; {names} {states} it for each shape")


def _from_word(word: str, family: Family, options: Mapping[str, str | bool]) -> Shape:
    name = word.strip().lower()
    if not is_range(name):
        return NamedProblem(name, family.problem(family.parse_shape(word), options))
    low, high = (family.problem(family.parse_shape(end), options) for end in range_ends(name))
    return NamedRange(name, Range(low, high))


def _values(option: str, *named: str) -> str:
    """Return what an option of the shipped families, or of those that are named, may be."""
    found = [o.values for name in named or families() for o in find_family(name).options if o.name == option]
    return ", ".join(dict.fromkeys(value for values in found for value in values))


def _options(args: argparse.Namespace, family: Family) -> dict[str, str | bool]:
    """Return the options that the arguments give, by name; raises as :func:`read_options`."""
    given = {"dtype": args.dtype, "out": args.out_dtype, "layout": args.layout}
    return read_options(
        family, args.options or "", {name: value for name, value in given.items() if value is not None}
    )


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
