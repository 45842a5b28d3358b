"""The isolated energy of the entries that a policy asks for, once their times are known."""

from __future__ import annotations

from collections.abc import Collection

from cutegen.errors import LaunchError
from cutegen.measure.candidate import REFERENCE
from cutegen.measure.energy import IsolatedEnergy, isolated_energy, join
from cutegen.measure.rounds import Rounds
from cutegen.measure.winner import choose_fastest

__all__ = ["measure_energy"]


def measure_energy(rounds: Rounds, keep: Collection[str]) -> None:
    """Add the isolated energy of the entries that the policy asks for to their timings.

    A second pass in the opposite order centres all measurements on the same moment, so that a steady drift of
    the GPU's power favours none; where only time decides, one pass is enough. An entry that fails here counts
    as failed.
    """
    names = _names(rounds, keep)
    turns = names if rounds.policy.objective == "time" else [*names, *reversed(names)]
    found: dict[str, list[IsolatedEnergy]] = {name: [] for name in names}
    for name in turns:
        if name not in rounds.prepared:
            continue
        one = _once(rounds, name)
        if one is not None:
            found[name].append(one)
        elif name == names[0]:
            break  # the counter does not work, so no other entry has to be tried
    for name, passes in found.items():
        if len(passes) * len(names) == len(turns) and name in rounds.timings:
            both = join(passes)
            rounds.timings[name] = rounds.timings[name].with_energy(both.energy_mj, both.power_w)


def _names(rounds: Rounds, keep: Collection[str]) -> list[str]:
    """Return the entries whose energy is measured: the reference first, then others in their order.

    Where only time decides, these are the winner and those of ``keep``.
    """
    alive = rounds.names
    timed = {name: rounds.timings[name] for name in alive if name in rounds.timings}
    if rounds.policy.objective == "time" and timed:
        winner, _ = choose_fastest(timed, alive)
        alive = [name for name in alive if name in {winner, *keep}]
    return [REFERENCE, *alive]


def _once(rounds: Rounds, name: str) -> IsolatedEnergy | None:
    """Return the energy of launches back to back: that of a predecessor would be included."""
    rounds.announce(name)
    try:
        prepared = rounds.engine.prepare(rounds.candidates[name])
        if not prepared.back_to_back:
            return None  # the counter would include the copies that restore tensors
        return isolated_energy(rounds.engine, prepared, rounds.policy.energy_s)
    except LaunchError as error:
        if name == REFERENCE:
            raise
        rounds.fail(name, error)
        del rounds.timings[name]
        return None
