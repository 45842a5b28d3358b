"""Write the documents that follow from the code: docs/api.md from docstrings, docs/knobs.md from spaces.

python tools/api_reference.py --write    # after a change of docstrings, knobs or domains
python tools/api_reference.py --check    # exit 1 if a document is out of date
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import cutegen
from cutegen import errors
from cutegen.arch import ARCHES, find_arch
from cutegen.deploy import pinned
from cutegen.errors import ConfigError, ResourceError
from cutegen.families import declared
from cutegen.families.registry import SOURCES, families, find_family, find_space
from cutegen.family import Family
from cutegen.kernel import Kernel
from cutegen.space import Space, format_value
from cutegen.torch_ops.recording import Recording
from cutegen.tuning import Row, TuneResult
from cutegen.tuning.model import Autotuned, Gain

ROOT = Path(__file__).resolve().parent.parent
#: Domains of more values than this are shown by their ends.
_MANY = 18
#: The family that docs/knobs.md begins with, and refers to.
_FIRST = "gemm"
_NOTE = "<!-- written by tools/api_reference.py; edit the docstrings instead -->"
#: What the reference begins with: names of ``cutegen`` by topic.
TOPICS = {
    "Operators": "gemm linear scaled_gemm gated_gemm grouped_gemm scaled_grouped_gemm activate gated swiglu "
    "geglu reglu rms_norm layer_norm softmax cross_entropy rope rope_",
    "Models": "optimize restore autotune record inductor_options",
    "Settings and serving": "configure load_table use warmup wait_for_kernels freeze counters reset_counters "
    "check_ranks",
    "Tuning": "AutoTuner Problem Epilogue Config Table",
    "Your own kernels": "load tunable exhaustive_search",
    "Inside": "Dispatcher Answer Kernels Store Arch find_arch CutegenError",
}
_SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises")


# --- the API ---


def api() -> str:
    """Return docs/api.md."""
    parts = [
        "# API reference",
        _NOTE,
        "The public API: `cutegen`, what its functions return, the errors, the loader of a pinned folder, "
        "and the declarations of kernels and families. Other names may change in any version.",
        *_index(),
        "## cutegen",
        *(
            text
            for name in sorted(cutegen.__all__, key=str.lower)
            for text in _entry(f"cutegen.{name}", name)
        ),
        "## What `record` and `autotune` return",
        *_class("record.Recording", Recording),
        *_class("autotune.Autotuned", Autotuned),
        *_class("autotune.Gain", Gain),
        "## Results of tuning",
        *_class("tuning.TuneResult", TuneResult),
        *_class("tuning.Row", Row),
        "## Errors",
        "All are in `cutegen.errors`, and all are `CutegenError`.",
        *(text for name in errors.__all__ for text in _member(errors, "errors", name)),
        "## pinned, the loader in a deployment folder",
        *(text for name in pinned.__all__ for text in _member(pinned, "pinned", name)),
        "## Declaring a kernel of your own",
        "See [own_kernel.md](own_kernel.md). These are in `cutegen.kernel`, beside `read`, `write`, `update` "
        "and `scalar`, which are those of the next section.",
        *_class("kernel.Kernel", Kernel),
        "## Declaring a kernel family",
        "See [new_family.md](new_family.md). These are in `cutegen.families.declared` and `cutegen.family`.",
        *(text for name in declared.__all__ for text in _member(declared, "declared", name)),
        *_class("family.Family", Family),
    ]
    return "\n\n".join(parts) + "\n"


def _index() -> Iterator[str]:
    """Return a table for each topic: names, and the first sentence of what they say."""
    for topic, names in TOPICS.items():
        rows = [f"| [`{name}`](#{_anchor(name)}) | {_summary(name)} |" for name in names.split()]
        yield "\n".join([f"| {topic} | |", "|---|---|", *rows])


def _anchor(name: str) -> str:
    """Return what GitHub calls the heading of a name."""
    found = getattr(cutegen, name)
    exception = "-exception" * (inspect.isclass(found) and issubclass(found, Exception))
    return "class-" * inspect.isclass(found) + f"cutegen{name.lower()}{exception}"


def _summary(name: str) -> str:
    """Return the first sentence of a docstring, of whose paragraph the rest may follow."""
    first = _inline((inspect.getdoc(getattr(cutegen, name)) or "").split("\n\n")[0])
    return re.split(r"(?<=[.;:]) ", first)[0].rstrip(";:.").replace("|", "\\|")


def _entry(title: str, name: str) -> Iterator[str]:
    found = getattr(cutegen, name)
    if not isinstance(found, str):
        yield from _any(title, found)


def _member(module: Any, prefix: str, name: str) -> Iterator[str]:
    found = getattr(module, name)
    if callable(found):
        yield from _any(f"{prefix}.{name}", found)


def _any(title: str, found: Any) -> Iterator[str]:
    yield from _class(title, found) if inspect.isclass(found) else _function(title, found, "###")


def _class(title: str, found: type) -> Iterator[str]:
    bases = [base.__name__ for base in found.__bases__ if base is not object and base.__module__ != "abc"]
    yield f"### class `{title}`" + (f" ({', '.join(bases)})" if issubclass(found, Exception) else "")
    yield _text(inspect.getdoc(found) or "")
    if issubclass(found, Exception):
        return
    for name, member in vars(found).items():
        plain = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        if name.startswith("_") or not inspect.getdoc(plain):
            continue
        if isinstance(plain, (property, cached_property)):
            yield f"- `{name}`: {_inline(inspect.getdoc(plain) or '')}"
        elif inspect.isfunction(plain):
            yield from _function(name, plain, "####")


def _function(title: str, function: Callable[..., Any], mark: str) -> Iterator[str]:
    yield f"{mark} {title}"
    yield f"```\n{_wrapped(title.rpartition('.')[2] + _signature(function))}\n```"
    yield _text(inspect.getdoc(function) or "")


def _wrapped(call: str) -> str:
    """Return a call on one line, or with a line for every few arguments."""
    return "\n".join(textwrap.wrap(call, 100, subsequent_indent="    ", break_on_hyphens=False))


def _signature(function: Callable[..., Any]) -> str:
    """Return names and defaults of the parameters; docstrings say what they are."""
    shown, marked = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not marked:
            shown.append("*")
        marked = marked or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        stars = {str(parameter.VAR_POSITIONAL): "*", str(parameter.VAR_KEYWORD): "**"}
        star = stars.get(str(parameter.kind), "")
        default = "" if parameter.default is parameter.empty else f"={_default(parameter.default)}"
        shown.append(f"{star}{parameter.name}{default}")
    return f"({', '.join(shown)})"


def _default(value: object) -> str:
    text = value.__name__ if inspect.isbuiltin(value) else repr(value)
    return "..." if " at 0x" in text or len(text) > 40 else text


def _text(doc: str) -> str:
    """Return a docstring as Markdown: its sections become lists."""
    blocks = []
    for block in re.split(r"\n\n(?=\S)", doc):
        head, _, rest = block.partition(":\n")
        if head in _SECTIONS:
            items = re.split(r"\n(?=    \S)", rest)
            blocks.append(f"{head}:\n\n" + "\n".join(f"- {_item(item)}" for item in items))
        elif block.startswith("- "):
            blocks.append("\n".join(f"- {_inline(item)}" for item in re.split(r"(?:^|\n)- ", block)[1:]))
        else:
            blocks.append(_inline(block) if "\n    " not in block else _markup(block))
    return "\n\n".join(blocks)


def _item(item: str) -> str:
    name, colon, meaning = item.strip().partition(": ")
    if colon and re.fullmatch(r"[\w.*]+", name):
        return f"`{name}`: {_inline(meaning)}"
    return _inline(item)


def _inline(text: str) -> str:
    return _markup(" ".join(text.split()))


def _markup(text: str) -> str:
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    return text.replace("``", "`")


# --- the knobs ---


def knobs() -> str:
    """Return docs/knobs.md."""
    parts = [
        "# Knobs",
        _NOTE.replace("docstrings", "descriptions in cutegen/families, and the domains in spaces/,"),
        "A config gives a value to every knob of its space. Names are NVIDIA's where there is one. Values "
        "are in order of simplicity: among statistically tied configs the simpler one wins. A "
        "**run-time** knob is an argument of the compiled kernel: changing it compiles nothing. `python "
        "-m cutegen.space FAMILY --arch sm_90a --shape ...` shows which combinations are valid, and why "
        "others are not.",
    ]
    first = _domains(_FIRST)
    for names, domains in _alike(sorted(families(), key=lambda name: name != _FIRST)):
        family = find_family(names[0])
        parts += [f"## {', '.join(names)}", *(f"`{n}`: {find_family(n).meaning}." for n in names)]
        same = [
            knob for knob in domains if names[0] != _FIRST and _same_as_first(knob, family, domains, first)
        ]
        parts += [f"As for `{_FIRST}`: {', '.join(f'`{knob}`' for knob in same)}."] * bool(same)
        parts += [_knob(knob, family, found) for knob, found in domains.items() if knob not in same]
    return "\n\n".join(parts) + "\n"


def _alike(names: Sequence[str]) -> Iterator[tuple[list[str], dict[str, dict[str, Space]]]]:
    """Yield groups of families of which the document says the same, and the knobs of the first."""
    found: dict[str, tuple[list[str], dict[str, dict[str, Space]]]] = {}
    for name in names:
        domains = _domains(name)
        text = "".join(_knob(knob, find_family(name), spaces) for knob, spaces in domains.items())
        found.setdefault(text, ([], domains))[0].append(name)
    yield from found.values()


def _same_as_first(
    knob: str,
    family: Family,
    domains: Mapping[str, Mapping[str, Space]],
    first: Mapping[str, Mapping[str, Space]],
) -> bool:
    """Whether a knob has the meaning and, in each space, the values that it has in the first family."""
    spaces = first.get(knob, {})
    return family.knobs[knob] == find_family(_FIRST).knobs.get(knob) and all(
        name in spaces and spaces[name].domains[knob] == space.domains[knob]
        for name, space in domains[knob].items()
    )


def _domains(family: str) -> dict[str, dict[str, Space]]:
    """Return, for each knob of a family, the spaces that have it, by what they are called here."""
    found: dict[str, dict[str, Space]] = {}
    others = [(source, "", f", provider {source}") for source in SOURCES if source != "cutegen"]
    further = [("cutegen", name, f", {name}") for name in find_family(family).algorithms]
    for source, algorithm, note in (("cutegen", "", ""), *others, *further):
        for arch in ARCHES:
            try:
                space = find_space(family, find_arch(arch), source, algorithm)
            except (ConfigError, ResourceError):
                continue
            for knob in space.domains:
                found.setdefault(knob, {})[f"{arch}{note}"] = space
    return found


def _knob(knob: str, family: Family, spaces: Mapping[str, Space]) -> str:
    run_time = any(knob in space.run_time_knobs for space in spaces.values())
    lines = [f"### {knob}{' (run-time)' if run_time else ''}", "", family.knobs[knob], ""]
    values: dict[str, list[str]] = {}
    for name, space in spaces.items():
        values.setdefault(_values(space.domains[knob]), []).append(name)
    return "\n".join([*lines, *(f"- {'; '.join(names)}: {shown}" for shown, names in values.items())])


def _values(domain: Sequence[Any]) -> str:
    words = [f"`{format_value(value)}`" for value in domain]
    if len(words) <= _MANY:
        return ", ".join(words)
    return f"{len(words)} values: {', '.join(words[:8])}, ..., {', '.join(words[-3:])}"


DOCUMENTS: Mapping[str, Callable[[], str]] = {"docs/api.md": api, "docs/knobs.md": knobs}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true")
    what.add_argument("--check", action="store_true")
    args = parser.parse_args(argv)
    stale = []
    for name, make in DOCUMENTS.items():
        path, text = ROOT / name, make()
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if args.write:
                path.write_text(text, encoding="utf-8")
    if stale:
        print(f"{'written' if args.write else 'out of date'}: {', '.join(stale)}")
    return int(bool(stale) and args.check)


if __name__ == "__main__":
    sys.exit(main())
