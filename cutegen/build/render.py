"""Config to text: the rendered kernel is the identity, so two configs that render alike are one kernel."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from cutegen.arch import Arch
from cutegen.digest import digest
from cutegen.errors import RenderError
from cutegen.families.registry import find_family, find_template, space_of
from cutegen.families.resources import resource_root
from cutegen.family import Problem, Signature
from cutegen.space import Config, Value

if TYPE_CHECKING:
    from cutegen.families.user.closure import Opening

__all__ = ["Source", "recipe_of", "render", "template_files"]

#: A template that another one names.
_REFERENCE = re.compile(r'{%-?\s*(?:extends|from|import|include)\s+"([^"]+)"')


@dataclass(frozen=True)
class Source:
    """A rendered kernel: readable text that stands alone on ``cutlass``, or opens modules of users.

    Attributes:
        text: The Python source of the kernel.
        arch: Name of the target, such as ``sm_90a``.
        signature: The compiled-in part of the problem.
        config: The compiled-in part of the config.
        opening: How to open the modules of users that it imports; None if it imports none.
        recipe: What :func:`recipe_of` says about it; empty for text that did not come from rendering.
    """

    text: str
    arch: str
    signature: Signature
    config: Config
    opening: Opening | None = field(default=None, compare=False)
    # Only rendering sets it, so a copy with other text has none.
    recipe: str = field(init=False, default="", compare=False)

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
    # The text names the knobs, so equal configs must name them in one order: files may sort them otherwise.
    config = Config({knob: config[knob] for knob in space.domains})
    compiled = space.compile_view(config)
    template = _template(find_template(problem.family, arch, config.source, config.algorithm))
    derived = dict(space.derive(config, problem, arch))
    clash = compiled.keys() & derived.keys()
    if clash:
        raise RenderError(f"derived values {', '.join(sorted(clash))} shadow knobs of {problem.family}")
    recipe = _recipe(problem, compiled, derived, arch)
    family = find_family(problem.family)
    derived |= family.render_values(problem, compiled, derived, arch)
    try:
        text = template.render(**compiled, **derived, sig=problem.signature, arch=arch, knobs=str(compiled))
    except jinja2.TemplateError as error:
        raise RenderError(f"template {_place(error)}: {error}") from error
    source = Source(_tidy(text), arch.name, problem.signature, compiled, family.opening(arch))
    object.__setattr__(source, "recipe", recipe)
    return source


def recipe_of(problem: Problem, config: Config, arch: Arch) -> str:
    """Return a digest of everything that :func:`render` reads to make the kernel of a valid config.

    That is the template, the compiled-in parts of problem and config, what the space derives from them, the
    target, and this module. Equal recipes render alike, so an artifact that records its recipe is recognised
    without rendering, in a tenth of the time. The package behind ``source=operators`` is left out: an
    artifact does not need it.

    Raises:
        ResourceError: There is no template for this family and architecture.
    """
    space = space_of(config, problem.family, arch)
    return _recipe(problem, space.compile_view(config), space.derive(config, problem, arch), arch)


def _recipe(problem: Problem, compiled: Config, derived: Mapping[str, Value], arch: Arch) -> str:
    identity = find_family(problem.family).identity()
    return digest(
        {
            "base": _base(problem.family, arch, compiled.source, compiled.algorithm),
            "signature": repr(problem.signature),
            "config": compiled.to_json(),
            "derived": dict(derived),
            **({"identity": identity} if identity else {}),
        }
    )


@cache
def _base(family: str, arch: Arch, source: str, algorithm: str) -> str:
    """The part of a recipe that all kernels of a template share."""
    template = find_template(family, arch, source, algorithm)
    texts = {name: digest(text) for name, text in _texts(template).items()}
    own = digest(Path(__file__).read_bytes())  # how templates are filled and tidied
    # Where its calibration is stored changes no kernel, and another machine has it elsewhere.
    return digest([own, template.name, asdict(replace(arch, calibration=None)), texts])


def _tidy(text: str) -> str:
    """Strip trailing blanks and runs of more than two empty lines that absent parts leave behind."""
    text = "\n".join(line.rstrip() for line in text.splitlines())
    return re.sub(r"\n{4,}", "\n\n\n", text).strip("\n") + "\n"


def _without_last_newline(value: Any) -> Any:
    """Let ``{{ macro() }}`` on a line of its own add no empty line after the macro's text."""
    return value.removesuffix("\n") if isinstance(value, str) else value


@cache
def _texts(path: Path) -> Mapping[str, str]:
    """Return a template and those that it refers to, directly or not, by the names that they have there.

    They are read once: a checkout that changes under a running process changes neither its kernels nor its
    recipes.
    """
    found: dict[str, str] = {}
    waiting = [_name(path)]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = _file(name, path).read_text(encoding="utf-8")
            waiting += _REFERENCE.findall(found[name])
    return found


def template_files(path: Path) -> frozenset[Path]:
    """Return a template and those that it refers to, directly or not.

    Raises:
        RenderError: One of them is not there.
    """
    return frozenset(_file(name, path) for name in _texts(path))


def _file(name: str, path: Path) -> Path:
    """Return what ``path`` calls ``name``: a file beside it, or one that the package shares."""
    beside, shipped = path.parent / name, resource_root("templates") / name
    for file in (beside, shipped):
        if file.is_file():
            return file
    raise RenderError(f"template {path} refers to {name}; there is neither {beside} nor {shipped}")


def _name(path: Path) -> str:
    root = resource_root("templates")
    return path.relative_to(root if root in path.parents else path.parent).as_posix()


@cache
def _template(path: Path) -> jinja2.Template:
    texts = _texts(path)

    def load(name: str) -> tuple[str, str, Callable[[], bool]] | None:
        return (texts[name], str(_file(name, path)), lambda: True) if name in texts else None

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(load),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
        finalize=_without_last_newline,
    )
    try:
        return environment.get_template(_name(path))
    except jinja2.TemplateError as error:
        raise RenderError(f"template {_place(error)}: {error}") from error


def _place(error: jinja2.TemplateError) -> str:
    """Return file and line of a template that cannot be rendered."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"{error.filename}, line {error.lineno}"
    files = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.endswith(".j2")]
    return f"{files[-1].filename}, line {files[-1].lineno}" if files else "of unknown file"
