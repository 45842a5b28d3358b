"""The builder: every source gets one outcome, kept for good, and nothing outlives its caller."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from samples import TWO_KERNELS, source

from cutegen.build import Artifact, Builder, Failure, Resources, Result, Toolchain, artifact_key, symbol_of
from cutegen.build import builder as builder_module
from cutegen.build import daemon as daemon_module
from cutegen.build.child import Job
from cutegen.build.compilation import Compilation
from cutegen.build.daemon import NICENESS
from cutegen.build.render import Source
from cutegen.build.store import Store, file_digest
from cutegen.errors import BuildError, StoreError

pytestmark = pytest.mark.dsl
TESTS = Path(__file__).parent
GOOD = source(TWO_KERNELS)
TOO_BIG = source(TWO_KERNELS.replace("SMEM_ELEMENTS = 16384", "SMEM_ELEMENTS = 65536"))
BAD = {
    "abort": source("import os\n\ndef inner():\n    os.abort()\n\ninner()\n"),
    "raise": source("raise ValueError('\\x1b[31mno such tile\\x1b[0m\\nsecond line')\n"),
    "sleep": source("import time\nprint('so far', flush=True)\ntime.sleep(1000)\n"),
    "exit": source("import os\nos._exit(3)\n"),
    "killed": source("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"),
    "terminated": source("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n"),
    "disk": source(f"raise OSError({errno.ENOSPC}, 'No space left on device')\n"),
    "limit": source(f"raise OSError({errno.EFBIG}, 'File too large')\n"),
    "unprintable": source("raise ValueError('\\udcff')\n"),
    "lacking": source("launch = None\n"),
    "environment": source(
        "import os, sys\n"
        "assert sys.modules['torch'] is None\n"
        f"assert os.nice(0) == {min(19, os.nice(0) + NICENESS)}\n"
        "assert os.environ['CUDA_VISIBLE_DEVICES'] == ''\n"
        "assert 'CUTE_DSL_LINEINFO' not in os.environ\n"
        "raise RuntimeError('as promised')\n"
    ),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, dict[str, Result]]]:
    """All samples: the store, and the results by name. Only what hangs has little time."""
    store = Store(tmp_path_factory.mktemp("cache"))
    names = {"good": GOOD, "too_big": TOO_BIG, **BAD}
    with (
        pytest.MonkeyPatch.context() as patch,
        Builder(store, workers=2) as builder,
        Builder(store, timeout_s=6.0, workers=1) as impatient,
    ):
        patch.setenv("CUTE_DSL_LINEINFO", "1")
        impatient.submit([BAD["sleep"]])
        builder.submit([*(text for name, text in names.items() if name != "sleep"), GOOD])
        results: list[tuple[Source, Result]] = []
        while builder.pending:
            results += builder.poll()
        results += impatient.poll()
    yield store, {name: result for name, text in names.items() for s, result in results if s is text}


def artifact(built: tuple[Store, dict[str, Result]]) -> Artifact:
    result = built[1]["good"]
    assert isinstance(result, Artifact), result
    return result


def failure(built: tuple[Store, dict[str, Result]], name: str) -> Failure:
    result = built[1][name]
    assert isinstance(result, Failure)
    return result


def test_an_artifact_has_library_object_and_source(built) -> None:  # type: ignore[no-untyped-def]
    got = artifact(built)
    assert got.key == artifact_key(GOOD, Toolchain.current())
    assert got.symbol == symbol_of(got.key)
    assert got.source.read_text() == TWO_KERNELS and got.source_digest == GOOD.digest
    assert got.object.is_file() and got.shared_object.is_file() and got.build_s > 0
    assert got.toolchain == Toolchain.current()
    assert sorted(path.name for path in got.folder.iterdir()) == [
        "kernel.o",
        "kernel.py",
        "kernel.so",
        "meta.json",
    ]


def test_resources_are_the_worst_of_all_kernels_and_list_each(built) -> None:  # type: ignore[no-untyped-def]
    got = artifact(built)
    first, second = got.resources.kernels
    assert first.name.startswith(f"{got.symbol}_k0") and second.name.startswith(f"{got.symbol}_k1")
    assert (first.threads, second.threads, got.resources.threads) == (128, 64, 128)
    assert (first.smem_bytes, second.smem_bytes, got.resources.smem_bytes) == (0, 65536, 65536)
    assert 0 < second.registers <= got.resources.registers <= 255
    assert got.resources.spill_store_bytes == got.resources.stack_bytes == 0
    assert got.resources.notes == ()
    assert Resources.from_json(got.resources.to_json()) == got.resources


def test_the_library_needs_neither_the_compiler_nor_a_driver(built) -> None:  # type: ignore[no-untyped-def]
    command = ["readelf", "-dW", str(artifact(built).shared_object)]
    dynamic = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    needed = {line.split("[")[1].rstrip("]\n") for line in dynamic.splitlines() if "(NEEDED)" in line}
    assert needed <= {
        "libtvm_ffi.so",
        "libc.so.6",
        "libdl.so.2",
        "ld-linux-x86-64.so.2",
        "ld-linux-aarch64.so.1",
    }


def test_the_library_shows_one_function_only(built) -> None:  # type: ignore[no-untyped-def]
    command = ["nm", "-D", "--defined-only", str(artifact(built).shared_object)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert [word for word in shown if len(word) > 1 and not word.startswith("0")] == [
        f"__tvm_ffi_{artifact(built).symbol}"
    ]


def test_a_kernel_that_no_gpu_could_launch_is_rejected_with_the_number(built) -> None:  # type: ignore[no-untyped-def]
    got = failure(built, "too_big")
    assert got.outcome == "rejected"
    assert got.message == "takes 262144 bytes of shared memory; sm_90a has 232448"


def test_an_abort_names_the_signal_and_the_line(built) -> None:  # type: ignore[no-untyped-def]
    got = failure(built, "abort")
    assert got.outcome == "abort"
    assert got.message == "the compiler died without a message (SIGABRT) at line 4 of the source, in inner"
    assert "Current thread" in got.log


def test_an_exception_becomes_one_plain_line_and_a_log(built) -> None:  # type: ignore[no-untyped-def]
    got = failure(built, "raise")
    assert (got.outcome, got.message) == ("error", "ValueError: no such tile at line 1 of the source")
    assert "second line" in got.log and "\x1b" not in got.log
    assert str(built[0].folder("sm_90a", got.key) / "kernel.py") in got.log
    error = got.error()
    assert error.outcome == "error" and "no such tile" in str(error) and error.log == got.log


def test_a_compilation_without_end_is_stopped(built) -> None:  # type: ignore[no-untyped-def]
    got = failure(built, "sleep")
    assert (got.outcome, got.message) == ("timeout", "compilation took longer than 6 s")
    assert got.log == "so far"


def test_a_compiler_that_leaves_without_an_answer_is_an_abort(built) -> None:  # type: ignore[no-untyped-def]
    assert failure(built, "exit").message == "the compiler exited with status 3 and no answer"


def test_what_cannot_be_printed_is_an_error_like_others(built) -> None:  # type: ignore[no-untyped-def]
    """Its answer comes before its log."""
    assert failure(built, "unprintable").message.startswith("ValueError: ")


def test_a_source_without_the_agreed_names_is_an_error(built) -> None:  # type: ignore[no-untyped-def]
    assert failure(built, "lacking").message == "AttributeError: the source defines no KERNELS"


def test_compilation_sees_no_torch_no_gpu_and_no_inherited_switches(built) -> None:  # type: ignore[no-untyped-def]
    assert failure(built, "environment").message == "RuntimeError: as promised at line 6 of the source"


def test_what_is_not_the_sources_fault_is_not_kept(built) -> None:  # type: ignore[no-untyped-def]
    store = built[0]
    killed, full = failure(built, "killed"), failure(built, "disk")
    assert killed.outcome == "abort" and "SIGKILL" in killed.message and killed.again
    assert full.outcome == "store" and full.again and isinstance(full.error(), StoreError)
    assert full.message == f"cannot write to {store.root}: No space left on device"
    assert not failure(built, "abort").again and not failure(built, "lacking").again
    terminated, limit = failure(built, "terminated"), failure(built, "limit")
    assert "SIGTERM" in terminated.message and terminated.again and limit.outcome == "store"
    kept = set(store.keys("sm_90a"))
    for name in ("killed", "terminated", "disk", "limit", "exit"):
        assert artifact_key(BAD[name], Toolchain.current()) not in kept
    assert not list(store.root.rglob("*.lock")) and not list(store.root.rglob("*.tmp"))


def test_outcomes_are_kept_and_asked_for_without_a_daemon(  # type: ignore[no-untyped-def]
    built, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, results = built
    monkeypatch.setattr("cutegen.build.builder.DaemonProcess", lambda _: pytest.fail("a daemon was started"))
    names = {"good": GOOD, "too_big": TOO_BIG, **{n: BAD[n] for n in ("abort", "raise", "sleep")}}
    with Builder(store, timeout_s=6.0) as builder:
        again = dict(builder.build(names.values()))
    assert {name: again[text] for name, text in names.items()} == {name: results[name] for name in names}


def test_a_time_out_is_tried_again_with_more_time_only(built) -> None:  # type: ignore[no-untyped-def]
    store = built[0]
    assert Builder(store, timeout_s=5.0).find(BAD["sleep"]) is not None
    assert Builder(store, timeout_s=60.0).find(BAD["sleep"]) is None
    assert Builder(store, timeout_s=60.0).find(BAD["abort"]) is not None


def test_a_corrupt_artifact_is_built_again_bit_for_bit(built, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    good = artifact(built)
    before = {path.name: file_digest(path) for path in (good.object, good.shared_object)}
    with good.shared_object.open("r+b") as library:
        library.write(b"garbage")
    with Builder(built[0]) as builder:
        [(_, again)] = builder.build([GOOD])
    assert isinstance(again, Artifact) and again.folder == good.folder
    assert {path.name: file_digest(path) for path in (again.object, again.shared_object)} == before


def test_poll_comes_back_in_time_and_close_forgets(tmp_path: Path) -> None:
    with Builder(Store(tmp_path)) as builder:
        assert builder.poll() == []
        builder.submit([BAD["sleep"], BAD["sleep"]])
        assert builder.pending == 2
        assert builder.poll(0.2) == []
        daemon = builder._daemons[False]._process
        assert daemon.poll() is None
    assert daemon.returncode is not None and builder.pending == 0
    assert Store(tmp_path).keys("sm_90a") == ()


def test_a_daemon_may_be_started_before_there_is_work(tmp_path: Path) -> None:
    """It then compiles as ever; where it cannot run, whoever has work for it is told, and nobody before."""
    text = source("raise ValueError(0)\n")
    with Builder(Store(tmp_path / "one"), workers=1) as builder:
        builder.start()
        (daemon,) = builder._daemons.values()
        assert [found for found, _ in builder.build([text])] == [text]
        assert list(builder._daemons.values()) == [daemon]
    elsewhere = replace(Toolchain.current(), flavour="cu99")
    with Builder(Store(tmp_path / "two"), elsewhere) as builder:
        builder.start()
        assert not builder._daemons
        with pytest.raises(BuildError, match="cannot compile for toolchain"):
            builder.submit([text])


def test_what_is_urgent_comes_before_what_waits(tmp_path: Path) -> None:
    """In the order asked for, as far as nothing has begun: one is compiled at a time."""
    os.mkfifo(gate := tmp_path / "gate")
    first = source(f"open({str(gate)!r}).read()\n")
    second, third, fourth = (source(f"raise ValueError({at})\n") for at in range(3))
    with Builder(Store(tmp_path / "cache"), workers=1) as builder:
        builder.submit([first, second])
        builder.submit([third, fourth], urgent=True)
        gate.write_text("go on")
        done = []
        while builder.pending:
            done += [text for text, _ in builder.poll()]
    assert [text for text in done if text != first] == [third, fourth, second]


def test_a_child_can_be_killed_before_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine that may take a while: the daemon would wait for what it was to end."""
    monkeypatch.setattr(daemon_module, "run_and_exit", lambda *_: signal.pause())
    inbox, outbox = os.pipe()
    linker: Any = None
    daemon = daemon_module.Daemon(Store(tmp_path), linker, {}, 1, 60.0, inbox, outbox)
    daemon._start(Job("0" * 32, "sm_90a", "symbol", "", {}))
    (pid,) = daemon._running
    try:
        assert os.getpgid(pid) == pid
    finally:
        os.kill(pid, signal.SIGKILL)
        daemon._kill_all()
    assert not alive(pid) and not list(tmp_path.rglob("*.lock"))


def wait_until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends between opening and reading
        return False
    return state != "Z"


PROGRAM = """
import sys
from pathlib import Path
from cutegen.build import Builder
from cutegen.build.store import Store
from samples import source
store, *texts = sys.argv[1:]
try:
    with Builder(Store(Path(store))) as builder:
        for text, result in builder.build(map(source, texts)):
            print(type(result).__name__, flush=True)
except KeyboardInterrupt:
    print("interrupted")
"""


def start(store: Path, *texts: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"}
    command = [sys.executable, "-c", PROGRAM, str(store), *texts]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill"])
def test_nothing_outlives_the_caller(tmp_path: Path, number: signal.Signals) -> None:
    note = tmp_path / "pids"
    text = f"import os, time\nopen({str(note)!r}, 'w').write(f'{{os.getpid()}} {{os.getppid()}} .')\n"
    text += "time.sleep(1000)\n"
    caller = start(tmp_path / "cache", text)
    wait_until(lambda: note.exists() and note.read_text().endswith("."))
    child, daemon = map(int, note.read_text().split()[:2])
    assert alive(child) and alive(daemon)
    os.killpg(caller.pid, number)  # as a terminal does: the whole foreground group
    out, _ = caller.communicate(timeout=60)
    assert (caller.returncode, out) == ((0, "interrupted\n") if number == signal.SIGINT else (-number, ""))
    wait_until(lambda: not alive(child) and not alive(daemon))
    assert Store(tmp_path / "cache").keys("sm_90a") == ()


def test_two_racing_runs_do_the_work_once(tmp_path: Path) -> None:
    note = tmp_path / "work"
    texts = [f"open({str(note)!r}, 'a').write('{n}\\n')\n" + TWO_KERNELS for n in range(2)]
    texts.append(f"open({str(note)!r}, 'a').write('2\\n')\nraise ValueError\n")
    runs = [start(tmp_path / "cache", *texts) for _ in range(2)]
    for run in runs:
        out, _ = run.communicate(timeout=120)
        assert sorted(out.split()) == ["Artifact", "Artifact", "Failure"]
    assert sorted(note.read_text().split()) == ["0", "1", "2"]


def test_what_a_killed_run_left_in_the_temporary_directory_is_swept_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Caller and daemon die at once, in the middle of linking; the next run need not compile anything."""
    top = tmp_path / "tmp"
    top.mkdir()
    monkeypatch.setenv("TMPDIR", str(top))
    monkeypatch.setattr(tempfile, "tempdir", str(top))
    note = tmp_path / "pids"
    text = "import os, tempfile, time\ntempfile.mkstemp()\n"  # as the C compiler leaves its files
    text += f"open({str(note)!r}, 'w').write(f'{{os.getpid()}} {{os.getppid()}} .')\ntime.sleep(1000)\n"
    caller = start(tmp_path / "cache", text)
    wait_until(lambda: note.exists() and note.read_text().endswith("."))
    child, daemon = map(int, note.read_text().split()[:2])
    for pid in (caller.pid, daemon):
        os.kill(pid, signal.SIGSTOP)  # neither puts things in order when another of them dies
    for pid in (child, daemon, caller.pid):
        os.kill(pid, signal.SIGKILL)
    caller.communicate(timeout=60)
    wait_until(lambda: not alive(child) and not alive(daemon))
    assert len(list(top.iterdir())) == 1 and list(top.rglob("tmp*"))
    with Builder(Store(tmp_path / "cache")):
        assert list(top.iterdir()) == []


def test_a_time_out_without_its_limit_is_tried_again(tmp_path: Path) -> None:
    """A record that says nothing sensible is no reason for a traceback."""
    store, key = Store(tmp_path), artifact_key(BAD["sleep"], Toolchain.current())
    for limit in (None, "long", [1]):
        with store.lock("sm_90a", key) as lock:
            store.stage(lock)
            store.publish(lock, {"outcome": "timeout", "message": "", "timeout_s": limit})
        assert Builder(store).find(BAD["sleep"]) is None


def test_a_daemon_that_dies_under_its_work_is_replaced(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    text = (
        f"import os, pathlib, signal\nflag = pathlib.Path({str(flag)!r})\n"
        "if not flag.exists():\n    flag.touch()\n"
        "    os.kill(os.getppid(), signal.SIGKILL)\n    signal.pause()\n"
        "raise ValueError('second life')\n"
    )
    with Builder(Store(tmp_path / "cache")) as builder:
        [(_, result)] = builder.build([source(text)])
    assert isinstance(result, Failure) and result.message.startswith("ValueError: second life at line 7")


def test_a_daemon_that_always_dies_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder_module, "RESTARTS", 0)
    text = "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nsignal.pause()\n"
    with Builder(Store(tmp_path)) as builder, pytest.raises(BuildError, match="daemon could not go on"):
        list(builder.build([source(text)]))


def test_a_broken_compiler_installation_is_told_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cutlass.py").write_text("raise ImportError('libfoo.so is missing')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with (
        Builder(Store(tmp_path / "cache")) as builder,
        pytest.raises(BuildError, match=r"start: .*libfoo.so") as info,
    ):
        list(builder.build([source("")]))
    assert "Traceback" in info.value.log


def test_a_store_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    with Builder(Store(root)) as builder:
        (root / "v1").mkdir(parents=True)
        builder.start()
        daemon = builder._daemons[False]
        os.kill(daemon.pid, signal.SIGSTOP)  # else it might make the folder first
        builder.submit([source("raise ValueError\n")])
        (root / "v1" / "sm_90a").write_text("in the way")
        os.kill(daemon.pid, signal.SIGCONT)
        with pytest.raises(StoreError, match=r"cannot write to .*cache: .*Not a directory|cannot read"):
            list(builder.build([]))
        assert builder.pending == 0


def test_a_program_with_many_open_files_can_compile(tmp_path: Path) -> None:
    """Descriptors from 1024 on, as a server has them, are those of the daemon here."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip(f"this system allows {hard} open files")
    code = (
        "import os, resource, sys; from pathlib import Path; from cutegen.build import Builder; "
        "from cutegen.build.store import Store; from samples import source; "
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (2048, {hard})); "
        "held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]; "
        "builder = Builder(Store(Path(sys.argv[1])), workers=1); "
        "[(_, result)] = builder.build([source('raise ValueError(1)\\n')]); builder.close(); "
        "print(result.message)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "cache")],
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.stdout.startswith("ValueError: 1"), run.stderr


def _daemon(tmp_path: Path) -> tuple[daemon_module.Daemon, int]:
    """A daemon that nobody serves, and where its messages are read."""
    store, (inbox, _), (outbox, words) = Store(tmp_path / "cache"), os.pipe(), os.pipe()[::-1]
    linker: Any = None
    return daemon_module.Daemon(store, linker, {}, 1, 9.0, inbox, outbox), words


def _duplicate(daemon: daemon_module.Daemon, key: str) -> Compilation:
    """A job whose child has ended, and whose kernel is to be that of another job."""
    store = daemon._store
    job = Job(key, "sm_90a", f"cutegen_{key[:12]}", "", {})
    lock = store.try_lock(job.arch, key)
    assert lock is not None
    ended = subprocess.Popen(["true"])
    ended.wait()
    report, orders = os.pipe()
    run = Compilation(job, lock, store.stage(lock), ended.pid, report, orders, time.monotonic())
    run.trace, run.is_duplicate, run.ended = "c" * 32, True, True
    return run


@pytest.mark.parametrize("lost", [False, True])
def test_a_duplicate_is_answered_once(tmp_path: Path, lost: bool) -> None:
    """Its kernel may be ready before its own child has ended; a copy that fails is its error alone."""
    daemon, words = _daemon(tmp_path)
    store, first, second = daemon._store, "a" * 32, "b" * 32
    with store.lock("sm_90a", first) as lock:
        folder = store.stage(lock)
        for name in ("kernel.o", "kernel.so"):
            (folder / name).write_text(name)
        store.publish(lock, {"outcome": "ok", "message": "", "symbol": "s", "resources": {}})
    store.note_trace("sm_90a", "c" * 32, first)
    run = _duplicate(daemon, second)
    if lost:
        (run.folder / "kernel.o").mkdir()  # in the way of the copy
    daemon._answer_duplicate(run, None)
    daemon._conclude(run, 0)
    told = [json.loads(line) for line in os.read(words, 1 << 16).splitlines()]
    assert [(each["key"], each["status"]) for each in told] == [(second, "store" if lost else "stored")]
    daemon._kill_all()
    assert (store.find("sm_90a", second) is None) == lost
