"""The tool that runs the GPU tests side by side: what it makes of tests that pass, fail, hang and die."""

from __future__ import annotations

import json
import os
import signal
import stat
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fake_engine
import pytest

from cutegen.errors import BuildError
from tools import results_table, run_gpu_tests
from tools.gpu_test_parts.outcomes import Ended, merge, read_events
from tools.gpu_test_parts.plan import START_S, by_file, slices
from tools.gpu_test_parts.processes import Processes
from tools.gpu_test_parts.sanitizer import Sanitizer
from tools.gpu_test_parts.summary import seconds_of_tests, summary

#: Tests that need no GPU, of every outcome.
TESTS = """
import os, time, pytest
pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("case", ["a b", "c::d", "e | f=1"])
def test_right(case): pass

def test_wrong(): assert 1 == 2, "no"

@pytest.mark.skip(reason="no such GPU")
def test_skipped(): pass

@pytest.mark.xfail(strict=True, reason="known")
def test_known(): assert False

@pytest.fixture
def broken():
    yield
    raise ValueError("behind the test")

def test_teardown(broken): pass
"""
ALONE = """
import pytest
pytestmark = [pytest.mark.gpu, pytest.mark.alone]

def test_first(tmp_path_factory): pass
def test_second(): pass
"""
ENDS = """
import os, pytest
pytestmark = pytest.mark.gpu

def test_before(): pass
def test_dies(): os.kill(os.getpid(), 9)
def test_behind(): pass
"""
#: Says which process it is once it has passed a test, and waits.
WAITS = """
import os, time, pytest
from pathlib import Path
pytestmark = pytest.mark.gpu

def test_before(): pass
def test_waits():
    Path({begun!r} + ".new").write_text(str(os.getpid()))
    Path({begun!r} + ".new").rename({begun!r})
    time.sleep(1000)
"""


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_gpu_tests, "present_device", lambda: fake_engine.DEVICE)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # many processes start


def write(folder: Path, **files: str) -> list[str]:
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: here\n    alone: here\n")
    return [str(folder)]


def run(words: Sequence[str], out: Path) -> tuple[int, dict[str, Any]]:
    code = run_gpu_tests.main([*words, "--processes", "2", "--out", str(out)])
    return code, json.loads(out.read_text())


def outcomes(facts: dict[str, Any], name: str) -> dict[str, int]:
    found = next(file for path, file in facts["files"].items() if path.endswith(f"test_{name}.py"))
    return {key: value for key, value in found.items() if key != "process_seconds"}


def test_every_outcome_is_told_by_file_and_bad_ones_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Behind a test with which the process died the others run in another; reasons of skips are counted."""
    paths = write(tmp_path, kinds=TESTS, alone=ALONE, ends=ENDS)
    code, facts = run(paths, tmp_path / "out.json")
    assert code == 1
    assert outcomes(facts, "kinds") == {"passed": 3, "failed": 1, "skipped": 1, "xfailed": 1, "error": 1}
    assert outcomes(facts, "alone") == {"passed": 2}
    assert outcomes(facts, "ends") == {"passed": 2, "unfinished": 1}
    assert facts["outcomes"] == {
        "passed": 7,
        "failed": 1,
        "skipped": 1,
        "xfailed": 1,
        "error": 1,
        "unfinished": 1,
    }
    assert facts["skipped"] == {"no such GPU": 1}
    bad = {entry["test"].rpartition("::")[2]: entry for entry in facts["bad"]}
    assert set(bad) == {"test_wrong", "test_teardown", "test_dies"}
    assert "no" in bad["test_wrong"]["message"] and "behind the test" in bad["test_teardown"]["message"]
    assert bad["test_dies"]["message"] == "it began"
    assert facts["gpu"] == fake_engine.DEVICE.name and facts["kind"] == "gpu tests"
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].split()[0].replace(".", "").isdigit() and "behind the test" in printed

    (tmp_path / "test_kinds.py").write_text(
        TESTS.replace("1 == 2", "1 == 1").replace("    raise ValueError", "    print")
    )
    (tmp_path / "test_ends.py").write_text(ENDS.replace("os.kill", "print"))
    code, again = run([*paths, "--again", str(tmp_path / "out.json")], tmp_path / "again.json")
    assert code == 0 and again["outcomes"] == {"passed": 3} and again["bad"] == []


def test_what_is_alone_comes_last_and_may_be_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file may have both kinds."""
    paths = write(tmp_path, alone=ALONE.replace("def test_second", "@pytest.mark.gpu\ndef test_second"))
    more = write(
        tmp_path, mixed=ALONE.replace(", pytest.mark.alone", "") + "\n@pytest.mark.alone\ndef test_z(): 0\n"
    )
    code, facts = run(paths, tmp_path / "out.json")
    assert (
        code == 0 and outcomes(facts, "mixed") == {"passed": 3} and outcomes(facts, "alone") == {"passed": 2}
    )
    names = [line.split()[2].rstrip(":") for line in capsys.readouterr().out.splitlines()[:-1]]
    assert names[0].startswith("test_mixed") and set(names[-2:]) == {"test_mixed.alone", "test_alone.alone"}
    _, facts = run([*more, "--no-alone"], tmp_path / "out.json")
    assert facts["outcomes"] == {"passed": 2}


def test_at_the_limit_what_runs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a machine is so slow that nothing had ended."""
    slow = ENDS.replace("os.kill(os.getpid(), 9)", "__import__('time').sleep(1000)")
    paths, collect = write(tmp_path, slow=slow), Processes.collect

    def collect_in_no_time(self: Processes, paths: Sequence[str]) -> dict[str, bool]:
        found = collect(self, paths)
        self.deadline = time.monotonic() + 2
        return found

    monkeypatch.setattr(Processes, "collect", collect_in_no_time)
    code, facts = run(paths, tmp_path / "out.json")
    assert code == 1 and facts["outcomes"]["unfinished"] >= 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_writes_what_is_known(tmp_path: Path, number: int) -> None:
    """Nothing is left running, and the signal is everybody's again."""
    begun = tmp_path / "begun"
    paths = write(tmp_path, waits=WAITS.format(begun=str(begun)), alone=ALONE)
    before = signal.getsignal(number)

    def interrupt() -> None:
        while not begun.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    code, facts = run(paths, tmp_path / "out.json")
    thread.join()
    assert code == 130 and signal.getsignal(number) is before
    assert facts["outcomes"] == {"passed": 1, "unfinished": 3}
    with pytest.raises(ProcessLookupError):
        os.kill(int(begun.read_text()), 0)


def test_files_that_cannot_be_read_and_no_tests_are_bad_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_gpu_tests.main(write(tmp_path, broken="import nothing_like_this\n")) == 2
    assert "nothing_like_this" in capsys.readouterr().err
    (tmp_path / "test_broken.py").write_text("def test_without_a_gpu(): pass\n")
    assert run_gpu_tests.main([str(tmp_path)]) == 2
    assert "there is no such test" in capsys.readouterr().err
    (tmp_path / "other.json").write_text('{"kind": "family"}')
    assert run_gpu_tests.main([str(tmp_path), "--again", str(tmp_path / "other.json")]) == 3


#: Stands in for the sanitizer: runs the command, and finds an error in what the test says.
SANITIZER = """#!/bin/sh
while [ "$1" != --log-file ]; do shift; done
log=$(echo "$2" | sed s/%p/$$/); shift 2
"$@"; status=$?
echo "========= COMPUTE-SANITIZER" > "$log"
[ -z "$PYTORCH_NO_CUDA_MEMORY_CACHING" ] || echo "========= ERROR SUMMARY: COUNT errors" >> "$log"
exit $status
"""


@pytest.mark.parametrize("count", [0, 3])
def test_errors_of_the_sanitizer_fail_the_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Though all of its tests pass."""
    program = tmp_path / "compute-sanitizer"
    program.write_text(SANITIZER.replace("COUNT", str(count)))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    code, facts = run([*write(tmp_path, alone=ALONE), "--sanitize"], tmp_path / "out.json")
    assert facts["sanitizer"] and facts["outcomes"]["passed"] == 2
    assert code == (1 if count else 0)
    assert [entry["message"].count("3 errors") for entry in facts["bad"]] == ([1] if count else [])


def test_a_sanitizer_that_is_missing_or_watches_nothing_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "watched nothing" in Sanitizer("it").errors(tmp_path)
    (tmp_path / "sanitizer.7.log").write_text("========= Error: Device not supported.\n")
    assert "not supported" in Sanitizer("it").errors(tmp_path)
    monkeypatch.setattr("tools.gpu_test_parts.sanitizer.shutil.which", lambda name, path=None: None)
    with pytest.raises(BuildError, match="compute-sanitizer is not on the PATH"):
        Sanitizer.find()


def test_slices_hold_every_test_once_and_long_ones_come_first() -> None:
    """A file is cut where it would take longer than its share; one process gets files as they are."""
    counts = {"a": 100, "b": 7, "c": 1, "d": 2}
    tests = [f"{name}.py::test[{at}]" for name, count in counts.items() for at in range(count)]
    parts = slices(tests, {"a.py": 3.0, "b.py": 1.0, "c.py": 50.0}, 10)
    assert sorted(test for part in parts for test in part.tests) == sorted(tests)
    assert [part.seconds for part in parts] == sorted((part.seconds for part in parts), reverse=True)
    sizes = [len(part.tests) for part in parts if part.name.startswith("a.")]
    assert len(sizes) > 10 and max(sizes) - min(sizes) <= 1 and parts[0].name == "c"
    assert [part.name for part in slices(tests, {}, 1)] == ["a", "b", "d", "c"]


def test_short_files_share_a_process() -> None:
    """Those of one part take no longer than a slice of a long file."""
    tests = [f"{name}.py::test[{at}]" for name in "abcde" for at in range(10)]
    seconds = {"a.py": 9.0, "b.py": 0.5, "c.py": 0.4, "d.py": 0.3, "e.py": 2.0}
    parts = slices(tests, seconds, 2)
    assert sorted(test for part in parts for test in part.tests) == sorted(tests)
    assert max(part.seconds for part in parts) <= 3 * START_S
    (short,) = [part for part in parts if part.name.startswith("b")]
    assert short.name == "b+2" and list(by_file(short.tests)) == ["b.py", "c.py", "d.py"]


def test_events_that_were_cut_off_and_errors_behind_a_test(tmp_path: Path) -> None:
    """The worst that is said of a test stands, in whatever order; files that cannot be read are told, too."""
    path = tmp_path / "events"
    event = {"test": "a", "outcome": "passed", "seconds": 1.0, "message": ""}
    path.write_text(json.dumps(event) + "\n" + '{"test": "b", "outc')
    assert read_events(path) == [event] and read_events(tmp_path / "none") == []
    worse = {"test": "a", "outcome": "error", "seconds": 2.0, "message": "late"}
    other = {"test": "c.py", "outcome": "error", "seconds": 0.0, "message": "SyntaxError"}
    for events in ([event, worse, other], [worse, event, other]):
        assert merge(["a", "b"], events) == [
            Ended("a", "error", 3.0, "late"),
            Ended("b", "unfinished", 0.0, "it did not begin"),
            Ended("c.py", "error", 0.0, "SyntaxError"),
        ]
    facts = summary(merge(["a.py::x", "a.py::y"], [{**event, "test": "a.py::x", "seconds": 5.0}]))
    assert seconds_of_tests(facts) == {"a.py": 2.5}


def test_results_do_not_say_where_files_are() -> None:
    """Neither of errors nor of reasons; what follows the folders of modules stays."""
    root, library = Path(__file__).parents[1], Path(json.__file__).parents[1]
    text = f"{library}/pathlib.py:1015: no file '{root}/docs/new_family.md'"
    short = "pathlib.py:1015: no file 'docs/new_family.md'"
    found = summary([Ended("a.py::test_a", "failed", 1.0, text), Ended("a.py::test_b", "skipped", 0.0, text)])
    assert found["bad"][0]["message"] == short and found["skipped"] == {short: 1}


def test_documents_can_quote_a_results_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """How many ended how, what is bad, why others were skipped, and where; other files are refused."""
    path, page = tmp_path / "gpu_tests.json", tmp_path / "page.md"
    _, facts = run(write(tmp_path, kinds=TESTS), path)
    page.write_text("<!-- results: gpu_tests -->\n<!-- end results: gpu_tests -->\n")
    assert results_table.main([str(path), "--into", str(page)]) == 0
    text = page.read_text()
    assert "- 7 tests that need a GPU: 1 error, 1 failed, 3 passed, 1 skipped, 1 xfailed\n" in text
    assert "- **failed**: `test_kinds.py::test_wrong`" in text and "| no such GPU | 1 |" in text
    assert f"{fake_engine.DEVICE.name}, driver" in text and " s in 2 processes." in text
    del facts["skipped"]
    path.write_text(json.dumps(facts))
    assert results_table.main([str(path)]) == 2
    assert "is not a file of tools/run_gpu_tests.py" in capsys.readouterr().err


def test_a_document_shows_the_newest_run_of_each_file(tmp_path: Path) -> None:
    """What ran again counts with the run before; a part of a file that passed says nothing of the others."""
    ends = {"test_ends.py": {"passed": 2, "unfinished": 1}, "test_kinds.py": {"passed": 3, "skipped": 1}}
    left = [{"test": "tests/gpu/test_ends.py::test_dies", "outcome": "unfinished", "message": ""}]
    runs = [
        newer(tmp_path, 1, ends, left),
        newer(tmp_path, 2, {"test_kinds.py": {"passed": 1}}),
        newer(tmp_path, 3, {"test_ends.py": {"passed": 1}}),
        newer(
            tmp_path,
            4,
            {"test_kinds.py": {"passed": 4, "failed": 1}},
            [{"test": "tests/gpu/test_kinds.py::test_wrong", "outcome": "failed", "message": "no"}],
        ),
    ]
    page = tmp_path / "page.md"
    page.write_text("<!-- results: run1_latest -->\n<!-- end results: run1_latest -->\n")
    assert results_table.main([*runs, "--latest", "--into", str(page)]) == 0
    text = page.read_text()
    assert "- 8 tests in 2 files, each in its newest run: 1 failed, 7 passed\n" in text
    assert "- **failed**: `tests/gpu/test_kinds.py::test_wrong`" in text and "test_dies" not in text
    assert "| `test_ends.py` | 3 |  |  | commit3; 2026-11-03 |  |" in text
    assert "| `test_kinds.py` | 4 |  | 1 failed | commit4; 2026-11-04 | commit1; 2026-11-01 |" in text


def newer(
    folder: Path, day: int, files: dict[str, dict[str, int]], bad: Sequence[dict[str, str]] = ()
) -> str:
    """Write the results of a run of that day."""
    path = folder / f"run{day}.json"
    named = {f"tests/gpu/{name}": {**counts, "process_seconds": 1.0} for name, counts in files.items()}
    facts: dict[str, Any] = {
        "kind": "gpu tests",
        "measured_at": f"2026-11-0{day}T00:00:00+00:00",
        "commit": f"commit{day}",
        "gpu": "GPU",
        "software": {"packages": {}},
        "machine": {"driver": "1", "cores": 2},
        "processes": 1,
        "seconds": 1.0,
        "outcomes": {},
        "bad": list(bad),
        "skipped": {},
        "files": named,
    }
    path.write_text(json.dumps(facts))
    return str(path)


def test_kernels_are_kept_where_a_folder_is_named(tmp_path: Path) -> None:
    """Tests of all processes get it, and find what an earlier run left."""
    kept = tmp_path / "kept"
    text = f"""
import pytest
pytestmark = pytest.mark.gpu
def test_it(request): assert str(request.config.getoption("--kernels")) == {str(kept)!r}
"""
    code, facts = run([*write(tmp_path, kept=text), "--kernels", str(kept)], tmp_path / "out.json")
    assert code == 0 and facts["kernels_kept"]
