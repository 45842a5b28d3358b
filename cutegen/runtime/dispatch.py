"""From a problem to the kernel that computes it: the answer to it, loaded, or what computes meanwhile."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cutegen.arch import Arch
from cutegen.build.host_library import open_library
from cutegen.errors import CutegenError, FrozenError, LaunchError, StoreError
from cutegen.families.registry import find_family, find_space, is_legal, space_of
from cutegen.family import Problem, Signature
from cutegen.measure.device import Device, present_device
from cutegen.records.calibrations import calibrated_arch
from cutegen.records.entry import ANY, Fingerprint
from cutegen.records.paths import default_table_path
from cutegen.records.table import Table, require_fallback
from cutegen.runtime.answer_lookup import Answer, estimate, look_up
from cutegen.runtime.background import PendingKernel
from cutegen.runtime.kernel_cache import FirstLaunch, Kernel, Kernels, frozen_error, not_in_capture
from cutegen.runtime.tally import AWAITED, MISSED, TORCH
from cutegen.search.defaults import default_config, prepare_defaults
from cutegen.space import Config, Launch, Space
from cutegen.text import printable

__all__ = [
    "Choice",
    "Dispatcher",
    "Served",
    "autotune_disabled",
]

_log = logging.getLogger("cutegen")


def autotune_disabled() -> bool:
    """Return whether ``CUTEGEN_DISABLE_AUTOTUNE`` asks that every lookup answers the default."""
    return os.environ.get("CUTEGEN_DISABLE_AUTOTUNE", "") not in {"", "0"}


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
    awaited: PendingKernel | None = None
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
            :data:`~cutegen.runtime.answer_lookup.DEFAULT_FALLBACK`. Only for problems that one call of
            PyTorch computes.

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
        none = index in self._tables and self._tables[index] is None  # known: the environment need not say it
        table = None if none or autotune_disabled() else self.table(index)
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
        error = _error_of(found)
        if _is_broken(error) and answer.how not in ("default", "given"):
            config = self._default(problem, index)
            answer = _set_aside(answer, config, error)
            found = self._ask(answer, config, index, capturing)
            error = _error_of(found)
        if isinstance(found, Kernel):
            choice = self._choice(answer, config, found, index, capturing)
            return self._counted(Served(answer, choice), answer.how)
        if error is None and capturing:
            raise not_in_capture(problem)
        # What ends in an error from here on is awaited: the next call sees it, and sets aside what it must.
        served = self._instead(answer, found if error is None else error, index, capturing)
        return self._counted(served, MISSED if isinstance(error, FrozenError) else AWAITED)

    def _ask(self, answer: Answer, config: Config, index: int, capturing: bool) -> Kernel | PendingKernel:
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

    def _instead(
        self, answer: Answer, found: PendingKernel | CutegenError, index: int, capturing: bool
    ) -> Served:
        """Return what computes a problem whose kernel is being compiled, or cannot be for that reason."""
        problem = answer.problem
        awaited = found if isinstance(found, PendingKernel) else None
        family = find_family(problem.family)
        near = None if family.is_library_call(problem) else self._nearest(problem, index)
        if near is not None:
            kernel = self.kernels.get(problem, near, self.arch(index), capturing=capturing)
            return Served(answer, self._choice(answer, near, kernel, index, capturing), awaited)
        if family.stand_in(problem) is not None:
            return Served(answer, None, awaited)
        if isinstance(found, CutegenError):
            raise found
        raise LaunchError(
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
        predicted = estimate(find_space(problem.family, self.arch(index)), problem, device.sm_count)
        return min(valid, key=predicted or (lambda config: 0.0), default=None)

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


def _error_of(found: Kernel | PendingKernel) -> CutegenError | None:
    """Return why there is no kernel, as far as that is known by now; a moment later it may be."""
    return found.error if isinstance(found, PendingKernel) else None


def _is_broken(error: CutegenError | None) -> bool:
    """Whether there is no kernel and will be none, although there might have been."""
    return error is not None and not isinstance(error, FrozenError)


def _set_aside(answer: Answer, default: Config, error: CutegenError | None) -> Answer:
    """Return the default's answer, in the place of a table's whose kernel is not to be had."""
    why = f"{answer.config} has no kernel: {printable(str(error))}"
    return Answer(answer.problem, "default", default, skipped=(*answer.skipped, why))
