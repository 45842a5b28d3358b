"""Times entries in interleaved rounds, then those that may win in other regimes, then their energy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from cutegen.measure.candidate import REFERENCE, Candidate
from cutegen.measure.engine import Engine
from cutegen.measure.entry_energy import measure_energy
from cutegen.measure.policy import Policy
from cutegen.measure.regimes import run_back_to_back, run_bursts
from cutegen.measure.rounds import Rounds
from cutegen.measure.series import Series
from cutegen.measure.stopping import Race
from cutegen.measure.timing_run import TimingRun

__all__ = ["time_in_rounds"]


def time_in_rounds(
    engine: Engine,
    candidates: Sequence[Candidate],
    policy: Policy,
    reference: str,
    announce: Callable[[str], None],
    keep: Collection[str] = (),
) -> TimingRun:
    """Time every candidate and the reference under ``policy``.

    Args:
        engine: Where they run; their problem is open.
        candidates: What to time, those that would win a tie first.
        policy: How to time it.
        reference: What the reference is called in the record.
        announce: Told the name of each entry before it runs, so that a hang can be blamed on it.
        keep: Entries that take part in bursts, launches back to back and energy measurements, if there are
            any, however slow they are.

    Raises:
        BrokenDeviceError: A launch broke the device; the entry announced last is to blame.
        LaunchError: The reference failed, or the kernel before each launch.
        MeasureError: A launch took no time once that of the kernel before it is subtracted.
    """
    rounds = Rounds(engine, policy, announce)
    rounds.prepare(candidates)
    if policy.clock == "burst":
        rounds.warm()
    elif policy.settle_s > 0:
        rounds.settle()
    race = Race(
        rounds.names,
        min_rounds=policy.min_rounds,
        max_rounds=policy.rounds,
        precision=policy.precision,
        prune=policy.prune,
        extra_rounds=policy.extra_rounds,
    )
    series = Series(race, policy.round_us)
    power_w = rounds.run(series)
    rounds.timings = series.timings(reference, power_w=power_w, without=rounds.failures)
    if policy.burst_rounds > 0:
        run_bursts(rounds, keep)
    if policy.back_to_back_rounds > 0:
        run_back_to_back(rounds, keep)
    if policy.energy_s > 0:
        measure_energy(rounds, keep)
    return TimingRun(
        timings=rounds.timings,
        reference=rounds.timings.pop(REFERENCE),
        failures=rounds.failures,
        rounds=race.rounds,
        settle_s=rounds.settle_s,
        settled=rounds.settled,
    )
