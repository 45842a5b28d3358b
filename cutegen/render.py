"""Config to text: the rendered kernel is the identity, so two configs that render alike are one kernel."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jinja2

from cutegen.arch import Arch
from cutegen.catalog import find_template, space_of
from cutegen.digest import digest
from cutegen.errors import RenderError
from cutegen.operator_api import require_package
from cutegen.problem import Problem, Signature
from cutegen.resources import resource_root
from cutegen.space import Config

__all__ = ["Source", "render"]


@dataclass(frozen=True)
class Source:
    """A rendered kernel: readable text that stands alone on ``cutlass``.

    Attributes:
        text: The Python source of the kernel.
        arch: Name of the target, such as ``sm_90a``.
        signature: The compiled-in part of the problem.
        config: The compiled-in part of the config.
    """

    text: str
    arch: str
    signature: Signature
    config: Config

    @property
    def digest(self) -> str:
        """32 hexadecimal digits that name the text."""
        return digest(self.text)


def render(problem: Problem, config: Config, arch: Arch) -> Source:
    """Return the kernel of ``config`` for problems of the same signature as ``problem``.

    Raises:
        ConfigError: The config breaks rules of its space.
        RenderError: The template asks for a value that nobody gave.
        ResourceError: There is no template for this family and architecture, or the package that the kernel
            comes from is not installed.
    """
    space = space_of(config, problem.family, arch)
    space.require(problem, config)
    compiled = space.compile_view(config)
    template = _template(find_template(problem.family, arch, config.source))
    derived = dict(space.derive(config, problem, arch))
    clash = compiled.keys() & derived.keys()
    if clash:
        raise RenderError(f"derived values {', '.join(sorted(clash))} shadow knobs of {problem.family}")
    if config.source == "operators":
        derived["package"] = require_package()
    try:
        text = template.render(**compiled, **derived, sig=problem.signature, arch=arch, knobs=str(compiled))
    except jinja2.UndefinedError as error:
        raise RenderError(f"template {problem.family}/{arch.family}: {error}") from error
    return Source(_tidy(text), arch.name, problem.signature, compiled)


def _tidy(text: str) -> str:
    """Strip trailing blanks and runs of more than two empty lines that absent parts leave behind."""
    text = "\n".join(line.rstrip() for line in text.splitlines())
    return re.sub(r"\n{4,}", "\n\n\n", text).strip("\n") + "\n"


@cache
def _template(path: Path) -> jinja2.Template:
    root = resource_root("templates")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(root),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    return environment.get_template(path.relative_to(root).as_posix())
