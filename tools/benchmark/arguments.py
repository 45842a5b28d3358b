"""Arguments that many tools have; :mod:`cutegen.cli.args` has those that commands of cutegen have, too."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from cutegen.cli.args import file_path

__all__ = ["add_commit_argument", "add_out_argument", "out_and_commit"]


def add_out_argument(
    parser: argparse._ActionsContainer, meaning: str = "results file", *, required: bool = False
) -> None:
    """Add the argument that names the results file; ``meaning``: its help."""
    parser.add_argument("--out", type=file_path, required=required, metavar="FILE.json", help=meaning)


def add_commit_argument(parser: argparse._ActionsContainer) -> None:
    """Add the argument that gives the commit where a copy of the checkout came without its history."""
    parser.add_argument("--commit", default="", help="of the checkout, where git cannot tell")


def out_and_commit(description: str | None, argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments of a tool that has these two alone."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_out_argument(parser, required=True)
    add_commit_argument(parser)
    return parser.parse_args(argv)
