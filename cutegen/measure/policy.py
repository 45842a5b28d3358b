"""How kernels are timed: the policy, which is stored with every timing and keys it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from cutegen.digest import Json, digest
from cutegen.errors import UsageError
from cutegen.measure.context import BACK_TO_BACK, CONTEXTS, DEFAULT_CONTEXT

__all__ = ["ENERGY_S", "OBJECTIVES", "Policy", "require_known_fields", "require_objective"]

#: What a kernel may be chosen by: microseconds, millijoules per launch, or their product.
OBJECTIVES = ("time", "energy", "edp")
#: Seconds of an isolated energy measurement, at least, by objective. Source: judgement. The counter of an
#: H200 steps every 0.1 s, and a step is noticed up to a few milliseconds late (polled 200 times a second).
#: Over one step that is an error of a few percent, over five it is smaller than a tie.
ENERGY_S = {"time": 0.05, "energy": 0.5, "edp": 0.5}

#: Fields that are stored under names of early development versions: digests of stored policies key timings.
_STORED_AS = {"extra_rounds": "playoff", "energy_s": "dwell_s"}
#: Fields that early development versions lacked, with the values that they implied; left out at these values.
_ADDED: Mapping[str, Json] = {"context": BACK_TO_BACK, "burst_rounds": 0, "back_to_back_rounds": 0}
_CHOICES = {
    "objective": OBJECTIVES,
    "context": CONTEXTS,
    "launch": ("graph",),
    "l2": ("cold",),
    "clock": ("settled", "burst"),
    "distribution": ("uniform",),
}


def require_objective(name: str) -> str:
    """Return ``name`` if it is an objective.

    Raises:
        UsageError: It is none.
    """
    if name not in OBJECTIVES:
        raise UsageError(f"unknown objective {name!r}; valid: {', '.join(OBJECTIVES)}")
    return name


@dataclass(frozen=True)
class Policy:
    """How a timing is made. Two timings may be compared only if their policies are equal.

    Attributes:
        launch: ``graph``: launches are replayed from a CUDA graph, so the host does not limit them.
        l2: ``cold``: operands rotate through more than three times the L2 cache.
        clock: ``settled`` (the GPU is loaded until its clock is stable) or ``burst`` (only until it leaves
            its idle clock).
        distribution: ``uniform``: operands are uniform in [-1, 1), those of 4 bits among all codes; data
            changes power and so clocks.
        rounds: Most rounds; each runs every entry and the reference once, in random order.
        min_rounds: Fewest rounds before ``precision`` may stop it.
        round_us: GPU time that one entry takes in one round, in microseconds (at least one graph).
        settle_s: Longest burn-in, in seconds; a burst takes 0.05 of them at most.
        precision: Stop when every interval's half width is under this fraction of its median; 0 never stops.
        prune: Drop entries that are slower than the best by more than this fraction, from the first round on,
            and by half of it from half of the rounds on; 0 drops none.
        extra_rounds: Most further rounds, after those for all, of the entries that are statistically tied for
            fastest, while there are several and ``precision`` does not stop it.
        seed: Of the order within rounds.
        objective: What the timings are to decide, and so whose energy is measured: for ``time`` that of the
            winner, the reference and the entries that the caller names, once; for ``energy`` and ``edp`` that
            of every entry, twice.
        energy_s: Seconds that an entry is replayed back to back, after the rounds, while the GPU's energy
            counter is read; 0 reads no energy. Only with settled clocks.
        context: What runs before each launch, one of :data:`cutegen.measure.context.CONTEXTS`. The time of
            what runs before is measured in the same rounds and subtracted. Energy is always that of launches
            back to back.
        burst_rounds: Rounds of short bursts, each after a moment of idling, that follow if a power limit held
            the settled clock down. The reference and the entries that may win take part. Objective ``time``
            only. They add to a timing and change no settled time, so the digest leaves them out.
        back_to_back_rounds: Rounds of launches back to back that follow if ``context`` is another one and
            launches are short. The reference and the entries that may win take part. Objective ``time`` only,
            and left out of the digest, as bursts are.

    Raises:
        UsageError: A value is not one of those above.
    """

    launch: str = "graph"
    l2: str = "cold"
    clock: str = "settled"
    distribution: str = "uniform"
    rounds: int = 15
    min_rounds: int = 7
    round_us: float = 6000.0
    settle_s: float = 3.0
    precision: float = 0.002
    prune: float = 0.0
    extra_rounds: int = 0
    seed: int = 0
    objective: str = "time"
    energy_s: float = 0.0
    context: str = BACK_TO_BACK
    burst_rounds: int = field(default=0, compare=False)
    back_to_back_rounds: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        for name, valid in _CHOICES.items():
            if getattr(self, name) not in valid:
                raise UsageError(f"policy {name} is {getattr(self, name)!r}; valid: {', '.join(valid)}")
        if not 1 <= self.min_rounds <= self.rounds:
            raise UsageError(
                f"policy wants {self.min_rounds} to {self.rounds} rounds; valid: 1 or more, in order"
            )
        for name in (
            "round_us",
            "settle_s",
            "precision",
            "prune",
            "extra_rounds",
            "energy_s",
            "burst_rounds",
            "back_to_back_rounds",
        ):
            if not getattr(self, name) >= 0:
                raise UsageError(f"policy {name} is {getattr(self, name)!r}; it must not be negative")
        if self.energy_s and self.clock != "settled":
            raise UsageError(f"policy measures energy for {self.energy_s:g} s after a {self.clock}; valid: 0")

    @classmethod
    def screen(cls, seed: int = 0, *, loaded: bool = False, context: str = DEFAULT_CONTEXT) -> Policy:
        """Return the policy for screening many candidates: three short rounds.

        Whatever the objective, screening is by time and reads no energy: an entry's turn takes a few
        milliseconds, less than a step of the counter.

        Args:
            seed: Of the order within rounds.
            loaded: For power-bound problems: load the GPU first, for up to a second, and add 3 rounds of
                bursts, since the fastest in bursts may not be among the fastest under load.
            context: What runs before each launch.
        """
        return cls(
            clock="settled" if loaded else "burst",
            rounds=3,
            min_rounds=3,
            round_us=4000.0 if loaded else 1500.0,
            settle_s=1.0 if loaded else 0.05,
            precision=0.0,
            prune=0.3,
            seed=seed,
            context=context,
            burst_rounds=3 if loaded else 0,
            back_to_back_rounds=3,
        )

    @classmethod
    def final(cls, seed: int = 0, objective: str = "time", *, context: str = DEFAULT_CONTEXT) -> Policy:
        """Return the policy for the finals: settled clocks, 7 to 15 rounds, energy.

        Where time decides, up to 30 more rounds follow for those that may still win, then 7 of bursts and 7
        of launches back to back.
        Source: on an H200 at its power limit medians of 15 rounds are known to 0.8 %, of 45 to 0.5 %. The
        number of rounds matters more than their length. Back to back they are as long as in early
        development versions, so that timings of those remain valid.

        Raises:
            UsageError: There is no such objective or context.
        """
        extra_rounds = 30 if objective == "time" else 0
        return cls(
            round_us=6000.0 if context == BACK_TO_BACK else 4000.0,
            seed=seed,
            objective=objective,
            energy_s=ENERGY_S.get(objective, 0.0),
            extra_rounds=extra_rounds,
            context=context,
            burst_rounds=7 if objective == "time" else 0,
            back_to_back_rounds=7 if objective == "time" else 0,
        )

    @classmethod
    def quick(cls, seed: int = 0, *, loaded: bool = False, context: str = DEFAULT_CONTEXT) -> Policy:
        """Return the policy that screens and decides at once: 5 to 9 short rounds, 8 or 14 more for ties.

        Args:
            seed: Of the order within rounds.
            loaded: For power-bound problems: load the GPU first, for up to 1.2 s, and add 5 rounds of bursts,
                which take half a second. Only entries more than 30 % behind are dropped: while the clock of
                an H200 oscillates, samples of two equally fast kernels may be 15 % apart.
            context: What runs before each launch.

        Raises:
            UsageError: There is no such context.
        """
        return cls(
            clock="settled" if loaded else "burst",
            rounds=9 if loaded else 7,
            min_rounds=7 if loaded else 5,
            round_us=4000.0 if loaded else 2000.0,
            settle_s=1.2 if loaded else 0.05,
            precision=0.003,
            prune=0.3 if loaded else 0.15,
            extra_rounds=8 if loaded else 14,
            seed=seed,
            context=context,
            burst_rounds=5 if loaded else 0,
            back_to_back_rounds=5,
        )

    @property
    def digest(self) -> str:
        """A short stable name, the same in every process."""
        return digest(self.without_regimes().to_json(), length=12)

    def without_regimes(self) -> Policy:
        """Return this policy without bursts, and without launches back to back beside another context."""
        return replace(self, burst_rounds=0, back_to_back_rounds=0)

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON data; one of early development versions is described, and keyed, as then."""
        values = asdict(self)
        kept = {name: v for name, v in values.items() if name not in _ADDED or v != _ADDED[name]}
        return {_STORED_AS.get(name, name): value for name, value in kept.items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Policy:
        """Return the policy that :meth:`to_json` described.

        Raises:
            UsageError: A field is unknown or its value invalid.
        """
        named = {stored: name for name, stored in _STORED_AS.items()}
        values = {named.get(name, name): value for name, value in data.items()}
        require_known_fields(cls, values)
        return cls(**values)


def require_known_fields(cls: type, data: Mapping[str, Any]) -> None:
    """Do nothing if every key of ``data`` is a field of the dataclass ``cls``.

    Raises:
        UsageError: One is not; a newer version may have written it.
    """
    unknown = sorted(set(data) - {f.name for f in fields(cls)})
    if unknown:
        raise UsageError(f"{cls.__name__.lower()} has no field {', '.join(unknown)}")
