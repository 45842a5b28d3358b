"""Toolchain and keys: whatever can change an artifact changes its key, and nothing is imported to know."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from samples import source

from cutegen.build import Builder, Toolchain, artifact_key, host_runs, parallelism, symbol_of, toolchain
from cutegen.build.store import Store
from cutegen.errors import BuildError

TOOLS = Toolchain(
    (("apache-tvm-ffi", "0.1"), ("nvidia-cutlass-dsl", "4.8.1")), "cu13", "linux-x86_64_v3", "ab12"
)


def test_the_key_depends_on_text_target_and_toolchain_only() -> None:
    key = artifact_key(source("x = 1\n"), TOOLS)
    assert len(key) == 32 and key == artifact_key(source("x = 1\n"), replace(TOOLS))
    changed = [
        artifact_key(source("x = 2\n"), TOOLS),
        artifact_key(source("x = 1\n", arch="sm_100a"), TOOLS),
        *(artifact_key(source("x = 1\n"), t) for t in other_toolchains()),
    ]
    assert len({key, *changed}) == len(changed) + 1


def other_toolchains() -> list[Toolchain]:
    return [
        replace(TOOLS, packages=(("apache-tvm-ffi", "0.1"), ("nvidia-cutlass-dsl", "4.8.2"))),
        replace(TOOLS, flavour="cu12"),
        replace(TOOLS, host="linux-x86_64_v4"),
        replace(TOOLS, runtime="ab13"),
        replace(TOOLS, schema=TOOLS.schema + 1),
    ]


def test_a_toolchain_survives_json() -> None:
    for tools in [TOOLS, Toolchain.current(), *other_toolchains()]:
        assert Toolchain.from_json(tools.to_json()) == tools
    with pytest.raises(ValueError, match="no toolchain"):
        Toolchain.from_json({"packages": 3})


def test_symbols_are_short_unique_names() -> None:
    assert symbol_of("0123456789abcdef" * 2) == "cutegen_gemm_0123456789ab"


def test_knowing_the_toolchain_imports_none_of_it() -> None:
    code = (
        "import sys\nfrom cutegen.build import Toolchain\nToolchain.current()\n"
        "assert not {'cutlass', 'torch', 'cuda', 'tvm_ffi', 'importlib.metadata'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent, check=True)


@pytest.mark.parametrize(
    ("built_for", "here", "runs"),
    [
        ("linux-x86_64_v3", "linux-x86_64_v4", True),
        ("linux-x86_64_v4", "linux-x86_64_v3", False),
        ("linux-x86_64", "linux-x86_64_v2", True),
        ("linux-x86_64_v2", "linux-x86_64", False),
        ("linux-aarch64", "linux-aarch64", True),
        ("linux-aarch64", "linux-x86_64_v4", False),
        ("win32-x86_64_v3", "linux-x86_64_v4", False),
        ("", "linux-x86_64_v4", False),
    ],
)
def test_code_runs_where_the_cpu_has_what_it_was_built_for(built_for: str, here: str, runs: bool) -> None:
    assert host_runs(built_for, here) is runs


@pytest.mark.parametrize(("driver", "flavour"), [(None, "cu13"), (13, "cu13"), (12, "cu12"), (11, "")])
def test_the_flavour_is_the_newest_that_the_driver_supports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: int | None, flavour: str
) -> None:
    for number in (12, 13):
        (tmp_path / "nvidia_cutlass_dsl" / f"cu{number}" / "lib").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(toolchain, "_driver_major", lambda: driver)
    monkeypatch.delitem(sys.modules, "nvidia_cutlass_dsl", raising=False)
    assert toolchain._flavour() == flavour


def test_without_a_compiler_only_what_is_stored_can_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = replace(TOOLS, packages=(), flavour="")
    monkeypatch.setattr(Toolchain, "current", classmethod(lambda _: absent))
    with (
        Builder(Store(tmp_path)) as builder,
        pytest.raises(BuildError, match="pip install nvidia-cutlass-dsl"),
    ):
        builder.submit([source("")])


def test_nothing_is_compiled_for_a_toolchain_that_is_not_installed(tmp_path: Path) -> None:
    with Builder(Store(tmp_path), toolchain=TOOLS) as builder:
        assert builder.find(source("")) is None
        with pytest.raises(BuildError, match=r"cannot compile for toolchain nvidia-cutlass-dsl 4.8.1 cu13"):
            builder.submit([source("")])


@pytest.mark.parametrize(
    ("cores", "gigabytes", "cgroup", "workers"),
    [
        (16, 64, {}, 16),
        (16, 2, {}, 5),
        (4, 0, {}, 1),
        (16, 64, {"cpu.max": "250000 100000\n"}, 2),
        (16, 64, {"memory.max": f"{3 * 2**30}\n", "memory.current": f"{2**30}\n"}, 5),
        (16, 64, {"cpu.max": "max 100000\n", "memory.max": "max\n", "memory.current": "5\n"}, 16),
    ],
)
def test_workers_are_as_many_as_cores_and_memory_carry(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cores: int,
    gigabytes: int,
    cgroup: dict[str, str],
    workers: int,
) -> None:
    for name, text in cgroup.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(parallelism, "_CGROUP", tmp_path)
    monkeypatch.setattr(parallelism, "_available_bytes", lambda: gigabytes * 2**30)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    assert parallelism.default_workers() == workers
