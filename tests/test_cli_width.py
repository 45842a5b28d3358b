"""Results on a terminal of 80 columns, and what a newcomer asks: lookups offline, aliases, typos."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fake_engine import DEVICE
from fake_tuning import FakeBench, quick_search  # noqa: F401
from test_cli import SHAPE, gpu, tune  # noqa: F401

from cutegen.cli import main as cli
from cutegen.cli.report import LEGEND, result_lines, summary_lines
from cutegen.cli.wrapped_text import Column, columns, fold
from cutegen.errors import NoWinnerError
from cutegen.families.gemm.family import GEMM
from cutegen.families.gemm.problem import Problem
from cutegen.families.ranges import parse_range
from cutegen.families.registry import find_space
from cutegen.records.entry import Entry, Fingerprint
from cutegen.records.range_entry import Piece, RangeEntry
from cutegen.records.table import Table
from cutegen.space import Config
from cutegen.tuning import Failed, Row, TuneResult

RUNS = {
    "measured": ["--shape", SHAPE],
    "by energy": ["--shape", SHAPE, "--objective", "energy"],
    "several": ["--shape", SHAPE, "--shape", "64x7168x2048"],
    "predicted": ["--shape", SHAPE, "--arch", "sm_90a"],
    "predicted for a fused epilogue": [
        *("--shape", "3x1000x1000x1032", "--arch", "sm_90a"),
        *("--options", "alpha beta bias=n act=gelu_tanh scale any_order"),
    ],
    "without a model": ["--shape", SHAPE, "--arch", "sm_100a"],
}


@pytest.mark.parametrize("words", RUNS.values(), ids=RUNS)
def test_every_result_fits_80_columns(
    gpu: FakeBench,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
) -> None:
    """No line is longer, and every word of the long form's last lines is there unbroken."""
    monkeypatch.setenv("COLUMNS", "80")
    assert tune(*words) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert tune(*words, "--wide") == 0
    lines = capsys.readouterr().out.splitlines()
    config = [line for line in lines if "split_k=" in line and "swap_ab=" in line][-1]
    assert [word for word in config.split() if "=" in word and word not in out.split()] == []


def test_a_long_name_of_a_baseline_and_a_failure_fit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A baseline whose name is a sentence has the heading 'baseline' and its name in its row."""
    failed = Failed(Problem(64, 64, 64), NoWinnerError("no working kernel " * 12), 1.0)
    assert max(map(len, result_lines("a", failed, 80))) <= 80
    assert max(map(len, summary_lines({f"shape {i}": failed for i in range(30)}, 80))) <= 80


def test_columns_are_dropped_in_order_and_the_last_one_wraps() -> None:
    """What matters least goes first; nothing is cut off; without a width all is there."""
    table = [
        Column("shape", ["x" * 20, "y"], left=True),
        Column("us", ["1.00", "200.00"]),
        Column("W", ["700", ""], drop=2),
        Column("95 %", ["[1.000, 1.001]", ""], drop=1),
        Column("", ["", ""]),
        Column("config", ["128x256 2x1 pingpong swizzle_size=8", "64x64"], left=True),
    ]
    wide = columns(table, None)
    assert len(wide) == 3 and "[1.000, 1.001]" in wide[1] and wide[1].endswith("swizzle_size=8")
    narrow = columns(table, 64)
    assert "W" not in narrow[0] and "95 %" not in narrow[0] and max(map(len, narrow)) <= 64
    assert narrow[2].strip() == "swizzle_size=8"
    assert narrow[2].index("swizzle") == narrow[1].index("128x256")


def test_folding_breaks_between_words_only() -> None:
    """A word that is longer than the line stays whole."""
    assert fold("  a: " + "bb " * 10, 20) == ["  a: bb bb bb bb bb", "      bb bb bb bb bb"]
    assert fold("x" * 30, 20) == ["x" * 30]


def test_the_legend_names_every_column(
    gpu: FakeBench,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whatever heads a column is explained by --legend."""
    assert tune("--shape", SHAPE, "--shape", "64x64x64", "--wide", "--objective", "edp") == 0
    heads = [line for line in capsys.readouterr().out.splitlines() if "time us" in line]
    assert len(heads) == 3
    titles = {title for head in heads for title in head.strip().replace("  ", "\n").split("\n") if title}
    known = LEGEND.replace("BASELINE", "torch.mm")
    assert [t for t in titles if t.strip().removeprefix("edp ") not in known and t.strip() != "shape"] == []
    with pytest.raises(SystemExit) as caught:
        tune("--legend")
    assert caught.value.code == 0 and capsys.readouterr().out.strip() == LEGEND.strip()


def test_predictions_and_measurements_are_two_fields() -> None:
    """A prediction is never a time, and asking for the ratio of what was not measured is no error."""
    row = Row(Config({"tile": 1}), predicted_us=12.5)
    result = TuneResult(Problem(64, 64, 64), "sm_90a", "", (row,))
    assert (result.time_us, result.predicted_us, result.ratio, result.tflops) == (None, 12.5, None, None)
    assert Row(Config({"tile": 1})).time_us is None


def explained(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, list[dict[str, object]]]:
    """What the command prints about problems for sm_90a, as text and as JSON."""
    assert cli.main(["explain", "gemm", "--arch", "sm_90a", *words]) == 0
    text = capsys.readouterr().out
    assert cli.main(["explain", "gemm", "--arch", "sm_90a", "--json", *words]) == 0
    return text, json.loads(capsys.readouterr().out)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A table of one problem, written for a H200."""
    problem = Problem(64, 7168, 2048)
    config = find_space("gemm", DEVICE.arch).default(problem)
    path = tmp_path / "table.json"
    Table(Fingerprint.of(DEVICE), [Entry(problem, config, time_us=9.0)]).save(path)
    return path


@pytest.mark.parametrize(
    ("shape", "how"),
    [("64x7168x2048", "exact"), ("63x7168x2048", "bucket"), ("100x7168x2048", "nearest"), (SHAPE, "default")],
)
def test_a_lookup_is_explained_without_a_gpu(
    table: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, shape: str, how: str
) -> None:
    """The rule, the entry behind it and the config, as a call on that GPU would have them."""
    monkeypatch.setattr(GEMM, "is_fitted", lambda *_: False)  # so that neighbours answer, however good
    text, [found] = explained(capsys, "--table", str(table), "--shape", shape, "--fallback", "none")
    assert f"  {how}: " in text and "config: tile_shape_mn=" in text
    assert found["how"] == how and max(map(len, text.splitlines())) <= 80
    assert found["entry"] == (None if how == "default" else "gemm 64x7168x2048 bf16 kk")


def test_a_table_for_another_gpu_answers_nothing(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is ignored, with the reason, as a call would."""
    known = Table.load(table)
    other = tmp_path / "other.json"
    Table(replace(known.fingerprint, compute_capability="10.0a"), known.entries.values()).save(other)
    text, [found] = explained(capsys, "--table", str(other), "--shape", "64x7168x2048")
    ignored = "the table is ignored: compute_capability is '10.0a' in the table but '9.0a' here"
    assert ignored in " ".join(text.split())
    assert found["how"] == "default" and found["table_ignored"]
    text, _ = explained(capsys, "--shape", SHAPE)
    assert "there is no table to ask" in text


@pytest.mark.parametrize("field", ["cutegen", "cutlass_dsl", "cuda_runtime"])
def test_without_a_gpu_a_table_of_other_software_answers_nothing(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str
) -> None:
    """Of the GPU nothing is known but its architecture: any name, driver and number of SMs will do."""
    known = Table.load(table)
    other, elsewhere = tmp_path / "other.json", tmp_path / "elsewhere.json"
    Table(replace(known.fingerprint, **{field: "0.0.1"}), known.entries.values()).save(other)
    there = replace(known.fingerprint, gpu_name="NVIDIA H100 PCIe", sm_count=114, cuda_driver="12.9")
    Table(there, known.entries.values()).save(elsewhere)
    text, [found] = explained(capsys, "--table", str(other), "--shape", "64x7168x2048")
    assert f"the table is ignored: {field} is '0.0.1' in the table but" in " ".join(text.split())
    assert found["how"] == "default"
    text, [found] = explained(capsys, "--table", str(elsewhere), "--shape", "64x7168x2048")
    assert found["how"] == "exact" and not found["table_ignored"] and "114 SMs" in text


def test_a_range_is_explained_size_by_size(
    table: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every size that the layout allows is in one run, with what a lookup of it alone finds."""
    monkeypatch.setattr(GEMM, "is_fitted", lambda *_: False)
    words = ["--table", str(table), "--fallback", "none"]
    text, [found] = explained(capsys, *words, "--shape", "48..80x7168x2048")
    runs = found["runs"]
    assert isinstance(runs, list) and [run["how"] for run in runs] == ["bucket", "exact", "nearest"]
    assert [(run["first"], run["last"], run["sizes"]) for run in runs] == [
        (48, 63, 16),
        (64, 64, 1),
        (65, 80, 16),
    ]
    assert "48..63  bucket " in text and "1 config of 1 kernel; sizes: 16 bucket, 1 exact, 16 nearest" in text
    assert max(map(len, text.splitlines())) <= 80
    shapes = ["1..70x7168x2048", *(f"{m}x7168x2048" for m in range(1, 71))]
    _, [whole, *singles] = explained(capsys, *(word for shape in shapes for word in ("--shape", shape)))
    runs = whole["runs"]
    assert isinstance(runs, list) and len(runs) > 3
    answers = [(run["how"], run["config"]) for run in runs for _ in range(run["sizes"])]
    assert answers == [(single["how"], single["config"]) for single in singles]
    _, [odd] = explained(capsys, "--shape", "8..32x7168x2048", "--layout", "mn")
    runs = odd["runs"]
    assert isinstance(runs, list) and sum(run["sizes"] for run in runs) == 4


def test_without_a_shape_all_that_a_table_holds_is_explained(
    table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its problems, then its ranges with every piece; a family that it lacks needs shapes."""
    [entry] = Table.load(table).entries.values()
    assert entry.config is not None
    other = entry.config.replace(swizzle_size=2)
    of = parse_range("gemm 128..512x7168x2048 bf16 kk")
    pieces = (Piece(128, 200, entry.config), Piece(201, 512, other))
    Table(Fingerprint.of(DEVICE), [entry], [RangeEntry(of, pieces)]).save(table)
    text, [single, whole] = explained(capsys, "--table", str(table), "--fallback", "none")
    assert (single["problem"], single["how"]) == ("gemm 64x7168x2048 bf16 kk", "exact")
    runs = whole["runs"]
    assert whole["range"] == str(of) and isinstance(runs, list)
    assert [(run["first"], run["last"], run["how"]) for run in runs] == [
        (128, 200, "range"),
        (201, 512, "range"),
    ]
    assert "2 configs of 1 kernel; sizes: 385 range" in text
    for words, why in (
        (["rmsnorm", "--arch", "sm_90a", "--table", str(table)], "the table has nothing of rmsnorm"),
        (
            ["gemm", "--arch", "sm_100a", "--table", str(table)],
            "the table is ignored: compute_capability is '9.0a'",
        ),
        (["gemm", "--arch", "sm_90a"], "there is no table to ask"),
    ):
        assert cli.main(["explain", *words]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert f"no shape given, and {why}" in said and "; use --shape, such as --shape" in said


def test_a_range_of_too_many_sizes_is_refused_with_a_part_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "gemm", "--arch", "sm_90a", "--shape", "2..40000x7168x2048"]) == 2
    assert "spans 39999 sizes; valid here: up to 32768; ask for a part of it, such as 2..32769" in (
        capsys.readouterr().err
    )


def test_an_entry_that_is_passed_over_says_what_is_wrong_with_it(
    table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A knob that is missing, one that does not exist, and a rule by its name."""
    [(problem, entry)] = Table.load(table).entries.items()
    assert entry.config is not None
    without = Config({knob: value for knob, value in entry.config.items() if knob != "pingpong"})
    wrong = {
        "config lacks pingpong": without,
        "unknown knob 'colour'": Config({**entry.config, "colour": 1}),
        "warpgroups_divide_tile: ": entry.config.replace(tile_shape_mn=(64, 256), mma_warpgroups=2),
    }
    for reason, config in wrong.items():
        Table(Fingerprint.of(DEVICE), [Entry(problem, config)]).save(table)
        text, [found] = explained(capsys, "--table", str(table), "--shape", "64x7168x2048")
        skipped = found["skipped"]
        assert found["how"] == "default" and isinstance(skipped, list) and reason in skipped[0]
        assert "passed over: " in text


def problem_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["space", "gemm", "--arch", "sm_90a", "--list", "1", *words]) == 0
    return capsys.readouterr().out.split(" on sm_90a")[0]


def test_names_of_torch_and_of_version_0_1_are_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Dtypes as torch has them, layouts as they were called, options as the library calls have them."""
    words = ["--shape", "64x64x64", "--dtype", "float16", "--layout", "mn", "--out-dtype", "torch.bfloat16"]
    line = "gemm 64x64x64 fp16 mn out=bf16 act=gelu"
    assert problem_of(capsys, *words, "--options", "activation=gelu") == line
    shapes = tmp_path / "shapes.toml"
    shapes.write_text(
        "[[shape]]\nm = 64\nn = 64\nk = 64\ndtype = 'half'\nlayout = 'mn'\nout_dtype = 'bfloat16'\n"
        "activation = 'gelu'\n"
    )
    assert problem_of(capsys, "--shapes", str(shapes)) == line
    shapes.write_text("[[shape]]\nm = 64\nn = 64\nk = 64\nact = 'relu'\nactivation = 'relu'\n")
    assert cli.main(["space", "gemm", "--arch", "sm_90a", "--shapes", str(shapes)]) == 2
    assert "give only one of act or activation" in capsys.readouterr().err


TYPOS: dict[str, tuple[list[str], str]] = {
    "option": (["tune", "gemm", "--shpae", "8x8x8"], "(did you mean --shape?)"),
    "family": (["tune", "gem", "--arch", "sm_90a", "--shape", SHAPE], "(did you mean gemm?)"),
    "knob": (["--shape", SHAPE, "--set", "pingpng=true"], "(did you mean pingpong?)"),
    "option word": (["--shape", SHAPE, "--options", "activaton=gelu"], "did you mean activation?"),
    "value as a word": (["--shape", SHAPE, "--options", "gelu"], "did you mean act=gelu?"),
    "command": (["tnue", "gemm"], "(did you mean tune?)"),
    "tile": (["--shape", SHAPE, "--set", "tile_shape_mn=130x111"], "the nearest that are: 128x112"),
    "fp8": (["--shape", SHAPE, "--dtype", "fp8"], "int8; fp8 is e4m3 or e5m2"),
    "missing shapes": (["tune", "gemm", "--shapes", "nowhere.toml"], "nowhere.toml does not exist"),
    "missing recording": (["tune", "--recorded", "nowhere.jsonl"], "nowhere.jsonl does not exist"),
    "tf32": (["--shape", SHAPE, "--dtype", "tf32"], "tf32 runs on sm_100a and sm_103a only"),
}


@pytest.mark.parametrize(("words", "message"), TYPOS.values(), ids=TYPOS)
def test_typos_end_in_a_suggestion(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    """Exit code 2, a few lines, and what was meant."""
    words = words if words[0][0] != "-" else ["space", "gemm", "--arch", "sm_90a", *words]
    try:
        assert cli.main(words) == 2
    except SystemExit as ended:
        assert ended.code == 2
    err = capsys.readouterr().err
    assert message in err and len(err) < 900


def test_a_wrong_value_of_a_known_option_needs_no_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["tune", "gemm", "--arch", "sm_90a", "--shape", SHAPE, "--workers", "0"])
    err = capsys.readouterr().err
    assert "--workers: '0' is not a positive integer" in err and "did you mean" not in err


def test_a_missing_bundle_is_what_is_said_to_be_missing(capsys: pytest.CaptureFixture[str]) -> None:
    """Not the driver, which matters only once there is something to measure."""
    assert cli.main(["tune", "gemm", "--import", "/nowhere.tar"]) == 3
    err = capsys.readouterr().err
    assert "/nowhere.tar does not exist" in err and "driver" not in err


@pytest.mark.parametrize("count", [1, 4, 12])
def test_no_more_kernels_are_compiled_than_asked_for(
    gpu: FakeBench,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    count: int,
) -> None:
    """--candidates counts kernels; the default config may be one more."""
    assert tune("--shape", "64x7168x2048", "--arch", "sm_90a", "--candidates", str(count)) == 0
    words = capsys.readouterr().out.split()
    assert 1 <= int(words[words.index("kernels,") - 1]) <= count + 1
