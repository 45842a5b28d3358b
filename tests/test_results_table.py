"""Tables of results: rounding never favours cutegen, what failed does not vanish, documents keep the rest."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutegen.errors import UsageError
from cutegen.families.gemm.problem import Problem
from cutegen.measure.policy import Policy
from cutegen.measure.timing import Timing
from tools import results_table as rt
from tools.benchmark.results import Entry, InContext, Results, ShapeResult

numbers = st.floats(min_value=1e-3, max_value=1e7, allow_nan=False)
REFERENCE_US = 100.0


def timing(us: float, reference_us: float = REFERENCE_US) -> Timing:
    return Timing.of(
        [us] * 7, [reference_us] * 7, clocks_mhz=[1500.0], rounds_power_w=650.0, reference="torch.mm"
    )


def entry(us: float | None, **details: str) -> Entry:
    if us is None:
        return Entry("timeout", "took longer than 10 s and was killed")
    return Entry("ok", "", timing(us), "128x256 2x1", {}, 20.04, details)


def row(name: str, entries: Mapping[str, Entry], sizes: tuple[int, int, int] = (64, 64, 64)) -> ShapeResult:
    reference = timing(REFERENCE_US)
    return ShapeResult(name, Problem(*sizes), reference, entries, 15, 1.0, True, 9.0, "2026-01-02T03:04:05")


def results(*rows: ShapeResult, names: tuple[str, ...] = ()) -> Results:
    conditions = {
        "gpu": {"name": "NVIDIA H200", "sm_count": 132, "cuda_driver": "13.0"},
        "software": {"cutegen": "0.1.0", "packages": {"torch": "2.11.0", "quack-kernels": "0.6.5"}},
        "policy": Policy().to_json(),
        "shapes": {"names": list(names or [r.name for r in rows])},
    }
    return Results(conditions, ({"driver": "580.1", "commit": "0123456789abcdef"},), rows)


def two_shapes() -> Results:
    """A small shape that wins by 1.25 and a large one that loses by 0.8; QuACK is at 100 us on both."""
    peer = {"quack": entry(100.0)}
    return results(
        row("S", {"cutegen": entry(80.0), **peer}),
        row("L", {"cutegen": entry(125.0), **peer}, (4096, 4096, 4096)),
    )


@given(numbers, st.integers(0, 4))
def test_rounding_goes_the_way_that_it_says(value: float, digits: int) -> None:
    """down never exceeds the value, up never falls short of it, and neither is off by a whole digit."""
    low, high = Decimal(rt.down(value, digits)), Decimal(rt.up(value, digits))
    assert low <= Decimal(value) <= high
    assert high - low <= Decimal(1).scaleb(-digits)


@given(st.floats(0.5, 2.0), st.floats(0.5, 2.0))
def test_no_cell_is_rounded_in_favour_of_cutegen(own: float, peer: float) -> None:
    """Our time and their time bracket the truth against us, and so does the ratio."""
    shape = row("S", {"cutegen": entry(own * 100), "quack": entry(peer * 100)})
    cells = [cell.strip() for cell in rt.table(results(shape))[2].strip("|").split("|")]
    theirs_us, ours_us, tflops, ratio, versus = cells[3:8]
    flops = shape.problem.flops
    assert float(ours_us) >= own * 100 and float(theirs_us) <= REFERENCE_US
    assert float(tflops) <= flops / (own * 100) / 1e6
    found = [float(number) for number in re.findall(r"[\d.]+", ratio)]
    assert all(number <= 1 / own + 1e-12 for number in found) and len(found) == 3
    assert float(versus) <= peer / own + 1e-12


def test_summary_has_the_means_over_all_shapes_and_over_the_large_ones() -> None:
    """1.25 and 0.8 have the geometric mean 1; the large shape alone is at 0.8."""
    lines = rt.summary(two_shapes())
    assert lines[0].startswith("- all 2 shapes: geometric mean of torch.mm / cutegen **")
    assert "smallest 0.800, at least 1 on 1 of 2" in lines[0]
    assert "all 2 shapes: QuACK / cutegen" in lines[1] and "on 1 of 2" in lines[1]
    assert "the 1 with M and N of at least 2048" in lines[2] and "**0.800**" in lines[2]


def test_further_contexts_have_a_column_and_a_mean_of_their_own() -> None:
    """The footing says what ran before each launch of the first; a file without contexts shows none."""
    there = InContext(timing(100.0), {"cutegen": timing(50.0)})
    found = two_shapes()
    rows = (replace(found.shapes[0], contexts={"back_to_back": there}), *found.shapes[1:])
    behind: dict[str, Any] = {**found.conditions, "policy": Policy(context="behind").to_json()}
    text = rt.render(replace(found, shapes=rows, conditions=behind))
    assert "torch.mm / cutegen (95 %) | the same back to back | QuACK / cutegen" in text
    assert "1.250 (1.250 to 1.250) | 2.000 |" in text and "0.800 (0.800 to 0.800) |  |" in text
    mean = "geometric mean of torch.mm / cutegen **2.000** over 1 (missing: 1)"
    assert f"all 2 shapes, back to back: {mean}" in text
    assert "clocks settled, each launch behind an element-wise kernel that writes the first input" in text
    plain = rt.render(found)
    assert "back to back" not in plain and "each launch" not in plain


def test_bursts_have_a_column_where_power_limits_any_row() -> None:
    """Rows that it does not limit have none; the mean is of those that it does."""
    found = two_shapes()
    own = found.shapes[1].entries["cutegen"]
    slower = replace(own, timing=timing(125.0).with_bursts(timing(200.0)))
    rows = (found.shapes[0], replace(found.shapes[1], entries={**found.shapes[1].entries, "cutegen": slower}))
    text = rt.render(replace(found, shapes=rows))
    assert "torch.mm / cutegen (95 %) | the same in bursts | QuACK / cutegen" in text
    assert "1.250 (1.250 to 1.250) |  |" in text and "0.800 (0.800 to 0.800) | 0.500 |" in text
    assert (
        "in bursts, 1 that a limit of power slows down: geometric mean of torch.mm / cutegen **0.500**"
        in text
    )
    assert "in bursts" not in rt.render(found)


def test_failures_of_cutegen_are_named_and_their_number_goes_with_the_mean() -> None:
    """A shape that failed can neither vanish nor count."""
    lines = rt.summary(results(row("A", {"cutegen": entry(80.0)}), row("B", {"cutegen": entry(None)})))
    assert "**1.250** over 1 (missing: 1)" in lines[0]
    assert lines[-1] == "- **cutegen failed on B; no mean includes these**"
    assert "**timeout**" in rt.render(results(row("B", {"cutegen": entry(None)})))


def test_shapes_that_were_not_measured_are_named() -> None:
    """A mean over half of a list does not pass for one over the list."""
    assert "- **not measured: B**" in rt.summary(
        results(row("A", {"cutegen": entry(80.0)}), names=("A", "B"))
    )


def test_wrong_answers_of_the_library_call_are_named() -> None:
    """The kernel may be right while cutegen.gemm is not."""
    bad = row("A", {"cutegen": entry(80.0, called_through_gemm="wrong_result: nan")})
    good = row("B", {"cutegen": entry(80.0, called_through_gemm="ok")})
    assert "- **cutegen.gemm did not give the right answer on A**" in rt.summary(results(bad, good))


DOCUMENT = "before\n<!-- results: a -->\nold\n<!-- end results: a -->\nafter\n"


def test_insert_replaces_what_is_between_the_marks_and_nothing_else() -> None:
    """The rest of the document stays, and doing it again changes nothing."""
    once = rt.insert(DOCUMENT, "a", r"new \1 | text")
    assert once.startswith("before\n<!-- results: a -->\n\nnew \\1 | text\n\n<!-- end")
    assert once.endswith("<!-- end results: a -->\nafter\n") and "old" not in once
    assert rt.insert(once, "a", r"new \1 | text") == once


def test_command_writes_documents_and_notices_stale_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--check exits 1 before the table is written, and 0 after."""
    file, document = tmp_path / "a.json", tmp_path / "PAGE.md"
    two_shapes().save(file)
    document.write_text(DOCUMENT)
    arguments = [str(file), "--into", str(document)]
    assert rt.main([*arguments, "--check"]) == 1
    assert document.read_text() == DOCUMENT
    assert rt.main(arguments) == 0
    assert rt.main([*arguments, "--check"]) == 0
    assert "| S | 64 x 64 x 64 | bf16 kk | 100.00 | 80.00 |" in document.read_text()
    assert "out of date: PAGE.md" in capsys.readouterr().out


def test_a_place_may_name_some_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It holds these alone, in few columns, with the mean over all; a row that is not there is refused."""
    file, document = tmp_path / "a.json", tmp_path / "PAGE.md"
    two_shapes().save(file)
    marks = "<!-- results: a rows=S -->\n<!-- end results: a -->\n"
    document.write_text(marks)
    assert rt.main([str(file), "--into", str(document)]) == 0
    text = document.read_text()
    assert "| 64 x 64 x 64 | bf16 kk | 100.00 | 80.00 |" in text and text.count("\n| ") == 3
    assert "Of all 2 shapes: geometric mean" in text and text.startswith(marks.split("\n")[0])
    assert rt.main([str(file), "--into", str(document), "--check"]) == 0
    document.write_text(marks.replace("rows=S", "rows=X"))
    assert rt.main([str(file), "--into", str(document)]) == 2
    assert "no shape is called X; there are " in capsys.readouterr().err


def test_spread_lists_the_shapes_on_which_runs_disagree_most_first() -> None:
    """10 % between runs comes before 1 %, rounded up."""
    one = results(row("A", {"cutegen": entry(100.0)}), row("B", {"cutegen": entry(100.0)}))
    two = results(row("A", {"cutegen": entry(101.0)}), row("B", {"cutegen": entry(110.0)}))
    lines = rt.spread({"one": one, "two": two})
    assert lines[0].startswith("geometric means over all 2 shapes that every run has: one 1.0000, two 0.948")
    assert [re.sub(r"\s+", " ", line).split()[2] for line in lines[1:]] == ["B", "A"]
    assert float(lines[1].split()[0]) >= 10.0


def test_runs_are_compared_by_the_shapes_that_all_of_them_have() -> None:
    """A run that ended early shifts no mean; with nothing in common there is nothing to compare."""
    whole = results(row("A", {"cutegen": entry(100.0)}), row("B", {"cutegen": entry(50.0)}))
    part = results(row("A", {"cutegen": entry(100.5)}))
    first, *rest = rt.spread({"whole": whole, "part": part})
    assert first.startswith(
        "geometric means over the 1 of 2 shapes that every run has: whole 1.0000, part 0.99"
    )
    assert len(rest) == 1 and " A " in rest[0]
    with pytest.raises(UsageError, match="in all of whole, other"):
        rt.spread({"whole": whole, "other": results(row("C", {"cutegen": entry(1.0)}))})


def test_seconds_of_tuning_are_summed_up_where_several_shapes_have_them() -> None:
    """Rounded up, since they are cutegen's; a peer's do not count, nor does a single shape's."""
    wanted = "- cutegen's tuning: 20.04 s a shape in the median of 2, 20.1 s at most"
    assert wanted in rt.summary(two_shapes())
    alone = results(row("S", {"cutegen": entry(80.0), "quack": entry(100.0)}))
    assert not [text for text in rt.summary(alone) if "tuning" in text]
