"""The texts ``construct`` and ``call`` of a declaration: which names they use, and what these become."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from cutegen.errors import FamilyError
from cutegen.families.user.declaration import Kernel, free
from cutegen.text import did_you_mean

__all__ = ["call_text", "compiled_names", "construct_text", "names_in", "require_texts", "rewritten"]

#: What the texts may use besides names of the declaration.
_MODULES = ("cutlass", "cute", "module")
_BUILTINS = ("True", "False", "None", "int", "float", "bool", "tuple", "list", "len", "min", "max", "range")


def call_text(kernel: Kernel) -> str:
    """Return the arguments of the launch: as declared, else all arguments in order, then the stream.

    A function that is called as it is gets knobs and derived values by name besides.
    """
    if kernel.call is not None:
        return kernel.call
    if (own := _by_name(kernel)) is not None:
        return own
    names = [a.name for a in kernel.arguments]
    names += [name for name in kernel.functions.integers if name not in kernel.grid]
    names += [kernel.scratch] if kernel.scratch else []
    names += ["stream"] if kernel.takes_stream and not kernel.launch else []
    if construct_text(kernel) is None and not kernel.launch:
        names += [f"{name}={name}" for name in (*kernel.domains, *kernel.functions.derived)]
    return ", ".join(names)


def construct_text(kernel: Kernel) -> str | None:
    """Return the arguments of the constructor: as declared, else what a class's own names; None for no class.

    Raises:
        FamilyError: The class takes something that is not declared.
    """
    if kernel.construct is not None or kernel.source is None or kernel.source.kind != "class":
        return kernel.construct
    name, parameters = kernel.entry.partition(":")[2], kernel.source.constructor
    if parameters is None:
        raise FamilyError(f"{name} takes its constructor from elsewhere; say construct='...'")
    known = [name for name in kernel.plain_names if kernel.sizes.get(name) != free]
    known += kernel.functions.derived
    for parameter in parameters:
        if parameter.name not in known and not parameter.optional:
            raise FamilyError(
                f"the constructor of {name} takes {parameter.name}{did_you_mean(parameter.name, known)}, "
                f"which is not declared; known: {', '.join(known)}; or say construct='...'"
            )
    return ", ".join(f"{p.name}={p.name}" for p in parameters if p.name in known)


def _by_name(kernel: Kernel) -> str | None:
    """Return the arguments by the names of the entry's own parameters; None if one of them is unknown."""
    if kernel.source is None:
        return None
    functions = kernel.functions
    known = {
        *kernel.domains,
        *functions.derived,
        *functions.integers,
        *kernel.options,
        *kernel.sizes,
        "stream",
    }
    arguments = {a.name for a in kernel.arguments} | ({kernel.scratch} if kernel.scratch else set())
    found = [p.name for p in kernel.source.call if p.name in known | arguments or not p.optional]
    if not arguments <= set(found) or not set(found) <= known | arguments:
        return None
    return ", ".join(f"{name}={name}" for name in found)


def names_in(text: str, what: str) -> tuple[str, ...]:
    """Return the names that a list of arguments uses, in order, those of comprehensions left out.

    Raises:
        FamilyError: It is no list of arguments.
    """
    tree = _parse(text, what)
    bound = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    found = [n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
    return tuple(name for name in dict.fromkeys(found) if name not in bound)


def _parse(text: str, what: str) -> ast.Call:
    try:
        tree = ast.parse(f"_({text})", mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise FamilyError(f"{what}={text!r} is not a list of arguments: {error}") from error
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name) or tree.func.id != "_":
        raise FamilyError(f"{what}={text!r} is not a list of arguments, such as 'x, y, stream'")
    tree.func = ast.Constant(value=None)
    return tree


def rewritten(text: str, names: Mapping[str, str]) -> str:
    """Return a list of arguments in which some names are replaced by other expressions."""

    class Rename(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            new = names.get(node.id)
            return node if new is None else ast.parse(new, mode="eval").body

    tree = Rename().visit(_parse(text, "call"))
    words = [ast.unparse(argument) for argument in tree.args]
    words += [
        f"{keyword.arg}={ast.unparse(keyword.value)}" if keyword.arg else f"**{ast.unparse(keyword.value)}"
        for keyword in tree.keywords
    ]
    return ", ".join(words)


def compiled_names(kernel: Kernel) -> tuple[str, ...]:
    """Return the names that ``construct`` and ``call`` use, less those that only a launch knows.

    A template may use them all.
    """
    if kernel.template:
        return (*kernel.domains, *kernel.functions.derived)
    texts = {"construct": construct_text(kernel) or "", "call": call_text(kernel), "launch": kernel.launch}
    names = [name for what, text in texts.items() for name in names_in(text, what)]
    return tuple(name for name in names if name not in kernel.functions.integers)


def require_texts(kernel: Kernel) -> None:
    """Do nothing if ``construct`` and ``call`` use what there is, and every knob is of use.

    Raises:
        FamilyError: A name stands for nothing, or a knob for nobody.
    """
    if kernel.template:
        return
    known = [name for name in kernel.plain_names if kernel.sizes.get(name) != free]
    known += [*kernel.functions.derived, *_MODULES, *_BUILTINS]
    _require("construct", construct_text(kernel) or "", known)
    known += [*kernel.sizes, *(a.name for a in kernel.arguments), *kernel.functions.integers, "stream"]
    known += [kernel.scratch] if kernel.scratch else []
    _require("call", call_text(kernel), known)
    _require("launch", kernel.launch, known)
    _require_all_used(kernel)
    _require_fitting(kernel)


def _require(what: str, text: str, known: list[str]) -> None:
    for name in names_in(text, what):
        if name not in known:
            shown = [k for k in known if k not in _BUILTINS]
            raise FamilyError(
                f"{what}={text!r} uses {name}{did_you_mean(name, known)}; valid: {', '.join(shown)}"
            )


def _require_fitting(kernel: Kernel) -> None:
    """See that the entry takes what a launch passes, as far as its text tells."""
    source = kernel.source
    if source is None or source.open_call or (source.kind != "class" and construct_text(kernel) is not None):
        return
    text, taken = call_text(kernel), [parameter.name for parameter in source.call]
    tree = _parse(text, "call")
    if any(isinstance(a, ast.Starred) for a in tree.args) or not all(k.arg for k in tree.keywords):
        return
    given = [*taken[: len(tree.args)], *(k.arg for k in tree.keywords if k.arg)]
    lacking = [p.name for p in source.call if not p.optional and p.name not in given]
    twice = [name for name in given if given.count(name) > 1]
    strange = [name for name in given if name not in taken]
    if kernel.call is None and (strange or twice or len(tree.args) > len(taken)):
        strange = [a.name for a in kernel.arguments if a.name not in taken] or strange
    many = len(tree.args) - len(taken)
    problems = [f"{name} is none of them" for name in strange] + [f"{name} is passed twice" for name in twice]
    problems += [f"{many} are too many"] * (many > 0) + [f"{name} is not passed" for name in lacking]
    if problems:
        name = kernel.entry.partition(":")[2]
        raise FamilyError(f"{name} takes {', '.join(taken)}; of call={text!r} {problems[0]}; say call='...'")


def _require_all_used(kernel: Kernel) -> None:
    """See that nothing is declared in vain: it would be tuned, or passed, without any effect."""
    called = names_in(call_text(kernel), "call")
    for argument in kernel.arguments:
        if argument.name not in called:
            raise FamilyError(f"argument {argument.name} is not passed: call={call_text(kernel)!r} lacks it")
    if "stream" not in called and kernel.takes_stream and not kernel.launch:
        raise FamilyError(
            f"call={call_text(kernel)!r} passes no stream, so the kernel would run on another one; if the "
            "entry takes none, declare takes_stream=False"
        )
    used = _reaching(kernel, (*compiled_names(kernel), *kernel.functions.integers))
    for knob in kernel.domains:
        if knob not in used:
            raise FamilyError(f"knob {knob} is used neither by construct nor by call nor by an integer()")


def _reaching(kernel: Kernel, names: tuple[str, ...]) -> set[str]:
    functions = kernel.functions
    scratch = functions.single.get("scratch")
    waiting, found = [*names, *(scratch.names if scratch else ())], set[str]()
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            function = functions.derived.get(name) or functions.integers.get(name)
            waiting += function.names if function else ()
    return found
