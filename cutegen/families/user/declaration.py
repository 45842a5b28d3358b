"""What a declaration file says about a kernel: data, and functions whose parameters name what they need.

::

    kernel = Kernel(
        "my_rmsnorm",
        entry="my_norm:RMSNorm",
        sizes={"m": free, "n": fixed},
        options={"dtype": ("bf16", "fp16")},
        arguments=(read("x", "dtype", ("m", "n")), write("y", "dtype", ("m", "n"))),
        knobs={"threads": (128, 256)},
    )

    @kernel.reference
    def reference(x):
        return {"y": x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()}

Nothing here imports torch or the DSL, and nothing opens the kernel: it is named by a text.
"""

from __future__ import annotations

import functools
import inspect
import keyword
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_args

from cutegen.errors import CutegenError, FamilyError, SpaceError
from cutegen.families.declared import Declared
from cutegen.families.user.entry_source import read_entry
from cutegen.families.user.knob_values import Domains, Together, knob_value, read_configs, read_knobs
from cutegen.family import Repeat
from cutegen.space import Value
from cutegen.space.space import reason_of
from cutegen.text import did_you_mean

__all__ = ["Kernel", "Named", "fixed", "free"]

_F = TypeVar("_F", bound=Callable[..., Any])

#: What a size may be: an argument of the launch, so that one kernel serves every value; or compiled in.
free, fixed = "free", "fixed"
#: Beside knobs, sizes and options, what functions may ask for.
_CONTEXT = ("problem", "arch", "sm_count")
#: Names that the launch code, and functions of :func:`cutegen.load`, have for their own arguments.
_NOT_ARGUMENTS = ("config", "entry", "self", "stream")
#: Names that the adapter uses itself.
_RESERVED = (
    "stream",
    "entry",
    "module",
    "launch",
    "cutlass",
    "cute",
    "cuda",
    "adapter",
    "sig",
    "knobs",
    "source",
    "algorithm",
)
#: Integers that are the grid of a launch.
_AXES = ("grid_x", "grid_y", "grid_z")
_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class Named:
    """A function of a declaration and what its parameters name.

    Attributes:
        function: The function.
        names: Its parameters.
    """

    function: Callable[..., Any]
    names: tuple[str, ...]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Named:
        """Return ``function`` with the names of its parameters."""
        return cls(function, tuple(inspect.signature(function).parameters))

    def __call__(self, values: Mapping[str, Any] | Callable[[str], Any]) -> Any:
        """Call it with what its parameters name."""
        get = values.__getitem__ if isinstance(values, Mapping) else values
        return self.function(**{name: get(name) for name in self.names})

    def value(self, values: Mapping[str, Any] | Callable[[str], Any]) -> Any:
        """As a call.

        Raises:
            FamilyError: It raises something; the message has file and line, where the author's text does so.
        """
        try:
            return self(values)
        except CutegenError:
            raise
        except Exception as error:  # a user's function may raise anything
            raise FamilyError(
                f"{self._place(error)}: {self.function.__name__}() raised {type(error).__name__}: {error}"
            ) from error

    def refused(self, mistake: str) -> FamilyError:
        """Return the error that says where it is and what is wrong with it."""
        return FamilyError(f"{self._place(None)}: {self.function.__name__}() {mistake}")

    def _place(self, error: Exception | None) -> str:
        """Return file and line of what led to ``error`` in its own file; of its beginning for none."""
        frames = traceback.extract_tb(error.__traceback__) if error is not None else []
        frames = [frame for frame in frames if frame.filename != __file__]
        if not frames:
            code = inspect.unwrap(self.function).__code__
            return f"{code.co_filename}, line {code.co_firstlineno}"
        lines = [frame.lineno for frame in frames if frame.filename == frames[0].filename]
        return f"{frames[0].filename}, line {lines[-1]}"


@dataclass(frozen=True)
class _Functions:
    """The functions of a declaration, by what they are for."""

    rules: list[Named] = field(default_factory=list)
    derived: dict[str, Named] = field(default_factory=dict)
    integers: dict[str, Named] = field(default_factory=dict)
    baselines: dict[str, Named] = field(default_factory=dict)
    single: dict[str, Named] = field(default_factory=dict)


class Kernel:
    """A kernel that somebody wrote, and how it is tuned, checked and called.

    Args:
        name: Of the kernel: in problem lines, of the operator, in pinned folders.
        meaning: What it computes, in one line.
        entry: ``module:name`` of a ``@cute.jit`` function, a class, or a function that makes one of these.
            The module is looked for beside the declaration file, then where Python looks.
        template: Instead of an entry: a Jinja template beside the declaration file.
        sizes: For each size ``free`` or ``fixed``.
        options: For each option its values, the default first; False for a flag.
        arguments: What callers pass, made with ``read``, ``write``, ``update`` and ``scalar``.
        knobs: For each knob its values: integers, flags, texts or tuples of integers, simplest first. The key
            ``"a, b"`` names several knobs, whose values come together. By default what ``cutegen.tunable``
            says beside the entry.
        configs: Instead of knobs: the configs themselves, each with all knobs.
        default: What its author runs; by default the first config. It always competes, and is checked first.
            A function of what its parameters name may choose it.
        construct: Arguments with which the entry is called once, as Python text; names in it are fixed sizes,
            options, knobs and derived values. By default a class gets those that its constructor names, and
            any other entry is called as it is.
        call: Arguments of the launch, as Python text; names in it are also arguments, free sizes, integers,
            scratch and ``stream``. By default all arguments in order, then ``stream``. In both, ``cutlass``,
            ``cute`` and ``module``, that of the entry, are what they are in the kernel's own text.
        launch: For an entry that is a ``@cute.kernel``, not a function that launches one: what it is launched
            with, such as ``"grid=(m, 1, 1), block=(threads, 1, 1)"``, of the names of ``call``; or a function
            of each keyword, ``{"grid": lambda m, rows: (m // rows, 1, 1), "block": lambda threads: (threads,
            1, 1)}``. The grid is worked out at each launch, everything else is compiled in.
        takes_stream: Whether the entry takes a stream; if not, what it launches is given that of the call.
        rows: A size along which problems are independent: the reference is then worked out for some rows at a
            time, on the tensors that have it as their first dimension.
        aligned: The kernel needs rows that start at multiples of 16 bytes, or of the ``align_bytes`` of an
            argument. Others are then refused.
        any_order: Sums are added in order of arrival, so results may differ in their last bits.
        repeat: How a kernel that updates tensors is timed: ``restore``, the default, puts them back between
            timed spans; ``bounded`` goes on with what earlier launches left, whose values stay in their
            range, as those of a rotation do; ``idempotent`` too, and says that a second launch changes
            nothing more, which is checked.
        sm_count: What the entry is told when it asks for the number of multiprocessors while it is compiled;
            by default that of the target's main product.
        modules: Modules that the entry loads without an import statement that names them.
        environment: Variables that the entry reads by names that are not written out in its modules.
        examples: Shapes and options of problems that between them reach every knob value.
        tails: Small shapes on which every candidate is checked too; by default a few rows.

    Raises:
        FamilyError: The declaration contradicts itself; the message names what would be valid.
    """

    def __init__(
        self,
        name: str,
        meaning: str = "",
        *,
        entry: str = "",
        template: str = "",
        sizes: Mapping[str, str],
        arguments: Sequence[Declared],
        options: Mapping[str, Sequence[str] | bool] | None = None,
        knobs: Mapping[str, Sequence[Any]] | None = None,
        configs: Sequence[Mapping[str, Value]] = (),
        default: Mapping[str, Value] | Callable[..., Mapping[str, Value]] | None = None,
        construct: str | None = None,
        call: str | None = None,
        launch: str | Mapping[str, Any] = "",
        takes_stream: bool = True,
        rows: str = "",
        aligned: bool = True,
        any_order: bool = False,
        repeat: str = "",
        sm_count: int | None = None,
        modules: Sequence[str] = (),
        environment: Sequence[str] = (),
        examples: Sequence[str] = (),
        tails: Sequence[Mapping[str, int]] = (),
    ) -> None:
        #: Line of the declaration in its file.
        self.line = sys._getframe(1).f_lineno
        self.name = name
        self.meaning = meaning or f"the kernel {entry or template}"
        self.entry = entry
        self.template = template
        self.sizes = _dictionary("sizes", sizes, "{'m': free, 'n': fixed}")
        self.options = _dictionary("options", options or {}, "{'dtype': ('bf16', 'fp16')}")
        self.arguments = (arguments,) if isinstance(arguments, Declared) else tuple(arguments)
        self.construct = construct
        self.call = call
        self.takes_stream = takes_stream
        self.rows = rows
        self.aligned = aligned
        self.any_order = any_order
        self.repeat = repeat
        self.sm_count = sm_count
        self.modules = tuple(modules)
        self.environment = tuple(environment)
        self.examples = (examples,) if isinstance(examples, str) else tuple(examples)
        one_tail = (tails,) if isinstance(tails, Mapping) else tails
        self.tails = tuple(_dictionary("tails", tail, "({'m': 37, 'n': 520},)") for tail in one_tail)
        self.functions = _Functions()
        self.scratch = ""
        self.scratch_zeroed = False
        self.default = Named.of(default) if callable(default) else default
        self.launch = launch if isinstance(launch, str) else ""
        #: The integers that are the grid, if a function works it out.
        self.grid: tuple[str, ...] = ()
        self._require_name()
        #: What the file of the entry tells; None if it does not define it.
        self.source = read_entry(entry, Path(sys._getframe(1).f_code.co_filename).parent) if entry else None
        self.domains, self.together = self._read_knobs(knobs, configs)
        #: Knobs of one value, between which there is nothing to choose.
        self.constants = {knob: values[0] for knob, values in self.domains.items() if len(values) == 1}
        self._require_distinct()
        self._require_default()
        if not isinstance(launch, str):
            self.launch = ", ".join(self._launched(keyword, value) for keyword, value in launch.items())

    def _read_knobs(
        self, knobs: Mapping[str, Sequence[Any]] | None, configs: Sequence[Mapping[str, Value]]
    ) -> tuple[Domains, Together]:
        """Return the knobs that are given here, or else beside the entry."""
        if self.source is not None and self.source.knobs:
            if knobs or configs:
                raise FamilyError(
                    f"knobs are given here and by tunable in {self.source.path}; give them in one place"
                )
            knobs = self.source.knobs
        if knobs and configs:
            raise FamilyError("knobs and configs are both given; give one of them")
        return read_configs(configs) if configs else read_knobs(knobs or {})

    def _require_name(self) -> None:
        if not _NAME.fullmatch(self.name) or keyword.iskeyword(self.name):
            raise FamilyError(f"name {self.name!r} must be lower-case letters, digits and _, such as my_norm")
        if bool(self.entry) == bool(self.template):
            raise FamilyError("give one of entry='module:name' and template='kernel.py.j2'")
        module, colon, name = self.entry.partition(":")
        words = [*module.split("."), name]
        if self.entry and not (colon and all(word.isidentifier() for word in words)):
            raise FamilyError(f"entry {self.entry!r} is not of the form module:name, such as my_norm:RMSNorm")
        for size, kind in self.sizes.items():
            if kind not in (free, fixed):
                raise FamilyError(f"size {size} is {kind!r}; it must be free or fixed")
        for size, value in (item for tail in self.tails for item in tail.items()):
            if self.sizes.get(size) != free:
                known = ", ".join(name for name, kind in self.sizes.items() if kind == free) or "none"
                raise FamilyError(
                    f"tails name {size}, which is {self.sizes.get(size, 'no size')}; one kernel serves all "
                    f"values of free sizes only: {known}"
                )
            if type(value) is not int or value < 1:
                raise FamilyError(f"tails have {size}={value!r}; it must be an integer from 1")
        if self.repeat and self.repeat not in get_args(Repeat):
            raise FamilyError(f"repeat is {self.repeat!r}; it must be {', '.join(get_args(Repeat))}")
        if self.repeat and not any(a.kind == "inout" for a in self.arguments):
            raise FamilyError(
                "repeat is for kernels that update tensors; no argument is declared by update()"
            )
        if not self.sizes:
            raise FamilyError("there are no sizes; a kernel has at least one, such as sizes={'m': free}")

    def _require_distinct(self) -> None:
        seen: dict[str, str] = dict.fromkeys((*_CONTEXT, *_RESERVED), "cutegen's own")
        groups: dict[str, Iterable[str]] = {"size": self.sizes, "option": self.options, "knob": self.domains}
        for what, names in groups.items():
            for name in names:
                if not name.isidentifier() or keyword.iskeyword(name):
                    raise FamilyError(f"{what} {name!r} is no Python identifier, such as tile_m")
                if name in seen:
                    raise FamilyError(f"{what} {name} has a name that is taken: {seen[name]}; rename it")
                seen[name] = f"an {what}" if what == "option" else f"a {what}"
        # An argument may have the name of the option that says whether it is there.
        taken = dict.fromkeys(_NOT_ARGUMENTS, "cutegen's own")
        taken |= {name: seen[name] for name in (*self.sizes, *self.domains)}
        for name in (argument.name for argument in self.arguments):
            if name in taken:
                raise FamilyError(f"argument {name} has a name that is taken: {taken[name]}; rename it")

    def _require_default(self) -> None:
        if self.default is None or isinstance(self.default, Named):
            return
        self.default = {knob: knob_value(knob, value) for knob, value in self.default.items()}
        for knob, value in self.default.items():
            if knob not in self.domains:
                raise FamilyError(
                    f"default names {knob}{did_you_mean(knob, self.domains)}; "
                    f"knobs: {', '.join(self.domains)}"
                )
            if not any(value == known and type(value) is type(known) for known in self.domains[knob]):
                raise FamilyError(f"default has {knob}={value!r}; its values are {self.domains[knob]}")
        missing = [knob for knob in self.domains if knob not in self.default and knob not in self.constants]
        if missing:
            raise FamilyError(
                f"default lacks knob {missing[0]}; it needs all, since its author runs one kernel"
            )

    # -- names

    @property
    def plain_names(self) -> tuple[str, ...]:
        """Names whose values are known before anything is derived: knobs, sizes and options."""
        return (*self.domains, *self.sizes, *self.options)

    def _known(self, function: Callable[..., Any], *more: str) -> Named:
        """Return ``function``, all of whose parameters name what is known by now.

        Raises:
            FamilyError: One does not; the message says what would be valid.
        """
        found = Named.of(function)
        known = (*self.plain_names, *self.functions.derived, *more)
        for name in found.names:
            if name not in known:
                raise FamilyError(
                    f"{function.__name__}() asks for {name}{did_you_mean(name, known)}; "
                    f"valid: {', '.join(known)}"
                )
        return found

    def _new(self, name: str, what: str) -> str:
        taken = (*self.plain_names, *self.functions.derived, *self.functions.integers, self.scratch)
        if name in taken or name in {a.name for a in self.arguments}:
            raise FamilyError(f"{what} {name} has a name that is taken; rename it")
        if not name.isidentifier() or keyword.iskeyword(name):
            raise FamilyError(f"{what} {name!r} is no Python identifier")
        return name

    def _launched(self, keyword: str, value: Any) -> str:
        """Take in a function, or a value, of a keyword of the launch, and return its text."""
        function = value if callable(value) else lambda: value
        if keyword != "grid":
            name = f"launch_{keyword}"
            self._derive(name, function)
            return f"{keyword}={name}"
        found = self._known(function, *_CONTEXT)

        def along(axis: int) -> Callable[..., int]:
            @functools.wraps(function)
            def extent(**values: Any) -> int:
                grid = function(**values)
                whole = isinstance(grid, tuple) and all(hasattr(part, "__index__") for part in grid)
                if not whole or len(grid) != len(_AXES):
                    raise SpaceError(f"the grid is {grid!r}; it must be a tuple of three integers")
                return int(grid[axis])

            return extent

        for axis, name in enumerate(_AXES):
            self.functions.integers[self._new(name, "integer")] = Named(along(axis), found.names)
        self.grid = _AXES
        return f"grid=({', '.join(_AXES)})"

    # -- functions

    def rule(self, function: _F) -> _F:
        """Add a rule: it returns whether a config is fine, and its docstring is the reason that users read.

        Its parameters name knobs, derived values, sizes, options, ``problem`` or ``arch``.
        """
        if not reason_of(function):
            raise FamilyError(f"rule {function.__name__} has no docstring, so no reason to show")
        self.functions.rules.append(self._known(function, "problem", "arch"))
        return function

    def derive(self, function: _F) -> _F:
        """Add a value of the function's name that follows from knobs, fixed sizes, options and ``arch``."""
        self._derive(function.__name__, function)
        return function

    def _derive(self, name: str, function: Callable[..., Any]) -> None:
        found = self._known(function, "arch")
        loose = [asked for asked in found.names if self.sizes.get(asked) == free]
        if loose:
            raise FamilyError(
                f"derived value {name} asks for {loose[0]}, which is free and so unknown while "
                "it is compiled; make the size fixed, or the value an integer()"
            )
        self.functions.derived[self._new(name, "derived value")] = found

    def integer(self, function: _F) -> _F:
        """Add an Int32 argument of the function's name, worked out at each launch's sizes.

        Its parameters name what those of a rule may, earlier integers, and ``sm_count``.
        """
        found = self._known(function, *_CONTEXT, *self.functions.integers)
        self.functions.integers[self._new(function.__name__, "integer")] = found
        return function

    def workspace(self, *, zeroed: bool = False) -> Callable[[_F], _F]:
        """Add scratch memory of the function's name: it returns the bytes that a launch needs.

        The entry gets it as a contiguous tensor of Float32. With ``zeroed`` it holds zeros, and the kernel
        must leave zeros behind.
        """

        def add(function: _F) -> _F:
            if self.scratch:
                raise FamilyError(f"there is scratch memory already, {self.scratch}; a launch gets one piece")
            found = self._known(function, *_CONTEXT, *self.functions.integers)
            self.scratch = self._new(function.__name__, "scratch")
            self.scratch_zeroed = zeroed
            self.functions.single["scratch"] = found
            return function

        return add

    def baseline(self, name: str) -> Callable[[_F], _F]:
        """Add what PyTorch users would call instead; parameters and result are those of the reference."""

        def add(function: _F) -> _F:
            if name in self.functions.baselines:
                raise FamilyError(f"there is a baseline {name!r} already; name it otherwise")
            self.functions.baselines[name] = self._known(function, *self._tensors_and_scalars)
            return function

        return add

    def _single(self, what: str, function: _F, *more: str) -> _F:
        if what in self.functions.single:
            raise FamilyError(f"{what} is declared twice; declare it once")
        self.functions.single[what] = self._known(function, *more)
        return function

    def reference(self, function: _F) -> _F:
        """Set what is right: parameters name arguments (tensors in fp64), sizes and options.

        It returns the outputs by name, in fp64; or the tensor itself where there is one output.
        """
        return self._single("reference", function, *self._tensors_and_scalars)

    def tolerance(self, function: _F) -> _F:
        """Set the allowed error of each element: of parameters ``output`` (its name), ``want``, ``problem``.

        By default that of rounding, and of a sum in fp32 along the longest dimension.
        """
        return self._single("tolerance", function, "output", "want", "problem")

    def inputs(self, function: _F) -> _F:
        """Set values of inputs: of ``generator``, sizes and options, tensors by name; others are random."""
        return self._single("inputs", function, "generator", "problem")

    def flops(self, function: _F) -> _F:
        """Set how many operations a problem takes; by default four for each element that is read."""
        return self._single("flops", function, "problem")

    def bytes(self, function: _F) -> _F:
        """Set how many bytes a problem moves at least; by default those of all tensors."""
        return self._single("bytes", function, "problem")

    @property
    def _tensors_and_scalars(self) -> tuple[str, ...]:
        return tuple(a.name for a in self.arguments if a.kind in ("in", "inout", "scalar"))


def _dictionary(what: str, given: Any, example: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise FamilyError(f"{what} is {given!r}; it must be like {what}={example}")
    return dict(given)
