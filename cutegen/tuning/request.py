"""What one tuning run is asked to do, and the name by which a finished run is recognised."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cutegen import __version__
from cutegen.arch import Arch
from cutegen.build.render import template_files
from cutegen.digest import digest
from cutegen.errors import UsageError
from cutegen.families.registry import find_family, find_template, short_list_file, space_files
from cutegen.family import Problem, is_heavy
from cutegen.measure.context import DEFAULT_CONTEXT, OVERLAPPING, require_context
from cutegen.measure.device import Device
from cutegen.measure.policy import Policy, require_objective
from cutegen.search.twins import alone, overlapped
from cutegen.space import Config, Value
from cutegen.text import shown

__all__ = ["EFFORTS", "Effort", "Request", "deciding_files", "find_effort", "require_seed"]


@dataclass(frozen=True)
class Effort:
    """How much to try.

    Attributes:
        classes: Most kernels to compile per problem before refinement.
        refine: Most further kernels around the best ones, and as many more that the measurements suggest.
        refinements: Most refinements, each with a quarter as many kernels as the one before; they end when
            one finds nothing faster. Source of these: replayed on recorded sweeps of 18 shapes on an H200, 32
            kernels and then 32 and 8 more end 0.02 % behind the best of up to 330, in the geometric mean.
        finalists: Candidates that are measured with settled clocks, at most, beside the default.
        alike: Finalists that share one compiled kernel, at most.
        final_band: Screened candidates within this fraction of the fastest may become finalists.
        final_s: Seconds of a budget that are kept for the finalists.
        energy_finalists: As ``finalists``, for objectives other than time.
        energy_band: As ``final_band``, for objectives other than time. A slower kernel needs less energy only
            if its power is lower by a larger factor than its time is longer. Source: judgement, that few
            beyond this band do.
        chunk: Most candidates that are screened together. Each set of a large GEMM needs a burn-in of its own
            and ends in bursts, which takes a second or more, so the usual 70 to 90 are one set.
        twins: How many of the most promising kernels are tried with ``use_pdl`` on and off. The model knows
            the effect from launches back to back; behind other kernels it is smaller. Source: on an H200, of
            132 configs behind an element-wise kernel, one without it won on 8 of 9 shapes.
        most: Most candidates before refinement; None for no limit.
        at_once: Whether one set of rounds both finds the fastest and decides, where time is the objective:
            there are no finals, and no energy is measured.
        refines_under_load: Whether kernels around the best are tried where power decides, too. Otherwise they
            are tried there only if the order of the first ones comes from no measurements, or none of these
            is clearly faster than the library. Source: in five tunings of three such shapes on an H200 none
            of 120 of these configs won, and one was among the three fastest; compiling and screening them is
            a third of the time.
        rescue: With ``at_once``, how many more kernels are tried in a second set of rounds if no candidate is
            clearly faster than the library: this many around the best, and as many that the measurements
            suggest.
    """

    classes: int = 24
    refine: int = 8
    refinements: int = 2
    finalists: int = 10
    alike: int = 2
    final_band: float = 0.05
    final_s: float = 5.0
    energy_finalists: int = 20
    energy_band: float = 0.15
    chunk: int = 96
    twins: int = 8
    most: int | None = None
    at_once: bool = False
    refines_under_load: bool = False
    rescue: int = 0

    @property
    def kernels(self) -> int:
        """Kernels to compile before refinement, at most, twins included."""
        return self.classes + self.twins

    def of_kernels(self, count: int) -> Effort:
        """Return this effort with ``count`` kernels to compile before refinement, a quarter of them twins."""
        twins = min(self.twins, count // 4)
        return replace(self, classes=count - twins, twins=twins, most=None)


#: How much to try, by name. ``quick`` measures the few that the model ranks first: on an H200 the best of
#: eight is 0.4 % behind the best of 96 in the geometric mean. Only the default has a twin there: with four
#: twins, those of 30 winners that had ``use_pdl`` either split k, or took so long that it did not matter.
#: ``exhaustive`` is for kernels that are pinned and used for a long time.
EFFORTS: Mapping[str, Effort] = {
    "quick": Effort(
        classes=15,
        refine=0,
        refinements=0,
        finalists=8,
        final_s=1.0,
        twins=1,
        most=20,
        at_once=True,
        rescue=6,
    ),
    "standard": Effort(),
    "exhaustive": Effort(
        classes=96,
        refine=24,
        refinements=3,
        finalists=20,
        alike=3,
        final_band=0.08,
        final_s=8.0,
        twins=24,
        refines_under_load=True,
    ),
}


def find_effort(effort: Effort | str) -> Effort:
    """Return an effort, or that of a name.

    Raises:
        UsageError: It is neither, or there is none of that name.
    """
    if isinstance(effort, Effort):
        return effort
    if not isinstance(effort, str) or effort not in EFFORTS:
        raise UsageError(f"unknown effort {shown(effort)}; valid: {', '.join(EFFORTS)}, or an Effort")
    return EFFORTS[effort]


def require_seed(seed: int) -> int:
    """Return ``seed``.

    Raises:
        UsageError: It is no integer.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise UsageError(f"seed is {shown(seed)}; it must be an integer")
    return seed


@dataclass(frozen=True)
class Request:
    """One problem to tune and everything that decides what is tried and how it is measured.

    Attributes:
        problem: What is to be computed.
        arch: The target.
        sm_count: SMs of the GPU that will run it.
        effort: How much to try.
        fixed: Knobs restricted to some values; the default still competes.
        explicit: Candidates that the caller gave, tried instead of the search's; the default still competes.
        vary: Whether run-time knobs of the best of these are varied as well, which needs no compiler.
        budget_s: Seconds that the user gave, None for no limit; it names the run, others keep to it.
        seed: Of the order within measuring rounds.
        allow_torch: Whether ``torch.mm`` may win the table's entry.
        objective: What finalists are chosen by: one of :data:`~cutegen.measure.policy.OBJECTIVES`. Candidates
            are screened by time in any case.
        context: What runs before each launch that is timed: one of
            :data:`~cutegen.measure.context.CONTEXTS`.
        sources: Whose kernels are tried, of :data:`~cutegen.families.registry.SOURCES`; the default
            competes anyway.
        package: What the operators come from, as
            :func:`~cutegen.families.gemm.operator_package.require_package` names it.

    Raises:
        UsageError: There is no such objective or context.
    """

    problem: Problem
    arch: Arch
    sm_count: int
    effort: Effort = field(default_factory=Effort)
    fixed: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    explicit: tuple[Config, ...] = ()
    vary: bool = False
    budget_s: float | None = None
    seed: int = 0
    allow_torch: bool = False
    objective: str = "time"
    context: str = DEFAULT_CONTEXT
    sources: tuple[str, ...] = ("cutegen",)
    package: str = ""

    def __post_init__(self) -> None:
        require_objective(self.objective)
        require_context(self.context)

    @property
    def usual_overlap(self) -> Callable[..., Config]:
        """What kernels are changed by that are not tried both with and without overlap, behind others."""
        return overlapped if self.context == OVERLAPPING else alone

    @property
    def searches(self) -> bool:
        """Whether cutegen's own space is searched: for candidates, or around those that were given."""
        return "cutegen" in self.sources and (self.vary or not self.explicit)

    @property
    def at_once(self) -> bool:
        """Whether one set of rounds both finds and decides; energy needs finals."""
        return self.effort.at_once and self.objective == "time"

    @property
    def refines_always(self) -> bool:
        """Whether kernels around the best are tried whatever the first ones took."""
        problem, family = self.problem, find_family(self.problem.family)
        if self.effort.refines_under_load or self.explicit or self.objective != "time":
            return self.effort.refinements > 0
        # What a fit says of plain products is only an estimate for families that compute more.
        ranked = family.is_library_call(problem) and family.is_fitted(problem, self.arch)
        return self.effort.refinements > 0 and not (ranked and is_heavy(problem))

    @property
    def screen_policy(self) -> Policy:
        """How candidates are screened: power-bound problems under load, the others in short bursts."""
        if self.at_once:
            return self.final_policy
        return Policy.screen(self.seed, loaded=is_heavy(self.problem), context=self.context)

    @property
    def final_policy(self) -> Policy:
        """How the finalists are timed."""
        if self.at_once:
            return Policy.quick(self.seed, loaded=is_heavy(self.problem), context=self.context)
        return Policy.final(self.seed, self.objective, context=self.context)

    @property
    def finalists(self) -> tuple[int, float]:
        """Most finalists beside the default, and how far behind the fastest they may be, as a fraction."""
        effort = self.effort
        if self.objective == "time":
            return effort.finalists, effort.final_band
        return effort.energy_finalists, effort.energy_band

    @property
    def final_s(self) -> float:
        """Seconds of a budget that are kept for the finalists, and for their energy if it counts."""
        if self.objective == "time":
            return self.effort.final_s
        entries = self.effort.energy_finalists + 3  # the default, the incumbent and torch.mm
        return self.effort.final_s + 2 * entries * self.final_policy.energy_s

    def run_name(self, device: Device | None, toolchain: str) -> str:
        """Return the name of this run: runs of equal names try and measure the same."""
        effort, declaration = self.effort, find_family(self.problem.family).declaration()
        return digest(
            {
                "problem": str(self.problem),
                "arch": self.arch.name,
                **({"calibration": self.arch.calibration.digest} if self.arch.calibration else {}),
                "sm_count": self.sm_count,
                "effort": [
                    effort.classes,
                    effort.refine,
                    effort.refinements,
                    *self.finalists,
                    effort.alike,
                    effort.final_s,
                    effort.twins,
                    effort.most,
                    self.at_once,
                    *([effort.refines_under_load] if effort.refinements else []),
                    *([effort.rescue] if effort.rescue else []),
                ],
                "fixed": {k: list(map(str, values)) for k, values in self.fixed.items()},
                "explicit": [config.to_json() for config in self.explicit],
                "vary": self.vary,
                "budget_s": self.budget_s,
                "allow_torch": self.allow_torch,
                "policies": [self.screen_policy.digest, self.final_policy.digest],
                "device": [device.key, device.cuda_driver_version] if device else [],
                "toolchain": toolchain,
                "sources": [*self.sources, self.package],
                "text": _text_digest(deciding_files(self.problem.family, self.arch, self.sources)),
                **({"declaration": declaration} if declaration else {}),
            },
            length=16,
        )


def deciding_files(family: str, arch: Arch, sources: tuple[str, ...]) -> list[Path]:
    """Return the files that propose and render candidates: family, kernels, spaces, short list and search."""
    paths = {*find_family(family).files(), *space_files(family)}
    if (listed := short_list_file(family)) is not None:
        paths.add(listed)
    for source in {"cutegen", *sources}:
        paths |= template_files(find_template(family, arch, source))
    for algorithm in find_family(family).algorithms:
        paths |= template_files(find_template(family, arch, algorithm=algorithm))
    package = Path(__file__).parent.parent
    return sorted(paths | {*package.glob("search/*.py"), *package.glob("space/*.py"), package / "arch.py"})


def _text_digest(paths: Sequence[Path]) -> str:
    return digest([__version__, *(path.read_text(encoding="utf-8") for path in paths)])
