"""A pretended compiler and bench: what becomes of a candidate is a function of its config."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
from fake_engine import DEVICE

from cutegen.build import Artifact, Failure, KernelResources, Resources, Result, Toolchain, artifact_key
from cutegen.build.render import Source
from cutegen.build.store import Store
from cutegen.families.gemm.problem import Problem
from cutegen.measure import Candidate, CheckResult, Opened, TimingRun
from cutegen.measure.context import BACK_TO_BACK
from cutegen.measure.policy import Policy
from cutegen.measure.statistics import Interval
from cutegen.measure.timing import Timing
from cutegen.search.strategies import rank
from cutegen.space import Config, Space
from cutegen.tuning import AutoTuner, Effort
from cutegen.tuning.backends import Backends

_RANKED: dict[tuple[object, ...], list[Config]] = {}


def remembered_rank(
    space: Space,
    problem: Problem,
    sm_count: int,
    limit: int,
    fixed: object = None,
    *,
    default: Config | None = None,
) -> list[Config]:
    """The search's own answer, worked out once per question: it takes a second."""
    key = (problem, sm_count, limit, repr(fixed), default)
    if key not in _RANKED:
        _RANKED[key] = rank(space, problem, sm_count, limit, fixed, default=default)  # type: ignore[arg-type]
    return _RANKED[key]


@pytest.fixture(autouse=True)
def quick_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs in this module's tests share what the search found."""
    monkeypatch.setattr("cutegen.tuning.proposals.rank", remembered_rank)


TOOLCHAIN = Toolchain((("nvidia-cutlass-dsl", "4.8.1"),), "cu13", "linux-test", "0")
REFERENCE_US = 100.0
WATTS = 500.0
SMALL = Effort(classes=6, refine=3, finalists=20, alike=3, final_band=0.08, final_s=6.0, chunk=16, twins=0)

#: ``ok``, a time such as ``12.5``, a time and watts such as ``12.5@400`` (500 unless given;
#: ``12.5@`` if they cannot be read), ``10~12.5`` for 10 back to back and 12.5 otherwise, ``10!9`` for 9 in
#: bursts, a build outcome, an outcome of the check, or ``breaks`` when it is timed.
Behaviour = Callable[[Config], str]


def steady(config: Config) -> str:
    """Every candidate works; wider tiles are faster."""
    tile = config.get("tile_shape_mn") or config["mma_tiler_mn"]
    assert isinstance(tile, tuple)
    return f"{300 - tile[1] / 2 + tile[0] / 100:g}"


class FakeCompiler:
    """Hands out artifacts whose symbol is their behaviour, ``batch`` at a time, and keeps them in a store."""

    def __init__(self, store: Store, behaviour: Behaviour = steady, batch: int = 2) -> None:
        self.store = store
        self.behaviour = behaviour
        self.batch = batch
        self.compiled: list[Source] = []
        self.closed = False
        self._queue: list[Source] = []

    @property
    def queued(self) -> Sequence[Source]:
        """What was asked for and is not handed out yet."""
        return tuple(self._queue)

    def find(self, source: Source) -> Result | None:
        return None

    def start(self) -> None:
        pass

    def submit(self, sources: Iterable[Source], *, urgent: bool = False) -> None:
        self._queue = [*sources, *self._queue] if urgent else [*self._queue, *sources]

    def poll(self, timeout_s: float | None = None) -> list[tuple[Source, Result]]:
        now, self._queue = self._queue[: self.batch], self._queue[self.batch :]
        self.compiled += now
        return [(source, self._result(source)) for source in now]

    def _result(self, source: Source) -> Result:
        key, what = artifact_key(source, TOOLCHAIN), self.behaviour(source.config)
        if what in ("error", "abort", "build-timeout", "rejected", "store", "killed"):
            again = what in ("store", "killed")
            return Failure(key, what.removeprefix("build-"), f"it went wrong: {what}", "log", again=again)
        with self.store.lock(source.arch, key) as lock:
            self.store.stage(lock)
            self.store.publish(lock, {})
        return Artifact(
            key=key,
            symbol=what,
            arch=source.arch,
            folder=self.store.folder(source.arch, key),
            resources=Resources.of(
                (KernelResources(registers=168, smem_bytes=200_000, threads=384, name="k"),)
            ),
            build_s=1.5,
            source_digest=source.digest,
            toolchain=TOOLCHAIN,
        )

    def close(self) -> None:
        self.closed = True


class FakeBench:
    """Judges and times candidates by their symbols; ``stop_after`` interrupts like Ctrl-C."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.checked: list[str] = []
        self.timed: list[tuple[Policy, tuple[str, ...]]] = []
        self.opened: list[Problem] = []
        self.steps = 0
        self.stop_after = stop_after
        self.closed = False
        self.behaviour: Behaviour = steady  # what the compiler beside it should make

    def start(self) -> None:
        """Start nothing."""

    def open(self, problem: Problem, seed: int = 0) -> Opened:
        self.opened.append(problem)
        return Opened(problem, "torch.mm", REFERENCE_US, 2, 1, 1)

    def _step(self) -> None:
        self.steps += 1
        if self.stop_after is not None and self.steps > self.stop_after:
            raise KeyboardInterrupt

    def check(self, candidate: Candidate) -> CheckResult:
        self._step()
        assert candidate.problem == self.opened[-1]
        self.checked.append(candidate.name)
        if candidate.symbol in ("wrong_result", "launch_failed", "timeout"):
            return CheckResult(candidate.symbol, f"it is {candidate.symbol}")
        return CheckResult("ok")

    def time(self, candidates: Sequence[Candidate], policy: Policy, keep: Sequence[str] = ()) -> TimingRun:
        self._step()
        self.timed.append((policy, tuple(c.name for c in candidates)))
        late = CheckResult("timeout", "took too long")
        broken = {c.name: late for c in candidates if c.symbol.startswith("breaks")}
        isolated = policy.energy_s > 0
        symbols = {c.name: c.symbol for c in candidates if c.name not in broken}
        timings = {name: _timed(symbol, policy) for name, symbol in symbols.items()}
        return TimingRun(timings, _timing(f"{REFERENCE_US}", isolated), broken)

    @property
    def finals(self) -> tuple[str, ...]:
        """Names in the last measurement that decides."""
        return next(names for policy, names in reversed(self.timed) if policy.energy_s)

    def close(self) -> None:
        self.closed = True


def _in_context(symbol: str, context: str) -> str:
    """What is left of a behaviour where only one of its times counts."""
    first, _, second = symbol.partition("~")
    return second if second and context != BACK_TO_BACK else first


def _timed(symbol: str, policy: Policy) -> Timing:
    """The timing of a behaviour under a policy, with other regimes if it is asked for them and has some."""
    symbol, _, burst = symbol.partition("!")
    found = _timing(_in_context(symbol, policy.context), policy.energy_s > 0)
    if "~" in symbol and policy.context != BACK_TO_BACK and policy.back_to_back_rounds:
        found = found.with_back_to_back(timing(float(symbol.partition("~")[0])))
    return found.with_bursts(timing(float(burst))) if burst and policy.burst_rounds else found


def _timing(symbol: str, isolated: bool) -> Timing:
    """The timing of a behaviour, with an interval of 0.2 % around its energy if that is measured."""
    time_us, at, watts = symbol.partition("@")
    plain = timing(float(time_us))
    if not isolated or (at and not watts):
        return plain
    energy = plain.median_us * float(watts or WATTS) / 1000
    return plain.with_energy(Interval(energy * 0.998, energy, energy * 1.002), float(watts or WATTS))


def timing(time_us: float) -> Timing:
    """A timing with an interval of 0.2 % around ``time_us``."""
    reference = [REFERENCE_US] * 9
    own = [time_us * (1 + 0.0005 * (i - 4) / 2) for i in range(9)]
    return Timing.of(own, reference, reference="torch.mm")


class Rig:
    """An AutoTuner in a folder, with its fakes at hand; a new one in the same folder is a new process."""

    def __init__(
        self, folder: Path, behaviour: Behaviour = steady, *, stop_after: int | None = None, **options: object
    ) -> None:
        self.compiler = FakeCompiler(Store(folder), behaviour)
        self.bench = FakeBench(stop_after)
        self.started: Counter[str] = Counter()
        own = {name: options.pop(name) for name in ("bench", "watch", "offers") if name in options}
        backends = Backends(compiler=self._compiler, **{"bench": self._bench, **own})  # type: ignore[arg-type]
        given = {"effort": SMALL, "device": DEVICE, **options}
        self.tuner = AutoTuner(cache_dir=folder, toolchain=TOOLCHAIN, backends=backends, **given)  # type: ignore[arg-type]

    def _compiler(self) -> FakeCompiler:
        self.started["compiler"] += 1
        return self.compiler

    def _bench(self) -> FakeBench:
        self.started["bench"] += 1
        return self.bench
