"""The commands: exit codes, messages without tracebacks, tables, JSON and progress."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from fake_engine import DEVICE
from fake_tuning import SMALL, TOOLCHAIN, FakeBench, FakeCompiler, quick_search  # noqa: F401
from patient_bench import PatientBench

import cutegen.cli.tune
from cutegen.build import Builder
from cutegen.build.store import Store
from cutegen.cli import main as cli
from cutegen.cli import space as cli_space
from cutegen.errors import DeviceError
from cutegen.families.registry import find_space, parse_problem
from cutegen.family import Problem
from cutegen.records.table import Table
from cutegen.records.trials import TrialStore
from cutegen.tuning import AutoTuner
from cutegen.tuning.backends import Backends
from cutegen.tuning.transfer import Imported

SHAPE = "4096x4096x4096"


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeBench:
    """A pretended GPU whose bench is returned, for ``python -m cutegen.tune``."""
    bench = FakeBench()
    tuner = partial(
        AutoTuner,
        backends=Backends(lambda: FakeCompiler(Store(tmp_path), bench.behaviour), lambda: bench),
    )

    def make(*args: object, **options: object) -> AutoTuner:
        effort = options.pop("effort")
        small = SMALL if effort == "standard" else effort
        return tuner(*args, **{**options, "toolchain": TOOLCHAIN, "effort": small})

    monkeypatch.setattr(cutegen.cli.tune, "AutoTuner", make)
    monkeypatch.setattr(cutegen.cli.tune, "present_device", lambda: DEVICE)
    monkeypatch.setenv("CUTEGEN_CACHE_DIR", str(tmp_path))
    return bench


def tune(*words: str) -> int:
    return cutegen.cli.tune.main(["gemm", *words])


def space(*words: str) -> int:
    return cli_space.main(["gemm", "--arch", "sm_90a", *words])


def test_disabled_autotuning_is_said(
    gpu: FakeBench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command that tunes does not tune then, nor does it pretend to."""
    monkeypatch.setenv("CUTEGEN_DISABLE_AUTOTUNE", "1")
    assert tune("--shape", SHAPE) == 2
    assert "CUTEGEN_DISABLE_AUTOTUNE is set" in capsys.readouterr().err
    assert not gpu.opened


def test_a_measured_run_prints_a_table(gpu: FakeBench, capsys: pytest.CaptureFixture[str]) -> None:
    """One row per finalist with time, rate, ratio to torch.mm with its interval, registers, shared memory."""
    assert tune("--shape", SHAPE, "--wide") == 0
    out, err = capsys.readouterr()
    head = next(line for line in out.splitlines() if "TFLOP/s" in line)
    assert head.split("  ")[1:] and "vs torch.mm" in head and "regs" in head and "smem KB" in head
    best = next(line for line in out.splitlines() if line.startswith("  best "))
    assert "[" in best and "tile_shape_mn=" in best
    assert "torch.mm" in out.splitlines()[-2] and "best: tile_shape_mn=" in out
    assert "winners in " in err and "python -m cutegen.pin --table " in err and "--legend" in err
    assert "predicted" not in out
    assert "] 4096x4096x4096: screen " in err and "done " in err, "without a terminal progress is plain lines"


def test_energy_is_shown_and_can_be_the_objective(gpu: FakeBench, capsys: pytest.CaptureFixture[str]) -> None:
    """Millijoules and watts have columns; with --objective energy the ratio is one of energies, and named."""
    assert tune("--shape", SHAPE, "--objective", "energy", "--wide") == 0
    out = capsys.readouterr().out
    head = next(line for line in out.splitlines() if "TFLOP/s" in line)
    assert head.split()[:8] == ["time", "us", "TFLOP/s", "mJ", "W", "energy", "vs", "torch.mm"]
    assert ", by energy, " in out.splitlines()[0]
    library = next(line for line in out.splitlines() if line.endswith(" torch.mm"))
    assert library.split()[:5] == ["100.00", "1374.4", "50", "500", "1.000"]
    assert tune("--shape", SHAPE, "--shape", "64x7168x2048", "--json", "--objective", "edp") == 0
    result = json.loads(capsys.readouterr().out)["results"][0]
    assert result["objective"] == "edp" and result["candidates"][0]["timing"]["energy_mj"]
    assert tune("--shape", SHAPE, "--shape", "64x7168x2048", "--objective", "energy") == 0
    assert "geometric mean of energy, torch.mm over cutegen: 0.4" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        tune("--shape", SHAPE, "--objective", "watts")
    assert "choose from" in capsys.readouterr().err
    assert tune("--shape", SHAPE, "--objective", "edp", "--arch", "sm_90a") == 2
    assert "edp needs a GPU" in capsys.readouterr().err


def test_json_holds_everything_and_nothing_else(gpu: FakeBench, capsys: pytest.CaptureFixture[str]) -> None:
    """--json prints one document on standard output."""
    assert tune("--shape", SHAPE, "--shape", "64x7168x2048", "--json", "--quiet") == 0
    out, _ = capsys.readouterr()
    document = json.loads(out)
    assert [r["problem"] for r in document["results"]] == [
        f"gemm {SHAPE} bf16 kk",
        "gemm 64x7168x2048 bf16 kk",
    ]
    result = document["results"][0]
    assert result["measured"] and result["winner"] == result["candidates"][0]["config"]
    assert result["candidates"][0]["timing"]["ratio"] and result["torch"]["median_us"]
    assert document["device"]["name"] == DEVICE.name and document["interrupted"] is False


def test_the_second_run_answers_from_records(gpu: FakeBench, capsys: pytest.CaptureFixture[str]) -> None:
    """The same command again measures nothing and says so."""
    assert tune("--shape", SHAPE, "--wide") == 0
    first = capsys.readouterr().out
    gpu.checked.clear()
    assert tune("--shape", SHAPE, "--wide") == 0
    second = capsys.readouterr().out
    assert not gpu.checked and "from records" in second
    assert first.splitlines()[1:] == second.splitlines()[1:]


def test_a_shapes_file_gives_a_summary(
    gpu: FakeBench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Several shapes end in one line each, by their id, and a geometric mean."""
    path = tmp_path / "shapes.toml"
    path.write_text(
        "".join(f'[[shape]]\nid = "S{i}"\nm = {m}\nn = 2048\nk = 512\n' for i, m in enumerate((64, 2048)))
    )
    assert tune("--shapes", str(path)) == 0
    out = capsys.readouterr().out
    assert "S0: gemm 64x2048x512 bf16 kk" in out and "  S1 " in out
    assert "geometric mean" in out.splitlines()[-1]


def test_a_shape_without_winner_gives_exit_code_1(gpu: FakeBench, capsys: pytest.CaptureFixture[str]) -> None:
    """The other shapes are tuned all the same."""
    gpu.behaviour = lambda config: "wrong_result"
    assert tune("--shape", SHAPE) == 1
    out = capsys.readouterr().out
    assert "no winner" in out and "wrong_result" in out


def test_an_interrupted_run_exits_with_130(gpu: FakeBench, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C ends with one line and keeps what was measured; a rerun continues."""
    gpu.stop_after = 12
    assert tune("--shape", SHAPE) == 130
    assert "interrupted" in capsys.readouterr().err
    seen = set(gpu.checked)
    gpu.stop_after = None
    gpu.checked.clear()
    assert tune("--shape", SHAPE) == 0
    with TrialStore(Store.default().root / "trials.db") as trials:
        assert len({t.config for t in trials.find() if t.config}) > len(seen)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--shape", "4096x4096"], 2, "not MxNxK"),
        (["--shape", "64x64x65"], 2, "must be a multiple of 8"),
        (["--shape", SHAPE, "--dtype", "fp64"], 2, "unsupported input dtype"),
        (["--shape", SHAPE, "--layout", "xy"], 2, "unknown layout"),
        (["--shape", SHAPE, "--options", "act=tanh"], 2, "unknown activation"),
        (["--shape", SHAPE, "--options", "act="], 2, "act takes a value: act=relu"),
        (["--shape", SHAPE, "--options", "beta="], 2, "beta takes no value"),
        (["--shape", SHAPE, "--arch", "sm_90"], 2, "did you mean sm_90a"),
        (["--shapes", "/nowhere.toml"], 2, "does not exist"),
        (["--shapes", "/nowhere.toml", "--dtype", "fp16"], 2, "--dtype goes with --shape"),
        ([], 2, "no shape given"),
        (["--shape", SHAPE, "--set", "tile=1"], 2, "unknown knob 'tile'"),
        (["--shape", SHAPE, "--set", "pingpong=maybe"], 2, "valid: false, true"),
        (["--shape", SHAPE, "--set", "pingpong"], 2, "knob=v1,v2"),
        (["--shape", SHAPE, "--set", "pingpong=true", "--set", "mma_warpgroups=2"], 2, "pingpong_has_one"),
        (["--shape", SHAPE, "--import", "/nowhere.tar"], 3, "bundle /nowhere.tar does not exist"),
        (["--shape", SHAPE, "--import", "/proc"], 3, "bundle /proc is a folder"),
        (["--shape", SHAPE, "--export", "/proc"], 3, "bundle /proc cannot be written: /proc is a folder"),
        (["--shape", SHAPE, "--export", "/dev/null/b.tar"], 3, "/dev/null is no folder"),
        (["--shape", "-1x64x64"], 2, "'-1x64x64' is not MxNxK"),
        (["--shape=-1x64x64"], 2, "'-1x64x64' is not MxNxK"),
        (["--shape", SHAPE, "--cache-dir", "/proc/nowhere"], 3, "/proc/nowhere"),
    ],
)
def test_mistakes_are_named_in_one_message(
    gpu: FakeBench, capsys: pytest.CaptureFixture[str], words: list[str], code: int, message: str
) -> None:
    """Bad usage exits with 2, a bad environment with 3; the message says what, never a traceback."""
    assert tune(*words) == code
    err = capsys.readouterr().err
    assert "cutegen: error: " in err and message in err and "Traceback" not in err
    assert not gpu.checked  # before anything is measured


def test_without_a_gpu_the_way_out_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No GPU and no --arch exits with 3 and mentions --arch."""

    def none() -> None:
        raise DeviceError("no NVIDIA driver on this machine")

    monkeypatch.setattr(cutegen.cli.tune, "present_device", none)
    assert tune("--shape", SHAPE) == 3
    assert "give --arch" in capsys.readouterr().err


def test_without_a_gpu_each_command_names_its_own_way_out_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> None:
        raise DeviceError("no NVIDIA driver on this machine")

    monkeypatch.setattr("cutegen.cli.target.present_device", none)
    for command, way in (("warm", "to compile for another"), ("explain", "to ask about another")):
        assert cli.main([command, "gemm", "--shape", SHAPE]) == 3
        err = capsys.readouterr().err
        assert way in err and err.count("give --arch") == 1


def test_a_damaged_database_names_the_remedy(
    gpu: FakeBench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that is no database stops the run before anything is measured."""
    (tmp_path / "trials.db").write_text("not a database, but long enough to look at" * 50)
    assert tune("--shape", SHAPE) == 3
    assert "trials.db" in capsys.readouterr().err and not gpu.checked


def test_predictions_are_called_predicted(gpu: FakeBench, capsys: pytest.CaptureFixture[str]) -> None:
    """With --arch the column says predicted, the default stands in its place, and the model is weighed."""
    assert tune("--arch", "sm_90a", "--shape", SHAPE) == 0
    out, err = capsys.readouterr()
    words = " ".join(out.split())
    assert "predicted us" in out and " time us" not in out and "best: " not in out
    assert (
        "that compile, by the model: tile_shape_mn=" in words and "smaller differences mean nothing" in words
    )
    assert "nothing measured" in out and not gpu.checked
    assert "no table is written" in err
    rows = [line.split() for line in out.splitlines() if " 168 " in line or "default" in line]
    assert any(row[0] == "default" and row[1].isdigit() for row in rows)


def test_a_table_that_nothing_would_be_written_to_is_refused(
    gpu: FakeBench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --arch there is no winner to write."""
    assert tune("--arch", "sm_90a", "--shape", SHAPE, "--table", str(tmp_path / "t.json")) == 2
    assert "would stay unwritten" in capsys.readouterr().err


def test_without_a_model_no_times_are_shown(gpu: FakeBench, capsys: pytest.CaptureFixture[str]) -> None:
    """For a target whose speed nobody described, candidates are compiled and nothing is predicted."""
    words = ["gemm_blockscaled", "--arch", "sm_100a", "--shape", SHAPE]
    assert cutegen.cli.tune.main(words) == 0
    out = capsys.readouterr().out
    assert "no performance model" in " ".join(out.split()) and "predicted" not in out and " us " not in out
    assert any(line.startswith("  default ") for line in out.splitlines())
    assert not gpu.checked


def test_a_model_that_nobody_measured_says_so(gpu: FakeBench, capsys: pytest.CaptureFixture[str]) -> None:
    """For Blackwell candidates are ordered, and the table says what the order is worth."""
    assert tune("--arch", "sm_100a", "--shape", SHAPE) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "predicted us" in out and "Nothing was measured on this target" in out and not gpu.checked


def test_space_explains_with_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    """A config that cannot be is refused by rule and reason, also if only its completions break rules."""
    assert space("--shape", SHAPE, "--explain", "tile_shape_mn=256x256") == 0
    out = capsys.readouterr().out
    assert (
        "is not valid" in out
        and "of a sample of completions" in out
        and "accumulators_fit_registers" in out
        and "registers" in out
    )
    assert space("--shape", SHAPE, "--explain", "tile_shape_mn=128x128", "--json") == 0
    [answer] = json.loads(capsys.readouterr().out)
    assert answer["legal"] and answer["example"]["tile_shape_mn"] == [128, 128]


def test_space_counts_lists_and_lints(capsys: pytest.CaptureFixture[str]) -> None:
    """The summary shows counts and rules, --list configs, --lint unused values."""
    assert space("--shape", SHAPE, "--set", "tile_shape_mn=128x256") == 0
    out = capsys.readouterr().out
    assert "valid configs" in out and "default: " in out and "rules:" in out
    assert "128x256:" in out and "128x248" not in out and ":0" not in out, "only what --set leaves is shown"
    assert space("--shape", SHAPE, "--list", "3") == 0
    listed = capsys.readouterr().out
    tiles = [word for word in listed.split() if word.startswith("tile_shape_mn=")]
    assert len(tiles) == len(set(tiles)) == 3, "they come from all over the space"
    assert space("--lint", "--shape", SHAPE, "--json") == 0
    assert "unused" in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shape", SHAPE, "--explain", "tile=1"], "unknown knob"),
        (["--shape", SHAPE, "--explain", "tile_shape_mn"], "knob=value"),
        (["--shape", SHAPE, "--set", "pingpong=true", "--set", "mma_warpgroups=3"], "pingpong_has_one"),
        ([], "no shape given"),
    ],
)
def test_space_names_mistakes(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    """Bad usage of the space command exits with 2 and one message."""
    assert space(*words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("space", ["--dtype", ""]),
        ("space", ["--out-dtype", " "]),
        ("space", ["--layout", ""]),
        ("tune", ["--sources", ","]),
        ("warm", ["--dtype", ","]),
        ("warm", ["--dtype", "bf16,,fp16"]),
        ("warm", ["--layout", ""]),
    ],
)
def test_an_empty_word_is_refused(capsys: pytest.CaptureFixture[str], command: str, words: list[str]) -> None:
    """It is no way to say the default."""
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "gemm", "--arch", "sm_90a", "--shape", SHAPE, *words])
    assert caught.value.code == 2
    assert "empty" in capsys.readouterr().err


def test_the_umbrella_command_lists_and_hands_on(capsys: pytest.CaptureFixture[str]) -> None:
    """``cutegen`` without a command is bad usage; with one it is that module."""
    assert cli.main([]) == 2
    assert cli.main(["--help"]) == 0
    assert "tune" in capsys.readouterr().out
    assert cli.main(["--version"]) == 0
    assert cli.main(["space", "gemm", "--arch", "sm_90a", "--shape", SHAPE, "--list", "1"]) == 0
    with pytest.raises(SystemExit) as caught:
        cli.main(["tune", "--help"])
    assert caught.value.code == 0
    assert "exit codes" in capsys.readouterr().out


@pytest.mark.parametrize(("family", "sizes"), [("gemm", 3), ("softmax", 2)])
def test_the_shape_that_is_shown_is_one_of_the_family(
    family: str, sizes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["space", family, "--arch", "sm_90a"]) == 2
    word = capsys.readouterr().err.split("such as --shape ")[1].split(",")[0]
    assert len(word.split("x")) == sizes
    assert cli.main(["space", family, "--arch", "sm_90a", "--shape", word, "--list", "1"]) == 0


def test_a_stream_that_takes_nothing_ends_no_command_in_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the disk of a log is full; the exit code still says what was wrong."""

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sys.stdout", Full())
    monkeypatch.setattr("sys.stderr", Full())
    assert cli.main(["--version"]) == 3
    assert cli.main(["explain", "gemm", "--arch", "sm_90a", "--shape", SHAPE]) == 3
    assert cli.main(["explain", "gemm", "--arch", "sm_90a", "--shape", "1x1"]) == 2


_STOPPED_WHILE_IMPORTING = """
import runpy, sys

class CtrlC:
    def find_spec(self, name, *more):
        if name == "cutegen.cli.args":
            raise KeyboardInterrupt

sys.meta_path.insert(0, CtrlC())
sys.argv[1:] = ["pin"]
runpy.run_module(MODULE, run_name="__main__")
"""


@pytest.mark.parametrize("module", ["cutegen", "cutegen.tune", "cutegen.space", "cutegen.warm"])
def test_ctrl_c_while_modules_are_imported_is_no_traceback(module: str) -> None:
    code = _STOPPED_WHILE_IMPORTING.replace("MODULE", repr(module))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 130 and "interrupted" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("name", sorted(cli._COMMANDS))
def test_each_command_is_a_module_of_its_own_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([name, "--help"])
    assert f"usage: python -m cutegen.{name} " in capsys.readouterr().out


@pytest.mark.dsl
def test_ctrl_c_in_a_real_compilation_keeps_what_was_compiled(tmp_path: Path) -> None:
    """SIGINT ends the command with 130 and no orphan; the rerun finds the finished kernels."""
    command = [sys.executable, "-m", "cutegen.tune", "gemm", "--arch", "sm_90a", "--shape", SHAPE]
    command += ["--candidates", "64", "--workers", "1", "--cache-dir", str(tmp_path)]  # for a minute
    root = Path(__file__).parent.parent
    process = subprocess.Popen(
        command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("v1/sm_90a/*/*/kernel.so")) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "interrupted" in err and "Traceback" not in err
    with TrialStore(tmp_path / "trials.db") as trials:
        kept = {t.artifact_key for t in trials.find(outcome="ok")}
    assert kept <= {path.parent.name for path in tmp_path.glob("v1/sm_90a/*/*/kernel.so")}


@pytest.mark.dsl
def test_one_shape_of_several_that_a_target_cannot_compute_stops_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """B300 has no int8: that shape has no winner, with the rule; alone it is refused before anything runs."""
    lines = [f'id="{d}"\nm=64\nn=64\nk=64\nlayout="kk"\ndtype="{d}"' for d in ("int8", "bf16")]
    shapes = tmp_path / "shapes.toml"
    shapes.write_text("\n".join(f"[[shape]]\n{line}" for line in lines))
    cache = str(tmp_path / "c")
    words = ["--arch", "sm_103a", "--candidates", "1", "--quiet", "--json", "--cache-dir", cache]
    assert tune("--shapes", str(shapes), *words) == 1
    first, second = json.loads(capsys.readouterr().out)["results"]
    assert first["winner"] is None and "arch_multiplies_the_dtype" in first["error"]
    assert second["name"] == "bf16" and second["winner"] is not None
    assert tune("--shape", "64x64x64", "--dtype", "int8", *words) == 2
    assert "sm_103a has no MMA of int8" in capsys.readouterr().err


@pytest.mark.dsl
def test_a_bundle_carries_candidates_to_a_machine_without_compiler(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What --export wrote here, --import can use there without compiling; a changed file is refused."""
    bundle = tmp_path / "candidates.tar"
    shape = ["--arch", "sm_90a", "--candidates", "1", "--quiet"]
    assert tune("--shape", SHAPE, *shape, "--cache-dir", str(tmp_path / "a"), "--export", str(bundle)) == 0
    monkeypatch.setattr(Builder, "_require_compiler", lambda self: pytest.fail("it compiled"))
    capsys.readouterr()
    there = ["--arch", "sm_90a", "--import", str(bundle)]
    assert tune(*there, "--cache-dir", str(tmp_path / "b"), "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["results"][0]["problem"] == f"gemm {SHAPE} bf16 kk"
    assert tune(*there, "--cache-dir", str(tmp_path / "b"), "--shape", "64x64x64") == 2
    assert "has no candidates for" in capsys.readouterr().err
    assert tune(*there, "--cache-dir", str(tmp_path / "b"), "--set", "tile_shape_mn=64x8") == 2
    assert f"has no candidate for gemm {SHAPE} bf16 kk with tile_shape_mn=64x8" in capsys.readouterr().err
    data = bytearray(bundle.read_bytes())
    data[len(data) // 2] ^= 1
    bundle.write_bytes(data)
    assert tune(*there, "--cache-dir", str(tmp_path / "c")) == 3


@pytest.mark.parametrize(
    "option", [("--dtype", "fp16"), ("--layout", "mn"), ("--options", "bias=n"), ("--out-dtype", "fp32")]
)
def test_options_of_a_bundles_problems_are_refused(
    option: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bundle says what is tuned; a shape that is named has options."""
    bundle = tmp_path / "candidates.tar"
    bundle.touch()
    for family in ([], ["gemm"]):
        assert cutegen.cli.tune.main([*family, "--arch", "sm_90a", "--import", str(bundle), *option]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert f"{option[0]} goes with --shape; {bundle} states it for each shape" in said


def test_of_a_bundle_the_family_that_is_named_is_tuned(
    gpu: FakeBench, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All families of the bundle if none is named; a family that it has nothing of is refused."""
    problems = [parse_problem(f"gemm {SHAPE} bf16 kk"), parse_problem("softmax 64x256 bf16")]
    held = {p: (find_space(p.family, DEVICE.arch).default(p),) for p in problems}
    monkeypatch.setattr(
        cutegen.cli.tune, "import_candidates", lambda *given: Imported(DEVICE.arch, TOOLCHAIN, held)
    )
    asked: list[Problem] = []
    monkeypatch.setattr(
        cutegen.cli.tune, "_request", lambda tuner, item, *rest, **more: asked.append(item.problem)
    )
    monkeypatch.setattr(cutegen.cli.tune, "_collect", lambda *given: {})
    bundle = tmp_path / "candidates.tar"
    bundle.touch()
    there = ["--import", str(bundle), "--quiet"]
    for family, wanted in ((["softmax"], problems[1:]), ([], problems)):
        asked.clear()
        assert cutegen.cli.tune.main([*family, *there]) == 0
        assert asked == wanted
    capsys.readouterr()
    assert cutegen.cli.tune.main(["rmsnorm", *there]) == 2
    assert "no candidates of rmsnorm; it has some of gemm, softmax: name one" in capsys.readouterr().err
    assert cutegen.cli.tune.main([*there, "--shape", SHAPE]) == 2
    assert "no FAMILY given" in capsys.readouterr().err


@pytest.mark.dsl
def test_a_bundle_for_a_b200_is_checked_measured_and_put_into_its_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled here for sm_100a, tried on a pretended B200: one is wrong, the fastest of the others wins."""
    shapes, bundle = tmp_path / "shapes.toml", tmp_path / "bundle.tar"
    shapes.write_text('[[shape]]\nid = "one"\nm = 300\nn = 1024\nk = 4096\n')
    words = ["--shapes", str(shapes), "--arch", "sm_100a", "--candidates", "3", "--quiet"]
    kinds = ["--set", "use_pdl=false", "--set", "split_k=4,1", "--set", "mma_tiler_mn=128x64"]
    kinds += ["--set", "cluster_shape_mn=1x1", "--set", "swap_ab=false", "--set", "use_clc=false"]
    here = ["--cache-dir", str(tmp_path / "here"), "--export", str(bundle)]
    assert tune(*words, *kinds, *here) == 0
    monkeypatch.setattr(Builder, "_require_compiler", lambda self: pytest.fail("it compiled"))
    b200 = replace(DEVICE, name="Fake B200", compute_capability=(10, 0), sm_count=148)
    monkeypatch.setattr(cutegen.cli.tune, "present_device", lambda: b200)
    backends = Backends(bench=lambda: PatientBench(engine="make_doubtful"))
    monkeypatch.setattr(cutegen.cli.tune, "AutoTuner", partial(AutoTuner, backends=backends))
    capsys.readouterr()
    table = tmp_path / "b200.json"
    there = ["--import", str(bundle), "--cache-dir", str(tmp_path / "there"), "--table", str(table), "--json"]
    assert tune(*there) == 0
    [result] = json.loads(capsys.readouterr().out)["results"]
    assert result["problem"] == "gemm 300x1024x4096 bf16 kk"
    with TrialStore(tmp_path / "there" / "trials.db") as trials:
        ended = Counter((t.outcome, t.config["split_k"]) for t in trials.find() if t.config)
    assert {outcome for outcome, split in ended if split == 4} == {"wrong_result"}
    assert {outcome for outcome, split in ended if split == 1} == {"ok"}
    made = Table.load(table)
    [entry] = made.entries.values()
    assert entry.config["split_k"] == 1 and made.fingerprint.gpu_name == "Fake B200"
    assert made.fingerprint.compute_capability == "10.0a"
    monkeypatch.setattr(cutegen.cli.tune, "present_device", lambda: DEVICE)
    assert tune(*there) == 2
    assert "is for sm_100a, not for sm_90a" in capsys.readouterr().err
