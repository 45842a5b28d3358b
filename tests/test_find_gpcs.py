"""Finding GPCs and their turns, of a GPU that is made up."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from cutegen.families.gemm.perf_model.wave_order import turn_of
from tools.benchmark.gpcs_table import GPC_TURNS, GpcTurns
from tools.find_gpcs import groups_of, where_expected
from tools.results_table import main


def test_multiprocessors_that_met_in_clusters_are_one_gpc() -> None:
    """Pairs join to groups, in any order; who met nobody else stays alone."""
    clusters = [[0, 1], [2, 3], [4, 5], [1, 2], [8, 9, 10, 11], [5, 7]]
    chance = random.Random(1)
    for _ in range(20):
        chance.shuffle(clusters)
        assert groups_of(clusters) == [[0, 1, 2, 3], [8, 9, 10, 11], [4, 5, 7]]
    assert groups_of([]) == []


@pytest.mark.parametrize("blocks", [1, 2, 4, 8])
def test_turns_are_recognized_whatever_gpcs_are_called(blocks: int) -> None:
    names = dict(zip(range(-4, 8), [5, 3, 7, 0, 1, 2, 6, 4, 11, 10, 9, 8], strict=True))
    count = 120 // blocks
    gpcs = [names[turn_of(cluster, blocks)[0]] for cluster in range(count)]
    assert where_expected(gpcs, blocks) == count
    gpcs[-1] = next(name for name in names.values() if name != gpcs[-1])
    assert where_expected(gpcs, blocks) == count - 1
    assert where_expected([0] * count, blocks) < count / 4, "one GPC for all takes no turns"


def test_a_file_is_rendered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """GPCs with their multiprocessors, and the worst launch of each kernel."""
    rows = [
        {"cluster": 1, "clusters": 6, "right": [6, 5, 6], "gpcs": [0, 1, 0, 1, 0, 0]},
        {"cluster": 2, "clusters": 3, "right": [3, 3, 3], "gpcs": [0, 1, 0]},
    ]
    facts = {"kind": GPC_TURNS, "sm_count": 6, "sms": [[0, 1, 4, 5], [2, 3]], "rows": rows, "gpu": "A GPU"}
    facts |= {"measured_at": "2026-11-27T17:00:00+00:00", "machine": {"driver": "1.2"}, "commit": "0" * 40}
    path = tmp_path / "gpc_turns.json"
    path.write_text(json.dumps(facts), encoding="utf-8")
    found = GpcTurns.load(path)
    assert found.summary()[0].endswith("the 2 GPCs: 4, 2")
    assert "**96.2 %** of 27" in found.summary()[1]
    assert main([str(path)]) == 0
    assert "| 1 | 6 | 4, 2 | 83.3 % or more | 3 |" in capsys.readouterr().out
