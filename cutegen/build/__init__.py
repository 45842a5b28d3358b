"""Source to artifact in worker processes, cached: the compiler is only started for what is not there yet."""

from cutegen.build.artifact import (
    Artifact,
    Failure,
    Result,
    about,
    find_result,
    from_entry,
)
from cutegen.build.builder import Builder
from cutegen.build.bundle import Bundle, export_bundle, open_bundle
from cutegen.build.kernel_resources import KernelResources, Resources
from cutegen.build.toolchain import Toolchain, artifact_key, host_runs, is_artifact_key, symbol_of

__all__ = [
    "Artifact",
    "Builder",
    "Bundle",
    "Failure",
    "KernelResources",
    "Resources",
    "Result",
    "Toolchain",
    "about",
    "artifact_key",
    "export_bundle",
    "find_result",
    "from_entry",
    "host_runs",
    "is_artifact_key",
    "open_bundle",
    "symbol_of",
]
