"""The compiler's packages and versions, found without importing them, and the artifact keys they enter."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

from cutegen.digest import Json, digest
from cutegen.system.interpreter import import_path
from cutegen.text import shown

if TYPE_CHECKING:
    from cutegen.build.render import Source

__all__ = [
    "Toolchain",
    "artifact_key",
    "host_flags",
    "host_name",
    "host_runs",
    "is_artifact_key",
    "key_of",
    "symbol_of",
]

#: Raised when the meaning of a stored artifact changes.
SCHEMA = 1
RUNTIME_SOURCE = Path(__file__).with_name("launch_runtime.c")
_COMPILER = "nvidia-cutlass-dsl"
_FFI = "apache-tvm-ffi"

#: Instruction-set levels of x86-64, each with CPU flags it adds.
#: Source: System V ABI, x86-64 microarchitecture levels.
_X86_LEVELS = (
    ("x86_64_v4", {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    ("x86_64_v3", {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}),
    ("x86_64_v2", {"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"}),
)


@dataclass(frozen=True)
class Toolchain:
    """Everything but source and target that decides what an artifact contains.

    Attributes:
        packages: Name and version of each installed compiler package and of the call interface.
        flavour: The CUDA flavour of the compiler, such as ``cu13``; it changes code. Empty when absent.
        host: Platform and instruction-set level: the compiler uses what the building machine's CPU has,
            so ``linux-x86_64_v4`` code does not run on a ``linux-x86_64_v3`` machine.
        runtime: Digest of the C code that every artifact is linked with.
        schema: Version of the stored form.
    """

    packages: tuple[tuple[str, str], ...]
    flavour: str
    host: str
    runtime: str
    schema: int = SCHEMA

    @classmethod
    def current(cls) -> Toolchain:
        """Return the toolchain of this interpreter; takes about a millisecond and imports none of it."""
        return cls(
            packages=_installed(),
            flavour=_flavour(),
            host=host_name(),
            runtime=digest(RUNTIME_SOURCE.read_bytes(), length=12),
        )

    @property
    def complete(self) -> bool:
        """Whether kernels can be compiled with it."""
        names = {name for name, _ in self.packages}
        return {_COMPILER, _FFI} <= names and bool(self.flavour)

    @property
    def compiler_version(self) -> str:
        """Version of the CuTe DSL, empty when it is not installed."""
        return dict(self.packages).get(_COMPILER, "")

    @cached_property
    def digest(self) -> str:
        """A short stable name of the whole."""
        return digest(self.to_json(), length=16)

    def __str__(self) -> str:
        return f"{_COMPILER} {self.compiler_version or 'absent'} {self.flavour} on {self.host}".replace(
            "  ", " "
        )

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON data."""
        return {
            "packages": dict(self.packages),
            "flavour": self.flavour,
            "host": self.host,
            "runtime": self.runtime,
            "schema": self.schema,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> Toolchain:
        """Return the toolchain that :meth:`to_json` described.

        Raises:
            ValueError: The data is not of that form.
        """
        packages = data.get("packages") if isinstance(data, Mapping) else None
        if not isinstance(packages, Mapping) or type(data.get("schema")) is not int:
            raise ValueError(f"no toolchain: {shown(data)}")
        flavour, host, runtime = words = [data.get(name) for name in ("flavour", "host", "runtime")]
        if not all(isinstance(text, str) for text in (*words, *packages.values())):
            raise ValueError(f"no toolchain: {shown(data)}")
        names = tuple(sorted((str(name), str(version)) for name, version in packages.items()))
        return cls(names, str(flavour), str(host), str(runtime), int(cast("int", data["schema"])))


def artifact_key(source: Source, toolchain: Toolchain) -> str:
    """Return the 32 hexadecimal digits under which the artifact of ``source`` is stored."""
    return key_of(source.digest, source.arch, toolchain)


def key_of(source_digest: str, arch: str, toolchain: Toolchain) -> str:
    """Return the key of an artifact whose source has this digest."""
    return digest({"source": source_digest, "arch": arch, "toolchain": toolchain.digest})


def is_artifact_key(text: str) -> bool:
    """Return whether ``text``, from a file, has the form of an artifact's key."""
    return re.fullmatch(r"[0-9a-f]{32}", text) is not None


def symbol_of(key: str, family: str = "gemm") -> str:
    """Return the name of the compiled function of ``key``; kernels in profiles start with it."""
    return f"cutegen_{family}_{key[:12]}"


def host_name() -> str:
    """Return platform and instruction-set level of this machine, such as ``linux-x86_64_v4``."""
    machine = platform.machine()
    if machine in {"x86_64", "AMD64"}:
        flags = _cpu_flags()
        machine = next((name for name, needs in _X86_LEVELS if needs <= flags), "x86_64")
    return f"{sys.platform}-{machine}"


def host_runs(built_for: str, here: str | None = None) -> bool:
    """Return whether a machine called ``here`` (default: this one) runs code built on ``built_for``."""
    here = here or host_name()
    pattern = re.compile(r"(.*x86_64)(?:_v(\d))?")
    wanted, own = pattern.fullmatch(built_for), pattern.fullmatch(here)
    if wanted is None or own is None:
        return built_for == here
    return wanted[1] == own[1] and int(wanted[2] or 1) <= int(own[2] or 1)


def host_flags(built_for: str) -> frozenset[str]:
    """Return the CPU flags that code built on ``built_for`` may need, by the names of ``/proc/cpuinfo``."""
    level = next(
        (at for at, (name, _) in enumerate(_X86_LEVELS) if built_for.endswith(name)), len(_X86_LEVELS)
    )
    return frozenset().union(*(flags for _, flags in _X86_LEVELS[level:]))


def _cpu_flags() -> set[str]:
    # Line by line: the whole file takes long to produce on a machine with many cores.
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("flags"):
                    return set(line.partition(":")[2].split())
    except OSError:
        pass
    return set()


#: Prefixes of the ``.dist-info`` folders of the packages that determine an artifact.
_PACKAGES = ("nvidia_cutlass_dsl", "apache_tvm_ffi")


def _installed() -> tuple[tuple[str, str], ...]:
    """Versions by the names of the ``.dist-info`` folders: importlib.metadata would take 40 ms."""
    found: dict[str, str] = {}
    for folder in import_path():  # what the compiling child sees
        try:
            names = os.listdir(folder)  # noqa: PTH208  a Path per file of site-packages is slow
        except OSError:
            continue
        for name in names:
            if not name.startswith(_PACKAGES):  # hundreds of others, and this is asked for every kernel
                continue
            if match := re.fullmatch(r"(\w+)-(.+)\.dist-info", name):
                found.setdefault(match[1].replace("_", "-"), match[2])
    return tuple(sorted(found.items()))


def _flavour() -> str:
    """The flavour that the compiler picks: the newest installed one that the driver, if any, supports."""
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    numbers = {
        int(match[1]) for root in roots for path in Path(root).glob("cu*/lib") for match in _numbers(path)
    }
    if len(numbers) > 1:
        limit = _driver_major()
        numbers = {number for number in numbers if limit is None or number <= limit}
    return f"cu{max(numbers)}" if numbers else ""


def _numbers(path: Path) -> list[re.Match[str]]:
    match = re.fullmatch(r"cu(\d+)", path.parent.name)
    return [match] if match else []


def _driver_major() -> int | None:
    import ctypes

    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int(0)
    return version.value // 1000 if driver.cuDriverGetVersion(ctypes.byref(version)) == 0 else None
