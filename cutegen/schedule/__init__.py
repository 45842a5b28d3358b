"""A model of who waits for whom in a kernel: barriers, stages and warps, simulated without a GPU."""

from cutegen.schedule.declared import Pipeline, pipelines
from cutegen.schedule.explore import Outcome, everything
from cutegen.schedule.protocol import Cluster
from cutegen.schedule.simulate import KernelProtocol, Report, lengths, protocol_of, simulate, simulate_cluster
from cutegen.schedule.violation import KINDS, Violation

__all__ = [
    "KINDS",
    "Cluster",
    "KernelProtocol",
    "Outcome",
    "Pipeline",
    "Report",
    "Violation",
    "everything",
    "lengths",
    "pipelines",
    "protocol_of",
    "simulate",
    "simulate_cluster",
]
