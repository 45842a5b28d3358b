"""A GPU whose other users the test decides."""

from __future__ import annotations

from cutegen.measure.contention import Look, Process

OURS = Process(10, "python", 2**30, 90.0, own=True)
NOTEBOOK = Process(20, "jupyter", 2**31, 0.0)
TRAINING = Process(30, "train", 50_000_000_000, 97.0)


class FakeWatch:
    """Shows one crowd after another, the last for ever; utilisation likewise. Time passes only in sleeps.

    Args:
        crowds: The processes of each look.
        percents: Utilisation of the whole GPU, reading by reading; None where it is unknown.
        complete: Whether looks show everyone.
    """

    def __init__(
        self,
        *crowds: tuple[Process, ...],
        percents: tuple[float | None, ...] = (None,),
        complete: bool = True,
    ) -> None:
        self.crowds = list(crowds) or [()]
        self.percents = list(percents)
        self.complete = complete
        self.looks: list[float] = []
        self.readings = 0
        self.now = 1000.0
        self.closed = False

    def look(self, since_s: float) -> Look:
        self.looks.append(since_s)
        crowd = self.crowds.pop(0) if len(self.crowds) > 1 else self.crowds[0]
        return Look(crowd, self.complete)

    def percent(self) -> float | None:
        self.readings += 1
        return self.percents.pop(0) if len(self.percents) > 1 else self.percents[0]

    def close(self) -> None:
        self.closed = True

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
