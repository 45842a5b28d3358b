"""Counters of kernels: what ncu prints is read, summed up and rendered; what goes wrong is said."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import fake_engine
import pytest

from cutegen.errors import UsageError
from cutegen.families.gemm.problem import Problem
from cutegen.records.entry import Entry, Fingerprint
from cutegen.records.table import Table
from tools import profile_gemm, results_table
from tools.benchmark.profile_child import MARK
from tools.benchmark.profile_table import METRICS, Profile, read_csv

OURS, THEIRS = "cutegen_gemm_ab12_k0_kernel_kernel_types_0", "void nvjet_tst_128x16<float>(int)"
ADDING = "cutegen_gemm_ab12_k1_reduce_kernel_types_1"
RANGES = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
Run = Callable[..., int]


def printed(*launches: tuple[str, str, float], drop: str = "") -> str:
    """What ``ncu --csv --page raw`` prints: chatter, a header, a row of units, then a row per launch."""
    columns = ["ID", RANGES, "Kernel Name", "Block Size", "Grid Size", *METRICS.values()]
    text = io.StringIO()
    writer = csv.DictWriter(text, [c for c in columns if c != drop], quoting=csv.QUOTE_ALL)
    writer.writeheader()
    writer.writerow({c: "byte" if c in METRICS.values() else "" for c in columns if c != drop})
    for number, (caller, name, ns) in enumerate(launches):
        row = dict.fromkeys(METRICS.values(), "12.5")
        row |= {METRICS["time_ns"]: f"{ns:,.0f}", METRICS["sm_cycles"]: f"{ns * 1.5:,.0f}"}
        row |= {METRICS["memory_bytes"]: "235,136,512", "ID": str(number), "Kernel Name": name}
        row |= {RANGES: f'71  "<default domain>:{MARK} {caller}:none:none"', "Block Size": "(256, 1, 1)"}
        row |= {"Grid Size": "(2, 3, 11)"}
        writer.writerow({k: v for k, v in row.items() if k != drop})
    return "==PROF== Connected to process 71\n" + text.getvalue()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command with an ``ncu`` that writes ``output``, or fails, instead of running anything."""
    problem = Problem(16, 8192, 8192)
    table = Table(Fingerprint.of(fake_engine.DEVICE), [Entry(problem, None, source="torch")])
    table.save(tmp_path / "table.json")
    monkeypatch.setattr(profile_gemm, "present_device", lambda: fake_engine.DEVICE)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def call(output: str, ends: str = "exit 0", limit_s: int = 100) -> int:
        (tmp_path / "output.csv").write_text(output, encoding="utf-8")
        program = tmp_path / "ncu"
        program.write_text(
            '#!/bin/sh\nif [ "$1" = --version ]; then echo "Version 2025.3.1.0 (build 1)"; exit 0; fi\n'
            f'while [ "$1" != --log-file ]; do shift; done\ncp {tmp_path}/output.csv "$2"\n{ends}\n'
        )
        program.chmod(0o755)
        shape = [
            "--shape",
            "16x8192x8192",
            "--table",
            str(tmp_path / "table.json"),
            "--timeout",
            str(limit_s),
        ]
        return profile_gemm.main([*shape, "--out", str(tmp_path / "profile.json"), "--commit", "abc"])

    return call


def test_launches_of_a_kernel_become_their_median() -> None:
    """Numbers come with commas; calls of one kernel are one row, others are rows of their own."""
    launches = [("vendor", THEIRS, 3000), *(("cutegen", OURS, ns) for ns in (1000, 9000, 2000))]
    vendor, ours, adding = read_csv(printed(*launches, ("cutegen", ADDING, 4000)))
    assert (vendor.caller, vendor.name, vendor.calls) == ("vendor", THEIRS, 1)
    assert (ours.caller, ours.calls, ours.counters["time_ns"]) == ("cutegen", 3, 2000)
    assert ours.counters["memory_bytes"] == 235136512 and ours.grid == (2, 3, 11)
    assert adding.name == ADDING


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("==ERROR== no permission", "no kernel in a range"),
        (printed(), "no kernel in a range"),
        (printed(("vendor", THEIRS, 1), drop=METRICS["sm_bytes"]), METRICS["sm_bytes"]),
    ],
)
def test_what_is_missing_is_named(text: str, said: str) -> None:
    """Neither an empty report nor one without a counter passes as a profile."""
    with pytest.raises(UsageError, match=said.replace(".", r"\.")):
        read_csv(text)


def test_a_profile_is_kept_and_rendered(tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """The file goes into a document; parts of a call add up in the summary."""
    text = printed(("vendor", THEIRS, 3000), ("cutegen", OURS, 1000), ("cutegen", ADDING, 500))
    assert run(text) == 0
    assert "vendor 3.00 us, cutegen 1.50 us" in capsys.readouterr().out
    document = tmp_path / "document.md"
    document.write_text("<!-- results: profile -->\n<!-- end results: profile -->\n", encoding="utf-8")
    assert results_table.main([str(tmp_path / "profile.json"), "--into", str(document)]) == 0
    written = document.read_text(encoding="utf-8")
    row = next(row for row in written.splitlines() if "nvjet" in row)
    assert "| 3.00 | 1500 | 12.5 | 235.1 |" in row and "`nvjet_tst_128x16`" in row
    assert "addition of parts" in written and "ncu 2025.3.1.0" in written and "commit abc" in written
    assert Profile.load(tmp_path / "profile.json").to_json() == json.loads(
        (tmp_path / "profile.json").read_text(encoding="utf-8")
    )


@pytest.mark.parametrize(
    ("ends", "limit_s", "said"),
    [("echo broken; exit 9", 100, "broken"), ("sleep 30", 1, "longer than 1 s")],
)
def test_a_shape_that_cannot_be_profiled_is_said(
    run: Run, capsys: pytest.CaptureFixture[str], ends: str, limit_s: int, said: str
) -> None:
    """A profiler that fails or hangs costs that shape, and the exit code says so."""
    assert run(printed(("vendor", THEIRS, 1)), ends, limit_s) == 1
    assert said in capsys.readouterr().err
