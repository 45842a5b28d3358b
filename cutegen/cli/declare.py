"""``python -m cutegen.declare``: the first draft of a declaration, from the signatures of an entry."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from cutegen.cli.args import Parser, file_path
from cutegen.cli.exit_codes import EXIT_OK, run_command
from cutegen.cli.wrapped_text import say
from cutegen.errors import FamilyError, UsageError
from cutegen.families.user.closure import find_source
from cutegen.families.user.draft import draft
from cutegen.families.user.entry_source import read_entry

__all__ = ["main"]

_EPILOG = """examples:
  python -m cutegen.declare my_norm:RMSNorm                       # prints it
  python -m cutegen.declare my_norm:RMSNorm --folder src --out src/my_norm_kernel.py

The command reads the source of the kernel and imports nothing. What it cannot know is marked TODO in the
draft. Then see docs/own_kernel.md.

exit codes:
  0    success
  2    bad usage: no such module or name, the file exists
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = _parser().parse_args(argv)
    return run_command(lambda: _run(args))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m cutegen.declare",
        description="Write a first draft of the declaration file of your own kernel.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "entry", metavar="MODULE:NAME", help="the kernel: a @cute.jit function, a @cute.kernel or a class"
    )
    parser.add_argument(
        "--folder",
        type=file_path,
        default=Path(),
        metavar="DIR",
        help="folder of the module (default: the current one)",
    )
    parser.add_argument(
        "--out",
        type=file_path,
        metavar="FILE.py",
        help="write the draft to this new file (default: print it)",
    )
    return parser


def _run(args: argparse.Namespace) -> int:
    module, colon, name = args.entry.partition(":")
    if not colon or not all(word.isidentifier() for word in (*module.split("."), name)):
        raise UsageError(f"{args.entry} is not of the form MODULE:NAME, such as my_norm:RMSNorm")
    try:
        find_source(module, args.folder.absolute())
        source = read_entry(args.entry, args.folder.absolute())
    except FamilyError as error:
        raise UsageError(str(error)) from error
    if source is None:
        raise UsageError(f"module {module} does not define {name} at its top level")
    text = draft(args.entry, source)
    if args.out is None:
        say(text)
        return EXIT_OK
    try:
        with args.out.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise UsageError(f"{args.out} exists already; name another file") from error
    except OSError as error:
        raise UsageError(f"{args.out} cannot be written: {error.strerror}") from error
    file = shlex.quote(str(args.out))
    say(f"finish what is marked TODO, then: python -m cutegen.space --kernel {file} --shape ...")
    return EXIT_OK
