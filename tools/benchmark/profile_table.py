"""Nsight Compute's counters of single kernels: read from its CSV, kept in a file, rendered."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from cutegen.digest import Json
from cutegen.errors import StoreError, UsageError
from tools.benchmark.markdown import down, line, short_commit, up
from tools.benchmark.profile_child import MARK
from tools.benchmark.results import OWN

__all__ = ["METRICS", "PROFILE", "Kernel", "Profile", "Profiled", "read_csv"]

#: What such a file says that it is.
PROFILE = "gemm profile"
#: Our names of the counters, and Nsight Compute's.
METRICS = {
    "time_ns": "gpu__time_duration.sum",
    "sm_cycles": "sm__cycles_elapsed.max",
    "tensor_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "memory_bytes": "dram__bytes_read.sum",
    "memory_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm_bytes": "l1tex__m_xbar2l1tex_read_bytes.sum",
    "l2_percent": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
}


@dataclass(frozen=True)
class Kernel:
    """One kernel of a call: medians over the calls.

    Attributes:
        caller: Whose call it belongs to.
        name: What the driver calls it.
        grid: Blocks along x, y, z.
        block: Threads along x, y, z.
        calls: Calls that were profiled.
        counters: Medians, by the names in :data:`METRICS`.
    """

    caller: str
    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    calls: int
    counters: Mapping[str, float]


@dataclass(frozen=True)
class Profiled:
    """One shape.

    Attributes:
        name: What it is called.
        problem: What was computed.
        config: What ``cutegen.gemm`` ran, for people.
        kernels: Of the vendor's call and of ours.
    """

    name: str
    problem: str
    config: str
    kernels: tuple[Kernel, ...]


@dataclass(frozen=True)
class Profile:
    """A file of profiles.

    Attributes:
        facts: When, where and with what, as :func:`tools.benchmark.environment.check_facts` says it.
        shapes: In the order in which they were profiled.
    """

    facts: Mapping[str, Json]
    shapes: tuple[Profiled, ...] = ()

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON data."""
        found = {**self.facts, "metrics": METRICS, "shapes": [asdict(row) for row in self.shapes]}
        plain: dict[str, Json] = json.loads(json.dumps(found))
        return plain

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Return the profile stored at ``path``.

        Raises:
            StoreError: The file cannot be read.
            UsageError: It is no such file.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["kind"] != PROFILE:
                raise UsageError(f"{path} is {data['kind']!r}, not a file of tools/profile_gemm.py")
            shapes = tuple(
                Profiled(**{**row, "kernels": tuple(map(_kernel, row["kernels"]))})
                for row in data.pop("shapes")
            )
        except OSError as error:
            raise StoreError(f"results file {path} cannot be read: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} is not a file of tools/profile_gemm.py: {error!r}") from error
        return cls(data, shapes)

    def summary(self) -> list[str]:
        """Return a line per shape: how long the calls took here."""
        return [f"- {row.name}: {', '.join(_spent(row.kernels))}" for row in self.shapes]

    def render(self) -> str:
        """Return the Markdown of the file."""
        head = ["shape", "call", "us", "MHz", "tensor cores %", "read from memory MB", "memory %"]
        head += ["L2 to SMs MB", "L2 %", "blocks x threads", "kernel"]
        align = ["---", "---", *["---:"] * 8, "---"]
        rows = [line(head), line(align)]
        for shape in self.shapes:
            rows += [line(_cells(shape, kernel)) for kernel in shape.kernels]
        return "\n".join([*rows, "", self._footing()])

    def _footing(self) -> str:
        facts: Any = self.facts
        packages = facts["software"]["packages"]
        versions = ", ".join(f"{n} {packages[n]}" for n in ("torch", "nvidia-cutlass-dsl") if n in packages)
        calls = max((kernel.calls for shape in self.shapes for kernel in shape.kernels), default=0)
        return (
            f"{facts['gpu']}, driver {facts['machine']['driver']}; {facts['ncu']}; {versions}; commit "
            f"{short_commit(facts['commit'])}; {facts['measured_at'][:10]}. Medians of {calls} calls, each "
            "alone on an idle GPU with empty caches and its clocks left alone, so times are not those of the "
            "benchmark: nothing overlaps, and nothing is at its power limit."
        )


def _kernel(data: Mapping[str, Any]) -> Kernel:
    return Kernel(**{**data, "grid": tuple(data["grid"]), "block": tuple(data["block"])})


def _spent(kernels: Sequence[Kernel]) -> list[str]:
    callers = dict.fromkeys(kernel.caller for kernel in kernels)
    totals = {c: sum(k.counters["time_ns"] for k in kernels if k.caller == c) for c in callers}
    return [f"{caller} {_time(caller, total)} us" for caller, total in totals.items()]


def _time(caller: str, nanoseconds: float) -> str:
    """Return microseconds, rounded up where they are ours and down where they are not."""
    return (up if caller == OWN else down)(nanoseconds / 1000, 2)


def _cells(shape: Profiled, kernel: Kernel) -> list[str]:
    found = kernel.counters
    blocks, threads = (x * y * z for x, y, z in (kernel.grid, kernel.block))
    return [
        shape.name,
        kernel.caller,
        _time(kernel.caller, found["time_ns"]),
        f"{1000 * found['sm_cycles'] / found['time_ns']:.0f}",
        f"{found['tensor_percent']:.1f}",
        f"{found['memory_bytes'] / 1e6:.1f}",
        f"{found['memory_percent']:.1f}",
        f"{found['sm_bytes'] / 1e6:.1f}",
        f"{found['l2_percent']:.1f}",
        f"{blocks} x {threads}",
        _title(shape, kernel),
    ]


def _title(shape: Profiled, kernel: Kernel) -> str:
    """Return the name without the types that it may go on with; for our product its config as well."""
    plain = kernel.name.removeprefix("void ").split("<")[0].split("(")[0]
    if kernel.caller != OWN:
        return f"`{plain}`"
    if "reduce_kernel" in plain:
        return "`addition of parts`"
    return f"`{plain.split('_kernel_kernel')[0]}` {shape.config}"


def read_csv(text: str) -> list[Kernel]:
    """Return the kernels of what ``ncu --csv --page raw`` printed, in the order of a call's launches.

    Raises:
        UsageError: It holds no kernel in a range of ours, or lacks a counter.
    """
    rows = list(csv.DictReader(row for row in text.splitlines() if row.startswith('"')))
    ranges = next((column for column in (rows[0] if rows else {}) if "Push/Pop_Range" in column), "")
    marked = [row for row in rows if ranges and MARK in row[ranges]]
    if not marked:
        raise UsageError(f"ncu saw no kernel in a range called {MARK!r}; it said: {text[-500:]!r}")
    lacking = [metric for metric in METRICS.values() if metric not in marked[0]]
    if lacking:
        raise UsageError(f"ncu did not report {', '.join(lacking)}, which this GPU may not count")
    groups: dict[tuple[str, str, str, str], list[dict[str, str]]] = {}
    for row in marked:
        caller = row[ranges].split(MARK)[1].split(":")[0].strip()
        groups.setdefault((caller, row["Kernel Name"], row["Grid Size"], row["Block Size"]), []).append(row)
    return [
        Kernel(caller, name, _dims(grid), _dims(block), len(found), _medians(found))
        for (caller, name, grid, block), found in groups.items()
    ]


def _dims(text: str) -> tuple[int, int, int]:
    x, y, z = (int(part) for part in text.strip("() ").split(","))
    return x, y, z


def _medians(rows: Iterable[Mapping[str, str]]) -> dict[str, float]:
    found = list(rows)
    return {
        ours: median(float(row[theirs].replace(",", "")) for row in found) for ours, theirs in METRICS.items()
    }
