"""Problem to kernel: which config answers, why that one, and the function that launches it."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cutegen.arch import Arch
from cutegen.build.host_library import open_library
from cutegen.errors import CutegenError, FrozenError, LaunchError, StoreError
from cutegen.families.registry import find_family, find_space, is_legal, require_legal, space_of
from cutegen.family import Problem, Signature
from cutegen.measure.device import Device, present_device
from cutegen.records.calibrations import calibrated_arch
from cutegen.records.entry import ANY, Entry, Fingerprint
from cutegen.records.lookup import Lookup
from cutegen.records.range_entry import RangeEntry
from cutegen.records.table import Table, require_fallback
from cutegen.runtime.background import Compilation
from cutegen.runtime.kernel_cache import FirstLaunch, Kernel, Kernels, frozen_error, not_in_capture
from cutegen.runtime.tally import AWAITED, MISSED, TORCH
from cutegen.search.defaults import choose_default, default_config, predictor, prepare_defaults
from cutegen.space import Config, Launch, Space
from cutegen.text import printable

__all__ = [
    "DEFAULT_FALLBACK",
    "MEASURED_LEAD",
    "Answer",
    "Choice",
    "Dispatcher",
    "Served",
    "autotune_disabled",
    "default_table_path",
    "look_up",
]

_log = logging.getLogger("cutegen")

#: Where PyTorch answers if neither the dispatcher nor the table says it: where it was measured to be faster,
#: or is expected to be, of what nobody measured. Source: docs/tuning.md, "Never slower than PyTorch".
DEFAULT_FALLBACK = "expected"
#: Measured leads of PyTorch up to this fraction count as none. Source: judgement; medians of repeated finals
#: differ by up to 0.6 %.
MEASURED_LEAD = 0.01
#: So many times as long must PyTorch be expected to take before a kernel that nobody measured runs, by
#: fallback. Source: 3,133 products measured on an H200, each (n, k) left out of the fits: docs/tuning.md.
_EXPECTED_LEAD = {"torch": 1.12, "expected": 1.03}


def autotune_disabled() -> bool:
    """Return whether ``CUTEGEN_DISABLE_AUTOTUNE`` asks that every lookup answers the default."""
    return os.environ.get("CUTEGEN_DISABLE_AUTOTUNE", "") not in {"", "0"}


def default_table_path(root: Path, device: Device) -> Path:
    """Return where the dispatch table of a kind of GPU is in the cache folder ``root``."""
    name = re.sub(r"[^a-z0-9]+", "_", device.name.lower()).strip("_")
    return root / "tables" / f"{name}.json"


@dataclass(frozen=True)
class Answer:
    """What a lookup found.

    Attributes:
        problem: What was asked.
        how: ``exact``, ``range``, ``bucket``, ``nearest``, ``default``, or ``given`` for a config that the
            caller chose.
        config: The config to run; None where torch is to compute the problem.
        entry: The table's entry behind it, if any; for a range, what it says of this problem.
        skipped: Why closer entries could not answer.
        within: The range that answers, if one does.
        because: Why torch computes it although there is a config, in words; empty otherwise.
        expected_us: Predicted microseconds of the config, where choosing it took a prediction.
    """

    problem: Problem
    how: str
    config: Config | None
    entry: Entry | None = None
    skipped: tuple[str, ...] = ()
    within: RangeEntry | None = None
    because: str = ""
    expected_us: float | None = None

    @property
    def known_key(self) -> str:
        """Where the artifact was when the entry was written; empty if it was made for another signature."""
        entry = self.entry
        same = entry is not None and entry.problem.signature == self.problem.signature
        return entry.artifact_key if entry is not None and same else ""

    def __str__(self) -> str:
        what = "torch" if self.config is None else str(self.config)
        reasons = [f"measured for {self.entry.problem}"] if self.entry and self.how != "exact" else []
        if self.within is not None:
            reasons = [f"tuned as {self.within.range}"]
        if self.because:
            reasons.append(self.because)
        if self.entry is not None and self.entry.objective != "time":
            reasons.append(f"tuned for {self.entry.objective}")
        if self.entry is not None and self.entry.contended_by:
            reasons.append("timed beside other work")
        because = f" ({', '.join(reasons)})" if reasons else ""
        return f"{self.problem}: {self.how}{because}: {what}"


@dataclass(frozen=True)
class Choice:
    """A kernel that is ready to launch.

    Attributes:
        answer: Which config it is, and why.
        function: The loaded kernel.
        launch: The scalars and the workspace that this problem needs.
        first: To be told of the kernel's first launch on this GPU; None if it ran there before.
    """

    answer: Answer
    function: Callable[..., Any]
    launch: Launch
    first: FirstLaunch | None = None


@dataclass(frozen=True)
class Served:
    """How a call is computed now.

    Attributes:
        answer: Which config it is to be, and why.
        choice: The kernel to launch; None where PyTorch computes the problem.
        awaited: The compilation of the kernel that takes over as soon as it is ready; None if nothing does.
        ticks: To be called at every launch: what counts calls, if anything does.
    """

    answer: Answer
    choice: Choice | None = None
    awaited: Compilation | None = None
    ticks: tuple[Callable[[], object], ...] = ()


class Dispatcher:
    """Answers problems from a dispatch table, else with the default config; never measures.

    Args:
        table: The table to ask; by default the one that tuning left in the cache folder for the GPU at hand.
        kernels: Where compiled kernels come from, and whether missing ones are compiled.
        device: Facts of a GPU by its index.
        device_type: Where tensors must be; tests on machines without a GPU pass ``cpu``.
        fallback: Where PyTorch's own call answers instead of a kernel, as
            :data:`~cutegen.records.table.FALLBACKS` says; empty leaves it to the table, and that to
            :data:`DEFAULT_FALLBACK`. Only for problems that one call of PyTorch computes.

    Raises:
        UsageError: There is no such fallback.
    """

    def __init__(
        self,
        table: Table | None = None,
        *,
        kernels: Kernels | None = None,
        device: Callable[[int], Device] = present_device,
        device_type: str = "cuda",
        fallback: str = "",
    ) -> None:
        self.kernels = kernels or Kernels()
        self.device_type = device_type
        self.fallback = require_fallback(fallback)
        #: Where the given table was read from; None if it was not, or none was given.
        self.table_path: Path | None = None
        self._given = table
        self._device = device
        self._devices: dict[int, Device] = {}
        self._arches: dict[int, Arch] = {}
        self._tables: dict[int, Table | None] = {}
        self._read: dict[Path, Table | None] = {}
        #: Signatures whose choices are as fast as they can be here.
        self._prepared: set[Signature] = set()

    def with_table(self, path: str | Path, *, fallback: str | None = None) -> Dispatcher:
        """Return a dispatcher that asks the table at ``path`` and is otherwise like this one.

        Args:
            path: The table.
            fallback: Where PyTorch's own call answers; None keeps this one's setting.

        Raises:
            StoreError: The file cannot be read.
            TableError: It is not a dispatch table.
            UsageError: There is no such fallback.
        """
        found = Dispatcher(
            Table.load(path),
            kernels=self.kernels,
            device=self._device,
            device_type=self.device_type,
            fallback=self.fallback if fallback is None else fallback,
        )
        found.table_path = Path(path)
        return found

    def with_build(self, build: str) -> Dispatcher:
        """Return a dispatcher whose kernels have another build policy and that is otherwise like this one.

        Raises:
            UsageError: There is no such policy.
        """
        kernels = self.kernels.with_build(build)
        return self._like(kernels, self.fallback)

    def with_fallback(self, fallback: str) -> Dispatcher:
        """Return a dispatcher that leaves other calls to PyTorch and is otherwise like this one.

        Raises:
            UsageError: There is no such fallback.
        """
        return self._like(self.kernels, fallback)

    def frozen(self, on_miss: str) -> Dispatcher:
        """Return a dispatcher that compiles and loads no kernel and is otherwise like this one.

        Args:
            on_miss: As for :meth:`~cutegen.runtime.kernel_cache.Kernels.frozen`.

        Raises:
            UsageError: There is no such answer to a miss.
        """
        found = self._like(self.kernels.frozen(on_miss), self.fallback)
        found._devices, found._tables, found._read = self._devices, self._tables, self._read
        return found

    def _like(self, kernels: Kernels, fallback: str) -> Dispatcher:
        found = Dispatcher(
            self._given,
            kernels=kernels,
            device=self._device,
            device_type=self.device_type,
            fallback=fallback,
        )
        found.table_path = self.table_path
        return found

    @property
    def has_given_table(self) -> bool:
        """Whether it asks a table that it was given, instead of the one in the cache folder."""
        return self._given is not None

    def device(self, index: int = 0) -> Device:
        """Return the facts of GPU ``index``, asked for once.

        Raises:
            DeviceError: There is no such GPU.
        """
        if index not in self._devices:
            self._devices[index] = self._device(index)
        return self._devices[index]

    def arch(self, index: int = 0) -> Arch:
        """Return the target for GPU ``index``, with the calibration that the cache folder has of it, if any.

        Raises:
            ArchError: cutegen has no target for that GPU.
            DeviceError: There is no such GPU.
        """
        if index not in self._arches:
            self._arches[index] = calibrated_arch(self.kernels.store.root, self.device(index))
        return self._arches[index]

    def explain(self, problem: Problem, index: int = 0) -> Answer:
        """Return which config answers ``problem`` on GPU ``index``, and which rule of lookup found it.

        Nothing is compiled or loaded. ``str`` of the answer is one line to print.

        Raises:
            ArchError: cutegen has no target for that GPU.
            DeviceError: There is no such GPU.
            ProblemError: No config computes the problem there.
        """
        device = self.device(index)
        space = find_space(problem.family, self.arch(index))
        if problem.signature not in self._prepared:
            self._prepare(problem, space, device.sm_count)
        table = None if autotune_disabled() else self.table(index)
        return look_up(table, problem, space, device.sm_count, self.fallback)

    def _prepare(self, problem: Problem, space: Space, sm_count: int) -> None:
        """Make choices for a signature fast, with what a warm-up left in the cache folder."""
        self._prepared.add(problem.signature)
        try:
            prepare_defaults(
                space, problem, sm_count, lambda source: open_library(source, self.kernels.store)
            )
        except StoreError as error:
            _log.info("choices take longer: %s", error)

    def kernel(
        self, problem: Problem, index: int = 0, *, config: Config | None = None, capturing: bool = False
    ) -> Choice | None:
        """Return the loaded kernel for ``problem`` on GPU ``index``, or None if torch is to compute it.

        If the kernel is missing and may be compiled, this waits for the compiler. Who launches it says so
        (:attr:`Choice.first`): until then it is refused while a CUDA graph is captured.

        Args:
            problem: What is to be computed.
            index: The GPU.
            config: Overrides the lookup.
            capturing: A CUDA graph is being captured: a kernel that never ran on this GPU is refused.

        Raises:
            BuildError: The kernel was not there and does not compile.
            ConfigError: ``config`` breaks rules of its space.
            LaunchError: The kernel is not there and may not be compiled or loaded now.
        """
        answer = self._answer(problem, index, config)
        if answer.config is None:
            return None
        arch, known = self.arch(index), answer.known_key
        kernel = self.kernels.get(problem, answer.config, arch, known_key=known, capturing=capturing)
        if self.kernels.on_miss and not self._has_run(kernel, index):
            raise frozen_error(problem)
        return self._choice(answer, answer.config, kernel, index, capturing)

    def serve(
        self, problem: Problem, index: int = 0, *, config: Config | None = None, capturing: bool = False
    ) -> Served:
        """Return how to compute ``problem`` on GPU ``index`` now: as :meth:`kernel`, but never waiting.

        Under ``build="background"`` a kernel that is missing is compiled while something else computes the
        problem: the library call that does, else the kernel of the same signature that is loaded, valid
        and predicted to be the fastest, else the family's stand-in. Under other policies nothing is awaited.

        A table's winner that cannot be compiled or loaded is set aside: the default config answers.

        Raises:
            BuildError: The kernel does not compile, and nothing else computes the problem.
            ConfigError: ``config`` breaks rules of its space.
            FrozenError: The kernel was not loaded when ``on_miss="error"`` froze what there is.
            LaunchError: The kernel is not there, and nothing else computes the problem or a CUDA graph is
                being captured.
        """
        answer = self._answer(problem, index, config)
        if answer.config is None:
            return self._counted(Served(answer), TORCH)
        found = self._ask(answer, answer.config, index, capturing)
        config = answer.config
        if isinstance(found, Compilation) and _is_broken(found) and answer.how not in ("default", "given"):
            config = self._default(problem, index)
            answer = _set_aside(answer, config, found.error)
            found = self._ask(answer, config, index, capturing)
        if isinstance(found, Kernel):
            choice = self._choice(answer, config, found, index, capturing)
            return self._counted(Served(answer, choice), answer.how)
        if found.error is None and capturing:
            raise not_in_capture(problem)
        missed = isinstance(found.error, FrozenError)
        return self._counted(self._instead(answer, found, index, capturing), MISSED if missed else AWAITED)

    def _ask(self, answer: Answer, config: Config, index: int, capturing: bool) -> Kernel | Compilation:
        """Return the kernel, or what there is in its place; of frozen kernels only those that ran there."""
        arch, known = self.arch(index), answer.known_key
        found = self.kernels.ask(answer.problem, config, arch, known_key=known, capturing=capturing)
        if self.kernels.on_miss and isinstance(found, Kernel) and not self._has_run(found, index):
            return self.kernels.miss(answer.problem)
        return found

    def _has_run(self, kernel: Kernel, index: int) -> bool:
        return FirstLaunch((kernel.artifact.key, index), self.kernels.launched).done

    def _default(self, problem: Problem, index: int) -> Config:
        device = self.device(index)
        return default_config(find_space(problem.family, self.arch(index)), problem, device.sm_count)

    def _counted(self, served: Served, rule: str) -> Served:
        """Remember what answers a problem; calls are counted too once nothing may be loaded any more."""
        tally, problem = self.kernels.tally, served.answer.problem
        tally.answered(problem, rule)
        if not self.kernels.on_miss:
            return served
        more = (tally.of_miss(problem),) if rule == MISSED else ()
        return replace(served, ticks=(tally.of_call(rule), *more))

    def serve_given(self, problem: Problem, index: int, config: Config, capturing: bool) -> Served:
        """Return how to compute ``problem`` with a config that the caller chose: nothing else will do, so the
        compiler is waited for, unless ``build="never"``. Raises as :meth:`kernel`."""
        choice = self.kernel(problem, index, config=config, capturing=capturing)
        served = Served(Answer(problem, "given", config) if choice is None else choice.answer, choice)
        return self._counted(served, served.answer.how)

    def _instead(self, answer: Answer, found: Compilation, index: int, capturing: bool) -> Served:
        """Return what computes a problem whose kernel is being compiled or cannot be."""
        problem = answer.problem
        awaited = found if found.error is None else None
        family = find_family(problem.family)
        near = None if family.is_library_call(problem) else self._nearest(problem, index)
        if near is not None:
            kernel = self.kernels.get(problem, near, self.arch(index), capturing=capturing)
            return Served(answer, self._choice(answer, near, kernel, index, capturing), awaited)
        if family.stand_in(problem) is not None:
            return Served(answer, None, awaited)
        raise found.error or LaunchError(
            f"the kernel for {problem} is being compiled, and nothing else computes it; call again in a few "
            "seconds, compile it before (python -m cutegen.warm), or let calls wait with build='allow'"
        )

    def _nearest(self, problem: Problem, index: int) -> Config | None:
        """Return the loaded config that is valid for ``problem`` and predicted to be the fastest, if any."""
        device = self.device(index)
        known = self.kernels.configs(self.arch(index), problem.signature)
        valid = [config for config in known if is_legal(config, problem, self.arch(index))]
        if self.kernels.on_miss:
            get = self.kernels.get
            valid = [c for c in valid if self._has_run(get(problem, c, self.arch(index)), index)]
        estimate = _estimate(find_space(problem.family, self.arch(index)), problem, device.sm_count)
        return min(valid, key=estimate or (lambda config: 0.0), default=None)

    def _answer(self, problem: Problem, index: int, config: Config | None) -> Answer:
        if config is None:
            return self.explain(problem, index)
        space_of(config, problem.family, self.arch(index)).require(problem, config)
        return Answer(problem, "given", config)

    def _choice(self, answer: Answer, config: Config, kernel: Kernel, index: int, capturing: bool) -> Choice:
        first = FirstLaunch((kernel.artifact.key, index), self.kernels.launched)
        if capturing and not first.done:
            raise not_in_capture(answer.problem)
        device = self.device(index)
        told = kernel.artifact.sm_count
        if told not in (0, device.sm_count):
            raise LaunchError(
                f"the kernel for {answer.problem} was compiled for a GPU of {told} multiprocessors, which "
                f"its code asked for; this one has {device.sm_count}; declare sm_count={device.sm_count}"
            )
        space = space_of(config, answer.problem.family, self.arch(index))
        launch = space.launch(config, answer.problem, device.sm_count)
        return Choice(answer, kernel.function, launch, None if first.done else first)

    def table(self, index: int = 0) -> Table | None:
        """Return the table that answers on GPU ``index``; None if none does."""
        if index not in self._tables:
            device = self.device(index)
            table = self._given if self._given is not None else self._cached_table(device)
            self._tables[index] = None if table is None or self._foreign(table, device) else table
        return self._tables[index]

    def _cached_table(self, device: Device) -> Table | None:
        """Return the table of the cache folder; one that cannot be used counts as none, with one warning."""
        path = default_table_path(self.kernels.store.root, device)
        if path not in self._read:
            try:
                self._read[path] = Table.find(path)
            except CutegenError as error:
                self._read[path] = None
                reason = printable(str(error))
                _log.warning("ignoring the dispatch table in the cache folder: %s", reason)
        return self._read[path]

    def _foreign(self, table: Table, device: Device) -> bool:
        reasons = table.mismatch(Fingerprint.of(device, self.kernels.toolchain))
        if reasons:
            _log.warning(
                "ignoring the dispatch table: %s; set the field to %r to accept any", "; ".join(reasons), ANY
            )
        return bool(reasons)


def _is_broken(found: Compilation) -> bool:
    """Whether there is no kernel and will be none, although there might have been."""
    return found.error is not None and not isinstance(found.error, FrozenError)


def _set_aside(answer: Answer, default: Config, error: CutegenError | None) -> Answer:
    """Return the default's answer, in the place of a table's whose kernel is not to be had."""
    why = f"{answer.config} has no kernel: {printable(str(error))}"
    return Answer(answer.problem, "default", default, skipped=(*answer.skipped, why))


def look_up(
    table: Table | None, problem: Problem, space: Space, sm_count: int, fallback: str = "none"
) -> Answer:
    """Return what ``table`` answers to ``problem`` on so many SMs, or else the default config.

    Args:
        table: The table, if there is one that holds.
        problem: What is to be computed.
        space: Where configs come from.
        sm_count: SMs of the GPU.
        fallback: Where PyTorch's own call answers, as :class:`Dispatcher`.

    Raises:
        ProblemError: No config computes it.
    """
    answer = _kernel_for(table, problem, space, sm_count)
    wanted = fallback or (table.fallback if table is not None else "") or DEFAULT_FALLBACK
    family = find_family(problem.family)
    served = family.is_library_calls if wanted == "torch" else family.is_library_call
    if wanted == "none" or answer.config is None or not served(problem):
        return answer
    because = _measured_slower(answer)
    if because is None:
        tuned = answer.how in ("exact", "range")
        asked = wanted == "torch" or (wanted == "expected" and not tuned)
        because = _expected_slower(answer, space, sm_count, _EXPECTED_LEAD[wanted]) if asked else ""
    return replace(answer, config=None, because=because) if because else answer


def _measured_slower(answer: Answer) -> str | None:
    """Return in words that a measurement of this very answer prefers PyTorch, empty if not, None without."""
    entry = answer.entry
    ratio = entry.ratio_to_baseline if entry is not None and not entry.contended_by else None
    if entry is None or ratio is None or answer.how not in ("exact", "range"):
        return None
    what = entry.baseline or "torch.mm"
    return f"{what} was measured {1 / ratio:.2f} times as good" if ratio < 1 - MEASURED_LEAD else ""


def _expected_slower(answer: Answer, space: Space, sm_count: int, lead: float) -> str:
    """Return in words that PyTorch is expected to take less than ``lead`` times as long; else nothing.

    More than ``lead`` is asked for where the family doubts what it expects.
    """
    problem, family = answer.problem, find_family(answer.problem.family)
    torch_us = family.baseline_us(problem, space.arch, sm_count)
    own_us = None if torch_us is None else _predicted_us(answer, space, sm_count)
    if torch_us is None or own_us is None:
        return ""
    own_us += family.fused_us(problem)
    if torch_us >= own_us * lead * family.doubt(problem):
        return ""
    return f"expected {torch_us:.1f} us of torch, {own_us:.1f} us of the kernel"


def _predicted_us(answer: Answer, space: Space, sm_count: int) -> float | None:
    """Return what the config of an answer is predicted to take, if there is one and anybody predicts it."""
    if answer.expected_us is not None or answer.config is None:
        return answer.expected_us
    predict = predictor(space, answer.problem, sm_count)
    return None if predict is None else predict(answer.config)


def _kernel_for(table: Table | None, problem: Problem, space: Space, sm_count: int) -> Answer:
    """Return the answer without a look at what PyTorch would take."""
    skipped: tuple[str, ...] = ()
    answer: Answer | None = None
    if table is not None:
        estimate = _estimate(space, problem, sm_count)
        found = table.lookup(problem, lambda config: require_legal(config, problem, space.arch), estimate)
        skipped = found.skipped
        answer = _of_entry(problem, found, space)
        if answer is not None and not _competes(answer, space):
            return answer
    config, expected_us = choose_default(space, problem, sm_count)
    default = Answer(problem, "default", config, skipped=skipped, expected_us=expected_us)
    if answer is None:
        return default
    if config == answer.config or not _is_faster(default, answer, space, sm_count):
        return answer
    because = [f"{answer.entry.problem}: the default is expected to be faster here"] if answer.entry else []
    return replace(default, skipped=(*skipped, *because))


def _competes(answer: Answer, space: Space) -> bool:
    """Whether the default may be better: a neighbour's winner answers, and predictions are fitted."""
    by_time = answer.entry is not None and answer.entry.objective == "time"
    fitted = find_family(answer.problem.family).is_fitted(answer.problem, space.arch)
    return fitted and by_time and answer.config is not None and answer.how in ("bucket", "nearest")


def _is_faster(answer: Answer, other: Answer, space: Space, sm_count: int) -> bool:
    """Whether the config of ``answer`` is predicted to be faster than that of another."""
    own, others = (_predicted_us(each, space, sm_count) for each in (answer, other))
    return own is not None and others is not None and own < others


def _of_entry(problem: Problem, found: Lookup, space: Space) -> Answer | None:
    """Return what an entry answers, or None if it has nothing for this problem."""
    entry = found.entry
    if entry is None:
        return None
    if entry.source == "torch" and find_family(problem.family).is_library_call(problem):
        return Answer(problem, found.how, None, entry, found.skipped, found.within)
    if entry.config is None or not is_legal(entry.config, problem, space.arch):
        return None
    return Answer(problem, found.how, entry.config, entry, found.skipped, found.within)


def _estimate(space: Space, problem: Problem, sm_count: int) -> Callable[[Config], float] | None:
    """Return the model's estimate in microseconds for configs of ``problem``, None without a model."""
    predict = predictor(space, problem, sm_count)
    if predict is None:
        return None

    def estimate(config: Config) -> float:
        found = predict(config)
        return math.inf if found is None else found

    return estimate
