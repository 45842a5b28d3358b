"""Which work unit a cluster takes first, by the text of the kernels themselves: evaluated as plain Python."""

from __future__ import annotations

import re
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest

from cutegen.arch import find_arch, resident_clusters
from cutegen.build.render import render
from cutegen.families.gemm.perf_model.wave_order import KNOWN_SMS, turn_of, units_of_gpcs
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space

ARCH = find_arch("sm_90a")
#: What the text needs of the DSL, on integers.
DSL: dict[str, Any] = {
    "cutlass": SimpleNamespace(
        Int32=int, Int64=int, min=min, max=max, const_expr=bool, range_constexpr=range
    ),
    "cute": SimpleNamespace(jit=lambda function: function),
}


def text_of(cluster: tuple[int, int]) -> str:
    """Return the text of a kernel."""
    problem = Problem(4096, 4096, 4096)
    config = find_space("gemm", ARCH).default(problem).replace(cluster_shape_mn=cluster)
    return render(problem, config, ARCH).text


def first_units(cluster: tuple[int, int], clusters: int, total: int) -> list[int]:
    """Return the first work unit of each cluster of a launch of at most ``clusters`` for ``total`` units."""
    text = text_of(cluster)
    constants = "\n".join(re.findall(r"^(?:CLUSTER_M|GPCS|FULL|PAIRS|APART|LATE|KNOWN)\b.*$", text, re.M))
    start = text.index("    early_units, late_units = cutlass.Int64(0)")
    launch = textwrap.dedent(text[start : text.index("    # Where D is short", start)])
    function = text[text.index("@cute.jit\ndef own_unit(") :].partition("\n    return unit\n")
    names = dict(DSL)
    exec(f"{constants}\n{function[0]}{function[1]}", names)
    names |= {"clusters": clusters, "total": total}
    exec(launch, names)
    launched = min(clusters, total)
    return [names["own_unit"](each, names["early_units"], names["late_units"]) for each in range(launched)]


@pytest.mark.parametrize("cluster", [(1, 1), (2, 1), (1, 2), (4, 1), (1, 4), (2, 2), (4, 2), (2, 4)])
def test_clusters_of_a_gpc_take_the_units_that_the_model_expects(cluster: tuple[int, int]) -> None:
    """Each unit once, whatever their number, and of each GPC those that follow each other."""
    blocks = cluster[0] * cluster[1]
    most = resident_clusters(KNOWN_SMS, blocks)
    for total in (1, 2, 7, most // 2, most - 1, most, most + 1, 10 * most):
        found = first_units(cluster, most, total)
        count = len(found)
        assert sorted(found) == [*range(count)]
        by_gpc: dict[int, list[int]] = {}
        for number, unit in enumerate(found):
            by_gpc.setdefault(turn_of(number, blocks)[0], []).append(unit)
        for gpc, (first, length) in enumerate(units_of_gpcs(count, blocks)[-8:]):
            assert by_gpc.get(gpc, []) == [*range(first, first + length)]


def test_gpus_whose_turns_are_not_known_take_units_by_their_numbers() -> None:
    for clusters in (66, 114, 131, 144):
        assert first_units((1, 1), clusters, 1000) == [*range(clusters)]
