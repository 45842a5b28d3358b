"""The first draft of a declaration, from what the text of an entry tells. A person finishes it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cutegen.families.user.entry_source import EntrySource, Parameter

__all__ = ["draft"]

#: Parameters that are called so are taken for outputs where the text does not show what becomes of them.
_OUTPUTS = re.compile(
    r"m?[YyOoDd]\d*|m?([Oo]ut|[Oo]utput|dst|res|result|lse|LSE)(_\w+)?|\w+(_out|Out|[a-z]O)"
)
#: Parameters of constructors that are called so are taken for sizes, and for the dtype.
_SIZES = re.compile(r"n|k|d|size|head_dim\w*|hidden\w*|dim\w*|N|K|D")
_DTYPE = re.compile(r"\w*dtype\w*|\w*element_type\w*")
_FLOATS, _INTEGERS = re.compile(r"\b(float|Float\d+)\b"), re.compile(r"\b(int|U?[Ii]nt\d+)\b")


def draft(entry: str, source: EntrySource) -> str:
    """Return the text of a declaration file for ``entry``; what it cannot know is marked TODO."""
    parts = _Parts.of(source)
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", entry.partition(":")[2]).lower()
    sizes = ", ".join([f'"{parts.rows}": free', *(f'"{size}": fixed' for size in parts.sizes)])
    options = [f'"{parts.dtype}": ("bf16", "fp16", "fp32")']
    options += [f'"{name}": False' for name in parts.optional]
    lines = [
        f'"""How {entry} is tuned, checked and called: a draft, see docs/own_kernel.md."""',
        "",
        "from cutegen.kernel import Kernel, fixed, free, read, scalar, update, write  # noqa: F401",
        "",
        "kernel = Kernel(",
        f'    "{name}",',
        f'    "{_first_line(source.doc) or "TODO: what it computes"}",',
        f'    entry="{entry}",',
        "    # TODO: sizes of the tensors below. A free one is an argument; a fixed one is compiled in.",
        f"    sizes={{{sizes}}},",
        f"    options={{{', '.join(options)}}},",
        "    # TODO: what is read, written (write) or both (update); shapes.",
        "    arguments=(",
        *(f"        {_tensor(p, parts)}," for p in parts.tensors),
        *(f"        {_scalar(p)}" for p in parts.scalars),
        "    ),",
        *_left_out(source, parts),
        *_texts(source, parts.rows),
        *_knobs(parts.knobs, source),
        f'    rows="{parts.rows}",  # TODO: leave out if rows depend on each other',
        ")",
        "",
        "",
        *_functions(parts),
    ]
    return "\n".join(lines)


#: What the size that rows are counted with is called, and a row's length: the first that is no argument.
_ROWS, _LENGTH = ("m", "rows", "row_count"), ("n", "columns", "row_length")


@dataclass(frozen=True)
class _Parts:
    """Parameters of an entry by what they are taken for."""

    tensors: tuple[Parameter, ...]
    outputs: tuple[str, ...]
    updated: tuple[str, ...]
    optional: tuple[str, ...]
    scalars: tuple[Parameter, ...]
    dtype: str
    rows: str
    sizes: tuple[str, ...]
    knobs: tuple[Parameter, ...]

    @classmethod
    def of(cls, source: EntrySource) -> _Parts:
        read, written = source.uses.read, source.uses.written
        used = read | written
        tensors = tuple(p for p in source.call if _is_tensor(p) or (not p.annotation and p.name in used))
        named = {p.name for p in tensors if _OUTPUTS.fullmatch(p.name)} - read
        outputs = tuple(p.name for p in tensors if p.name in written | named)
        settings = [*(source.constructor or ()), *(p for p in source.call if _is_setting(p))]
        dtypes = [p.name for p in settings if _DTYPE.fullmatch(p.name)]
        sizes = [p.name for p in settings if p.name not in dtypes and _SIZES.fullmatch(p.name)] or [
            _free(_LENGTH, source)
        ]
        taken = {*dtypes, *sizes, *_names(source.knobs)}
        others = [p for p in source.call if p not in tensors and not _is_setting(p) and not _is_left_out(p)]
        return cls(
            tensors,
            outputs or tuple(p.name for p in tensors[-1:]),
            tuple(name for name in outputs if name in read),
            tuple(p.name for p in tensors if _may_be_absent(p) or p.name in source.uses.optional),
            tuple(p for p in others if "tream" not in p.name + p.annotation),
            dtypes[0] if dtypes else "dtype",
            _free(_ROWS, source),
            tuple(sizes),
            tuple(p for p in settings if p.name not in taken),
        )


def _functions(parts: _Parts) -> list[str]:
    """Return rules and reference, to be filled in."""
    missing = f"say what is right: {', '.join(parts.outputs)}"
    written = {*parts.outputs} - {*parts.updated}
    inputs = [p.name for p in (*parts.tensors, *parts.scalars) if p.name not in written]
    return [
        "# TODO: rules that the kernel does not check itself, such as what fits registers:",
        "# @kernel.rule",
        "# def fits(n, threads):",
        '#     """Why a config that breaks it is of no use."""',
        "#     return n <= 128 * threads",
        "",
        "",
        "@kernel.reference",
        f"def reference({', '.join(inputs)}):",
        '    """Tensors are fp64; return the outputs by name."""',
        f"    raise NotImplementedError({missing!r})",
        "",
    ]


def _free(names: Sequence[str], source: EntrySource) -> str:
    """Return the first of ``names`` that no parameter has."""
    taken = {p.name for p in (*(source.constructor or ()), *source.call)}
    return next((name for name in names if name not in taken), names[-1])


def _names(knobs: Iterable[str]) -> set[str]:
    return {name.strip() for key in knobs for name in key.split(",")}


def _is_tensor(parameter: Parameter) -> bool:
    return "Tensor" in parameter.annotation or "Pointer" in parameter.annotation


def _is_left_out(parameter: Parameter) -> bool:
    """Whether a parameter of a launch may stay what it is by default, because it is, or may be, no number."""
    text = parameter.annotation
    if "tream" in parameter.name + text:
        return False
    return bool(parameter.default) and (
        _may_be_absent(parameter) or not (_FLOATS.search(text) or _INTEGERS.search(text))
    )


def _is_setting(parameter: Parameter) -> bool:
    """Whether a parameter of a launch is compiled in."""
    return "Constexpr" in parameter.annotation


def _first_line(doc: str) -> str:
    return next(iter(doc.splitlines()), "").rstrip(".").replace('"', "'")


def _may_be_absent(parameter: Parameter) -> bool:
    """Whether None is a tensor of that parameter: an option of its name then says whether it is there."""
    return "Optional" in parameter.annotation or "None" in (parameter.annotation + parameter.default)


def _tensor(parameter: Parameter, parts: _Parts) -> str:
    name = parameter.name
    kind = "update" if name in parts.updated else "write" if name in parts.outputs else "read"
    when = f', when="{name}"' if name in parts.optional else ""
    return f'{kind}("{name}", "{parts.dtype}", ("{parts.rows}", "{parts.sizes[0]}"){when})'


def _scalar(parameter: Parameter) -> str:
    if _INTEGERS.search(parameter.annotation) and not _FLOATS.search(parameter.annotation):
        return f'scalar("{parameter.name}", "int32", (1, 3)),  # TODO: the usual value, and another one'
    return f'scalar("{parameter.name}", "fp32", (1.0, -0.5)),  # TODO: the usual value, and another one'


def _left_out(source: EntrySource, parts: _Parts) -> list[str]:
    """Return a line on parameters of the launch that the draft does not pass."""
    settled = {p.name for p in parts.tensors}
    names = [p.name for p in source.call if p.name not in settled and not _is_setting(p) and _is_left_out(p)]
    return [f"    # Left at what they are by default: {', '.join(names)}."] if names else []


def _texts(source: EntrySource, rows: str) -> list[str]:
    """Return ``construct``, ``call`` and ``launch`` where they do not follow from names."""
    if source.constructor is None:
        return ['    construct="TODO",']
    if source.kind == "kernel":
        return [f'    launch="grid=({rows}, 1, 1), block=(threads, 1, 1)",  # TODO']
    return []


def _knobs(knobs: Sequence[Parameter], source: EntrySource) -> list[str]:
    if source.knobs:
        return ["    # Knobs are those of tunable beside the entry."]
    if not knobs and source.kind == "kernel":
        return ['    knobs={"threads": (128, 256)},  # TODO']
    if not knobs:
        return ["    # TODO: knobs={...}: there is no parameter left to choose."]
    values = [p.default if p.default not in ("", "None") else "TODO" for p in knobs]
    shown = ", ".join(f'"{p.name}": ({value},)' for p, value in zip(knobs, values, strict=True))
    known = "TODO" not in values
    return [
        "    # TODO: more values of each, simplest first."
        if known
        else "    # TODO: values, simplest first.",
        f"    knobs={{{shown}}},",
    ]
