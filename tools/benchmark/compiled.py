"""A config as something to time: compiled if it has to be."""

from __future__ import annotations

from cutegen.families.registry import space_of
from cutegen.family import Problem
from cutegen.measure import Candidate
from cutegen.measure.device import Device
from cutegen.runtime.kernel_cache import Kernels
from cutegen.space import Config

__all__ = ["compiled_candidate"]


def compiled_candidate(
    kernels: Kernels, device: Device, name: str, problem: Problem, config: Config, known_key: str = ""
) -> Candidate:
    """Return a config on ``problem`` under a name, compiled for ``device``.

    Raises:
        BuildError: It does not compile.
    """
    artifact = kernels.artifact(problem, config, device.arch, known_key=known_key)
    space = space_of(config, problem.family, device.arch)
    return Candidate.of(
        name, artifact.shared_object, artifact.symbol, space, config, problem, device.sm_count
    )
