"""Where a benchmark ran: versions of everything that decides its numbers, and the commit."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import cutegen
from cutegen.digest import Json
from cutegen.measure.device import Device
from cutegen.measure.policy import Policy

__all__ = [
    "ROOT",
    "UNKNOWN_COMMIT",
    "check_facts",
    "conditions",
    "git_commit",
    "package_versions",
    "session",
    "session_facts",
    "software",
]

#: The checkout.
ROOT = Path(__file__).resolve().parents[2]
UNKNOWN_COMMIT = "unknown"

#: Distributions whose version changes what is measured.
_PACKAGES = (
    "torch",
    "triton",
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
    "apache-tvm-ffi",
    "nvidia-cublas",
    "nvidia-cublas-cu12",
    "quack-kernels",
    "nvidia-cutlass-operators",
    "nvidia-matmul-heuristics",
)


def package_versions() -> dict[str, Json]:
    """Return the versions of the packages that matter, by distribution; absent ones are left out."""
    found: dict[str, Json] = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def git_commit(root: Path = ROOT) -> str:
    """Return the commit of the checkout, with ``-dirty`` if tracked files differ; ``unknown`` without git."""
    head = _git(root, "rev-parse", "HEAD")
    if head is None:
        return UNKNOWN_COMMIT
    changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    return f"{head}-dirty" if changes else head


def _git(root: Path, *arguments: str) -> str | None:
    if shutil.which("git") is None:
        return None
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def software() -> dict[str, Json]:
    """Return what software ran: two results compare only where this agrees."""
    return {
        "cutegen": cutegen.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "packages": package_versions(),
    }


def conditions(device: Device, policy: Policy, **others: Json) -> dict[str, Json]:
    """Return what decides the numbers of a benchmark, as plain JSON data.

    Rows in which it agrees belong in one table.

    Args:
        device: The GPU.
        policy: How everything is timed.
        others: What else does, such as the digest of the table.
    """
    gpu: dict[str, Json] = {
        "name": device.name,
        "compute_capability": device.arch.name.removeprefix("sm_"),
        "sm_count": device.sm_count,
        "cuda_driver": device.cuda_driver_version,
    }
    found = {"gpu": gpu, "software": software(), "policy": policy.to_json(), **others}
    plain: dict[str, Json] = json.loads(json.dumps(found))
    return plain


def session_facts(device: Device | None) -> dict[str, Json]:
    """Return what else is worth knowing about this machine, but may differ between sessions."""
    return {
        "gpu_uuid": device.uuid if device else "",
        "driver": device.driver_version if device else "",
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
    }


def _cpu_model() -> str:
    """Return the processor's name as Linux reports it; empty where it reports none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def check_facts(kind: str, device: Device | None, commit: str = "") -> dict[str, Json]:
    """Return what a file of checks begins with: what it is, when, where and with what software.

    Args:
        kind: What was checked.
        device: The GPU, None where there was none.
        commit: Of the checkout, where git cannot tell.
    """
    return {
        "kind": kind,
        "measured_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit or git_commit(),
        "gpu": device.name if device else "",
        "software": software(),
        "machine": session_facts(device),
    }


def session(arguments: Mapping[str, Any], device: Device, commit: str = "") -> dict[str, Json]:
    """Return what is recorded about one run of a benchmark.

    Args:
        arguments: The command line as parsed; files are recorded by their names only.
        device: The GPU.
        commit: Of the checkout, where git cannot tell.
    """
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    shown = {name: value.name if isinstance(value, Path) else value for name, value in arguments.items()}
    return {
        "started_at": now,
        "commit": commit or git_commit(),
        "arguments": {name: value for name, value in shown.items() if value not in (None, "", False)},
        **session_facts(device),
    }
