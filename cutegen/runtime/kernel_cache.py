"""Config to a function that launches: from the cache, or compiled when that is allowed."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from cutegen.arch import Arch
from cutegen.build import (
    Artifact,
    Builder,
    Failure,
    Toolchain,
    artifact_key,
    find_result,
    host_runs,
    is_artifact_key,
)
from cutegen.build.artifact import require_written
from cutegen.build.parallelism import default_workers
from cutegen.build.render import Source, recipe_of, render
from cutegen.build.store import Store
from cutegen.errors import BuildError, CutegenError, FrozenError, LaunchError, UsageError
from cutegen.families.registry import space_of
from cutegen.family import Problem, Signature
from cutegen.runtime.background import BackgroundCompiler, Builds, PendingKernel
from cutegen.runtime.tally import Tally
from cutegen.space import Config
from cutegen.system.forks import RenewedLock, renew_in_children
from cutegen.text import printable

__all__ = [
    "BUILD_POLICIES",
    "ON_MISS",
    "FirstLaunch",
    "Kernel",
    "Kernels",
    "build_one",
    "frozen_error",
    "not_in_capture",
    "open_builder",
    "require_on_miss",
    "require_policy",
]

BUILD_POLICIES = ("allow", "never", "background")
#: What frozen kernels do for a call whose kernel is not loaded: see :meth:`Kernels.frozen`.
ON_MISS = ("fallback", "warn", "error")
#: Target, signature, and what of a config is compiled in.
_View: TypeAlias = tuple[str, Signature, Config]
_log = logging.getLogger("cutegen")


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel: calling ``function`` launches it on torch's current stream."""

    artifact: Artifact
    function: Callable[..., Any]


@dataclass(frozen=True)
class FirstLaunch:
    """The first launch of a kernel on a GPU: it loads the code there, which no capture of a graph allows.

    Attributes:
        kernel: Key of the artifact, and the GPU.
        launched: Those that have been launched.
    """

    kernel: tuple[str, int]
    launched: set[tuple[str, int]]

    @property
    def done(self) -> bool:
        """Whether it has happened."""
        return self.kernel in self.launched

    def happened(self) -> None:
        """Remember that the kernel was launched, and that this did not fail."""
        self.launched.add(self.kernel)


def not_in_capture(problem: Problem) -> LaunchError:
    """Return the error for a kernel that would first have to be made ready while a CUDA graph is captured."""
    return LaunchError(
        f"the kernel for {problem} has not run yet, and a CUDA graph is being captured, when nothing can be "
        "compiled or loaded; make the same call once before the capture, or call cutegen.warmup"
    )


def frozen_error(problem: Problem) -> FrozenError:
    """Return the error for a kernel that was not loaded before nothing could be any more."""
    return FrozenError(
        f"the kernel for {problem} is not loaded, and cutegen is frozen; warm up before cutegen.freeze(): "
        f"cutegen.warmup(problems=[{str(problem)!r}])"
    )


def require_policy(build: str) -> str:
    """Return ``build`` if it is one of :data:`BUILD_POLICIES`; raises :class:`UsageError`."""
    if build not in BUILD_POLICIES:
        raise UsageError(f"build={build!r} is no policy; valid: {', '.join(BUILD_POLICIES)}")
    return build


def require_on_miss(on_miss: str) -> str:
    """Return ``on_miss`` if it is one of :data:`ON_MISS`; raises :class:`UsageError`."""
    if on_miss not in ON_MISS:
        raise UsageError(f"on_miss={on_miss!r} is no answer to a miss; valid: {', '.join(ON_MISS)}")
    return on_miss


def open_builder(store: Store) -> Builds:
    """Return what compiles beside a program that runs: it leaves half of the cores to the program."""
    return Builder(store, workers=max(1, default_workers() // 2))


def build_one(source: Source, store: Store) -> Artifact:
    """Compile ``source`` into ``store`` and return the artifact; takes seconds.

    Raises:
        BuildError: The compiler refused, died or took too long.
        StoreError: The store cannot be written.
    """
    with Builder(store, workers=1) as builder:
        for _, result in builder.build([source]):
            if isinstance(result, Failure):
                raise result.error()
            return result
    raise AssertionError("a build of one source gave no result")


def _load(library: Path, symbol: str) -> Callable[..., Any]:
    from cutegen.build.loader import load_kernel

    return load_kernel(library, symbol)


class _NotLoadedError(LaunchError):
    """A kernel could not be loaded, now or before."""

    def __init__(self, compilation: PendingKernel) -> None:
        self.compilation = compilation
        super().__init__(str(compilation.error))


@dataclass(eq=False)
class _Request:
    """A kernel that is asked for, and the moment.

    Attributes:
        problem: What is to be computed.
        config: How.
        arch: The target.
        known_key: Where a table says that the artifact is; empty if nowhere.
        capturing: A CUDA graph is being captured.
        wait: Whether the caller waits for the compiler.
    """

    problem: Problem
    config: Config
    arch: Arch
    known_key: str
    capturing: bool
    wait: bool

    @property
    def exact(self) -> _View:
        """What is asked for, to the letter: with the knobs that only a launch takes."""
        return self.arch.name, self.problem.signature, self.config

    @property
    def view(self) -> _View:
        """What tells its kernel from others; rendering would say so too, but costs a millisecond."""
        space = space_of(self.config, self.problem.family, self.arch)
        return self.arch.name, self.problem.signature, space.compile_view(self.config)


class Kernels:
    """The kernels of one store, each found, compiled and loaded at most once.

    Args:
        store: Where artifacts are; the user's cache folder by default.
        build: What becomes of a kernel that is not there when :meth:`ask` is asked for it: ``background``
            compiles it in a thread while the caller does something else, ``allow`` makes the caller wait
            (seconds, logged at INFO), ``never`` refuses.
        load: Turns a library and a symbol into a function.
        compile: Turns a source into an artifact of the store.
        builder: Opens what compiles in the background.

    Attributes:
        on_miss: What becomes of calls whose kernel is not loaded, if nothing is loaded any more; else empty.
        launched: Keys of artifacts that were launched, each with the GPU: a first launch loads code there.
        tally: How calls were answered.

    Raises:
        UsageError: There is no such build policy.
    """

    def __init__(
        self,
        store: Store | None = None,
        *,
        build: str = "background",
        load: Callable[[Path, str], Callable[..., Any]] = _load,
        compile: Callable[[Source, Store], Artifact] = build_one,
        builder: Callable[[Store], Builds] = open_builder,
    ) -> None:
        self.build = require_policy(build)
        self.store = store or Store.default()
        self._load = load
        self._compile = compile
        self._loaded: dict[str, Kernel] = {}
        self._ready: dict[_View, Kernel] = {}
        self._refused: set[str] = set()
        self._lock = RenewedLock()
        #: Held while a thread waits for the compiler, one for each kernel.
        self._making: dict[_View, RenewedLock] = {}
        #: Kernels that are being compiled in the background, and those that could not be.
        self._compilations: dict[_View, PendingKernel] = {}
        self._said: set[str] = set()
        #: Kernels that could not be loaded, with the reason.
        self._broken: dict[_View, PendingKernel] = {}
        self._builder = builder
        self._background = BackgroundCompiler(lambda: builder(self.store))
        self.on_miss = ""
        self.launched: set[tuple[str, int]] = set()
        self.tally = Tally()
        renew_in_children(self)

    def renew(self) -> None:
        """Forget in a child of fork what the parent compiles: whoever waits for it asks again."""
        pending = [view for view, each in self._compilations.items() if not each.finished]
        for view in pending:
            self._compilations.pop(view).abandon()

    def with_build(self, build: str) -> Kernels:
        """Return the same kernels, loaded ones included, under another build policy.

        Raises:
            UsageError: There is no such build policy.
        """
        other = copy.copy(self)  # what is loaded and what is being compiled stays common to both
        other.build = require_policy(build)
        renew_in_children(other)
        if other.on_miss:
            other.on_miss, builder = "", self._builder
            other._background = BackgroundCompiler(lambda: builder(other.store))
        return other

    def frozen(self, on_miss: str) -> Kernels:
        """Return the same kernels, of which nothing is compiled or loaded any more.

        What is being compiled in the background is given up; this waits some seconds at most.

        Args:
            on_miss: What a call gets whose kernel is not loaded. ``fallback``: something else computes it, as
                under ``build="background"``. ``warn``: so, and the log says it once for each problem.
                ``error``: :class:`FrozenError`.

        Raises:
            UsageError: There is no such answer.
        """
        other = self.with_build("never")
        other.on_miss = require_on_miss(on_miss)
        with self._lock:
            for view in [view for view, each in self._compilations.items() if not each.finished]:
                del self._compilations[view]
        self._background.close()
        return other

    def miss(self, problem: Problem) -> PendingKernel:
        """Return what stands for a kernel that is not loaded and may not be, after what ``on_miss`` asks for.

        Raises:
            FrozenError: It asks for an error.
        """
        error = frozen_error(problem)
        if self.on_miss == "error":
            raise error
        if self.on_miss == "warn":
            self._say(str(error), "%s; something else computes it", error)
        return PendingKernel(error)

    @cached_property
    def toolchain(self) -> Toolchain:
        """What compiles kernels here."""
        return Toolchain.current()

    def get(
        self, problem: Problem, config: Config, arch: Arch, *, known_key: str = "", capturing: bool = False
    ) -> Kernel:
        """Return the kernel of ``config``, compiled and loaded; waits for the compiler if that is allowed.

        Args:
            problem: What is to be computed.
            config: A valid config for it; only a kernel that must be rendered is checked here.
            arch: The target.
            known_key: Where a table says that the artifact is; empty if nowhere. Tried first: if that
                artifact records the recipe of what is asked for, nothing is rendered.
            capturing: A CUDA graph is being captured, when neither compiling nor loading is allowed.

        Raises:
            BuildError: It does not compile.
            ConfigError: The config breaks rules of its space.
            LaunchError: It cannot be loaded, or may not be compiled or loaded now.
            ResourceError: It must be rendered, and the package that it comes from is not installed.
            StoreError: The store cannot be read or written.
        """
        found = self._get(_Request(problem, config, arch, known_key, capturing, wait=True))
        assert isinstance(found, Kernel)
        return found

    def ask(
        self, problem: Problem, config: Config, arch: Arch, *, known_key: str = "", capturing: bool = False
    ) -> Kernel | PendingKernel:
        """Return the kernel of ``config``, or under ``build="background"`` what is awaited in its place.

        A compilation that failed is returned too, and so is a kernel that cannot be loaded; the reason was
        logged once. Nothing starts while a CUDA graph is captured. Other policies answer as :meth:`get`,
        whose arguments and errors these are, but for kernels that cannot be loaded, and for frozen ones.
        """
        wait = self.build != "background"
        try:
            return self._get(_Request(problem, config, arch, known_key, capturing, wait))
        except FrozenError:
            return self.miss(problem)
        except _NotLoadedError as error:
            return error.compilation

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is compiled in the background, or so many seconds; return whether it is so."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            compilations = list(self._compilations.values())
        left = (None if deadline is None else max(0.0, deadline - time.monotonic()) for _ in compilations)
        return all(compilation.wait(seconds) for compilation, seconds in zip(compilations, left, strict=True))

    def configs(self, arch: Arch, signature: Signature) -> tuple[Config, ...]:
        """Return configs whose kernels are loaded, for problems of a signature; some lack run-time knobs."""
        ready = list(self._ready)  # at once: whoever finds a kernel does not wait for the lock
        return tuple(config for name, of, config in ready if (name, of) == (arch.name, signature))

    @property
    def loaded(self) -> tuple[str, ...]:
        """Keys of the artifacts that are loaded."""
        with self._lock:
            return tuple(self._loaded)

    def _get(self, request: _Request) -> Kernel | PendingKernel:
        # What is ready is found without the lock, which another thread may hold while it compiles.
        ready = self._ready.get(request.exact)
        if ready is not None:
            return ready
        view = request.view
        found: Kernel | PendingKernel | None = self._ready.get(view)
        if found is None:
            found = self._made_ready(request, view)
        if isinstance(found, Kernel):
            self._ready[request.exact] = self._ready[view] = found
        return found

    def _made_ready(self, request: _Request, view: _View) -> Kernel | PendingKernel:
        """Load or compile a kernel; or return what is awaited, or why there is none."""
        with self._lock:
            found = self._found(request, view)
            if not isinstance(found, Source):
                return self._open(found, request.problem, view) if isinstance(found, Artifact) else found
            if not request.wait:
                return self._begin(found, request.problem, view)
            self._require_builds(found, request.problem)
            making = self._making.setdefault(view, RenewedLock())
        with making:  # whoever wants another kernel goes on meanwhile
            return self._made_now(request, view)

    def _made_now(self, request: _Request, view: _View) -> Kernel | PendingKernel:
        """Compile and load a kernel, unless another thread has done so by now."""
        with self._lock:
            found = self._found(request, view)
        if isinstance(found, Source):
            found = self._make(found, request.problem)
            self.tally.compiled()
        with self._lock:
            self._making.pop(view, None)  # whoever waited for it looks again, with the lock held
            return self._open(found, request.problem, view) if isinstance(found, Artifact) else found

    def _found(self, request: _Request, view: _View) -> Kernel | PendingKernel | Artifact | Source:
        """Return a kernel, or what it is to be made of; or what is awaited. The lock is held."""
        with self._lock:
            if (ready := self._ready.get(view)) is not None:  # by now
                return ready
            if self.on_miss:
                raise frozen_error(request.problem)
            if view in self._broken:
                raise _NotLoadedError(self._broken[view])
            if not request.wait and view in self._compilations:
                return self._compilations[view]
            try:
                found = self.find(request.problem, request.config, request.arch, request.known_key)
            except BuildError as error:
                if request.wait:
                    raise
                self._tell(request.problem, request.config, error)
                return self._compilations.setdefault(view, PendingKernel(error))
            if request.capturing and not isinstance(found, Kernel):
                raise not_in_capture(request.problem)
            return found

    def _open(self, artifact: Artifact, problem: Problem, view: _View) -> Kernel:
        """Load a kernel."""
        try:
            kernel = self._loaded_from(artifact)
        except LaunchError as error:
            self._tell(problem, view[2], error)
            self._broken[view] = PendingKernel(error)
            raise _NotLoadedError(self._broken[view]) from error
        self._ready[view] = kernel
        return kernel

    def _loaded_from(self, artifact: Artifact) -> Kernel:
        kernel = Kernel(artifact, self._load(artifact.shared_object, artifact.symbol))
        self._loaded[artifact.key] = kernel
        return kernel

    def _begin(self, source: Source, problem: Problem, view: _View) -> PendingKernel:
        """Compile ``source`` in the background."""

        def ready(artifact: Artifact) -> None:
            kernel = self._loaded_from(artifact)
            with self._lock:
                self._ready[view] = kernel
                # Together: whoever waited until nothing is compiled finds finished what call plans await.
                if (compilation := self._compilations.pop(view, None)) is not None:
                    compilation.finish()

        self.tally.compiled()
        _log.info("compiling a kernel for %s (%s) in the background", problem, source.config)
        # It may be ready before this returns, and must be in the dictionary by then: so the lock is held.
        compilation = self._background.start(
            source, ready, lambda error: self._tell(problem, source.config, error)
        )
        self._compilations[view] = compilation
        return compilation

    def _tell(self, problem: Problem, config: Config, error: CutegenError) -> None:
        """Say once why there is no kernel: a full disk keeps many from being."""
        reason = printable(str(error))
        self._say(reason, "no kernel for %s (%s), so others compute it: %s", problem, config, reason)

    def _say(self, what: str, text: str, *arguments: object) -> None:
        with self._lock:
            known = what in self._said
            self._said.add(what)
        if not known:
            _log.warning(text, *arguments)

    def artifact(self, problem: Problem, config: Config, arch: Arch, *, known_key: str = "") -> Artifact:
        """Return the artifact of ``config``, compiled if need be and allowed, without loading it.

        Raises:
            CutegenError: As :meth:`get`.
        """
        found = self.find(problem, config, arch, known_key)
        if isinstance(found, Kernel):
            return found.artifact
        return self._make(found, problem) if isinstance(found, Source) else found

    def compile_all(self, wanted: Iterable[tuple[Problem, Config, str]], arch: Arch) -> None:
        """Compile what the store lacks of several kernels, side by side, where that is allowed.

        What does not compile is an error when that kernel is asked for.

        Args:
            wanted: Problems, their configs, and the artifacts that a table names, or nothing.
            arch: The target.

        Raises:
            CutegenError: There is no compiler, or the store cannot be read or written.
        """
        sources = []
        for problem, config, known_key in wanted if self.build != "never" else ():
            with suppress(BuildError):
                sources.append(self.find(problem, config, arch, known_key))
        missing = list(dict.fromkeys(source for source in sources if isinstance(source, Source)))
        if len(missing) < 2:
            return
        _log.info("compiling %d kernels; later calls find them in %s", len(missing), self.store.root)
        with self._builder(self.store) as builder:
            builder.submit(missing)
            done = 0
            while done < len(missing):
                done += len(require_written(builder.poll(None)))

    def find(
        self, problem: Problem, config: Config, arch: Arch, known_key: str = ""
    ) -> Kernel | Artifact | Source:
        """Return what there is: the loaded kernel, else the artifact, else the source to compile.

        Raises:
            BuildError: It is known not to compile.
            CutegenError: As for :func:`~cutegen.build.render.render`, if it must be rendered.
        """
        known = self._known(arch, known_key) if known_key else None
        if known is not None and known.recipe == recipe_of(problem, config, arch):
            return self._loaded.get(known.key) or known
        source = render(problem, config, arch)
        if known is not None and known.source_digest == source.digest:
            return self._loaded.get(known.key) or known
        if known is not None and known_key not in self._refused:
            self._refused.add(known_key)
            _log.info("artifact %s is not the kernel of %s for %s: not used", known_key, config, problem)
        key = artifact_key(source, self.toolchain)
        return self._loaded.get(key) or self._stored(arch, key) or source

    def _known(self, arch: Arch, key: str) -> Artifact | None:
        """Return the artifact that a table names, None if there is none that this machine runs."""
        result = find_result(self.store, arch.name, key) if is_artifact_key(key) else None
        if isinstance(result, Artifact) and host_runs(result.toolchain.host, self.toolchain.host):
            return result
        return None

    def _stored(self, arch: Arch, key: str) -> Artifact | None:
        result = find_result(self.store, arch.name, key)
        if isinstance(result, Failure):
            raise result.error()
        return result

    def _require_builds(self, source: Source, problem: Problem) -> None:
        """Raise if nothing may be compiled."""
        if self.build == "never":
            raise LaunchError(
                f"no compiled kernel for {problem} ({source.config}) in {self.store.root}, and "
                "build='never'; warm it up or tune it first, or import a bundle that has it"
            )

    def _make(self, source: Source, problem: Problem) -> Artifact:
        self._require_builds(source, problem)
        _log.info(
            "compiling a kernel for %s (%s); later calls find it in %s",
            problem,
            source.config,
            self.store.root,
        )
        return self._compile(source, self.store)
