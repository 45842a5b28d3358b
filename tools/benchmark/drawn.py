"""What a results file says of products and sizes that were drawn at random."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cutegen.digest import Json
from cutegen.measure.device import Device
from cutegen.measure.policy import Policy
from tools.benchmark.environment import check_facts, conditions

__all__ = ["drawn_results"]


def drawn_results(
    kind: str,
    device: Device,
    commit: str,
    policy: Policy,
    drawing: Mapping[str, Json],
    rows: Sequence[Mapping[str, Json]],
    failures: Sequence[str],
) -> dict[str, Json]:
    """Return the file's content.

    Args:
        kind: Of the file.
        device: Where it was measured.
        commit: Of the checkout, where git cannot tell.
        policy: How kernels were timed.
        drawing: What was drawn: the seed and how much.
        rows: What was measured.
        failures: What could not be, in words.
    """
    return {
        **check_facts(kind, device, commit),
        "conditions": conditions(device, policy, drawing=dict(drawing)),
        "rows": [dict(row) for row in rows],
        "failures": list(failures),
    }
