"""The ``cutegen`` command: hands each subcommand to its module."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from cutegen import __version__
from cutegen.cli.exit_codes import EXIT_OK, EXIT_USAGE, run_command
from cutegen.cli.wrapped_text import say
from cutegen.text import did_you_mean

__all__ = ["main"]

#: Each is a module of this package.
_COMMANDS = {
    "tune": "find the fastest kernel for each shape",
    "space": "show which configs are valid, and why others are not",
    "explain": "show which config a call would use, and why",
    "warm": "compile kernels before the first calls that need them",
    "calibrate": "fit the performance model to the local GPU",
    "shrink": "reduce a family's space to the few configs that some shapes need",
    "declare": "write a first draft of the declaration file of your own kernel",
    "pin": "export winners into a folder that needs neither cutegen nor a compiler",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that ``argv`` names and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    return run_command(lambda: _answer(words))


def _answer(words: list[str]) -> int:
    """Run the subcommand, or print what is asked of the command itself, and return the exit code."""
    if words and words[0] in _COMMANDS:
        # Imported here, since that takes half a second in which Ctrl-C ends the command as it does later.
        module = importlib.import_module(f"cutegen.cli.{words[0]}")
        code: int = module.main(words[1:])
        return code
    if words and words[0] == "--version":
        say(f"cutegen {__version__}")
        return EXIT_OK
    if words and not words[0].startswith("-"):
        say(f"cutegen: unknown command {words[0]!r}{did_you_mean(words[0], _COMMANDS)}", error=True)
    asked = bool(words) and words[0] in {"-h", "--help"}
    say(_usage(), error=not asked)
    return EXIT_OK if asked else EXIT_USAGE


def _usage() -> str:
    lines = ["usage: cutegen COMMAND ...", "", "commands:"]
    lines += [f"  {name:<10} {what}" for name, what in _COMMANDS.items()]
    return "\n".join(
        [*lines, "", "cutegen COMMAND --help shows its options; cutegen --version prints the version"]
    )
