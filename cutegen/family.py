"""The interface of a kernel family, through which everything else in cutegen works for any family.

A family computes one kind of problem, such as a GEMM or an RMSNorm. It defines how its problems are written,
which arguments its kernels take, the reference, the baselines and the cost. Its spaces define which configs
there are, its templates how a config is rendered; both are found by the family's name.

Nothing here imports torch. Methods that are given tensors import it inside.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias

from cutegen.dtypes import TMA_ALIGN_BYTES
from cutegen.errors import UsageError
from cutegen.text import shown

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from typing_extensions import Self

    from cutegen.arch import Arch
    from cutegen.families.user.closure import Opening
    from cutegen.space import Config, Launch, Value
    from cutegen.strategy import Strategy

__all__ = [
    "Argument",
    "Baseline",
    "Chunk",
    "Family",
    "Inputs",
    "Kind",
    "Option",
    "OwnProblem",
    "Problem",
    "Reference",
    "Repeat",
    "Signature",
    "Size",
    "StandIn",
    "Tensors",
    "bind",
    "is_heavy",
]

#: A problem of the family whose method it is. Families name their own class there, which a type checker lets
#: them do for Any only.
OwnProblem: TypeAlias = Any
#: By name of the argument.
Tensors: TypeAlias = "Mapping[str, torch.Tensor]"
#: One call of what a kernel is compared with: inputs and outputs by name. It writes the outputs, or returns
#: its own, which is not charged with a copy.
Baseline = Callable[["Inputs", Tensors], "Tensors | None"]
#: Computes what a kernel would, with PyTorch, from inputs and outputs by name. It writes the outputs, some of
#: which may be inputs.
StandIn = Callable[["Inputs", Tensors], None]


class Signature(Hashable, Protocol):
    """The compiled-in part of a problem: a frozen dataclass of plain values."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def family(self) -> str:
        """Name of the family."""
        ...


class Problem(Hashable, Protocol):
    """What is to be computed: a value that is hashable and prints as the line from which it is parsed."""

    @property
    def family(self) -> str:
        """Name of the family that computes it."""
        ...

    @property
    def signature(self) -> Signature:
        """The part that is compiled in: problems of equal signature share their kernels."""
        ...

    @property
    def sizes(self) -> Mapping[str, int]:
        """Every size by name, in the order in which a shape is written."""
        ...

    @property
    def flops(self) -> int:
        """Floating-point operations."""
        ...

    @property
    def min_bytes(self) -> int:
        """Bytes that must cross device memory: each input read once, each output written once."""
        ...

    def with_sizes(self, **sizes: int) -> Self:
        """Return the same kind of problem with some sizes changed.

        Raises:
            ProblemError: The sizes do not fit the kind.
        """
        ...


def is_heavy(problem: Problem) -> bool:
    """Return whether the power limit, not the clock limit, decides how fast ``problem`` runs.

    Source: measured on an H200, 2026-11-20: GEMMs of 4096^3 and more settle near 1450 MHz under load but
    run at 1980 MHz in bursts, and other tiles win in each case; 64 GFLOP take about 0.1 ms there.
    """
    return problem.flops >= 64e9 and problem.flops >= 200 * problem.min_bytes


@dataclass(frozen=True)
class Size:
    """A size of a family's problems, such as the rows of a matrix.

    Attributes:
        name: Its name in problems, tables and messages.
        meaning: What it counts, in a few words.
        free: Whether kernels take it as an argument, so that one kernel serves every value. A size that is
            not free is compiled in.
        default: Its value when it is not given; None if it must be given.
    """

    name: str
    meaning: str
    free: bool = True
    default: int | None = None


@dataclass(frozen=True)
class Option:
    """A word that a problem may have beside its sizes, on the command line and in shapes files.

    Attributes:
        name: The key in shapes files.
        meaning: For ``--help``.
        values: Its valid values; empty for a flag, which is there or not.
        default: Its value when it is not given; ``""`` for none.
        aliases: Other names under which it may be given, such as the keyword argument of a library call.
    """

    name: str
    meaning: str
    values: tuple[str, ...] = ()
    default: str = ""
    aliases: tuple[str, ...] = ()

    @property
    def is_flag(self) -> bool:
        """Whether it is a word without a value."""
        return not self.values


#: How launches follow one another while they are timed, see :class:`Family`.
Repeat = Literal["idempotent", "bounded", "restore"]
#: ``in`` is read only. ``out`` is written completely. ``inout`` is read and written in place. ``scratch`` is
#: the workspace of :class:`~cutegen.space.Launch`; ``launch`` stands for all of its integers. ``scalar`` is a
#: number that the caller gives.
Kind = Literal["in", "out", "inout", "scratch", "launch", "scalar"]


@dataclass(frozen=True)
class Argument:
    """One argument of the kernels of a signature, in the order of the kernel's parameters.

    Attributes:
        name: Its name in messages, records and calls.
        kind: What the kernel does with it.
        dtype: Short name of the element type; for a scalar ``fp32`` or ``int32``.
        shape: Sizes of a tensor; empty for other arguments.
        aligned: Whether every row starts at a multiple of ``align_bytes``; if not, checks use odd pitches.
        may_alias: Inputs whose memory an output may share; checks run without aliasing and with each of them.
        align_bytes: At multiples of how many bytes rows start if they are aligned; checks use no larger ones.
    """

    name: str
    kind: Kind
    dtype: str = ""
    shape: tuple[int, ...] = ()
    aligned: bool = True
    may_alias: tuple[str, ...] = ()
    align_bytes: int = TMA_ALIGN_BYTES


@dataclass(frozen=True)
class Inputs:
    """The inputs of one launch.

    Attributes:
        tensors: The ``in`` and ``inout`` arguments by name.
        scalars: The ``scalar`` arguments by name.
    """

    tensors: Tensors
    scalars: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Chunk:
    """A part of one output and of its reference; all three tensors are fp64 and have the same shape.

    Attributes:
        got: What the kernel wrote.
        want: The reference.
        allowed: How far they may differ, element by element.
        place: Maps an index into the chunk to the index into the output.
    """

    got: torch.Tensor
    want: torch.Tensor
    allowed: torch.Tensor
    place: Callable[[tuple[int, ...]], tuple[int, ...]]


def bind(
    arguments: Sequence[Argument], values: Mapping[str, Any], launch: Launch, workspace: Any = None
) -> tuple[Any, ...]:
    """Return the arguments of a kernel call: the one place that knows the calling convention.

    Args:
        arguments: The kernel's arguments, in the order of its parameters.
        values: Tensors and scalars by name.
        launch: Integers for this config and problem.
        workspace: Scratch memory; None if the launch needs none, and then none is passed.
    """
    found: list[Any] = []
    for argument in arguments:
        if argument.kind == "scratch":
            found += [] if workspace is None else [workspace]
        elif argument.kind == "launch":
            found += launch.scalars
        else:
            found.append(values[argument.name])
    return tuple(found)


class Reference(Protocol):
    """The correct outputs of one problem on its inputs, and the allowed error of each element."""

    def compared(self, output: str) -> float:
        """Return the fraction of an output that is compared; large ones may be sampled."""
        ...

    def chunks(self, output: str, got: torch.Tensor) -> Iterator[Chunk]:
        """Yield the parts of an output with their references."""
        ...


class Family(ABC):
    """A kind of problem and its kernels.

    Attributes:
        name: As in problem lines and folder names, such as ``gemm``.
        meaning: What it computes, in one line.
        sizes: Its sizes, in the order in which a shape is written: ``4096x4096x4096``.
        options: What else a problem may say.
        metric: How results are shown: by operations or by bytes.
        knobs: For each knob what it does and when it pays, in a few sentences.
        algorithms: Further algorithms, beside the general one, which computes all problems. Each has a space
            of its name, whose configs have ``algorithm=NAME``, and templates in a folder of that name.
        default_is_its_authors: Whether the default config is the one that a kernel's author runs. If it
            fails the check, the reference or the declaration is wrong, and nothing is timed.
        hidden_us: Microseconds of a kernel that launches back to back hide, and that predictions leave out.
        repeat: How kernels that update tensors in place are launched repeatedly while they are timed.
            ``restore``: the tensors are restored between timed spans, so that each launch gets what a caller
            passes. ``bounded``: launches continue with the results of earlier ones, whose values stay in
            range. ``idempotent``: likewise, for kernels that leave their own results unchanged, which is
            checked.
    """

    name: str
    meaning: str
    sizes: tuple[Size, ...]
    options: tuple[Option, ...]
    metric: Literal["TFLOP/s", "GB/s"]
    knobs: Mapping[str, str] = {}
    algorithms: tuple[str, ...] = ()
    default_is_its_authors: bool = False
    hidden_us: float = 0.0
    repeat: Repeat = "restore"

    # -- problems

    @abstractmethod
    def parse(self, line: str) -> Problem:
        """Return the problem that prints as ``line``.

        Raises:
            ProblemError: The line is malformed; the message says what would be valid.
        """

    @abstractmethod
    def problem(self, sizes: Mapping[str, int], options: Mapping[str, str | bool]) -> Problem:
        """Return the problem of sizes and options by name; those with a default may be missing.

        Raises:
            ProblemError: As :meth:`parse`.
        """

    def option(self, name: str) -> Option | None:
        """Return the option of that name or alias; None if there is none."""
        return next((o for o in self.options if name == o.name or name in o.aliases), None)

    def lines(self, problem: OwnProblem) -> tuple[str, ...]:
        """Return every line by which records of any version name ``problem``, the present one first."""
        return (str(problem),)

    @property
    def shape_form(self) -> str:
        """How a shape is written, such as ``MxN``."""
        return "x".join(size.name.upper() for size in self.sizes)

    @property
    def example_shape(self) -> str:
        """A shape for messages: the first typical one, since sizes may depend on one another."""
        first = next(iter(self.typical()), None)
        return "x".join("4096" for _ in self.sizes) if first is None else str(first).split()[1]

    def parse_shape(self, word: str) -> dict[str, int]:
        """Return the sizes of a word such as ``4096x1024``.

        Raises:
            UsageError: It is not of that form.
        """
        numbers = word.strip().lower().split("x")
        if len(numbers) != len(self.sizes) or not all(re.fullmatch(r"[0-9]{1,18}", n) for n in numbers):
            raise UsageError(
                f"shape {shown(word)} is not {self.shape_form}; write for example {self.example_shape}"
            )
        return {size.name: int(number) for size, number in zip(self.sizes, numbers, strict=True)}

    @abstractmethod
    def typical(self) -> Sequence[Problem]:
        """Return problems that together reach every knob value; ``--lint`` checks them."""

    @abstractmethod
    def tails(self, problem: OwnProblem) -> Sequence[Problem]:
        """Return small problems of the same signature with awkward sizes, smallest first.

        A candidate is checked on the first for which its config is valid.
        """

    def kin(self, problem: OwnProblem) -> Hashable:
        """Return a key; problems of equal keys may use each other's table entries."""
        signature: Signature = problem.signature
        return signature

    def is_plain(self, problem: OwnProblem) -> bool:
        """Return whether ``problem`` is the plainest of its :meth:`kin`, whose entries the others prefer."""
        return True

    def is_library_call(self, problem: OwnProblem) -> bool:
        """Return whether one call of PyTorch computes ``problem``, so that a table may name it the winner."""
        return False

    def is_library_calls(self, problem: OwnProblem) -> bool:
        """Return whether PyTorch computes ``problem`` by calls of its own that may round in between."""
        return self.is_library_call(problem)

    # -- kernels

    @abstractmethod
    def arguments(self, problem: OwnProblem) -> tuple[Argument, ...]:
        """Return the arguments of the kernels for ``problem``, in the order of their parameters."""

    def upstream_input(self, problem: OwnProblem) -> str:
        """Return the name of the input that the previous kernel usually writes: activations, not weights.

        It is the first input, unless a family overrides this.
        """
        return next(a.name for a in self.arguments(problem) if a.kind in ("in", "inout"))

    def any_order(self, problem: OwnProblem) -> bool:
        """Return whether ``problem`` allows results whose last bits differ from run to run."""
        return False

    def render_values(
        self, problem: OwnProblem, config: Config, derived: Mapping[str, Value], arch: Arch
    ) -> Mapping[str, Any]:
        """Return values for the template of ``config`` beside its knobs and what the space derives.

        Args:
            problem: What is computed.
            config: The compiled-in part of the config.
            derived: What the space derives.
            arch: The target.

        Raises:
            FamilyError: A module that the kernel is made of cannot be read.
            ResourceError: The package that the kernel comes from is not installed.
        """
        return {}

    def identity(self) -> str:
        """Return a digest of what kernels depend on beside template, problem and config; empty if nothing.

        Raises:
            FamilyError: A module that kernels are made of cannot be read.
        """
        return ""

    def declaration(self) -> str:
        """Return a digest of what declares the space beside files; empty if there is nothing else.

        Raises:
            FamilyError: It cannot be read.
        """
        return ""

    def opening(self, arch: Arch) -> Opening | None:
        """Return what a compiling child needs to open users' modules; None if there are none.

        Raises:
            FamilyError: As :meth:`identity`.
        """
        return None

    # -- checks and baselines

    @abstractmethod
    def inputs(self, problem: OwnProblem, generator: torch.Generator, *, awkward: bool = False) -> Inputs:
        """Return random inputs on the generator's device.

        Args:
            problem: What they are inputs of.
            generator: Source of the values.
            awkward: Leave gaps between rows, filled with NaN, which shows reads beyond an input, and use
                unusual scalars, which shows scalars that were compiled in.
        """

    @abstractmethod
    def reference(self, problem: OwnProblem, inputs: Inputs) -> Reference:
        """Return the correct outputs for ``inputs``, computed in fp64."""

    @abstractmethod
    def baselines(self, problem: OwnProblem, inputs: Inputs, outputs: Tensors) -> Mapping[str, Baseline]:
        """Return what a PyTorch user would call instead, by name, tried on ``inputs`` and ``outputs``.

        The fastest correct one is the baseline of the problem. There may be none.
        """

    def stand_in(self, problem: OwnProblem) -> StandIn | None:
        """Return what computes ``problem`` while its kernel is being compiled; None if there is nothing.

        It is as exact as a kernel that passes the check, and need not be fast.
        """
        return None

    # -- choosing

    def strategy(self, arch: Arch, algorithm: str = "") -> Strategy | None:
        """Return the performance model of an algorithm; None leaves the search to even samples of its space.

        Args:
            arch: The target.
            algorithm: One of :attr:`algorithms`, or ``""`` for the general one.
        """
        return None

    def baseline_us(self, problem: OwnProblem, arch: Arch, sm_count: int) -> float | None:
        """Return the microseconds that PyTorch is expected to take, None where they are not known.

        Called for problems for which :meth:`is_library_calls` holds, and compared with the time that the
        strategy predicts for a kernel: the call may then be left to PyTorch.
        """
        return None

    def fused_us(self, problem: OwnProblem) -> float:
        """Return the microseconds that fused operations add to the predicted time of a kernel."""
        return 0.0

    def doubt(self, problem: OwnProblem) -> float:
        """Return the factor by which a predicted lead over PyTorch must exceed the usual one to count."""
        return 1.0

    def is_fitted(self, problem: OwnProblem, arch: Arch) -> bool:
        """Return whether predicted times of kernels for ``problem`` are fitted to measurements.

        Such a prediction takes precedence over a win measured at another size.
        """
        return False

    def accuracy(self, arch: Arch) -> str:
        """Return a sentence on how well predictions agree with measurements; empty if unknown."""
        return ""

    def files(self) -> Sequence[Path]:
        """Return the files that determine, beside template and space, which candidates there are."""
        return ()
