"""Kernels of one problem from several texts, compiled and timed in the same rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cutegen.build import Artifact, Builder
from cutegen.build.render import Source
from cutegen.build.store import Store
from cutegen.digest import Json
from cutegen.errors import CutegenError
from cutegen.families.registry import space_of
from cutegen.family import Problem
from cutegen.measure import Bench, Candidate
from cutegen.measure.device import Device
from cutegen.measure.policy import Policy
from cutegen.space import Config

__all__ = ["SideBySide", "compiled"]


def compiled(store: Store, sources: Iterable[Source]) -> dict[Source, Artifact]:
    """Return all kernels, compiled side by side; those that cannot be are left out."""
    with Builder(store) as builder:
        found = builder.build(set(sources))
        return {source: artifact for source, artifact in found if isinstance(artifact, Artifact)}


class SideBySide:
    """Measures kernels on one GPU: ``kernels`` that are compiled, by their text, as ``policy`` says."""

    def __init__(
        self, bench: Bench, device: Device, kernels: Mapping[Source, Artifact], policy: Policy
    ) -> None:
        self._bench, self._device, self._kernels, self._policy = bench, device, kernels, policy

    def row(self, problem: Problem, config: Config, sources: Mapping[str, Source]) -> dict[str, Json]:
        """Return the times of a problem by the names of ``sources``, once each kernel was seen to be right.

        Args:
            problem: What is computed.
            config: Says what launches of all of them take.
            sources: The kernels.

        Raises:
            CutegenError: It cannot be measured, or a kernel is wrong.
        """
        self._bench.open(problem)
        entries = [self._entry(name, problem, config, source) for name, source in sources.items()]
        run = self._bench.time(entries, self._policy)
        if run.failures:
            raise CutegenError(f"{problem}: {next(iter(run.failures.values())).error}")
        return {
            "problem": str(problem),
            "config": str(config),
            "bytes": problem.min_bytes,
            "times": {name: round(t.steady_us or t.median_us, 3) for name, t in run.timings.items()},
        }

    def _entry(self, name: str, problem: Problem, config: Config, source: Source) -> Candidate:
        if source not in self._kernels:
            raise CutegenError(f"{problem}: the kernel with {name} could not be compiled")
        built, device = self._kernels[source], self._device
        space = space_of(config, problem.family, device.arch)
        entry = Candidate.of(name, built.shared_object, built.symbol, space, config, problem, device.sm_count)
        found = self._bench.check(entry, repeats=0)
        if not found.ok:
            raise CutegenError(f"{problem}: {name}: {found.error}")
        return entry
