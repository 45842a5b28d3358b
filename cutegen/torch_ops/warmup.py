"""``cutegen.warmup``: kernels compiled, loaded and launched before the first call that needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from cutegen.arch import Arch, find_arch
from cutegen.build.budget import require_budget
from cutegen.build.parallelism import require_workers
from cutegen.dtypes import torch_dtype
from cutegen.errors import UsageError
from cutegen.families.registry import as_problem, find_family, has_space, is_legal
from cutegen.family import Problem
from cutegen.measure.device import or_else
from cutegen.records.table import Table
from cutegen.runtime.call_plan import make_launcher
from cutegen.runtime.dispatch import Dispatcher
from cutegen.runtime.needs import Needs, Wanted, each_once, kinds
from cutegen.runtime.warming import Warming, compile_wanted, prepare_choices, require_observer
from cutegen.runtime.workspace import new_workspace
from cutegen.text import shown
from cutegen.torch_ops import gemm as state
from cutegen.torch_ops.family_operator import drop_family_plans
from cutegen.torch_ops.warm_sources import ExpectedCalls, Rows, read_source

__all__ = ["launch_once", "prepare", "warmup"]

_T = TypeVar("_T")


def warmup(
    source: Any = "gemm",
    *,
    m: Rows | None = None,
    dtypes: str | Sequence[str] = (),
    layouts: str | Sequence[str] = (),
    options: str | Sequence[str] = (),
    problems: str | Iterable[str | Problem] = (),
    table: str | Path | None = None,
    arch: str | Arch | None = None,
    launch: bool = True,
    workers: int | None = None,
    budget_s: float | None = None,
    observe: Callable[[Warming], None] = lambda warming: None,
) -> Warming:
    """Compile what calls will need, and load it into this process.

    With a model, a recording or a table for ``source``, the kernels that answer its problems. With a family's
    name, all that untuned calls of some kinds may need: afterwards calls of these kinds compile nothing,
    whatever their sizes. What is there already is not compiled again, so an interrupted warm-up goes on where
    it was. After :func:`cutegen.freeze`, it still compiles and loads what it is asked for.

    Args:
        source: A module: what its linear layers call, optimized or not; what a compiled model fuses behind
            them, only a recording knows. A recording, or the path of its file
            (``.jsonl``): what was called, but for calls with a ``config``. A table, or its path: all of its
            kernels. A family's name: what the next arguments say; more families by further calls.
        m: Rows of the calls of a model, recording or table: numbers; ``"1..8192"``, which also means
            every kernel that an untuned problem of these kinds may need; ``"vllm"`` or ``"sglang"``, for
            which these capture CUDA graphs. By default as recorded, or as in the table; a model needs it.
        dtypes: Of the operands, one or several; by default the family's first.
        layouts: By default the family's first.
        options: Words of options, such as ``"bias=n act=silu"``; one text for each kind of epilogue. By
            default the plain one.
        problems: Problems, or their lines, whose kinds and own kernels are wanted. If there are some, and
            neither dtypes, layouts nor options, they are all that is wanted.
        table: A dispatch table, all of whose kernels are wanted. The table that calls ask is always used to
            find the kernels of ``problems``.
        arch: Another target, whose kernels are only compiled; by default that of the current GPU.
        launch: Whether kernels are loaded and launched once on the current GPU, on small operands.
        workers: Most compilations at a time; by default one per core, fewer where memory is short.
        budget_s: Seconds after which nothing more is compiled.
        observe: Called whenever something has changed.

    Returns:
        What was there, what was compiled, and what could not be, with reasons.

    Raises:
        UsageError: An option does not exist, the source is none of these, a model has no ``m``, the family
            needs problems to know its kinds, ``problems`` holds something else, ``workers`` or ``budget_s``
            is not positive, or ``observe`` is no function.
        CutegenError: There is no compiler and something is missing, the cache or table cannot be used, or
            there is no GPU and no ``arch``.
    """
    import torch

    require_workers(workers)
    require_budget(budget_s)
    require_observer(observe)
    words = {"dtypes": dtypes, "layouts": layouts, "options": options}
    dtypes, layouts, options = (_several(name, value) for name, value in words.items())
    given = [as_problem(each) for each in _several("problems", problems)]
    dispatcher = state.default_dispatcher()
    frozen = bool(dispatcher.kernels.on_miss)
    if frozen:
        dispatcher = dispatcher.with_build("allow")  # what was asked for by name is no late compilation
    index = torch.cuda.current_device() if arch is None and torch.cuda.is_available() else 0
    target, sm_count = _target(dispatcher, arch, index)
    asked = Table.load(table) if table is not None else dispatcher.table(index) if arch is None else None
    expected = read_source(source, m, asked)
    expected = replace(
        expected,
        problems=tuple(p for p in expected.problems if has_space(p.family, target)),
        kinds=tuple(p for p in expected.kinds if has_space(p.family, target)),
    )
    only_given = not expected.family or (bool(given) and not (dtypes or layouts or options))
    of_kinds = () if only_given else kinds(find_family(expected.family), dtypes, layouts, options)
    needs = Needs(asked, target, sm_count, dispatcher.fallback)
    named = needs.of_table() if table is not None else ()
    more = (*needs.of_problems(given), *named, *needs.of_kinds((*of_kinds, *given)))
    wanted = each_once((*_of_source(expected, needs), *more), target)
    warmed = compile_wanted(
        wanted, dispatcher.kernels.store, target, workers=workers, budget_s=budget_s, observe=observe
    )
    prepare_choices(wanted, dispatcher.kernels.store, target, sm_count)
    if not launch or arch is not None:
        return warmed
    warmed = _launch_all(dispatcher, warmed, index, observe)
    if frozen:
        state.drop_plans()
        drop_family_plans()
    return warmed


def _several(name: str, given: str | Iterable[_T]) -> tuple[str | _T, ...]:
    """Return what is given, of which one text alone is one; raises UsageError."""
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, Iterable):
        raise UsageError(f"{name} is {shown(given)}; valid: one text, or several in a list")
    return tuple(given)


def _target(dispatcher: Dispatcher, arch: str | Arch | None, index: int) -> tuple[Arch, int]:
    """Return what is compiled for, and how many SMs it has: GPU ``index`` unless a target is named."""
    if arch is None:
        with or_else("for a GPU that is not here name a target: arch='sm_90a'"):
            return dispatcher.arch(index), dispatcher.device(index).sm_count
    target = find_arch(arch) if isinstance(arch, str) else arch
    return target, target.nominal_sm_count


def _launch_all(
    dispatcher: Dispatcher, warmed: Warming, index: int, observe: Callable[[Warming], None]
) -> Warming:
    """Launch every kernel that is ready once on GPU ``index``, and torch's own GEMM there."""
    import torch

    for count, each in enumerate(warmed.ready, 1):
        launch_once(dispatcher, each, index)
        warmed = replace(warmed, launched=count)
        observe(warmed)
    if dispatcher.device_type == "cuda":
        small = torch.ones(16, 16, dtype=torch.bfloat16, device=torch.device("cuda", index))
        torch.mm(small, small)  # where torch answers, it is not made ready in a capture either
    return warmed


def _of_source(expected: ExpectedCalls, needs: Needs) -> Iterator[Wanted]:
    """Yield the kernels that a source of calls needs; a table that is one answers them itself."""
    named = expected.table is not None
    needs = replace(needs, table=expected.table) if named else needs
    yield from needs.of_problems(expected.problems)
    if named:
        yield from needs.of_table()
    yield from needs.of_kinds(expected.kinds)


def launch_once(dispatcher: Dispatcher, wanted: Wanted, index: int = 0) -> None:
    """Load a compiled kernel and launch it on small operands of GPU ``index``, which loads its code there.

    Raises:
        LaunchError: It cannot be loaded or launched.
    """
    import torch

    arch = dispatcher.arch(index)
    problem = _smallest(wanted, arch)
    dispatcher.kernels.get(wanted.problem, wanted.config, arch, known_key=wanted.known_key)
    choice = dispatcher.kernel(problem, index, config=wanted.config)
    assert choice is not None  # it was asked for a config
    device = torch.device(dispatcher.device_type, index) if dispatcher.device_type == "cuda" else "cpu"
    family = find_family(problem.family)
    inputs = family.inputs(problem, torch.Generator(device).manual_seed(0))
    arguments = family.arguments(problem)
    values = {**inputs.tensors, **inputs.scalars}
    for argument in arguments:
        if argument.kind == "out":
            values[argument.name] = torch.empty(
                argument.shape, dtype=torch_dtype(argument.dtype), device=device
            )
    given = [a.name for a in arguments if a.kind not in ("scratch", "launch")]
    launch = make_launcher(choice.function, arguments, choice.launch, new_workspace, index)
    launch(*(values[name] for name in given))
    if choice.first is not None:
        choice.first.happened()


def _smallest(wanted: Wanted, arch: Arch) -> Problem:
    """Return a small problem that the kernel computes; the one it is wanted for if no smaller is known."""
    problem, config = wanted.problem, wanted.config
    tails = find_family(problem.family).tails(problem)
    same = (tail for tail in tails if tail.signature == problem.signature and is_legal(config, tail, arch))
    return min([problem, *same], key=lambda each: each.min_bytes)


def prepare() -> None:
    """Import torch and register the operators with it; again does nothing."""
    state.prepare()
