"""Tuning from Python: :class:`AutoTuner` tunes problems and remembers the results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, cast, overload

from cutegen.arch import Arch, find_arch
from cutegen.build import Toolchain
from cutegen.build.budget import require_budget
from cutegen.errors import ConfigError, UsageError
from cutegen.families.gemm.operator_package import require_package
from cutegen.families.gemm.problem import Epilogue
from cutegen.families.gemm.problem import Problem as Gemm
from cutegen.families.ranges import Range, is_range, range_of
from cutegen.families.registry import as_problem, find_space, require_sources, space_of
from cutegen.family import Problem
from cutegen.measure.context import DEFAULT_CONTEXT, require_context
from cutegen.measure.device import Device, or_else, present_device
from cutegen.measure.policy import require_objective
from cutegen.records.trials import TrialStore
from cutegen.runtime.dispatch import autotune_disabled
from cutegen.runtime.warming import require_observer
from cutegen.search.defaults import default_config, predictor
from cutegen.space import Config, Value, format_value
from cutegen.text import shown
from cutegen.tuning.backends import Backends, Children
from cutegen.tuning.progress import Observer, ignore_progress
from cutegen.tuning.range_request import RangeEffort, RangeRequest, find_range_effort
from cutegen.tuning.range_result import RangeResult
from cutegen.tuning.range_run import untuned_range
from cutegen.tuning.request import Effort, Request, find_effort, require_seed
from cutegen.tuning.result import Row, TuneResult
from cutegen.tuning.result_cache import HistoryEntry, ResultCache
from cutegen.tuning.session import Session
from cutegen.tuning.setting import Setting
from cutegen.tuning.sweep import Failed, Tuning

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["AutoTuner"]

#: How many kernels to compile, or the configs to try, each in any form.
Candidates = int | Sequence[Config | Mapping[str, Value] | str]


class AutoTuner:
    """Finds the fastest config for problems, on the GPU at hand or, for a named target, by compiling only.

    Every trial goes to the database and every winner to the dispatch table, as with
    ``python -m cutegen.tune``; what either knows already is not measured again. Used as a context manager it
    keeps the compiler and the measuring process between calls.

    Args:
        arch: A target such as ``sm_90a``: compile, inspect and predict for it instead of measuring.
        cache_dir: Folder for artifacts, database and table; default ``CUTEGEN_CACHE_DIR``, else the user's.
        db: The trial database.
        table: The dispatch table.
        effort: How much to try: ``quick``, ``standard``, ``exhaustive``, or an :class:`Effort`.
        range_effort: How much to try for a range; by default as much as ``effort`` names.
        budget_s: Seconds per call, None for no limit.
        workers: Most compilations at a time.
        seed: Of the order within measuring rounds.
        allow_torch: Whether ``torch.mm`` may win an entry of the table.
        again: Whether to measure again what earlier runs measured.
        objective: What finalists are chosen by, unless a call says otherwise: ``time``, ``energy``
            (millijoules per launch) or ``edp`` (their product).
        context: What runs before each launch that is timed: ``behind`` (an element-wise kernel that writes
            the first input, as in a model), ``overlapping`` (one whose launch overlaps with its neighbours,
            as other kernels of cutegen do), ``alone`` (a kernel that touches no operand) or ``back_to_back``
            (the launch before).
        sources: Whose kernels to try: ``cutegen``, ``operators`` (NVIDIA's Operator API) or both.
        busy: While others use the GPU: ``wait`` for them, 10 minutes at most, ``warn``, or ``refuse``.
        fallback: Where PyTorch's own call answers instead of a kernel, to be written into the table:
            ``torch``, ``expected``, ``measured`` or ``none``; None leaves what the table says.
        observe: Called with the progress.
        toolchain: Whose artifacts to use, such as an imported bundle's; the installed one by default.
        device: The GPU to measure on, as :func:`~cutegen.measure.device.present_device` describes it; by
            default the first that this process sees.
        backends: What to use instead of the usual builder, measuring child and so on; for tests.

    Raises:
        ArchError: The architecture is unknown, or cutegen has no target for the GPU.
        DeviceError: No architecture is given and there is no GPU.
        UsageError: There is no such effort, objective, context, source or ``busy``, no source is given,
            ``budget_s`` is no number above 0, ``seed`` no integer, ``observe`` no function, or a table or
            fallback is given where no GPU is measured.
        StoreError: No file can have a name that is given.
    """

    def __init__(
        self,
        arch: str | Arch | None = None,
        *,
        cache_dir: Path | str | None = None,
        db: Path | str | None = None,
        table: Path | str | None = None,
        effort: Effort | str = "standard",
        range_effort: RangeEffort | None = None,
        budget_s: float | None = None,
        workers: int | None = None,
        seed: int = 0,
        allow_torch: bool = False,
        again: bool = False,
        objective: str = "time",
        context: str = DEFAULT_CONTEXT,
        sources: Sequence[str] = ("cutegen",),
        busy: str = "wait",
        fallback: str | None = None,
        observe: Observer = ignore_progress,
        toolchain: Toolchain | None = None,
        device: Device | None = None,
        backends: Backends | None = None,
    ) -> None:
        if arch is None:
            with or_else("to compile and predict without a GPU name a target: AutoTuner('sm_90a')"):
                device = device or present_device()
        if device is None:
            _require_no_table(str(arch), table, fallback)
        target = device.arch if device else find_arch(str(arch))
        self.setting = Setting.of(
            target,
            device,
            cache_dir=None if cache_dir is None else Path(cache_dir),
            db=None if db is None else Path(db),
            table=None if table is None else Path(table),
            workers=workers,
            toolchain=toolchain,
            busy=busy,
            fallback=fallback,
            backends=backends,
        )
        self._sources = require_sources(sources)
        self._effort = find_effort(effort)
        self._range_effort = find_range_effort(range_effort, effort)
        self._budget_s = require_budget(budget_s)
        self._seed = require_seed(seed)
        self._allow_torch = allow_torch
        self._again = again
        self._objective = require_objective(objective)
        self.context = require_context(context)
        self._observe = require_observer(observe)
        self._children: Children | None = None
        self._results = ResultCache()

    def __enter__(self) -> Self:
        self._children = self.setting.children()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        children, self._children = self._children, None
        if children is not None:
            children.close()

    # -- tuning

    @overload
    def tune(
        self,
        m: int,
        n: int,
        k: int,
        *,
        batch: int = 1,
        dtype: str = "bf16",
        out_dtype: str = "",
        layout: str = "kk",
        epilogue: Epilogue | None = None,
        candidates: Candidates | None = None,
        objective: str | None = None,
    ) -> TuneResult: ...

    @overload
    def tune(
        self,
        m: int | str,
        n: int | str,
        k: int | str,
        *,
        batch: int | str = 1,
        dtype: str = "bf16",
        out_dtype: str = "",
        layout: str = "kk",
        epilogue: Epilogue | None = None,
        candidates: Candidates | None = None,
        objective: str | None = None,
    ) -> TuneResult | RangeResult: ...

    def tune(
        self,
        m: int | str,
        n: int | str,
        k: int | str,
        *,
        batch: int | str = 1,
        dtype: str = "bf16",
        out_dtype: str = "",
        layout: str = "kk",
        epilogue: Epilogue | None = None,
        candidates: Candidates | None = None,
        objective: str | None = None,
    ) -> TuneResult | RangeResult:
        """Return the best config for ``D[m, n] = A[m, k] @ B[k, n]``, tuning it unless that is known.

        One of the four sizes may be a range, such as ``"1..8192"`` for m: then the answers for all of them
        are tuned at once, as by :meth:`tune_range`.

        With ``CUTEGEN_DISABLE_AUTOTUNE=1`` the answer is the default config, with the model's time if any.

        Args:
            m: Rows of A and D.
            n: Columns of B and D.
            k: Columns of A, rows of B.
            batch: Independent GEMMs.
            dtype: Of A and B: ``bf16``, ``fp16``, ``e4m3``, ``e5m2``, ``int8`` or (Blackwell) ``tf32``.
            out_dtype: Of D; by default as ``dtype``, bf16 for fp8, int32 for int8, fp32 for tf32.
            layout: The axis along which A is contiguous, then that of B: ``kk``, ``kn``, ``mn`` or ``mk``.
            epilogue: What is fused behind the GEMM.
            candidates: How many kernels to compile, or the configs to try, as objects, mappings or text such
                as ``tile_k=64 ...``; the default config competes in any case. If given, a result that this
                object remembers is not used, and what is found is not remembered.
            objective: What finalists are chosen by: ``time``, ``energy`` or ``edp``; by default the object's.

        Raises:
            NoWinnerError: No candidate works.
            UsageError: There is no such objective, or there is no GPU to read energy from.
            ConfigError: A given candidate breaks rules.
            ProblemError: The problem is ill-formed.
            BuildError: There is no compiler.
            DeviceError: Another process uses the GPU, and ``busy`` does not allow to go on.
            MeasureError: The GPU cannot hold the problem, a timing cannot be trusted, or the objective needs
                energy and the GPU does not tell.
            StoreError: Cache, database or table cannot be used.
        """

        def make(m: int, n: int, k: int, batch: int) -> Gemm:
            return Gemm(m, n, k, batch, dtype, out_dtype, layout, epilogue=epilogue or Epilogue())

        sizes = {"m": m, "n": n, "k": k, "batch": batch}
        if not any(isinstance(size, str) for size in sizes.values()):
            problem = make(**cast("dict[str, int]", sizes))
            return self.tune_problem(problem, candidates=candidates, objective=objective)
        if candidates is not None or (objective or self._objective) != "time":
            raise UsageError("a range is tuned for time, and finds its candidates itself; give single sizes")
        return self.tune_range(range_of(sizes, lambda found: make(**found)))

    def tune_range(
        self, whole: Range, *, fixed: Mapping[str, tuple[Value, ...]] | None = None
    ) -> RangeResult:
        """Return which config answers each size of a range, from measurements at a few of them.

        It takes about as long as a handful of single sizes. The table then answers every size of the range;
        entries of single sizes still come first at their own.

        Args:
            whole: Problems that differ in one size.
            fixed: Knobs restricted to some values; the default config answers where nothing else does.

        Raises:
            UsageError: There is no GPU to measure on, or the tuner is for another objective than time or
                tries other kernels than cutegen's own.
            CutegenError: As :meth:`tune`.
        """
        [result] = self.run([self.range_request(whole, None, fixed, self._budget_s)], self._budget_s)
        if isinstance(result, Failed):
            raise result.error
        assert isinstance(result, RangeResult)
        return result

    def tune_problem(
        self,
        problem: Problem | str,
        *,
        candidates: Candidates | None = None,
        fixed: Mapping[str, tuple[Value, ...]] | None = None,
        objective: str | None = None,
    ) -> TuneResult:
        """Return the best config for ``problem``; as :meth:`tune`.

        Args:
            problem: What is to be computed, or its line, such as ``gemm 64x64x64 bf16 kk``.
            candidates: How many kernels to compile, or the configs to try.
            fixed: Knobs restricted to some values, such as ``{"tile_k": (64, 128)}``. Candidates that are
                given must keep to them; the default config competes in any case.
            objective: What finalists are chosen by.

        Raises:
            ConfigError: There is no such knob or value, or a given candidate has another one.
            CutegenError: As :meth:`tune`.
        """
        problem = as_problem(problem)
        if candidates is None and not fixed:
            known = self._results.find(problem, objective or self._objective)
            if known is not None and not known.contended_by:
                return known
        if autotune_disabled():
            return self._default(problem)
        request = self.request(problem, candidates, fixed, self._budget_s, objective)
        [result] = self.run([request], self._budget_s)
        if isinstance(result, Failed):
            raise result.error
        assert isinstance(result, TuneResult)
        return result

    def tune_all(
        self,
        problems: Iterable[Problem | str] | str,
        *,
        candidates: Candidates | None = None,
        fixed: Mapping[str, tuple[Value, ...]] | None = None,
        budget_s: float | None = None,
        stakes: Sequence[float] | None = None,
        contexts: Sequence[str] | None = None,
    ) -> Iterator[TuneResult | Failed]:
        """Yield the result of each problem; a problem without a winner does not stop the others.

        While one problem is measured the next one's candidates are being compiled.

        Args:
            problems: What to tune: problems or their lines, or one line.
            candidates: How many kernels to compile per problem, or the configs to try.
            fixed: Knobs restricted to some values, as for :meth:`tune_problem`.
            budget_s: Seconds for all problems together.
            stakes: As for :meth:`run`.
            contexts: The launch context of each problem; by default that of the object.

        Raises:
            UsageError: ``budget_s`` is no number above 0, there is no such context, or what is to be tuned is
                no problem.
            CutegenError: As :meth:`request`.
        """
        require_budget(budget_s)
        if isinstance(problems, str) or not isinstance(problems, Iterable):
            problems = [problems]
        wanted = list(map(as_problem, problems))
        requests = [
            self.request(problem, candidates, fixed, budget_s, context=context)
            for problem, context in zip(wanted, contexts or [self.context] * len(wanted), strict=True)
        ]
        for result in self.run(requests, budget_s, stakes):
            assert not isinstance(result, RangeResult)
            yield result

    def run(
        self,
        requests: Sequence[Request | RangeRequest],
        budget_s: float | None = None,
        stakes: Sequence[float] | None = None,
    ) -> Iterator[TuneResult | RangeResult | Failed]:
        """Yield the result of each request, in order; as :meth:`tune`.

        Args:
            requests: Made by :meth:`request` and :meth:`range_request`.
            budget_s: Seconds for all of them together.
            stakes: How much depends on each, such as calls times microseconds. Seconds are shared in this
                proportion, but each gets at least a quarter of an equal share. None for equal shares.
        """
        if autotune_disabled():
            yield from map(self._untuned, requests)
            return
        self.setting.save_fallback()
        children = self._children or self.setting.children()
        try:
            with TrialStore(self.setting.db) as trials:
                session = Session(self.setting, children, trials, self._observe, self._again)
                results = Tuning(session).run_all(requests, budget_s, stakes)
                for request, result in zip(requests, results, strict=True):
                    if isinstance(result, TuneResult):
                        self._results.add(result, again=self._is_usual(request))
                    yield result
        finally:
            if children is not self._children:
                children.close()

    def _is_usual(self, request: Request | RangeRequest) -> bool:
        """Whether a problem alone leads to this request: no candidates, knobs or context were given."""
        return isinstance(request, Request) and request == self.request(
            request.problem, budget_s=request.budget_s, objective=request.objective
        )

    def request(
        self,
        problem: Problem | str,
        candidates: Candidates | None = None,
        fixed: Mapping[str, tuple[Value, ...]] | None = None,
        budget_s: float | None = None,
        objective: str | None = None,
        context: str | None = None,
    ) -> Request:
        """Return what :meth:`run` needs to know of one problem; arguments are as for :meth:`tune_problem`.

        Raises:
            ConfigError: A given candidate breaks rules or ``fixed``, or there is no such knob or value.
            ProblemError: A line describes no problem.
            ResourceError: The operators are a source, and their package is not installed.
            UsageError: There is no such problem, objective or context, candidates or values of a fixed knob
                are none or no list, or there is no GPU to read energy from.
        """
        problem = as_problem(problem)
        wanted = require_objective(objective or self._objective)
        if wanted != "time" and self.setting.device is None:
            raise UsageError(f"objective {wanted} needs a GPU; valid without one: time")
        effort = self._effort
        explicit: tuple[Config, ...] = ()
        kept = self._fixed(problem, fixed or {})
        if isinstance(candidates, int):
            if candidates < 1:
                raise UsageError(f"candidates={candidates} must be at least 1")
            effort = effort.of_kernels(candidates)
        elif candidates is not None:
            explicit = self._explicit(problem, candidates, kept)
        return Request(
            problem=problem,
            arch=self.setting.arch,
            sm_count=self.setting.sm_count,
            effort=effort,
            fixed=kept,
            explicit=explicit,
            budget_s=budget_s,
            seed=self._seed,
            allow_torch=self._allow_torch,
            objective=wanted,
            context=context or self.context,
            sources=self._sources,
            package=require_package() if "operators" in self._sources else "",
        )

    def range_request(
        self,
        whole: Range,
        candidates: int | None = None,
        fixed: Mapping[str, tuple[Value, ...]] | None = None,
        budget_s: float | None = None,
    ) -> RangeRequest:
        """Return what :meth:`run` needs to know of a range; raises as :meth:`tune_range`.

        Args:
            whole: The range.
            candidates: Most kernels to compile for it.
            fixed: Knobs restricted to some values, as for :meth:`tune_range`.
            budget_s: Seconds that the user gave; they name the run.
        """
        if self.setting.device is None and not autotune_disabled():
            raise UsageError(f"{whole}: a range is tuned by measuring, which needs a GPU; give single sizes")
        effort = self._range_effort
        effort = effort if candidates is None else replace(effort, kernels=candidates)
        return RangeRequest(whole, self.request(whole.low, candidates, fixed, budget_s), effort)

    def _untuned(self, request: Request | RangeRequest) -> TuneResult | RangeResult:
        if isinstance(request, RangeRequest):
            return untuned_range(request, self.setting)
        return self._default(request.problem)

    def _fixed(
        self, problem: Problem, fixed: Mapping[str, tuple[Value, ...]]
    ) -> dict[str, tuple[Value, ...]]:
        """Return ``fixed``, whose knobs and values exist, each knob with a value at least."""
        if not isinstance(fixed, Mapping):
            raise UsageError(f"fixed is {shown(fixed)}; valid: a mapping such as {{'tile_k': (64, 128)}}")
        for knob, values in fixed.items():
            if not isinstance(values, (tuple, list)) or not values:
                raise UsageError(
                    f"fixed values of {knob} are {shown(values)}; valid: a tuple with at least one, such as "
                    "(64, 128)"
                )
            for value in values:
                find_space(problem.family, self.setting.arch).explain(problem, {knob: value})
        return {knob: tuple(dict.fromkeys(values)) for knob, values in fixed.items()}

    def _explicit(
        self,
        problem: Problem,
        candidates: Sequence[Config | Mapping[str, Value] | str],
        fixed: Mapping[str, tuple[Value, ...]],
    ) -> tuple[Config, ...]:
        """Return the configs that were given, each complete, valid and within ``fixed``."""
        if isinstance(candidates, (str, Mapping)) or not isinstance(candidates, Iterable):
            raise UsageError(
                f"candidates is {shown(candidates)}; valid: a list of configs, or how many to try"
            )
        configs = tuple(map(Config.of, candidates))
        if not configs:
            raise UsageError("candidates is empty; give at least one config, or how many to try")
        return tuple(self._complete(problem, config, fixed) for config in configs)

    def _complete(self, problem: Problem, config: Config, fixed: Mapping[str, tuple[Value, ...]]) -> Config:
        """Return ``config`` with its knobs in the order of its space."""
        space = space_of(config, problem.family, self.setting.arch)
        space.require(problem, config)
        for knob, values in fixed.items():
            if config.get(knob) not in values:
                valid = ", ".join(map(format_value, values))
                raise ConfigError(f"candidate {config} breaks what is fixed; valid for {knob}: {valid}")
        return Config({knob: config[knob] for knob in space.domains})

    def _default(self, problem: Problem) -> TuneResult:
        space = find_space(problem.family, self.setting.arch)
        sm_count = self.setting.sm_count
        config, predict = default_config(space, problem, sm_count), predictor(space, problem, sm_count)
        row = Row(config, default=True, chosen=True, predicted_us=predict(config) if predict else None)
        return TuneResult(problem, self.setting.arch.name, "", (row,))

    # -- memory

    def get_cached(
        self,
        m: int,
        n: int,
        k: int,
        *,
        batch: int = 1,
        dtype: str = "bf16",
        out_dtype: str = "",
        layout: str = "kk",
        epilogue: Epilogue | None = None,
        objective: str | None = None,
    ) -> TuneResult | None:
        """Return the result that this object remembers of a problem, None if there is none; never tunes.

        Raises:
            UsageError: There is no such objective, or a size is a range: only single sizes are remembered.
            ProblemError: The problem is ill-formed.
        """
        wanted = require_objective(objective or self._objective)
        for name, size in (("m", m), ("n", n), ("k", k), ("batch", batch)):
            if is_range(size):
                raise UsageError(f"{name} is the range {shown(size)}; only single sizes are remembered")
        problem = Gemm(m, n, k, batch, dtype, out_dtype, layout, epilogue=epilogue or Epilogue())
        return self._results.find(problem, wanted)

    @property
    def cache(self) -> Mapping[Problem, TuneResult]:
        """The results that this object remembers, by problem: the newest of those for several objectives."""
        return self._results.by_problem

    @property
    def cache_size(self) -> int:
        """How many results it remembers."""
        return len(self._results)

    @property
    def cache_hit_rate(self) -> float:
        """The share of lookups, by :meth:`tune` and :meth:`get_cached`, that were remembered; else 0."""
        return self._results.hit_rate

    @property
    def total_tunes(self) -> int:
        """How many tunings it did."""
        return len(self._results.history)

    def clear_cache(self) -> None:
        """Forget all results and counts of lookups; the database, the table and the history stay."""
        self._results.clear()

    def get_tuning_history(self) -> tuple[HistoryEntry, ...]:
        """Return every tuning of this object, oldest first."""
        return self._results.history


def _require_no_table(arch: str, table: object, fallback: str | None) -> None:
    """Refuse what is said of the table where nothing is measured, so that none is written."""
    for name, value in (("table", table), ("fallback", fallback)):
        if value is not None:
            raise UsageError(
                f"{name}={str(value)!r} would stay unwritten: with arch={arch!r} and no device nothing is "
                "measured, so there is no winner; leave one of them out"
            )
