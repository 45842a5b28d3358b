"""A model of who waits for whom in a kernel: barriers, stages and warps, simulated without a GPU."""

from tools.schedule.declared import Pipeline, pipelines
from tools.schedule.explore import Outcome, everything
from tools.schedule.protocol import Cluster
from tools.schedule.simulate import KernelProtocol, Report, lengths, protocol_of, simulate, simulate_cluster
from tools.schedule.violation import KINDS, Violation

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
