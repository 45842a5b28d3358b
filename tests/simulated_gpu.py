"""A GPU that only pretends: kernels take what the model says, off by errors of the size that the model has.

Errors are those seen on an H200: a constant for each kernel, a drift along the size that alike kernels share
in part, a jump where tiles become more, and time lost on what the last tile does not use. All follow from a
seed, so that the true best config of any size is known.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from hashlib import sha256
from math import exp, floor, log2

from fake_tuning import FakeBench

from cutegen.arch import find_arch
from cutegen.families.ranges import Range
from cutegen.families.registry import find_space, space_of
from cutegen.measure import Candidate, TimingRun
from cutegen.measure.policy import Policy
from cutegen.measure.timing import Timing
from cutegen.search.defaults import default_config
from cutegen.search.range_predict import Predictions
from cutegen.space import Config

__all__ = ["SimulatedBench", "SimulatedGpu"]

ARCH = find_arch("sm_90a")


class SimulatedGpu:
    """Times of every config at every size of a range.

    Args:
        whole: The range.
        seed: Of the errors.
        error: Size of each kind of error, as a standard deviation of logarithms.
    """

    def __init__(self, whole: Range, seed: int = 0, error: float = 0.04) -> None:
        self.range = whole
        self.space = find_space(whole.low.family, ARCH)
        self.predict = Predictions(whole, self.space, ARCH.nominal_sm_count)
        #: By how much all takes longer at present.
        self.pace = 1.0
        self._seed = seed
        self._error = error
        # Tests ask for the same ones by the ten thousand.
        self._names: dict[Config, tuple[str, str]] = {}
        self._draws: dict[tuple[object, ...], float] = {}

    def time_us(self, size: int, config: Config) -> float | None:
        """Return what a config takes, None if it is not valid."""
        predicted = self.predict(size, config)
        if predicted is None:
            return None
        view, shape = self._names_of(config)
        tile = self.predict.tile_of(config)
        tiles = -(-size // tile)
        errors = self._draw("kernel", view) + self._drift(size, view)
        errors += self._drift(size, shape)
        errors += self._draw("tiles", view, tiles) if tiles < 6 else 0.0
        unused = 1 - size / (tiles * tile) if tiles > 1 else 0.0
        return self.pace * predicted * exp(self._error * errors) * (1 + 0.3 * unused / tiles)

    def torch_us(self, size: int) -> float:
        """Return what the library takes, off our default by errors of its own."""
        problem = self.range.at(size)
        assert problem is not None
        base = self.predict(size, default_config(self.space, problem))
        assert base is not None
        return self.pace * base * exp(0.05 * self._drift(size, "torch"))

    def _drift(self, size: int, what: str) -> float:
        at = log2(size)
        step = floor(at)
        return (1 - at + step) * self._draw(what, step) + (at - step) * self._draw(what, step + 1)

    def _draw(self, *what: object) -> float:
        if what not in self._draws:
            text = repr((self._seed, *what)).encode()
            self._draws[what] = random.Random(sha256(text).digest()).gauss(0, 1)
        return self._draws[what]

    def _names_of(self, config: Config) -> tuple[str, str]:
        """Return what tells the kernel of a config from others, and its tile."""
        if config not in self._names:
            view = space_of(config, self.space.family, ARCH).compile_view(config)
            self._names[config] = str(view), str(config.get("tile_shape_mn"))
        return self._names[config]


class SimulatedBench(FakeBench):
    """Times candidates as a simulated GPU would, with the noise of short rounds.

    Args:
        gpu: Whose times.
        config_of: Returns the config that a candidate's name stands for.
        noise: Of a round, as a fraction.
        stop_after: Interrupts like Ctrl-C after so many steps.
    """

    def __init__(
        self,
        gpu: SimulatedGpu,
        config_of: Callable[[str], Config],
        *,
        noise: float = 0.01,
        stop_after: int | None = None,
    ) -> None:
        super().__init__(stop_after)
        self.gpu = gpu
        self.sizes: list[int] = []
        self._config_of = config_of
        self._noise = noise

    def time(self, candidates: Sequence[Candidate], policy: Policy, keep: Sequence[str] = ()) -> TimingRun:
        """Time as asked; noise follows from what is timed, so that a run can be repeated."""
        self._step()
        size = candidates[0].problem.sizes[self.gpu.range.size]
        self.sizes.append(size)
        self.timed.append((policy, tuple(candidate.name for candidate in candidates)))
        rounds = range(policy.rounds)

        def noisy(name: str, us: float) -> list[float]:
            rng = random.Random(f"{size} {name}")
            return [us * exp(rng.gauss(0, self._noise)) for _ in rounds]

        reference = noisy("torch", self.gpu.torch_us(size))
        timings = {}
        for candidate in candidates:
            took = self.gpu.time_us(size, self._config_of(candidate.name))
            assert took is not None
            timings[candidate.name] = Timing.of(noisy(candidate.name, took), reference, reference="torch.mm")
        return TimingRun(timings, Timing.of(reference, reference, reference="torch.mm"))
